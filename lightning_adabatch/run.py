# SPDX-License-Identifier: Apache-2.0
"""One fit: the parts wired together, from ``setup`` until everything is given back."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import ShardingStrategy
from torch.optim import Optimizer

from lightning_adabatch import guards, sinks
from lightning_adabatch.bridge import Bridge
from lightning_adabatch.checkpoint import FRESH, Snapshot
from lightning_adabatch.controller import Controller
from lightning_adabatch.limits import Decision
from lightning_adabatch.loader import ElasticLoader, for_ranks, lost
from lightning_adabatch.lr import LRFactor
from lightning_adabatch.meter import Meter
from lightning_adabatch.policies import Observation
from lightning_adabatch.ranks import Ranks
from lightning_adabatch.report import PREFIX, Gate, Record
from lightning_adabatch.settings import Settings

_METRIC = PREFIX + "batch_size"


class Run:
    """What one call of ``Trainer.fit`` needs.

    Args:
        trainer: The Trainer, before it uses its train loader.
        settings: The callback's arguments.

    Attributes:
        restored: The state of a checkpoint from which this run goes on, or None.
        controller: Counts and decisions; None before training starts.
        meter: Measures the update in hand.
        had_backward: Whether the batch in hand had a backward pass: a step without one is no update.
    """

    def __init__(self, trainer: pl.Trainer, settings: Settings) -> None:
        self.controller: Controller | None = None
        self.restored: Snapshot | None = None
        self._ranks = ranks_of(trainer)
        self.meter = Meter(settings.policy.requires, self._ranks.mean if self._ranks.several else None)
        self.meter.shards = shards_of(trainer)
        self.had_backward = False
        self._trainer = trainer
        self._settings = settings
        self._stepped = False
        self._batch: Any = None  # in hand
        self._placed: ElasticLoader | None = None  # which loader was told where to go on
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set late
        self._gate = Gate(every if trainer.loggers else 0)
        self._lr = LRFactor([])
        self._hooks: list[Any] = []
        self._unlogged: tuple[Decision, int] | None = None  # of the last update, if its record was not written
        self._bridge = Bridge(trainer)
        if settings.adapt == "batch_size":
            self._bridge.slot.install(self._make_elastic, made=self._bridge.counts.loaders_made)

    def start(self) -> Controller:
        """Check the loader, take hold of optimizers and schedulers, and decide for the first update.

        Raises:
            MisconfigurationException: For a loader that is not supported, or bounds that do not hold B0.
        """
        initial, training_samples, epoch_samples = self._data()
        restored = self.restored
        if restored is not None:
            initial = restored.rule["initial_batch_size"]
        limits = self._settings.limits(
            initial, training_samples, epoch_samples, self._ranks.count, resumed=restored is not None
        )
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

    def end_validation(self) -> None:
        """Note that a validation ended."""
        self._bridge.resume.end_validation()

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

    def begin_batch(self, batch: Any = None) -> None:
        """Forget what a batch that never reached its end left behind."""
        self.meter.open()
        self.had_backward = self._stepped = False
        self._batch = batch

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

    # Checkpoints ------------------------------------------------------------------------------------

    def state_dict(self, *, alone: bool) -> dict[str, Any]:
        """Return what another process needs to go on after the last update that was made.

        Args:
            alone: Ask no other rank, and compute nothing that takes all of them.
        """
        if self.controller is None:
            return FRESH if self.restored is None else self.restored.state_dict()
        controller, meter, gate, unlogged = self.controller, self.meter, self._gate, self._unlogged
        # Hooks of others may come before ours: what this update will have changed is worked out on copies.
        settled = self._stepped or self._bridge.resume.batch_processed
        if settled:
            meter, gate = meter.copy(alone=alone), copy.copy(gate)
            controller = controller.copy(meter.read)
            trained = self._trained(self._batch, self._bridge.resume.ended)
            used = controller.decision
            if self._stepped:
                meter.close(trained)
            controller.end_batch(trained, updated=self._stepped, learning_rate=self._base_rate)
            if self._stepped:
                unlogged = None if gate.admits(controller.updates, trained) else (used, trained)
        place, own = self._bridge.resume.state(settled=settled)
        everybody = [own] if alone else self._ranks.gather(own)
        snapshot = Snapshot(
            rule=controller.state_dict(),
            rows=[[row.loss, row.grad_norm_sq, row.batch_size] for row in meter.peek(alone=alone)],
            logged={"size": gate.logged_size, "last": unlogged and [*astuple(unlogged[0]), unlogged[1]]},
            place=place,
            metrics=self._bridge.resume.metrics(alone=alone),
            ranks=self._ranks.count,
            own=everybody[:1] if _all_equal(everybody) else everybody,
            whole=not (alone and self._ranks.several),
            inside_step=not settled and self._bridge.resume.batch_begun,
        )
        return snapshot.state_dict()

    def _go_on(self, controller: Controller, restored: Snapshot) -> None:
        """Stand where the run of the checkpoint stood."""
        controller.load_state_dict(restored.rule)
        self.meter.put_back([Observation(*row) for row in restored.rows])
        last = restored.logged["last"]
        self._gate.logged_size = restored.logged["size"]
        self._unlogged = None if last is None else (Decision(*last[:-1]), last[-1])
        self._apply(controller.decision)
        own = restored.of_rank(self._ranks.rank)
        if self._bridge.slot.loader is not None:
            self._find_place(self._bridge.slot.loader, restored)
        elif restored.place["batches"] and not self._bridge.slot.stateful:
            rank_zero_warn(
                "AdaptiveBatchSize(adapt='lr') leaves the DataLoader to you, and it cannot go on in the middle of an "
                "epoch: the epoch ends after as many batches as it had left, of an order that begins anew. Resume from "
                "a checkpoint that was written at the end of an epoch, or use a loader that has a state, such as "
                "torchdata's StatefulDataLoader."
            )
        self._bridge.resume.go_on(dict(restored.place), own, restored.metrics)
        if restored.inside_step:
            rank_zero_info(
                f"AdaptiveBatchSize: the checkpoint was written inside a step; training goes on after update "
                f"{controller.updates}, the last one that was complete."
            )
        self.restored = None

    def _find_place(self, loader: ElasticLoader, restored: Snapshot) -> None:
        """See that the pass over the data stands where the checkpoint says, on every rank alike."""
        if self._placed is not loader:  # it was made before the checkpoint was read
            self._place(loader, restored)
            self._bridge.slot.begin_pass_again()
        if self._ranks.smallest(int(not loader.lost_place)) == 0:
            if not loader.lost_place:
                loader.place_at(lost(restored.of_rank(self._ranks.rank)["pass"]))
                self._bridge.slot.begin_pass_again()
            rank_zero_warn(
                f"AdaptiveBatchSize: the order of the epoch in which the checkpoint was written cannot be made again "
                f"with {type(loader.sampler).__name__} on {self._ranks.count} rank(s), where there were "
                f"{restored.ranks}: the epoch begins again, with all of its samples. For an exact resume keep data, "
                "sampler and number of ranks, or use a checkpoint that was written at the end of an epoch."
            )
        elif loader.num_workers and restored.place["batches"]:
            rank_zero_info(
                "AdaptiveBatchSize: the epoch goes on exactly where it stood; only what worker processes draw at "
                "random is drawn anew."
            )
        loader.place_at(None)
        loader.carried = restored.carried(self._ranks.rank, self._ranks.count)

    def _place(self, loader: ElasticLoader, restored: Snapshot) -> None:
        """Have the next pass begin where the checkpoint says."""
        self._placed = loader
        loader.resize(max(1, restored.rule["batch_size"] // self._ranks.count))
        rank, ranks = self._ranks.rank, self._ranks.count
        own = restored.of_rank(rank)
        loader.shuffle_seed = own.get("shuffle_seed")  # Lightning takes it from the global seed of this process
        place = own.get("pass")
        if place is not None:
            if not restored.whole and ranks > 1 and place["carried"]:
                place = lost(place)  # what the other ranks carried is not known
            total = loader.epoch_samples + len(place["carried"])
            loader.place_at(for_ranks(place, restored.ranks, ranks, loader.sampler, total))
        else:
            loader.carried = restored.carried(rank, ranks)

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
        if self.restored is not None:
            self._bridge.resume.restore(self.restored.of_rank(self._ranks.rank))

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
        max_batches, max_samples = self._bridge.counts.limits_of(loader)
        elastic = ElasticLoader(loader, tail=self._settings.tail, max_batches=max_batches, max_samples=max_samples)
        self._agree(elastic)
        if self.controller is not None:
            epoch_samples = elastic.epoch_samples * self._ranks.count
            limits = dataclasses.replace(self.controller.limits, epoch_samples=epoch_samples)
            self.controller.move_to(limits, training_samples=elastic.available() * self._ranks.count)
            elastic.resize(self.controller.decision.batch_size // self._ranks.count)
        elif self.restored is not None:
            self._place(elastic, self.restored)
        return elastic

    def _agree(self, elastic: ElasticLoader) -> None:
        """Have all ranks take the number of samples that the one with the fewest has: a collective."""
        if self._ranks.count > 1:
            elastic.agreed_samples = self._ranks.smallest(len(elastic.sampler))

    def _data(self) -> tuple[int, int, int]:
        """Return B0, the number of training samples, and the samples of one epoch, over all ranks."""
        ranks = self._ranks.count
        loaders = self._bridge.slot.train_loaders()
        if len(loaders) != 1:
            raise guards.refuse(f"{len(loaders)} train loaders yet", "train on one DataLoader")
        if self._bridge.slot.uses_dataloader_iter:
            raise guards.refuse("training_step(dataloader_iter)", "take batch and batch_idx in training_step instead")
        loader = loaders[0]
        if isinstance(loader, ElasticLoader):
            return loader.own_batch_size * ranks, loader.available() * ranks, loader.epoch_samples * ranks
        if self._settings.adapt == "batch_size":
            raise guards.refuse(
                "a callback that replaces the train loader", "remove the callback that sets strategy.process_dataloader"
            )
        guards.check_fixed_loader(loader)
        sampler = loader.batch_sampler.sampler
        return loader.batch_sampler.batch_size * ranks, len(sampler) * ranks, len(sampler) * ranks

    def _follow_data(self) -> None:
        """Take over what changed since the last epoch: a reload, or a sampler whose length moves."""
        controller = self.controller
        if controller is None:
            return
        if self._bridge.slot.loader is not None:
            self._agree(self._bridge.slot.loader)
        _, training_samples, epoch_samples = self._data()
        if self._bridge.slot.loader is None:
            controller.training_samples = training_samples
        elif controller.limits.epoch_samples != epoch_samples:
            limits = dataclasses.replace(controller.limits, epoch_samples=epoch_samples)
            controller.move_to(limits, training_samples=training_samples)
        self._apply(controller.decision)

    def _trained(self, batch: Any, batch_idx: int) -> int:
        """Return the samples of the batch in hand, over all ranks."""
        return self._trained_here(batch, batch_idx) * self._ranks.count

    def _trained_here(self, batch: Any, batch_idx: int) -> int:
        if self._bridge.slot.loader is not None:
            return self._bridge.slot.live.plan.last_size
        loader = self._bridge.slot.train_loaders()[0]
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
        if self._bridge.slot.loader is not None:
            self._bridge.slot.loader.resize(decision.batch_size // self._ranks.count)
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
            device_batch_size=trained // self._ranks.count if self._ranks.count > 1 else None,
            loss=estimates.get("loss"),
            grad_norm_sq=estimates.get("grad_norm_sq"),
            skipped=controller.skipped or None,
        )
        sinks.write(self._trainer.loggers, record)


def ranks_of(trainer: pl.Trainer) -> Ranks:
    """Return the data-parallel ranks of a Trainer."""
    strategy: Any = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return Ranks()
    kwargs = strategy.distributed_sampler_kwargs
    return Ranks(kwargs["num_replicas"], kwargs["rank"], strategy.root_device)


def shards_of(trainer: pl.Trainer) -> int:
    """Return over how many processes gradients that are plain tensors are divided."""
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy) and strategy.sharding_strategy is not ShardingStrategy.NO_SHARD:
        return int(trainer.world_size)
    return 1


def _all_equal(states: Sequence[Any]) -> bool:
    first, *others = [pickle.dumps(state) for state in states] if len(states) > 1 else [b""]
    return all(other == first for other in others)
