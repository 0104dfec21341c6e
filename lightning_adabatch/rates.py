# SPDX-License-Identifier: Apache-2.0
"""The learning rates of a fit: the factor on all of its optimizers, whatever its schedulers say."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_adabatch.lr import LRFactor, planned_steps
from lightning_adabatch.policies import Constant
from lightning_adabatch.schedulers import SchedulerWatch
from lightning_adabatch.settings import Settings


class Rates:
    """Keeps the LR factor on the groups of a Trainer's optimizers.

    Args:
        trainer: The Trainer.
        settings: The callback's arguments.
    """

    def __init__(self, trainer: pl.Trainer, settings: Settings) -> None:
        self._trainer = trainer
        self._settings = settings
        self._factor = LRFactor([])
        self._finetuning: list[BaseFinetuning] = []
        self._made: list[Any] = []  # schedulers, before anybody knows the optimizers
        self._watch = SchedulerWatch(self._bare, self._take_note)

    def take_hold(self) -> None:
        """Take hold of the optimizers and schedulers that the Trainer has."""
        self._factor = LRFactor(self._trainer.optimizers)
        self.guard_schedulers()
        self._guard_finetuning()
        self._notice_planned_schedulers()

    def follow(self) -> bool:
        """Take hold of the optimizers that the Trainer has now, whether somebody put others in their place."""
        changed: bool = self._trainer.optimizers != self._factor.optimizers
        if changed:
            self._factor.move_to(self._trainer.optimizers)
            self.guard_schedulers()
        return changed

    def watch(self) -> None:
        """Know of the schedulers that are made from now on, be Lightning told of them or not, until the release."""
        self._watch.begin()

    def refresh(self) -> None:
        """Put the factor on a learning rate that was assigned meanwhile."""
        self._factor.refresh()

    def base(self) -> float:
        """Return the learning rate of the first group, without the factor."""
        return self._factor.base

    def set(self, factor: float) -> None:
        """Put another factor on, or the same one on learning rates that were assigned meanwhile."""
        self._factor.set(factor)

    def guard_schedulers(self) -> None:
        """Have the factor off while a scheduler steps; again whenever another callback may have put new ones in."""
        for config in self._trainer.lr_scheduler_configs:
            self._factor.guard(config.scheduler)
        made, self._made = self._made, []
        for scheduler in made:
            self._take_note(scheduler)

    def _bare(self) -> AbstractContextManager[None]:
        return self._factor.off()

    def _take_note(self, scheduler: Any) -> None:
        """Guard a scheduler that was made for one of the optimizers."""
        of = getattr(scheduler, "optimizer", None)
        if any((of.optimizer if isinstance(of, LightningOptimizer) else of) is one for one in self._factor.optimizers):
            self._factor.guard(scheduler)
        elif not self._factor.optimizers:
            self._made.append(scheduler)

    def write_base(self, checkpoint: dict[str, Any]) -> None:
        """Put the learning rates without the factor into a checkpoint, by copies; the live ones stay."""
        states = checkpoint.get("optimizer_states", [])
        for number, optimizer in enumerate(self._factor.optimizers[: len(states)]):
            if "param_groups" not in states[number]:
                continue  # of a sharded optimizer only the first rank has the full state
            groups = states[number]["param_groups"]
            bases = self._factor.bases(optimizer)
            changed = [
                group if base is None else {**group, "lr": base} for group, base in zip(groups, bases, strict=True)
            ]
            states[number] = {**states[number], "param_groups": changed}

    def release(self) -> None:
        """Put the base learning rates back; safe to call twice."""
        self._watch.end()
        self._made = []
        self._factor.release()
        while self._finetuning:
            del self._finetuning.pop().finetune_function  # the method of the class is behind it

    def _guard_finetuning(self) -> None:
        """Have the factor off while parameters are unfrozen: their learning rate is made of the first group's."""
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]  # set late
            if isinstance(callback, BaseFinetuning) and "finetune_function" not in vars(callback):
                callback.finetune_function = self._without_factor(callback.finetune_function)  # type: ignore[method-assign]
                self._finetuning.append(callback)

    def _without_factor(self, function: Callable[..., None]) -> Callable[..., None]:
        def bare(*args: Any, **kwargs: Any) -> None:
            with self._factor.off():
                function(*args, **kwargs)

        return bare

    def _notice_planned_schedulers(self) -> None:
        """Say once what a change of size means for schedules that are planned in updates."""
        if self._settings.adapt == "lr" or isinstance(self._settings.policy, Constant):
            return
        planned = {
            (type(config.scheduler).__name__, steps): None  # in their order, each once
            for config in self._trainer.lr_scheduler_configs
            if config.interval == "step" and (steps := planned_steps(config.scheduler)) is not None
        }
        if planned:
            listed = ", ".join(
                f"{name} for {'what its function says' if steps == math.inf else steps}" for name, steps in planned
            )
            once_per_epoch = (
                "use interval='epoch'"
                if self._trainer.lightning_module.automatic_optimization
                else "step it once per epoch"
            )
            rank_zero_warn(
                f"AdaptiveBatchSize changes the number of updates, and schedules are planned in them: {listed}. "
                "trainer.estimated_stepping_batches is the count at the initial batch size: with larger batches the "
                "run ends before the schedule does; with smaller ones OneCycleLR is held at its final value, and a "
                f"cosine climbs again. For a schedule that keeps its shape {once_per_epoch}."
            )
