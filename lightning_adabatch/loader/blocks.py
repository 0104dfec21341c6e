# SPDX-License-Identifier: Apache-2.0
"""Blocks: the indices that are asked of the workers, drawn from the user's sampler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from torch.utils.data import Sampler

from lightning_adabatch import generators
from lightning_adabatch.loader.order import order_of
from lightning_adabatch.loader.plan import BlockPlan, EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.plain import plain

# So many of the indices before a place are remembered by what they look like, to know the order again.
_WITNESSES = 8


class BlockSampler(Sampler[list[Any]]):
    """The batch sampler of the owned ``DataLoader`` in one pass: lists of indices, each one block.

    Args:
        sampler: The user's; of one without a length the plan is open.
        plan: The pass.
        carried: Indices that the pass begins with.
        size: Knows the batch size in force.
        own: The generators of the loader and the sampler.

    Attributes:
        drawn: Called when a block's indices were drawn, before it is fetched; or None.
        started: The generators' state when the user's sampler began; None before.
        finished: Whether the sampler has come to its end.
        sampler_epoch: The epoch that the sampler shuffles for, if it has one.
        order: What is known of the order over all ranks.
        unsized: Whether the sampler has no length.
    """

    def __init__(
        self, sampler: Any, plan: EpochPlan, carried: list[Any], size: SizeInForce, own: Mapping[str, generators.Own]
    ) -> None:
        self.plan = plan
        self.unsized = plan.open
        self.blocks = BlockPlan(plan, available=math.inf if plan.open else len(carried) + len(sampler))
        self.in_flight: deque[int] = deque()  # samples of the blocks that were asked for and did not arrive
        self.sampler = sampler
        self.sampler_epoch = getattr(sampler, "epoch", None)
        self.order = order_of(sampler)
        self.carried = carried
        self.drawn: Callable[[], None] | None = None
        self.started: dict[str, Any] | None = None
        self.finished = False
        self._size = size
        self._own = own
        self._source: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()  # indices that were drawn to see whether there are more
        # (position, indices) of the blocks around what is being trained, for tails that are carried and witnesses
        self._kept: deque[tuple[int, list[Any]]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        """Return an iterator that can go on after it said that there is nothing to fetch."""
        return self

    def __next__(self) -> list[Any]:
        """Draw the next block."""
        start, wanted = self.blocks.dispatched, self._size.device_size
        if self.plan.open:
            self.see(self.blocks.reach(wanted))
        size = self.blocks.next_block(wanted)
        if size < self._size.asked:
            # A DataLoader would have asked its sampler for a whole batch: what that does after its last index
            # (many draw from a generator once more) is to happen now.
            self.finish(keep=size)
        if size == 0:
            raise StopIteration
        indices = self._draw(start, size)
        self.in_flight.append(size)
        if self.drawn is not None:
            self.drawn()
        return indices

    def finish(self, keep: int = 0) -> None:
        """Let the sampler come to its end, if all that it gives is asked for but for less than one batch."""
        rest = self.blocks.available - self.blocks.dispatched + keep
        if rest < self._size.asked and not self.finished:
            self._exhaust(int(rest))

    def see(self, position: int) -> None:
        """Find out whether the sampler gives as many indices as that; if not, the plan is open no longer."""
        source = self._indices()
        seen = self.blocks.dispatched + len(self._ahead)
        self._ahead.extend(islice(source, max(0, position - seen)))
        known = self.blocks.dispatched + len(self._ahead)
        if known < position:
            self.blocks.available = known
            self.finished = True
        self.plan.see(known, more=known >= position)

    def put_back(self, start: int) -> None:
        """Have the indices of the batch in hand, which begins at ``start``, and all after it drawn once more."""
        self._ahead.extendleft(reversed(self._between(start, self.blocks.dispatched)))
        self.blocks.dispatched = start
        while self._kept and self._kept[-1][0] >= start:
            self._kept.pop()

    def leftover(self) -> list[Any]:
        """Return the indices that the pass did not get to and the next one begins with."""
        plan = self.plan
        if plan.consumed == 0:
            return self.carried
        if not plan.over or plan.left == 0 or plan.batches == plan.max_batches:
            return []
        missing = plan.total - self.blocks.dispatched
        if missing > 0:
            self._draw(self.blocks.dispatched, missing)
            self.blocks.dispatched += missing
        return self._between(plan.consumed, plan.total)

    def witnesses(self, consumed: int) -> list[str]:
        """Return what the last few indices before a place look like."""
        return [repr(plain(index)) for index in self._between(consumed - _WITNESSES, consumed)]

    def replay(self, started: dict[str, Any], witnesses: list[str] | None, *, finished: bool) -> bool:
        """Begin the sampler as it had begun, and go past what was handed out; whether the order is the same.

        Leaves the global generators where the sampler left them.
        """
        generators.restore(started["global"])
        generators.set_states(self._own, started["own"])
        source = self._indices()
        passed = deque(islice(source, self.plan.consumed), maxlen=_WITNESSES)
        if self.plan.consumed == 0:  # what it draws with its first index it had drawn
            self._source = chain(list(islice(source, 1)), source)
        self.started = started
        self.blocks.dispatched = self.plan.consumed
        self._kept.append((self.plan.consumed - len(passed), list(passed)))
        if finished:
            if self.unsized:
                self._ahead.extend(source)
                self.see(self.plan.consumed + len(self._ahead) + 1)
            else:
                self._exhaust(int(self.blocks.available) - self.plan.consumed)
        return witnesses is None or [repr(plain(index)) for index in passed] == witnesses

    def own_states(self) -> dict[str, Any]:
        """Return the states of the own generators before the sampler began."""
        return generators.states_of(self._own) if self.started is None else self.started["own"]

    def _between(self, start: int, stop: int) -> list[Any]:
        return [
            index
            for first, block in self._kept
            for position, index in enumerate(block, first)
            if start <= position < stop
        ]

    def _indices(self) -> Iterator[Any]:
        if self._source is None:
            # Only now, as in a DataLoader: many samplers draw their seed from the global state here.
            self.started = {"global": generators.capture(), "own": self.own_states()}
            own = iter(self.sampler)
            # Many draw only with their first index, which is not to wait until what was carried is used up.
            first = list(islice(own, 1)) if self.carried else []
            self._source = chain(self.carried, first, own)
        return self._source

    def _exhaust(self, rest: int) -> None:
        source = self._indices()
        left = list(islice(source, rest))
        next(source, None)  # beyond its last index; never further, should it have no end
        self._source = iter(left)
        self.finished = True

    def _draw(self, start: int, size: int) -> list[Any]:
        indices = [self._ahead.popleft() for _ in range(min(size, len(self._ahead)))]
        indices.extend(islice(self._indices(), size - len(indices)))
        if len(indices) < size:
            raise RuntimeError(
                f"{type(self.sampler).__name__} has a length of {len(self.sampler)} but gave only "
                f"{start + len(indices) - len(self.carried)} indices. Make its __len__ say how many it gives."
            )
        done = self.plan.consumed - self.plan.last_size - _WITNESSES  # the batch in hand may have to be begun again
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) <= done:
            self._kept.popleft()
        self._kept.append((start, indices))
        return indices
