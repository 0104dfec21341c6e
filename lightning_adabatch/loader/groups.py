# SPDX-License-Identifier: Apache-2.0
"""Batch samplers of the user's own, with a ``batch_size`` that can be set: buckets, token budgets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_adabatch import generators
from lightning_adabatch.loader.assembly import Assemble, assembler, block_collate, blocks_apart
from lightning_adabatch.loader.group_sampler import GroupSampler
from lightning_adabatch.loader.indices import CurrentBlocks, at_least_two
from lightning_adabatch.loader.pieces import BlockStream
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.loader.supply import Kind, Supply, begin_with, known_length, settings_of


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
        epochs: That the user's objects shuffle for.
        ended: Called with the samples of an epoch whose end was reached.
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
        epochs: list[Any],
        ended: Callable[[int], None],
    ) -> None:
        lengths = sampler.in_flight
        super().__init__(plan, BlockStream(source, lambda block: (lengths.popleft(), block)), assemble)
        self._sampler = sampler
        self._size = size
        self._samples = samples
        self._epochs = epochs
        self._note_end = ended
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
        most = self._size.max_samples
        if most is not None and self.plan.consumed + group > most:
            group = sampler.shorten(most - self.plan.consumed)
        far = self._samples is not None and self._samples - sampler.drawn >= 2 * size
        follows = bool(sampler.groups) or far or sampler.draw(size)
        if not follows:
            self._check_end()
        end = self.plan.consumed + group
        follows = follows and (self._size.max_samples is None or end < self._size.max_samples)
        self.plan.initial = group  # it stands as it is, whatever is left
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
        if sampler.ended:
            self._note_end(sampler.drawn)
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
            "own": self._sampler.own_states(),
            "epochs": self._epochs,
            "witnesses": [repr(index) for index in self._sampler.last(consumed)],
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
        self._hint_holds = True
        self._lengths: dict[int, int | None] = {}  # by size, for asking may make all batches

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
        if size not in self._lengths:
            before, generators_before = self._batch_sampler.batch_size, generators.capture()
            self._batch_sampler.batch_size = size
            self._lengths[size] = known_length(self._batch_sampler)
            self._batch_sampler.batch_size = before
            generators.restore(generators_before)
        return self._lengths[size]

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
        self.set_epochs(place["epochs"])
        sampler = GroupSampler(self._batch_sampler, plan, size, self.generators)
        if place["started"] is None:
            generators.set_states(self.generators, place["own"])
        elif not sampler.go_past(place):
            return None
        self._current.blocks = sampler
        return self._supply(sampler, begin_with(owned, place["base_state"]), plan, size)

    def give_back(self) -> None:
        """Put back the batch size."""
        self._batch_sampler.batch_size = self.own_batch_size

    def _supply(self, sampler: GroupSampler, source: Iterator[Any], plan: EpochPlan, size: SizeInForce) -> GroupSupply:
        on_demand = self.loader.num_workers == 0
        samples = self.hint() if self._hint_holds else None
        return GroupSupply(
            *(sampler, source, plan, assembler(self.loader), size, samples),
            on_demand=on_demand,
            epochs=self.epochs,
            ended=self._note_end,
        )

    def _note_end(self, drawn: int) -> None:
        """Trust the length of the data no longer once an epoch ended before it."""
        samples = self.hint()
        self._hint_holds = self._hint_holds and (samples is None or drawn >= samples)
