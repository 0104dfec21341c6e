# SPDX-License-Identifier: Apache-2.0
"""Which batches make one update: one, several parts that the loader plans, or a window that Lightning counts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_adabatch import guards
from lightning_adabatch.bridge import Bridge
from lightning_adabatch.data import TrainData
from lightning_adabatch.settings import Settings
from lightning_adabatch.update import Update


class Division:
    """Knows where in its update the batch in hand is.

    Args:
        trainer: The Trainer.
        settings: The callback's arguments.
        bridge: Of the Trainer.
        data: The training data.
        update: The update in hand.
        ranks: That train together.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        settings: Settings,
        bridge: Bridge,
        data: TrainData,
        update: Update,
        ranks: int,
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._bridge = bridge
        self._data = data
        self._update = update
        self._ranks = ranks
        self._in_parts = False  # whether updates may have several
        self._accumulate = trainer.accumulate_grad_batches
        self._losses = 0  # of the batch in hand: an optimizer may evaluate its closure again
        # Whether Lightning makes updates of several batches, since the loader is left alone.
        self._in_windows = settings.adapt == "lr" and trainer.accumulate_grad_batches > 1

    def take_hold(self) -> None:
        """Have updates of several parts, where they are asked for.

        Raises:
            MisconfigurationException: For a set-up that does not go together with them.
        """
        settings = self._settings
        self._in_parts = settings.adapt == "batch_size" and (
            self._trainer.accumulate_grad_batches > 1
            or settings.max_device_batch_size is not None
            or self._data.lowered is not None
            or settings.follows_variance
        )
        if self._in_parts:
            guards.check_parts(self._trainer)
            self._bridge.accumulate()
        if settings.adapt == "batch_size":
            self._watch_memory()

    @property
    def first(self) -> bool:
        """Whether the batch in hand begins an update: asked before :meth:`begin_batch`."""
        if self._in_windows:
            return self._bridge.windows.complete
        return not self._in_parts or self._bridge.accumulation.first

    @property
    def whole(self) -> bool:
        """Whether the batch in hand is the last one of its update."""
        return self._bridge.windows.complete and (not self._in_parts or self._bridge.accumulation.complete)

    def begin_batch(self, batch: Any) -> None:
        """Take a batch into the update.

        Raises:
            MisconfigurationException: If ``accumulate_grad_batches`` is another one now.
        """
        self._losses = 0
        now = self._trainer.accumulate_grad_batches
        if now != self._accumulate and not (self._in_windows and now > 1):
            raise guards.refuse(
                f"trainer.accumulate_grad_batches={now}, which was {self._accumulate} when the fit began",
                "give it to the Trainer and leave it as it is; for batch sizes that you know ahead use a policy such "
                "as Schedule({0: 64, 10: 128}, unit='epochs')",
            )
        if self._in_windows:
            self._bridge.windows.begin_batch(self._data.trained(batch), self._data.effective)

    def loss_of(self, loss: Tensor) -> tuple[Tensor, int, int, int]:
        """Return what of a batch's loss is measured, and of which part: as :meth:`Meter.loss` takes it.

        A part's loss is weighed in place.

        Raises:
            MisconfigurationException: For a closure that is evaluated again, of which the other parts know nothing.
        """
        self._losses += 1
        if self._in_windows:
            windows = self._bridge.windows
            # Lightning has divided it by the number of batches.
            factor = self._trainer.accumulate_grad_batches * self._data.balance
            return loss.detach() * factor, windows.batches, windows.batch_samples, 0
        if self._in_parts:
            plan = self._bridge.slot.live.plan
            if self._losses > 1 and plan.part_size != plan.last_size:
                raise guards.refuse(
                    "an optimizer that evaluates its closure more than once per step (SAM, LBFGS) together with "
                    "updates of several micro-batches: it sees the last of them alone",
                    "use another optimizer, or set neither accumulate_grad_batches nor max_device_batch_size, no "
                    "policy that follows the variance of gradients, and a max_batch_size that fits into memory",
                )
            self._bridge.accumulation.weigh(loss)
            return loss, plan.part, plan.part_size, plan.last_size
        balance = self._data.balance
        return loss if balance == 1.0 else loss.detach() * balance, 1, 0, 0

    @property
    def first_part(self) -> tuple[float, float] | None:
        """The share of the update's gradient that is there after its first batch, and that one's samples here.

        None after others, and where there is only one: before the last one no rank has told another of its gradients.
        """
        windows, parts = self._bridge.windows, self._bridge.accumulation
        if self._in_windows and windows.batches == 1 and not windows.complete:
            return 1 / self._trainer.accumulate_grad_batches, windows.batch_effective / self._ranks
        if self._in_parts and parts.first and not parts.complete:
            return parts.share, parts.part_size
        return None

    @property
    def scale(self) -> float:
        """What makes the mean over the update's samples of its gradients."""
        return self._bridge.windows.scale if self._in_windows else 1.0

    def trained(self, batch: Any) -> int:
        """Return the samples of the update in hand, over all ranks."""
        if self._in_windows:  # Lightning ends a batch that is None without having begun it
            return 0 if batch is None else self._bridge.windows.samples
        return self._data.trained(batch)

    @property
    def effective(self) -> float | None:
        """The samples whose plain mean has as much noise as the update's gradients; None for all of them."""
        return self._bridge.windows.effective if self._in_windows else None

    def device_size(self, trained: int) -> int:
        """Return the samples of one pass on one rank, of an update's over all ranks."""
        device = trained // self._ranks
        if not self._in_parts:
            return device
        plan = self._bridge.slot.live.plan
        parts = (device == plan.last_size and plan.part + plan.parts_left) or plan.parts(device)
        return min(plan.unit, device) if plan.filled else -(-device // parts)

    def _watch_memory(self) -> None:
        """Have an update that does not fit into memory divided, where this can be."""
        loaders = len(self._bridge.slot.loaders)
        setting = "max_device_batch_size" if guards.divisible(self._trainer, loaders) else "max_batch_size"
        divide = self._divide if guards.divisible_in_mid_run(self._trainer, loaders) else None
        self._bridge.watch_memory(divide, setting)

    def _divide(self, device_limit: int) -> None:
        """Have updates of several parts from now on, of at most so many samples."""
        if not self._in_parts:
            self._in_parts = True
            self._bridge.accumulate()
        self._data.lowered = device_limit
        self._update.batch = None  # it takes memory
