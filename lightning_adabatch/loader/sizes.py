# SPDX-License-Identifier: Apache-2.0
"""The batch size in force, shared by a loader and its passes."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_adabatch.loader.plan import fills, parts_of


class SizeInForce:
    """The batch size in force.

    Args:
        samples: Returns how many samples the data has; None where nobody knows.
        max_samples: No pass has more samples, or None.
        initial: Samples of the initial batch.
        device_limit: Samples of one part of a batch at most, or None.
        least_parts: Of every batch.
        max_batches: No pass has more batches, each part of one counted, or None.
        unit: Samples of one of the user's batches, of which the initial one has several; 0 for none.

    Attributes:
        agreed: What all ranks have of the samples; None for all.
        epoch_samples: Samples of one pass, carried ones apart; ``math.inf`` where nobody knows.
        batch_size: Samples of the next batch, the epoch's tail apart; never more than one epoch holds.
        device_size: Samples of its first part; all of it where it has but one.
        asked: What the user's loader would ask its sampler for at a time, for as many.
        largest: Samples of the largest batch that a pass can have; ``math.inf`` where nobody knows.
    """

    def __init__(
        self,
        samples: Callable[[], int | None],
        max_samples: int | None,
        initial: int,
        device_limit: int | None = None,
        least_parts: int = 1,
        *,
        max_batches: int | None = None,
        unit: int = 0,
    ) -> None:
        self.device_limit = self._first_limit = device_limit
        self.least_parts = least_parts
        self.agreed: int | None = None
        self._samples = samples
        self.max_samples = max_samples
        self._max_batches = max_batches
        self._unit = unit
        self._initial = self._wanted = initial
        self.refresh()

    def set(self, wanted: int) -> None:
        """Ask for another size."""
        if wanted != self._wanted:
            self._wanted = wanted
            self.refresh()

    def beginning(self, initial: int) -> SizeInForce:
        """Return what it was when the run began with a size of ``initial``."""
        first = SizeInForce(
            self._samples,
            self.max_samples,
            initial,
            self._first_limit,
            self.least_parts,
            max_batches=self._max_batches,
            unit=self._unit,
        )
        first.agreed = self.agreed
        first.refresh()
        return first

    def available(self) -> int | None:
        """Return the samples that are used; None where nobody knows."""
        samples = self._samples()
        return samples if self.agreed is None or samples is None else min(samples, self.agreed)

    def refresh(self) -> None:
        """Look at the length of the data again: it may change from one pass to the next."""
        known = [count for count in (self.available(), self.max_samples) if count is not None]
        samples = self.epoch_samples = min(known, default=math.inf)
        self.largest = samples
        if self._max_batches and self.device_limit is not None:
            self.largest = min(samples, self._max_batches * self.device_limit)
        size = self.batch_size = int(min(self._wanted, self.largest)) if samples else self._wanted
        own = size == min(self._initial, self.largest)  # the initial size, as far as the data go
        self.device_size = self._first_part(size, own=own)
        self.asked = self._first_part(self._initial, own=True) if own else self.device_size

    def _first_part(self, size: int, *, own: bool) -> int:
        parts = parts_of(size, self.device_limit, self.least_parts)
        filled = own and fills(size, parts, self._unit, self.device_limit)
        return min(self._unit, size) if filled else -(-size // parts)
