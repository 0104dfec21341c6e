# SPDX-License-Identifier: Apache-2.0
"""Updates of several micro-batches, planned by the loader instead of by a fixed ``accumulate_grad_batches``."""

from __future__ import annotations

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
        batch_samples: Of its last batch.
        complete: Whether the window in hand has ended.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.batches = self.samples = self.batch_samples = 0
        self.complete = True

    @property
    def scale(self) -> float:
        """What makes the mean gradient of the window's batches of their sum, which Lightning divides by a constant."""
        return self._trainer.accumulate_grad_batches / self.batches

    def begin_batch(self, samples: int) -> None:
        """Take a batch into the window."""
        if self.complete:
            self.batches = self.samples = 0
        self.batches += 1
        self.samples += samples
        self.batch_samples = samples
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

    def install(self, patches: Patches) -> None:
        """Take over the two decisions that Lightning takes from a count of batches."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        automatic = epoch_loop.automatic_optimization
        zero_grad = automatic._make_zero_grad_fn

        def accumulated_batches_reached() -> bool:
            return self.complete

        def make_zero_grad_fn(batch_idx: int, optimizer: Any) -> Any:
            del batch_idx
            return zero_grad(0, optimizer) if self._slot.live.plan.part <= 1 else None

        patches.put(epoch_loop, "_accumulated_batches_reached", accumulated_batches_reached)
        patches.put(automatic, "_make_zero_grad_fn", make_zero_grad_fn)

    @property
    def complete(self) -> bool:
        """Whether the part in hand is the last one of its update."""
        return self._slot.loader is None or self._slot.live.plan.rest == 0

    @property
    def first(self) -> bool:
        """Whether the part in hand is the first one of its update."""
        return self._slot.loader is None or self._slot.live.plan.part <= 1

    def weigh(self, loss: Tensor) -> None:
        """Weigh a part's loss by its share of the update's samples, in place.

        Lightning has divided it by ``accumulate_grad_batches``, into a tensor of its own.
        """
        plan = self._slot.live.plan
        weight = self._trainer.accumulate_grad_batches * plan.part_size / plan.last_size
        if weight != 1.0:
            loss.mul_(weight)
