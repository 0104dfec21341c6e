# SPDX-License-Identifier: Apache-2.0
"""One fit: the parts wired together, from ``setup`` until everything is given back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_adabatch import guards, sinks
from lightning_adabatch.bridge import Bridge, prepare, ranks_of, shards_of
from lightning_adabatch.checkpoint import FRESH, Snapshot
from lightning_adabatch.controller import Controller
from lightning_adabatch.data import TrainData
from lightning_adabatch.limits import Decision
from lightning_adabatch.lr import LRFactor, planned_steps
from lightning_adabatch.meter import Meter
from lightning_adabatch.policies import Constant, Observation
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
        self._ranks = ranks_of(trainer)
        self.meter = Meter(settings.policy.requires, self._ranks.mean if self._ranks.several else None)
        self.meter.shards = shards_of(trainer)
        self.had_backward = False
        self._trainer = trainer
        self._settings = settings
        self._stepped: list[int] = []  # optimizers that stepped in the batch in hand
        self._closed = False  # whether its row in the meter is closed,
        self._counted = False  # and whether it is counted: what raises in between leaves it half done
        self._manual = False
        self._said_backward = False
        self._batch: Any = None  # in hand
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set late
        self._gate = Gate(every if trainer.loggers else 0)
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._lr = LRFactor([])
        self._hooks: list[Any] = []
        self._unlogged: tuple[Decision, int] | None = None  # of the last update, if its record was not written
        self._bridge = Bridge(trainer)
        self._data = TrainData(settings, self._bridge, self._ranks, trainer.accumulate_grad_batches)
        self._in_parts = False  # whether updates may have several

    def start(self) -> Controller:
        """Check the loader, take hold of optimizers and schedulers, and decide for the first update.

        Raises:
            MisconfigurationException: For a loader that is not supported, or bounds that do not hold B0.
        """
        initial, training_samples, epoch_samples = self._data.look()
        restored = self._data.restored
        if restored is not None:
            initial = restored.rule["initial_batch_size"]
        limits = self._settings.limits(
            initial, training_samples, epoch_samples, self._ranks.count, resumed=restored is not None
        )
        self._in_parts = self._settings.adapt == "batch_size" and (
            self._trainer.accumulate_grad_batches > 1 or self._settings.max_device_batch_size is not None
        )
        if self._settings.adapt == "lr":
            guards.check_fixed_updates(self._trainer)
        if self._in_parts:
            guards.check_parts(self._trainer)
            self._bridge.accumulate()
        self.controller = Controller(
            self._settings.policy,
            limits,
            self._settings.cadence,
            training_samples=training_samples,
            observe=self.meter.peek,
            notify=rank_zero_warn,
        )
        self._data.controller = self.controller
        self._manual = not self._trainer.lightning_module.automatic_optimization
        self._lr = LRFactor(self._trainer.optimizers)
        self._guard_schedulers()
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in self._trainer.optimizers]
        self._notice_planned_schedulers()
        if restored is None:
            self._apply(self.controller.start(self._base_rate))
        else:
            self._go_on(self.controller, restored)
        sinks.lay_out(self._trainer.loggers)
        return self.controller

    @property
    def several_ranks(self) -> bool:
        """Whether other processes take part."""
        return self._ranks.several

    def begin_epoch(self) -> None:
        """Plan the epoch at the size in force."""
        self._guard_schedulers()  # another callback may have put new ones in
        if self.controller is not None:
            self._data.follow(self.controller)
            self._apply(self.controller.decision)
        self._bridge.begin_epoch()

    def end_epoch(self) -> None:
        """Log the epoch's last update, whatever ended the epoch."""
        if self.controller is not None and self._unlogged is not None and self._gate.open:
            self._gate.note(self._unlogged[1])
            self._write(self.controller, *self._unlogged)

    def begin_batch(self, batch: Any = None) -> None:
        """Forget what a batch that never reached its end left behind."""
        self._batch = batch
        if not self._in_parts or self._bridge.accumulation.first:
            self._forget()

    def _forget(self) -> None:
        self.meter.open()
        self.had_backward = False
        self._stepped = []
        self._closed = self._counted = False

    def take_loss(self, loss: Tensor) -> None:
        """Measure the loss, without what a gradient scaler multiplied it by; of a part its share."""
        part = 1
        if self._in_parts:
            self._bridge.accumulation.weigh(loss)
            part = self._bridge.slot.live.plan.part
        scaler = self._scaler
        self.meter.loss(loss if scaler is None else loss.detach() / scaler.scale(torch.ones_like(loss)), part)

    def before_step(self, optimizer: Optimizer) -> None:
        """Measure the gradients, and put the factor on a learning rate that was assigned meanwhile."""
        if self.meter.measures_norm:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.meter.gradients(grads, id(optimizer))
        self._lr.refresh()

    def end_batch(self, batch: Any, batch_idx: int) -> None:
        """Count the batch, decide, apply the decision, and report."""
        controller = self.controller
        assert controller is not None  # for the type checker: start() came before
        if self._in_parts and not self._bridge.accumulation.complete:
            self._bridge.end_batch(batch_idx)
            return
        used = controller.decision
        trained = self._data.trained(batch, batch_idx)
        updated = bool(self._stepped)
        if updated:
            self.meter.close(trained, self._stepped)
            self._closed = True
            if self._manual and not self.had_backward:
                self._say_backward()
        decision = controller.end_batch(trained, updated=updated, learning_rate=self._base_rate)
        self._counted = True
        if updated and controller.cadence.due(controller.updates):
            self.meter.clear()
        self._apply(decision)
        self._bridge.end_batch(batch_idx)
        # Lightning ends a batch that is None without having begun it.
        self._batch = None
        self._forget()
        if updated:
            self._report(controller, used, trained)

    # Checkpoints ------------------------------------------------------------------------------------

    def resume_from(self, snapshot: Snapshot | None, checkpoint: dict[str, Any]) -> None:
        """Have the run go on from a checkpoint, if the run in it had begun."""
        self._data.restored = snapshot
        if snapshot is not None:
            prepare(checkpoint, snapshot.place)

    def state_dict(self, *, alone: bool) -> dict[str, Any]:
        """Return what another process needs to go on after the last update that was made.

        Args:
            alone: Ask no other rank, and compute nothing that takes all of them.
        """
        if self.controller is None:
            return dict(FRESH) if self._data.restored is None else self._data.restored.state_dict()
        controller, meter, gate, unlogged = self.controller, self.meter, self._gate, self._unlogged
        # Hooks of others may come before ours: what this update will have changed is worked out on copies.
        whole = not self._in_parts or self._bridge.accumulation.complete
        settled = whole and (bool(self._stepped) or self._bridge.resume.batch_processed)
        updated, trained = bool(self._stepped), 0
        if settled:
            trained = self._data.trained(self._batch, self._bridge.resume.ended)
            meter, gate, used = meter.copy(alone=alone), copy.copy(gate), controller.decision
            controller = controller.copy(meter.peek)
            if updated and not self._closed:
                meter.close(trained, self._stepped)
            if not self._counted:
                controller.end_batch(trained, updated=updated, learning_rate=self._base_rate)
            if updated:
                unlogged = None if gate.admits(controller.updates, trained) else (used, trained)
                if controller.cadence.due(controller.updates):
                    meter.clear()
        metrics = self._bridge.resume.metrics(alone=alone and self._ranks.several)
        if settled and updated:
            metrics[_METRIC] = torch.tensor(float(trained))
        place, own = self._bridge.resume.state(settled=settled)
        everybody = [own] if alone else self._ranks.gather(own)
        snapshot = Snapshot(
            rule=controller.state_dict(),
            rows=[[row.loss, row.grad_norm_sq, row.batch_size] for row in meter.peek(alone=alone)],
            logged={"size": gate.logged_size, "last": unlogged and [*astuple(unlogged[0]), unlogged[1]]},
            place=place,
            metrics=metrics,
            ranks=self._ranks.count,
            own=everybody[:1] if _all_equal(everybody) else everybody,
            whole=not (alone and self._ranks.several),
            inside_step=self._bridge.resume.batch_begun and not (settled and self._bridge.resume.batch_processed),
        )
        return snapshot.state_dict()

    def last_state(self) -> dict[str, Any]:
        """Return the state after an exception, asking nobody; empty if what raised would raise again."""
        try:
            return self.state_dict(alone=True)
        except Exception as error:  # noqa: BLE001  # the one that ended the run is what the user is to see
            rank_zero_warn(
                f"AdaptiveBatchSize: its state could not be taken ({type(error).__name__}: {error}); a checkpoint that "
                "is written now cannot be resumed. Use the last one that was written before."
            )
            return {}

    def _go_on(self, controller: Controller, restored: Snapshot) -> None:
        """Stand where the run of the checkpoint stood."""
        controller.load_state_dict(restored.rule)
        self.meter.put_back([Observation(*row) for row in restored.rows])
        last = restored.logged["last"]
        self._gate.logged_size = restored.logged["size"]
        self._unlogged = None if last is None else (Decision(*last[:-1]), last[-1])
        self._apply(controller.decision)
        end = self._data.find_place(restored)
        own = restored.of_rank(self._ranks.rank)
        self._bridge.resume.go_on(dict(restored.place), own, restored.metrics, end)
        if restored.inside_step:
            rank_zero_info(
                f"AdaptiveBatchSize: the checkpoint was written inside a step; training goes on after update "
                f"{controller.updates}, the last one that was complete."
            )
        self._data.restored = None

    def write_base_learning_rates(self, checkpoint: dict[str, Any]) -> None:
        """Put the learning rates without the factor into a checkpoint, by copies; the live ones stay."""
        states = checkpoint.get("optimizer_states", [])
        for number, optimizer in enumerate(self._lr.optimizers[: len(states)]):
            if "param_groups" not in states[number]:
                continue  # of a sharded optimizer only the first rank has the full state
            groups = states[number]["param_groups"]
            bases = self._lr.bases(optimizer)
            changed = [{**group, "lr": base} for group, base in zip(groups, bases, strict=True)]
            states[number] = {**states[number], "param_groups": changed}

    def end(self) -> None:
        """Leave the generators as the run of the checkpoint did, if there was nothing left to train."""
        restored = self._data.restored
        if restored is not None:
            self._bridge.resume.restore(restored.of_rank(self._ranks.rank))

    def give_back(self) -> None:
        """Undo every change to the user's objects; safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()
        self._lr.release()
        self._bridge.give_back()

    # Optimizers -------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        # With automatic optimization a step without a backward pass is none: training_step returned None.
        if (self.had_backward or self._manual) and id(optimizer) not in self._stepped:
            self._stepped.append(id(optimizer))

    def _say_backward(self) -> None:
        """Say once that a backward pass went past Lightning, and with it the loss."""
        if self.meter.measures_loss and not self._said_backward:
            self._said_backward = True
            rank_zero_warn(
                f"AdaptiveBatchSize: an optimizer stepped and no loss was seen, "
                f"which {self._settings.policy!r} follows. Call self.manual_backward(loss) instead of loss.backward()."
            )

    def _base_rate(self) -> float:
        return self._lr.base

    def _guard_schedulers(self) -> None:
        for config in self._trainer.lr_scheduler_configs:
            self._lr.guard(config.scheduler)

    def _notice_planned_schedulers(self) -> None:
        """Say once what a change of size means for schedules that are planned in updates."""
        if self._settings.adapt == "lr" or isinstance(self._settings.policy, Constant):
            return
        planned = {
            type(config.scheduler).__name__: steps
            for config in self._trainer.lr_scheduler_configs
            if config.interval == "step" and (steps := planned_steps(config.scheduler)) is not None
        }
        if planned:
            listed = ", ".join(f"{name} for {steps}" for name, steps in planned.items())
            rank_zero_warn(
                f"AdaptiveBatchSize changes the number of updates, and schedules are planned in them: {listed}. "
                "trainer.estimated_stepping_batches is the count at the initial batch size: with larger batches the "
                "run ends before the schedule does; with smaller ones OneCycleLR is held at its final value, and a "
                "cosine climbs again. For a schedule that keeps its shape use interval='epoch'."
            )

    def _apply(self, decision: Decision) -> None:
        self._data.resize(decision.batch_size)
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
        device = trained // self._ranks.count
        if self._in_parts:
            device = -(-device // self._bridge.slot.live.plan.parts(device))
        estimates = {**observed, **controller.policy.estimates(controller.state)}
        record = Record(
            batch_size=trained,
            updates=controller.updates,
            samples=controller.samples,
            epochs=controller.epochs,
            lr_factor=used.lr_factor,
            damping=used.damping,
            device_batch_size=device if device < trained else None,
            loss=estimates.get("loss"),
            grad_norm_sq=estimates.get("grad_norm_sq"),
            skipped=controller.skipped or None,
        )
        sinks.write(self._trainer.loggers, record)


def _all_equal(states: Sequence[Any]) -> bool:
    first, *others = [pickle.dumps(state) for state in states] if len(states) > 1 else [b""]
    return all(other == first for other in others)
