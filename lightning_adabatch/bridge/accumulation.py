# SPDX-License-Identifier: Apache-2.0
"""Updates of several micro-batches, planned by the loader instead of by a fixed ``accumulate_grad_batches``."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_adabatch.bridge.patches import Patches
from lightning_adabatch.bridge.slot import Slot


class Windows:
    """Updates of ``accumulate_grad_batches`` batches, as Lightning itself makes them.

    Args:
        trainer: The Trainer.

    Attributes:
        batches: Of the window in hand.
        samples: Of the window in hand.
        batch_samples: Of its last batch,
        batch_effective: and the samples whose plain mean has as much noise as that one's.
        complete: Whether the window in hand has ended.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.batches = self.samples = self.batch_samples = 0
        self.batch_effective = 0.0
        self._inverses = 0.0  # of these, summed up over the batches
        self.complete = True

    @property
    def scale(self) -> float:
        """What makes the mean gradient of the window's batches of their sum, which Lightning divides by a constant."""
        return self._trainer.accumulate_grad_batches / self.batches

    @property
    def effective(self) -> float:
        """Samples whose plain mean has as much noise as the mean of the batches' means: all, if these are equal."""
        return self.batches**2 / self._inverses if self._inverses else 0.0

    def begin_batch(self, samples: int, effective: float) -> None:
        """Take a batch into the window, of so many samples, with the noise of ``effective`` ones."""
        if self.complete:
            self.batches = self.samples = 0
            self._inverses = 0.0
        self.batches += 1
        self.samples += samples
        self.batch_samples = samples
        self.batch_effective = effective
        self._inverses += 1.0 / effective if effective else math.inf
        self.complete = not self._trainer.fit_loop._should_accumulate()


class Accumulation:
    """Has Lightning step after the last part of a batch, and have the gradients of an update be their mean.

    ``trainer.accumulate_grad_batches`` stays as it is: Lightning divides each loss by it, and users read it.

    Args:
        trainer: The Trainer.
        slot: Where its loader is.
    """

    def __init__(self, trainer: pl.Trainer, slot: Slot) -> None:
        self._trainer = trainer
        self._slot = slot
        self._cleared = False  # whether the gradients of the update in hand were set to zero

    def install(self, patches: Patches) -> None:
        """Take over the two decisions that Lightning takes from a count of batches."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        automatic = epoch_loop.automatic_optimization
        zero_grad = automatic._make_zero_grad_fn

        def accumulated_batches_reached() -> bool:
            return self.complete

        def make_zero_grad_fn(batch_idx: int, optimizer: Any) -> Any:
            # Of a first part that is None, Lightning evaluates no closure: then it is for the next one to do.
            del batch_idx
            if self._slot.live.plan.part > 1 and self._cleared:
                return None
            self._cleared = True
            return zero_grad(0, optimizer)

        patches.put(epoch_loop, "_accumulated_batches_reached", accumulated_batches_reached)
        patches.put(automatic, "_make_zero_grad_fn", make_zero_grad_fn)

    def end_update(self) -> None:
        """The next part begins another update."""
        self._cleared = False

    @property
    def complete(self) -> bool:
        """Whether the part in hand is the last one of its update."""
        return self._slot.loader is None or self._slot.live.plan.rest == 0

    @property
    def first(self) -> bool:
        """Whether the part in hand is the first one of its update."""
        return self._slot.loader is None or self._slot.live.plan.part <= 1

    @property
    def share(self) -> float:
        """The share of the part in hand in its update's samples."""
        plan = self._slot.live.plan
        return plan.part_size / plan.last_size

    @property
    def part_size(self) -> int:
        """Samples of the part in hand, on this rank."""
        return self._slot.live.plan.part_size

    def weigh(self, loss: Tensor) -> None:
        """Weigh a part's loss by its share of the update's samples, in place.

        Lightning has divided it by ``accumulate_grad_batches``, into a tensor of its own.
        """
        weight = self._trainer.accumulate_grad_batches * self.share
        if weight != 1.0:
            loss.mul_(weight)
