# SPDX-License-Identifier: Apache-2.0
"""Blocks: what is asked of the workers, and how batches are cut from what they bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from lightning_adabatch import generators
from lightning_adabatch.loader.order import order_of
from lightning_adabatch.loader.parcel import Parcel, unpack
from lightning_adabatch.loader.plan import BlockPlan, EpochPlan

# So many of the indices before a place are remembered by what they look like, to know the order again.
_WITNESSES = 8


class SizeInForce:
    """The batch size in force, shared by a loader and its passes.

    Args:
        sampler: The user's, of which only the length is read.
        max_samples: No pass has more samples, or None.
        wanted: Samples per batch that are asked for.
        device_limit: Samples of one part of a batch at most, or None.

    Attributes:
        agreed: What all ranks have of the sampler's indices; None for all.
        epoch_samples: Samples of one pass, carried ones apart.
        batch_size: Samples of the next batch, the epoch's tail apart; never more than one epoch holds.
        device_size: Samples of its first part; all of it where it has but one.
    """

    def __init__(self, sampler: Any, max_samples: int | None, wanted: int, device_limit: int | None = None) -> None:
        self.device_limit = device_limit
        self.agreed: int | None = None
        self._sampler = sampler
        self._max_samples = max_samples
        self.set(wanted)

    def set(self, wanted: int) -> None:
        """Ask for another size."""
        self._wanted = wanted
        self.refresh()

    def available(self) -> int:
        """Return the samples of the sampler that are used."""
        samples = len(self._sampler)
        return samples if self.agreed is None else min(samples, self.agreed)

    def refresh(self) -> None:
        """Look at the length of the sampler again: it may change from one pass to the next."""
        samples = self.available()
        self.epoch_samples = samples if self._max_samples is None else min(samples, self._max_samples)
        size = self.batch_size = min(self._wanted, self.epoch_samples) if self.epoch_samples else self._wanted
        self.device_size = size if self.device_limit is None else -(-size // -(-size // self.device_limit))


class BlockSampler(Sampler[list[Any]]):
    """The batch sampler of the owned ``DataLoader`` in one pass: lists of indices, each one block.

    Args:
        sampler: The user's.
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
    """

    def __init__(
        self, sampler: Any, plan: EpochPlan, carried: list[Any], size: SizeInForce, own: list[torch.Generator]
    ) -> None:
        self.plan = plan
        self.blocks = BlockPlan(plan, available=len(carried) + len(sampler))
        self.in_flight: deque[int] = deque()  # samples of the blocks that were asked for and did not arrive
        self._sampler = sampler
        self.sampler_epoch = getattr(sampler, "epoch", None)
        self.order = order_of(sampler)
        self.carried = carried
        self.drawn: Callable[[], None] | None = None
        self.started: dict[str, Any] | None = None
        self.finished = False
        self._size = size
        self._own = own
        self._source: Iterator[Any] | None = None
        # (position, indices) of the blocks around what is being trained, for tails that are carried and witnesses
        self._kept: deque[tuple[int, list[Any]]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        """Return an iterator that can go on after it said that there is nothing to fetch."""
        return self

    def __next__(self) -> list[Any]:
        """Draw the next block."""
        start, wanted = self.blocks.dispatched, self._size.device_size
        size = self.blocks.next_block(wanted)
        if size < wanted:
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
        if rest < self._size.device_size:
            self._exhaust(rest)

    def put_back(self, start: int) -> None:
        """Have the indices of the batch in hand, which begins at ``start``, and all after it drawn once more."""
        again = self._between(start, self.blocks.dispatched)
        self._source = chain(again, self._indices())
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
        return [repr(index) for index in self._between(consumed - _WITNESSES, consumed)]

    def replay(self, started: dict[str, Any], witnesses: list[str] | None, *, finished: bool) -> bool:
        """Begin the sampler as it had begun, and go past what was handed out; whether the order is the same.

        Leaves the global generators where the sampler left them.
        """
        generators.restore(started["global"])
        if len(started["own"]) != len(self._own):
            return False
        for generator, state in zip(self._own, started["own"], strict=True):
            generator.set_state(state.cpu())
        source = self._indices()
        passed = deque(islice(source, self.plan.consumed), maxlen=_WITNESSES)
        if self.plan.consumed == 0:  # what it draws with its first index it had drawn
            self._source = chain(list(islice(source, 1)), source)
        self.started = started
        self.blocks.dispatched = self.plan.consumed
        self._kept.append((self.plan.consumed - len(passed), list(passed)))
        if finished:
            self._exhaust(self.blocks.available - self.plan.consumed)
        return witnesses is None or [repr(index) for index in passed] == witnesses

    def own_states(self) -> list[torch.Tensor]:
        """Return the states of the own generators before the sampler began."""
        return [own.get_state() for own in self._own] if self.started is None else self.started["own"]

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
            own = iter(self._sampler)
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
        indices = list(islice(self._indices(), size))
        if len(indices) < size:
            raise RuntimeError(
                f"{type(self._sampler).__name__} has a length of {len(self._sampler)} but gave only "
                f"{start + len(indices) - len(self.carried)} indices. Make its __len__ say how many it gives."
            )
        done = self.plan.consumed - self.plan.last_size - _WITNESSES  # the batch in hand may have to be begun again
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) <= done:
            self._kept.popleft()
        self._kept.append((start, indices))
        return indices


class Piece(NamedTuple):
    """Samples ``start`` to ``stop`` of a block of ``length``."""

    block: Any
    start: int
    stop: int
    length: int

    @property
    def whole(self) -> bool:
        """Whether the piece is all of its block."""
        return self.stop - self.start == self.length


class BlockStream:
    """Samples in order, taken off the blocks as they arrive.

    Args:
        source: Gives the blocks; None once there are no more to come.
        in_flight: The number of samples of each block that ``source`` has been asked for.
    """

    def __init__(self, source: Iterator[Any], in_flight: deque[int]) -> None:
        self.source: Iterator[Any] | None = source
        self._in_flight = in_flight
        self._waiting: deque[Piece] = deque()  # arrived, and not taken

    def take(self, size: int) -> list[Piece]:
        """Return the next ``size`` samples as pieces of blocks."""
        pieces: list[Piece] = []
        while size > 0:
            piece = self._waiting.popleft() if self._waiting else self._arrived()
            if piece.stop - piece.start > size:
                cut = piece.start + size
                self._waiting.appendleft(piece._replace(start=cut))
                piece = piece._replace(stop=cut)
            pieces.append(piece)
            size -= piece.stop - piece.start
        return pieces

    def put_back(self, pieces: list[Piece]) -> None:
        """Have pieces that were taken last taken once more."""
        self._waiting.extendleft(reversed(pieces))

    def _arrived(self) -> Piece:
        if self.source is None:
            raise RuntimeError(
                "This pass over the data was closed. With persistent_workers=True a loader has one pass at a time: to "
                "look at a batch while an epoch runs, use a DataLoader of your own, or persistent_workers=False."
            )
        try:
            block = next(self.source)
        except StopIteration:  # would pass for the end of the epoch
            raise RuntimeError(
                "The DataLoader ended before its epoch did: this is a fault of lightning_adabatch."
            ) from None
        length = self._in_flight.popleft()
        return Piece(unpack(block) if isinstance(block, Parcel) else block, 0, length, length)
