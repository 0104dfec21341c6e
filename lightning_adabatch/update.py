# SPDX-License-Identifier: Apache-2.0
"""The update in hand: what has been seen of it so far, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_adabatch.hooks import calls_hooks, registered
from lightning_adabatch.meter import Meter


class Update:
    """Measures one update, and notes which optimizers stepped in it.

    Args:
        meter: Takes what is measured.
        scaler: A gradient scaler, by which the loss is multiplied, or None.
        loss_unseen: Called when an optimizer stepped under manual optimization and no backward pass was seen.
        gradients_unseen: Called when optimizers stepped past what could have shown their gradients.
        before_step: Called when an optimizer that Lightning did not wrap is about to step.

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

    def __init__(
        self,
        meter: Meter,
        scaler: Any,
        loss_unseen: Callable[[], None],
        gradients_unseen: Callable[[], None],
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.meter = meter
        self.batch: Any = None
        self.manual = False
        self.loss_seen = False
        self._scaler = scaler
        self._loss_unseen = loss_unseen
        self._gradients_unseen = gradients_unseen
        self._ready = before_step
        self._hooks: list[Any] = []
        self._silent: set[int] = set()  # optimizers whose steps no hook shows, by identity
        self.begin()

    def watch(self, optimizers: list[Optimizer]) -> None:
        """Note every step of these from now on, and of no others."""
        self.release()
        self._silent = {id(optimizer) for optimizer in optimizers if not calls_hooks(optimizer)}
        for optimizer in optimizers:
            # A wrapper may hand the hook on to the optimizer inside: so it is bound to the one that is known here.
            self._hooks += registered(optimizer, "step_post", partial(self._after_step, optimizer))
            if self.manual and self._scaler is None:
                self._hooks += registered(optimizer, "step_pre", partial(self._before_step, optimizer))

    def begin(self) -> None:
        """Forget what an update that never reached its end left behind."""
        self.meter.open()
        self.had_backward = False
        self.stepped: list[int] = []
        self._about_to_step: list[Optimizer] = []
        self.closed = self.counted = False

    def take_loss(self, loss: Tensor, part: int, samples: int = 0, share_of: int = 0) -> None:
        """Measure the loss, of a part its share or the mean over its samples, without a gradient scaler's factor."""
        self.loss_seen = True
        self.meter.loss(self._unscaled(loss), part, samples, share_of)

    def take_gradients(self, optimizer: Optimizer, scale: float = 1.0) -> None:
        """Measure the gradients that an optimizer is about to step with, times ``scale``."""
        if id(optimizer) in self._silent:
            self._about_to_step.append(optimizer)
        if self.meter.measures_norm:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.meter.gradients(grads, id(optimizer), scale)

    def settle(self) -> None:
        """Take note of steps that no hook showed: whatever could have raised in them is over."""
        while self._about_to_step:
            self._note_step(self._about_to_step.pop(0))

    def take_first_part(self, optimizers: list[Optimizer], share: float, samples: float) -> None:
        """Measure the gradients of the first of several parts, which are ``share`` of its mean ones.

        Args:
            optimizers: Whose gradients they are.
            share: Of the part in the update.
            samples: Of the part, on this rank.
        """
        if self.meter.measures_variance:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            self.meter.small_gradients(grads, samples, lambda norm: self._unscaled(norm) / share)

    def close(self, trained: int, effective: float | None = None) -> None:
        """End its row: it was an update over ``trained`` samples, with the noise of ``effective`` ones."""
        self.meter.close(trained, self.stepped, effective)
        self.closed = True
        if self.manual and not self.had_backward and self.meter.measures_loss:
            self._loss_unseen()
        if self.meter.measures_norm and not self.meter.saw_gradients:
            self._gradients_unseen()

    def end(self) -> None:
        """Let go of the batch, and begin the next update."""
        self.batch = None
        self.begin()

    def release(self) -> None:
        """Watch no optimizer any longer; safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()

    def _unscaled(self, value: Tensor) -> Tensor:
        scaler = self._scaler
        return value if scaler is None else value.detach() / scaler.scale(torch.ones_like(value))

    def _before_step(
        self, optimizer: Optimizer, _: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # Of an optimizer that Lightning did not wrap. What Lightning steps comes with a closure, and is measured in it.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
        if closure is None:
            self.take_gradients(optimizer)
            self._ready()

    def _after_step(self, optimizer: Optimizer, _: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        self._note_step(optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        # With automatic optimization a step without a backward pass is none: training_step returned None.
        if (self.had_backward or self.manual) and id(optimizer) not in self.stepped:
            self.stepped.append(id(optimizer))
