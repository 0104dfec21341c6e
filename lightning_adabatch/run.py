# SPDX-License-Identifier: Apache-2.0
"""One fit: the parts wired together, from ``setup`` until everything is given back."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_adabatch import guards
from lightning_adabatch.bridge import Bridge, ranks_of, shards_of
from lightning_adabatch.checkpoint import Snapshot
from lightning_adabatch.controller import Controller
from lightning_adabatch.data import TrainData
from lightning_adabatch.division import Division
from lightning_adabatch.evaluation import Evaluation
from lightning_adabatch.limits import Decision
from lightning_adabatch.logbook import Logbook
from lightning_adabatch.meter import Meter
from lightning_adabatch.notices import Notices
from lightning_adabatch.rates import Rates
from lightning_adabatch.report import BATCH_SIZE
from lightning_adabatch.settings import Settings
from lightning_adabatch.standing import Standing
from lightning_adabatch.update import Update


class Run:
    """What one call of ``Trainer.fit`` needs.

    Args:
        trainer: The Trainer, before it uses its train loader.
        settings: The callback's arguments.

    Attributes:
        controller: Counts and decisions; None before training starts.
        update: The update in hand.
    """

    def __init__(self, trainer: pl.Trainer, settings: Settings) -> None:
        self.controller: Controller | None = None
        self._ranks = ranks_of(trainer)
        self._meter = Meter(settings.policy.requires, self._ranks.mean if self._ranks.several else None)
        self._meter.shards = shards_of(trainer)
        self._notices = Notices(settings.policy)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._rates = Rates(trainer, settings)
        self.update = Update(
            self._meter, scaler, self._say_no_loss, self._notices.no_gradients, before_step=self._rates.refresh
        )
        self._trainer = trainer
        self._settings = settings
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set late
        self._bridge = Bridge(trainer)
        self._data = TrainData(settings, self._bridge, self._ranks, trainer.accumulate_grad_batches)
        self._bridge.counts.changed = self._follow_data
        fraction = getattr(settings.policy, "fraction", 1.0)
        self._evaluation = Evaluation(trainer, self._ranks, fraction, self._data.to_evaluate)
        self._division = Division(trainer, settings, self._bridge, self._data, self.update, self._ranks.count)
        self._logbook = Logbook(every, self._division.device_size)
        self._standing = Standing(
            self._bridge,
            self._ranks,
            self._data,
            self.update,
            self._division,
            self._evaluation,
            self._rates,
            self._logbook,
        )
        self._rates.watch()

    def start(self) -> None:
        """Check the loader, take hold of optimizers and schedulers, and decide for the first update.

        Raises:
            MisconfigurationException: For a loader that is not supported, or bounds that do not hold B0.
        """
        initial, training_samples, epoch_samples = self._data.look()
        restored = self._data.places.restored
        if restored is not None:
            initial = restored.rule["initial_batch_size"]
        self._notices.state()
        self._notices.laid_out([loader.sampler for loader in self._bridge.slot.loaders], self._settings.multiple_of)
        self._take_hold()
        if initial is not None:
            self._begin(initial, training_samples, epoch_samples)

    def _take_hold(self) -> None:
        """Take hold of micro-batches, optimizers and schedulers."""
        if self._settings.follows_variance:
            guards.check_variance(self._trainer, self._settings, len(self._bridge.slot.loaders))
        if self._settings.evaluates:
            guards.check_evaluation(self._trainer, self._settings, self._data.own_loaders)
        self._division.take_hold()
        self.update.manual = not self._trainer.lightning_module.automatic_optimization
        self._rates.take_hold()
        self._bridge.before_step(self._rates.refresh)  # hooks may have assigned a learning rate after ours
        self.update.watch(self._trainer.optimizers)

    def _begin(self, initial: int, training_samples: int | None, epoch_samples: float) -> None:
        """Decide for the first update, or go on where the run of a checkpoint stood."""
        restored = self._data.places.restored
        limits = self._settings.limits(
            initial, training_samples, epoch_samples, self._ranks.count, resumed=restored is not None
        )
        self.controller = Controller(
            self._settings.policy,
            limits,
            self._settings.cadence,
            training_samples=training_samples,
            observe=self._meter.peek,
            notify=rank_zero_warn,
            evaluate=self._evaluation.measure,
        )
        self._data.controller = self.controller
        if restored is None:
            self._logbook.follow(self._bridge.steps)
            self._apply(self.controller.start(self._rates.base))
            self._evaluation.forget()
        else:
            self._standing.go_on(self.controller, restored, self._apply)
        self._logbook.begin(self._trainer.loggers)
        self._notices.tail_is_due = self._data.keeps_tails

    @property
    def several_ranks(self) -> bool:
        """Whether other processes take part."""
        return self._ranks.several

    def begin_epoch(self) -> None:
        """Plan the epoch at the size in force."""
        self._rates.guard_schedulers()
        if self.controller is not None:
            self._data.follow(self.controller)
            self._apply(self.controller.decision)
        self._bridge.begin_epoch()

    def _follow_data(self) -> None:
        if self.controller is not None and not self._ranks.several:  # with several it takes all of them
            self._data.follow(self.controller)
            self._apply(self.controller.decision)

    def end_epoch(self) -> None:
        """Log the epoch's last update, whatever ended the epoch."""
        if self.controller is not None:
            self._logbook.end_epoch(self.controller)
            if self._meter.measures_loss and not self.update.loss_seen and self.controller.latest is None:
                self._say_no_loss()
            if self.update.manual and self.controller.updates == 0:
                self._notices.no_updates()

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Forget what a batch that never reached its end left behind."""
        self._data.begin_batch(batch, batch_idx)
        if self.controller is None:  # only the first batch says how large one is
            first = self._data.trained(batch) * self._trainer.accumulate_grad_batches
            self._begin(first, self._data.training_samples, math.inf)
        self.update.batch = batch
        self._rates.refresh()
        if self._division.first:
            self.update.begin()
        self._division.begin_batch(batch)

    def take_loss(self, loss: Tensor) -> None:
        """Measure the loss, of a part its share."""
        self.update.take_loss(*self._division.loss_of(loss))

    def after_backward(self) -> None:
        """Note that there are gradients, and measure those of the first of several parts."""
        self.update.had_backward = True
        part = self._division.first_part
        if part is not None:
            self.update.take_first_part(self._trainer.optimizers, *part)

    def before_step(self, optimizer: Optimizer) -> None:
        """Measure the gradients."""
        self._follow_optimizers()
        self.update.take_gradients(optimizer, self._division.scale)

    def end_batch(self, batch: Any, batch_idx: int) -> None:
        """Count the batch, decide, apply the decision, and report."""
        controller = self.controller
        if controller is None:
            return  # the first batches are None, and only others say how large one is
        self.update.settle()
        if not self._division.whole:
            self._bridge.end_batch(batch_idx)
            return
        used = controller.decision
        trained = self._division.trained(batch)
        updated = bool(self.update.stepped)
        if updated:
            self.update.close(trained, self._division.effective)
        decision = controller.end_batch(trained, updated=updated, learning_rate=self._rates.base)
        self._evaluation.forget()
        self.update.counted = True
        if updated and controller.cadence.due(controller.updates):
            self._meter.clear()
        self._apply(decision)
        self._bridge.end_batch(batch_idx)
        # Lightning ends a batch that is None without having begun it.
        self.update.end()
        if updated:
            self._bridge.publish(BATCH_SIZE, trained)
            self._logbook.end_update(controller, used, trained)
            self._notices.small_tail(trained, used.batch_size, controller.limits.initial_batch_size)

    # Checkpoints ------------------------------------------------------------------------------------

    def resume_from(self, snapshot: Snapshot | None, checkpoint: dict[str, Any]) -> None:
        """Have the run go on from a checkpoint, if the run in it had begun."""
        self._standing.resume_from(snapshot, checkpoint)

    def state_dict(self, *, alone: bool) -> dict[str, Any]:
        """Return what another process needs to go on after the last update that was made.

        Args:
            alone: Ask no other rank, and compute nothing that takes all of them.
        """
        return self._standing.state_dict(self.controller, alone=alone)

    def last_state(self) -> dict[str, Any]:
        """Return the state after an exception, asking nobody; empty if what raised would raise again."""
        return self._standing.last_state(self.controller)

    def write_base_learning_rates(self, checkpoint: dict[str, Any]) -> None:
        """Put the learning rates without the factor into a checkpoint."""
        self._follow_optimizers()
        self._rates.write_base(checkpoint)

    def end(self) -> None:
        """Leave the generators as the run of the checkpoint did, if there was nothing left to train."""
        restored = self._data.places.restored
        if restored is not None:
            self._bridge.resume.restore(restored.of_rank(self._ranks.rank))

    def give_back(self) -> None:
        """Undo every change to the user's objects; safe to call twice."""
        self.update.release()
        self._rates.release()
        self._bridge.give_back()

    # Optimizers -------------------------------------------------------------------------------------

    def _follow_optimizers(self) -> None:
        """Take hold of the optimizers that the Trainer has now: somebody may have put others in their place."""
        if self.controller is not None and self._rates.follow():
            self.update.watch(self._trainer.optimizers)

    def _say_no_loss(self) -> None:
        self._notices.no_loss(manual=self.update.manual)

    def _apply(self, decision: Decision) -> None:
        self._data.resize(decision.batch_size)
        self._rates.set(decision.lr_factor)
