# SPDX-License-Identifier: Apache-2.0
"""Batch samplers of the user's own, with a ``batch_size`` that can be set: buckets, token budgets."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_adabatch import generators
from lightning_adabatch.loader.assembly import Assemble, assembler, block_collate, blocks_apart
from lightning_adabatch.loader.indices import CurrentBlocks, at_least_two
from lightning_adabatch.loader.pieces import BlockStream
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.loader.supply import Kind, Supply, begin_with, known_length, settings_of


class GroupSampler:
    """Asks the user's batch sampler for groups of indices, of the size in force at that moment.

    Args:
        batch_sampler: The user's; its ``batch_size`` is set.
        plan: The pass: it says in how many parts a group goes to the device.
        size: Knows the batch size in force.
        own: The user's generators.

    Attributes:
        waiting: Groups that were drawn and not asked for by a ``DataLoader``.
        groups: Samples of the groups that were drawn and not handed out.
        drawn: Samples of all groups so far.
        in_flight: Samples of the parts that were asked for and did not arrive.
        ended: Whether the batch sampler has come to its end.
        started: The generators' state when it began; None before.
        history: How many groups in a row were asked for with which size.
        name: Of the batch sampler's class.
        asked: Called when a ``DataLoader`` asked for a part of a group, or None.
    """

    def __init__(self, batch_sampler: Any, plan: EpochPlan, size: SizeInForce, own: list[torch.Generator]) -> None:
        self.groups: deque[int] = deque()
        self.drawn = 0
        self.in_flight: deque[int] = deque()
        self.ended = False
        self.started: dict[str, Any] | None = None
        self.history: list[list[int]] = []
        self.name = type(batch_sampler).__name__
        self._batch_sampler = batch_sampler
        self._plan = plan
        self._size = size
        self._own = own
        self.asked: Callable[[], None] | None = None
        self.waiting: deque[list[Any]] = deque()
        self._current: list[Any] = []  # the group that was asked for last
        self._parts: deque[list[Any]] = deque()  # what is to come of it
        self._source: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the next part of a group."""
        if not self._parts:
            if not self.waiting and not self.draw(self._size.batch_size):
                raise StopIteration
            self._current = self.waiting.popleft()
            self._divide()
        part = self._parts.popleft()
        self.in_flight.append(len(part))
        if self.asked is not None:
            self.asked()
        return part

    def put_back(self) -> None:
        """Have the group that was asked for last asked for once more, from its beginning, in other parts."""
        self._divide()

    def _divide(self) -> None:
        group, left, position = self._current, self._plan.parts(len(self._current)), 0
        self._parts.clear()
        while left:
            step = -(-(len(group) - position) // left)
            self._parts.append(group[position : position + step])
            position, left = position + step, left - 1

    def draw(self, size: int) -> bool:
        """Ask for one more group; whether there was one."""
        if self.ended:
            return False
        if self._source is None:
            self.started = {"global": generators.capture(), "own": [one.get_state() for one in self._own]}
            self._source = iter(self._batch_sampler)
        self._batch_sampler.batch_size = size
        if self.history and self.history[-1][1] == size:
            self.history[-1][0] += 1
        else:
            self.history.append([1, size])
        group = next((list(found) for found in self._source if found), None)  # an empty one trains nothing
        if group is None:
            self.ended = True
            return False
        self.waiting.append(group)
        self.groups.append(len(group))
        self.drawn += len(group)
        return True

    def go_past(self, place: Mapping[str, Any]) -> bool:
        """Ask again for the groups that had been asked for, and drop those that were handed out."""
        generators.restore(place["started"]["global"])
        for own, state in zip(self._own, place["started"]["own"], strict=False):
            own.set_state(state.cpu())
        for count, size in place["history"]:
            for _ in range(count):
                self.draw(size)
        self.started = place["started"]
        samples = 0
        while samples < place["consumed"] and self.groups:
            samples += self.groups.popleft()
            self.waiting.popleft()
        return bool(samples == place["consumed"])


class GroupSupply(Supply):
    """The groups of one pass.

    Args:
        sampler: Asks for the groups.
        source: The owned ``DataLoader``'s iterator.
        plan: The pass, open.
        assemble: Makes a batch of a part.
        size: Knows the batch size in force.
        samples: Of an epoch, where that is known.
        on_demand: There are no workers.
    """

    def __init__(
        self,
        sampler: GroupSampler,
        source: Iterator[Any],
        plan: EpochPlan,
        assemble: Assemble,
        size: SizeInForce,
        samples: int | None,
        *,
        on_demand: bool,
    ) -> None:
        lengths = sampler.in_flight
        super().__init__(plan, BlockStream(source, lambda block: (lengths.popleft(), block)), assemble)
        self._sampler = sampler
        self._size = size
        self._samples = samples
        self.on_demand = on_demand
        if on_demand:
            sampler.asked = self._note_drawn

    def prepare(self, size: int) -> int:
        """Draw the next group if workers have not; return its samples.

        Whether another one follows is asked for now only near the end of the epoch: further away the answer is
        known, and the next group can be drawn once its size is decided.
        """
        sampler = self._sampler
        if not sampler.groups:
            sampler.draw(size)
        if not sampler.groups:
            self.plan.see(self.plan.consumed, more=False)
            return size
        group = self._allowed(sampler.groups.popleft())
        far = self._samples is not None and self._samples - sampler.drawn >= 2 * size
        follows = bool(sampler.groups) or far or sampler.draw(size)
        if not follows:
            self._check_end()
        end = self.plan.consumed + group
        follows = follows and (self._size.max_samples is None or end < self._size.max_samples)
        self.plan.own_size = group  # it stands as it is, whatever is left
        self.plan.see(end + follows, more=follows)
        return group

    def _allowed(self, group: int) -> int:
        """Return the samples of the parts of a group that the epoch still has batches for."""
        parts, plan = self.plan.parts(group), self.plan
        left = parts if plan.max_batches is None else min(parts, plan.max_batches - plan.batches)
        return sum(-(-(group - number) // parts) for number in range(left))  # the first ones of an even division

    def put_back(self) -> None:
        """Have the batch in hand fetched again."""
        self._sampler.put_back()

    def _note_drawn(self) -> None:
        if self.drawn is not None:
            self.drawn()

    def look_ahead(self) -> None:
        """Draw the next group with the size in force now, to know that there is one."""
        plan, sampler = self.plan, self._sampler
        if not (plan.over or plan.rest or sampler.groups or sampler.draw(self._size.batch_size)):
            plan.see(plan.consumed, more=False)
            plan.over = True
            self._check_end()

    def _check_end(self) -> None:
        """Warn of a batch sampler that takes its batch size for constant, and so loses or repeats samples."""
        sampler = self._sampler
        if len(sampler.history) > 1 and self._samples not in {None, sampler.drawn}:
            name = sampler.name
            warnings.warn(
                f"{name} gave {sampler.drawn} samples of {self._samples} in an epoch in which its batch_size changed. "
                f"If it is to give each one once, read {name}.batch_size once for each batch, and go on from where "
                "that batch ended.",
                stacklevel=2,
            )

    def mark(self) -> dict[str, Any] | None:
        """Return the generators' state when the batch sampler began, None before."""
        return self._sampler.started

    def state(self, mark: dict[str, Any] | None, consumed: int) -> dict[str, Any]:
        """Return how to ask again for the groups that were asked for."""
        return {
            "total": None,
            "order": None,
            "consumed": consumed,
            "started": mark,
            "history": [list(entry) for entry in self._sampler.history] if mark else [],
        }


class Groups(Kind):
    """Map-style data with a batch sampler of the user's own."""

    in_batches = True
    can_carry = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        batch_sampler: Any = loader.batch_sampler
        self._batch_sampler = batch_sampler
        self.sampler = getattr(self._batch_sampler, "sampler", loader.sampler)
        self.own_batch_size = int(self._batch_sampler.batch_size)
        self.drop_last = False  # what it yields is trained
        self._current = CurrentBlocks()

    def samples(self) -> int | None:
        """Return None: only the batch sampler knows when it ends."""
        return None

    def hint(self) -> int | None:
        """Return the samples of the data, by which epochs are counted, or None."""
        of_sampler = known_length(getattr(self._batch_sampler, "sampler", None))
        return known_length(self.loader.dataset) if of_sampler is None else of_sampler

    @property
    def owners(self) -> list[Any]:
        """Whose generators are drawn from."""
        return [self.loader, self.sampler, self._batch_sampler]

    def length(self, size: int) -> int | None:
        """Return how many batches the batch sampler says there are at a size, or None."""
        before = self._batch_sampler.batch_size
        self._batch_sampler.batch_size = size
        length = known_length(self._batch_sampler)
        self._batch_sampler.batch_size = before
        return length

    def batches_left(self, plan: EpochPlan, size: int) -> int | float:
        """Return about how many batches follow if ``size`` stays, by what the batch sampler says."""
        length = self.length(size)
        if not plan.open:
            return plan.batches_left(size)
        if length is None:
            return at_least_two(plan, math.inf)
        samples = self.hint()
        if not samples or plan.own_size == size:
            return at_least_two(plan, length * plan.parts(size) - plan.batches)
        return at_least_two(plan, math.ceil(length * (1 - plan.consumed / samples)) * plan.parts(size))

    def own(self, num_workers: int, worker_init_fn: Any) -> DataLoader[Any]:
        """Build the ``DataLoader`` that fetches the groups."""
        user = self.loader
        return DataLoader(
            user.dataset,
            batch_sampler=self._current,
            collate_fn=block_collate(user),
            pin_memory=user.pin_memory and not blocks_apart(user),
            **settings_of(user, num_workers, worker_init_fn),
        )

    def begin(self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, carried: list[Any]) -> Supply:
        """Begin a pass."""
        del carried
        sampler = self._current.blocks = GroupSampler(self._batch_sampler, plan, size, self.generators)
        return self._supply(sampler, iter(owned), plan, size)

    def go_on(
        self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, place: Mapping[str, Any]
    ) -> Supply | None:
        """Ask again for what was asked for; None where that gives other groups."""
        if "history" not in place or "workers" in place:
            return None
        sampler = GroupSampler(self._batch_sampler, plan, size, self.generators)
        if place["started"] is not None and not sampler.go_past(place):
            return None
        self._current.blocks = sampler
        return self._supply(sampler, begin_with(owned, place["base_state"]), plan, size)

    def give_back(self) -> None:
        """Put back the batch size."""
        self._batch_sampler.batch_size = self.own_batch_size

    def _supply(self, sampler: GroupSampler, source: Iterator[Any], plan: EpochPlan, size: SizeInForce) -> GroupSupply:
        on_demand = self.loader.num_workers == 0
        return GroupSupply(sampler, source, plan, assembler(self.loader), size, self.hint(), on_demand=on_demand)
