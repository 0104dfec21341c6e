# SPDX-License-Identifier: Apache-2.0
"""One fit: the parts wired together, from ``setup`` until everything is given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_adabatch import guards, sinks
from lightning_adabatch.bridge import Bridge
from lightning_adabatch.controller import Controller
from lightning_adabatch.limits import Decision
from lightning_adabatch.loader import ElasticLoader
from lightning_adabatch.lr import LRFactor
from lightning_adabatch.meter import Meter
from lightning_adabatch.report import PREFIX, Gate, Record
from lightning_adabatch.settings import Settings

_METRIC = PREFIX + "batch_size"


class Run:
    """What one call of ``Trainer.fit`` needs.

    Args:
        trainer: The Trainer, before it uses its train loader.
        settings: The callback's arguments.

    Attributes:
        controller: Counts and decisions; None before training starts.
        meter: Measures the update in hand.
        had_backward: Whether the batch in hand had a backward pass: a step without one is no update.
    """

    def __init__(self, trainer: pl.Trainer, settings: Settings) -> None:
        self.controller: Controller | None = None
        self.meter = Meter(settings.policy.requires)
        self.had_backward = False
        self._trainer = trainer
        self._settings = settings
        self._stepped = False
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set late
        self._gate = Gate(every if trainer.loggers else 0)
        self._lr = LRFactor([])
        self._hooks: list[Any] = []
        self._unlogged: tuple[Decision, int] | None = None  # of the last update, if its record was not written
        self._bridge = Bridge(trainer)
        if settings.adapt == "batch_size":
            self._bridge.install(self._make_elastic)

    def start(self) -> Controller:
        """Check the loader, take hold of optimizers and schedulers, and decide for the first update.

        Raises:
            MisconfigurationException: For a loader that is not supported, or bounds that do not hold B0.
        """
        initial, training_samples, epoch_samples = self._data()
        limits = self._settings.limits(initial, training_samples, epoch_samples)
        guards.check_device_limit(limits, self._settings.max_device_batch_size)
        self.controller = Controller(
            self._settings.policy,
            limits,
            self._settings.cadence,
            training_samples=training_samples,
            observe=self.meter.read,
            notify=rank_zero_warn,
        )
        self._lr = LRFactor(self._trainer.optimizers)
        self._guard_schedulers()
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in self._trainer.optimizers]
        self._apply(self.controller.start(self._base_rate))
        sinks.lay_out(self._trainer.loggers)
        return self.controller

    def begin_epoch(self) -> None:
        """Plan the epoch at the size in force."""
        self._guard_schedulers()  # another callback may have put new ones in
        self._follow_data()
        self._bridge.begin_epoch()

    def end_epoch(self) -> None:
        """Log the epoch's last update, whatever ended the epoch."""
        if self.controller is not None and self._unlogged is not None and self._gate.open:
            self._gate.note(self._unlogged[1])
            self._write(self.controller, *self._unlogged)

    def begin_batch(self) -> None:
        """Forget what a batch that never reached its end left behind."""
        self.meter.open()
        self.had_backward = self._stepped = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Measure the gradients, and put the factor on a learning rate that was assigned meanwhile."""
        if self.meter.measures_norm:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.meter.gradients(grads)
        self._lr.refresh()

    def end_batch(self, batch: Any, batch_idx: int) -> None:
        """Count the batch, decide, apply the decision, and report."""
        controller = self.controller
        assert controller is not None  # for the type checker: start() came before
        used = controller.decision
        trained = self._trained(batch, batch_idx)
        if self._stepped:
            self.meter.close(trained)
        self._apply(controller.end_batch(trained, updated=self._stepped, learning_rate=self._base_rate))
        self._bridge.end_batch(batch_idx)
        if self._stepped:
            self._report(controller, used, trained)
        # Lightning ends a batch that is None without having begun it.
        self.begin_batch()

    def write_base_learning_rates(self, checkpoint: dict[str, Any]) -> None:
        """Put the learning rates without the factor into a checkpoint, by copies; the live ones stay."""
        states = checkpoint.get("optimizer_states", [])
        for number, optimizer in enumerate(self._lr.optimizers[: len(states)]):
            groups = states[number]["param_groups"]
            bases = self._lr.bases(optimizer)
            changed = [{**group, "lr": base} for group, base in zip(groups, bases, strict=True)]
            states[number] = {**states[number], "param_groups": changed}

    def give_back(self) -> None:
        """Undo every change to the user's objects; safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()
        self._lr.release()
        self._bridge.give_back()

    # Data -------------------------------------------------------------------------------------------

    def _make_elastic(self, loader: Any) -> ElasticLoader:
        """Make the elastic loader for one of the user's; on a reload it goes on with the size in force."""
        guards.check_loader(loader)
        max_batches, max_samples = self._bridge.limits_of(loader)
        elastic = ElasticLoader(loader, tail=self._settings.tail, max_batches=max_batches, max_samples=max_samples)
        if self.controller is not None:
            limits = dataclasses.replace(self.controller.limits, epoch_samples=elastic.epoch_samples)
            self.controller.move_to(limits, training_samples=len(elastic.sampler))
            elastic.resize(self.controller.decision.batch_size)
        return elastic

    def _data(self) -> tuple[int, int, int]:
        """Return B0, the number of training samples, and the samples of one epoch."""
        loaders = self._bridge.train_loaders()
        if len(loaders) != 1:
            raise guards.refuse(f"{len(loaders)} train loaders yet", "train on one DataLoader")
        if self._bridge.uses_dataloader_iter():
            raise guards.refuse("training_step(dataloader_iter)", "take batch and batch_idx in training_step instead")
        loader = loaders[0]
        if isinstance(loader, ElasticLoader):
            return loader.own_batch_size, len(loader.sampler), loader.epoch_samples
        if self._settings.adapt == "batch_size":
            raise guards.refuse(
                "a callback that replaces the train loader", "remove the callback that sets strategy.process_dataloader"
            )
        guards.check_fixed_loader(loader)
        sampler = loader.batch_sampler.sampler
        return loader.batch_sampler.batch_size, len(sampler), len(sampler)

    def _follow_data(self) -> None:
        """Take over what changed since the last epoch: a reload, or a sampler whose length moves."""
        controller = self.controller
        if controller is None:
            return
        _, training_samples, epoch_samples = self._data()
        if self._bridge.loader is None:
            controller.training_samples = training_samples
        elif controller.limits.epoch_samples != epoch_samples:
            limits = dataclasses.replace(controller.limits, epoch_samples=epoch_samples)
            controller.move_to(limits, training_samples=training_samples)
        self._apply(controller.decision)

    def _trained(self, batch: Any, batch_idx: int) -> int:
        """Return the samples of the batch in hand."""
        if self._bridge.loader is not None:
            return self._bridge.plan.last_size
        loader = self._bridge.train_loaders()[0]
        if guards.own_iteration(loader):
            return int(extract_batch_size(batch))
        batch_sampler = loader.batch_sampler
        size: int = batch_sampler.batch_size
        return min(size, len(batch_sampler.sampler) - batch_idx * size)

    # Optimizers -------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del optimizer, args, kwargs
        self._stepped = self._stepped or self.had_backward

    def _base_rate(self) -> float:
        return self._lr.base

    def _guard_schedulers(self) -> None:
        for config in self._trainer.lr_scheduler_configs:
            self._lr.guard(config.scheduler)

    def _apply(self, decision: Decision) -> None:
        if self._bridge.loader is not None:
            self._bridge.loader.resize(decision.batch_size)
        if decision.lr_factor != self._lr.factor:
            self._lr.set(decision.lr_factor)

    # Report -----------------------------------------------------------------------------------------

    def _report(self, controller: Controller, used: Decision, trained: int) -> None:
        self._bridge.publish(_METRIC, trained)
        if self._gate.admits(controller.updates, trained):
            self._write(controller, used, trained)
        else:
            self._unlogged = used, trained

    def _write(self, controller: Controller, used: Decision, trained: int) -> None:
        self._unlogged = None
        latest = controller.latest
        observed = {} if latest is None else {"loss": latest.loss, "grad_norm_sq": latest.grad_norm_sq}
        estimates = {**observed, **controller.policy.estimates(controller.state)}
        record = Record(
            batch_size=trained,
            updates=controller.updates,
            samples=controller.samples,
            epochs=controller.epochs,
            lr_factor=used.lr_factor,
            damping=used.damping,
            loss=estimates.get("loss"),
            grad_norm_sq=estimates.get("grad_norm_sq"),
            skipped=controller.skipped or None,
        )
        sinks.write(self._trainer.loggers, record)
