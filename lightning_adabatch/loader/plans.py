# SPDX-License-Identifier: Apache-2.0
"""What a loader plans ahead: a plan for each pass, and how many batches a pass that has not begun will have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_adabatch.loader.plan import EpochPlan, Tail, parts_of
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.loader.supply import Kind


class Plans:
    """Makes the plans of a loader's passes.

    Args:
        kind: Of the data.
        size: Knows the batch size in force.
        tail: What happens to samples that do not fill a batch.
        max_batches: No pass has more batches, or None.
        accumulate: The initial batch has so many of the user's.
        drop_unit: Where it has several, whether an incomplete one of them is dropped.

    Attributes:
        initial: Samples of the initial batch.
    """

    def __init__(
        self,
        kind: Kind,
        size: SizeInForce,
        tail: Tail,
        max_batches: int | None,
        *,
        accumulate: int = 1,
        drop_unit: bool = False,
    ) -> None:
        self.initial: int = kind.own_batch_size * accumulate
        self._kind = kind
        self._size = size
        self._tail = tail
        self._max_batches = max_batches
        self._unit = kind.own_batch_size if accumulate > 1 else 0
        self._drop_unit = drop_unit and accumulate > 1

    def make(self, carried: int) -> EpochPlan:
        """Return the plan of a pass that begins with so many carried samples."""
        return self._make(carried, self._size)

    def length(self, carried: int) -> int | float:
        """Return the batches of a pass that starts now and keeps the size; ``math.inf`` where nobody knows."""
        return self._kind.batches_left(self.make(carried), self._size.batch_size)

    def ends(self, batches: int, carried: int) -> Sequence[int]:
        """Return where so many batches of a pass that starts now and keeps the size end, each part of one counted."""
        size, plan = self._size.batch_size, self.make(carried)
        if not plan.in_parts:
            return range(size, batches * size + 1, size)
        plan.see(batches * size, more=False)  # of a stream only a number of batches is known
        return [plan.consumed for _ in range(batches) if plan.hand_out(size)]

    def first_length(self) -> int | float:
        """Return the batches of the first pass of a run that begins."""
        first = self._size.beginning(self.initial)
        return self._kind.batches_left(self._make(0, first), first.batch_size)

    def planned_length(self) -> int | float:
        """Return the batches of a pass at the initial size as they were without us.

        One for each update, or each of the user's that it accumulates; ``math.inf`` where nobody knows.
        """
        first = self._size.beginning(self.initial)
        parts = parts_of(first.batch_size, first.device_limit, first.least_parts)
        first.device_limit, first.least_parts = self._unit or None, 1
        plan = self._make(0, first)
        if plan.max_batches is not None:  # which are parts
            plan.max_batches = -(-plan.max_batches // parts) * (self.initial // self._kind.own_batch_size)
        return self._kind.batches_left(plan, first.batch_size)

    def nominal_length(self) -> int | float:
        """Return the length of the user's loader, whatever the size in force and the limits of the Trainer."""
        kind, own = self._kind, self._kind.own_batch_size
        if kind.in_batches:
            return kind.batches_left(EpochPlan(0, own, "keep", open=True), own)
        samples = self._size.available()
        samples = kind.hint() if samples is None else samples
        if samples is None:
            return math.inf
        full, rest = divmod(samples, own)
        # Even where the user's loader would have none: no epoch is empty.
        return full + (rest > 0 and not (kind.drop_last and full > 0))

    def _make(self, carried: int, size: SizeInForce) -> EpochPlan:
        unknown = size.available() is None
        return EpochPlan(
            0 if unknown else int(size.epoch_samples) + carried,
            self.initial,
            self._tail,
            self._max_batches,
            open=unknown,
            most=size.max_samples if unknown else None,
            device_limit=size.device_limit,
            least_parts=size.least_parts,
            unit=self._unit,
            drop_unit=self._drop_unit,
        )
