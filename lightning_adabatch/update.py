# SPDX-License-Identifier: Apache-2.0
"""The update in hand: what has been seen of it so far, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_adabatch.meter import Meter


class Update:
    """Measures one update, and notes which optimizers stepped in it.

    Args:
        meter: Takes what is measured.
        scaler: A gradient scaler, by which the loss is multiplied, or None.
        loss_unseen: Called when an optimizer stepped under manual optimization and no backward pass was seen.

    Attributes:
        meter: Takes what is measured.
        batch: The batch in hand, or None.
        had_backward: Whether there was a backward pass: a step without one is no update.
        stepped: The optimizers that stepped, by identity.
        closed: Whether its row in the meter is closed,
        counted: and whether it is counted: what raises in between leaves it half done.
        manual: Whether the user's module steps its optimizers itself.
        loss_seen: Whether any batch so far showed its loss.
    """

    def __init__(self, meter: Meter, scaler: Any, loss_unseen: Callable[[], None]) -> None:
        self.meter = meter
        self.batch: Any = None
        self.manual = False
        self.loss_seen = False
        self._scaler = scaler
        self._loss_unseen = loss_unseen
        self._hooks: list[Any] = []
        self.begin()

    def watch(self, optimizers: list[Optimizer]) -> None:
        """Note every step of these from now on, and of no others."""
        self.release()
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers]

    def begin(self) -> None:
        """Forget what an update that never reached its end left behind."""
        self.meter.open()
        self.had_backward = False
        self.stepped: list[int] = []
        self.closed = self.counted = False

    def take_loss(self, loss: Tensor, part: int, samples: int = 0) -> None:
        """Measure the loss, of a part its share or the mean over its samples, without a gradient scaler's factor."""
        scaler = self._scaler
        self.loss_seen = True
        unscaled = loss if scaler is None else loss.detach() / scaler.scale(torch.ones_like(loss))
        self.meter.loss(unscaled, part, samples)

    def take_gradients(self, optimizer: Optimizer, scale: float = 1.0) -> None:
        """Measure the gradients that an optimizer is about to step with, times ``scale``."""
        if self.meter.measures_norm:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.meter.gradients(grads, id(optimizer), scale)

    def close(self, trained: int) -> None:
        """End its row: it was an update over ``trained`` samples."""
        self.meter.close(trained, self.stepped)
        self.closed = True
        if self.manual and not self.had_backward and self.meter.measures_loss:
            self._loss_unseen()

    def end(self) -> None:
        """Let go of the batch, and begin the next update."""
        self.batch = None
        self.begin()

    def release(self) -> None:
        """Watch no optimizer any longer; safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        # With automatic optimization a step without a backward pass is none: training_step returned None.
        if (self.had_backward or self.manual) and id(optimizer) not in self.stepped:
            self.stepped.append(id(optimizer))
