# SPDX-License-Identifier: Apache-2.0
"""The learning rate past the cap: once, reversible, on top of any scheduler."""

from __future__ import annotations

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import LRSchedulerConfig
from models import Recorder, adapt, fit, loader
from torch.optim import lr_scheduler as schedules

# The notice has tests of its own.
pytestmark = pytest.mark.filterwarnings("ignore:AdaptiveBatchSize changes the number of updates")

WANTED = [8, 64, 128, 256, 64, 8]


def test_rate_falls_past_the_cap_and_comes_back(tmp_path):
    """C15: wanted 8, 64, 128, 256, 64, 8 with cap 64 gives LR 0.1, 0.1, 0.05, 0.025, 0.1, 0.1."""
    module = Recorder()
    fit(module, loader(300, 8), callbacks=[adapt(*WANTED, max_batch_size=64)], epochs=1, max_steps=6, root=tmp_path)
    assert module.sizes == [8, 64, 64, 64, 64, 8]
    assert [batch.lr for batch in module.batches] == [0.1, 0.1, 0.05, 0.025, 0.1, 0.1]


SCHEDULERS = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda k: 1 / (1 + 0.1 * k)),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.2, total_steps=60),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 7),
    "StepLR": lambda o: schedules.StepLR(o, 5, 0.5),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.95),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 60),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, 1.0, 30),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_factor_multiplies_what_a_scheduler_says(name, tmp_path):
    """C16, C17: at each step the LR is that of the run without the callback, times the factor; and comes back."""
    script = [8, 16, 16, 32, 64, 16, 8, 8] + [16] * 42 + [8]
    factors = [min(1.0, 8 / wanted) for wanted in script]
    rates = []
    for callbacks in ([], [adapt(*script, max_batch_size=8)]):
        module = Recorder(schedule=SCHEDULERS[name], interval="step")
        fit(module, loader(8 * 51, 8), callbacks=callbacks, epochs=1, max_steps=51, root=tmp_path)
        rates.append([batch.lr for batch in module.batches])
    assert rates[1] == pytest.approx([rate * factor for rate, factor in zip(rates[0], factors, strict=True)], rel=1e-8)
    assert rates[1][-1] == rates[0][-1]
    assert rates[0][1] != pytest.approx(rates[0][20]), "the scheduler must move, or the test says nothing"


class Steps(pl.Callback):
    """Steps a scheduler that Lightning was never told of, where a user keeps it; and copies it every time."""

    def __init__(self, owner, keep, get):
        self.owner, self.keep, self.get = owner, keep, get
        self.copied = None

    def on_train_start(self, trainer, pl_module):
        owner = self if self.owner == "callback" else pl_module
        owner.own = self.keep(schedules.ExponentialLR(trainer.optimizers[0], 0.9))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        scheduler = self.get((self if self.owner == "callback" else pl_module).own)
        scheduler.step()
        self.copied = [copy.deepcopy(scheduler), *(pickle.loads(pickle.dumps(scheduler, k)) for k in (2, 5))]


@pytest.mark.parametrize("owner", ["module", "callback"])
@pytest.mark.parametrize(
    ("keep", "get"),
    [
        (lambda one: one, lambda own: own),
        (lambda one: [None, one], lambda own: own[1]),
        (lambda one: {"a": one}, lambda own: own["a"]),
        (lambda one: lambda: one, lambda own: own()),
    ],
    ids=["itself", "list", "dict", "closure"],
)
def test_a_scheduler_that_lightning_does_not_know(owner, keep, get, tmp_path):
    """It multiplies what it finds in the groups: it must not find the factor there, nor leave our class in a copy."""
    script = [8, 16, 16, 32, 64, 16, 8, 8, 16, 16]
    rates = []
    for callbacks in ([], [adapt(*script, max_batch_size=8)]):
        module, steps = Recorder(), Steps(owner, keep, get)
        fit(module, loader(80, 8), callbacks=[steps, *callbacks], epochs=1, max_steps=10, root=tmp_path)
        rates.append([batch.lr for batch in module.batches])
    factors = [min(1.0, 8 / wanted) for wanted in script]
    assert rates[0] == pytest.approx([0.1 * 0.9**k for k in range(10)])
    assert rates[1] == pytest.approx([rate * factor for rate, factor in zip(rates[0], factors, strict=True)], rel=1e-8)
    assert [type(one) for one in steps.copied] == [schedules.ExponentialLR] * 3


def test_factor_and_plateau(tmp_path):
    """C17: ReduceLROnPlateau with a floor sees the base LR: 0.1, then 0.05 at the floor, each times 1/2."""

    class Flat(Recorder):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

    module = Flat(schedule=lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=0.05))
    callback = adapt(16, max_batch_size=8)
    trainer = fit(module, loader(16, 8), loader(8, 8), callbacks=[callback], epochs=5, root=tmp_path)
    assert [batch.lr for batch in module.batches] == [0.05] * 4 + [0.025] * 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05


def test_epoch_schedulers_step_once_per_epoch(tmp_path):
    """C52: StepLR(1, 0.5) from 0.1 is at 0.025 after two epochs, with growth in the first."""
    module = Recorder(schedule=lambda o: schedules.StepLR(o, 1, 0.5))
    trainer = fit(module, loader(64, 4), callbacks=[adapt(4, 4, 4, 4, 16)], root=tmp_path)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.025
    assert [batch.lr for batch in module.batches] == [0.1] * 7 + [0.05] * 4


@pytest.mark.parametrize("before", [True, False], ids=["monitor first", "callback first"])
def test_monitor_shows_the_rate_in_use(before, tmp_path):
    """C80: what LearningRateMonitor logs for a step is the LR that optimizer_step used, wherever we stand in the list.

    Lightning's monitor numbers the steps from 0, so update k is at k - 1.
    """
    ours, monitor = adapt(*WANTED, max_batch_size=64), LearningRateMonitor("step")
    logged: dict[int, float] = {}
    used: list[float] = []

    class Net(Recorder):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            used.append(optimizer.param_groups[0]["lr"])
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    class Logger(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if "lr-SGD" in metrics:
                logged[step] = metrics["lr-SGD"]

    fit(
        Net(schedule=SCHEDULERS["StepLR"], interval="step"),
        loader(400, 8),
        callbacks=[monitor, ours] if before else [ours, monitor],
        epochs=1,
        max_steps=8,
        logger=Logger(tmp_path),
        log_every_n_steps=1,
    )
    # StepLR(5, 0.5) halves after 5 updates; the last size of the script, 8, stays.
    assert used == pytest.approx([0.1, 0.1, 0.05, 0.025, 0.1, 0.05, 0.05, 0.05])
    assert logged == dict(enumerate(used))


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("name", ["LinearLR", "LambdaLR", "CosineAnnealingLR", "StepLR", "ExponentialLR"])
def test_a_scheduler_that_is_put_in_while_the_factor_is_on(name, hook, tmp_path):
    """A second stage with a scheduler of its own, from the hook of a module, which comes after ours."""

    class Stages(Recorder):
        def stage(self):
            if self.trainer.global_step == 4:
                scheduler = SCHEDULERS[name](self.trainer.optimizers[0])
                self.trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step")]

    setattr(Stages, hook, lambda self, *args: self.stage())
    rates = []
    for callbacks in ([], [adapt(8, 16, 16, 32, max_batch_size=8)]):
        module = Stages()
        fit(module, loader(32, 8), callbacks=callbacks, epochs=3, root=tmp_path)
        rates.append([batch.lr for batch in module.batches])
    factors = [1, 0.5, 0.5] + [0.25] * 9
    assert rates[1] == pytest.approx([rate * factor for rate, factor in zip(rates[0], factors, strict=True)], rel=1e-8)
    assert len(set(rates[0])) > 1, "the scheduler must move, or the test says nothing"


@pytest.mark.parametrize("raw", [True, False], ids=["raw optimizer", "Lightning's"])
def test_manual_steps_with_a_rate_of_their_own(raw, tmp_path):
    """A rate that is assigned right before each step is used with the factor, whichever optimizer takes the step."""
    used = []

    class Manual(Recorder):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda one, *_: used.append(one.param_groups[0]["lr"]))
            return optimizer

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=not raw)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    fit(Manual(), loader(32, 8), callbacks=[adapt(8, 16, 32, 8, max_batch_size=8)], epochs=1, root=tmp_path)
    assert used == pytest.approx([0.1, 0.05 / 2, 0.1 / 3 / 4, 0.025])


class Assigns(pl.Callback):
    """Assigns a rate in a hook."""

    def assign(self, trainer, *args):
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + trainer.global_step)


OF_MODULE = ["on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("where", [*OF_MODULE, "callback behind", "callback before"])
def test_a_rate_that_is_assigned_right_before_the_step(where, precision, tmp_path):
    """A warm-up in any hook before the step: what steps has the factor, also where our own hook came before it."""
    used = []

    class Net(Recorder):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda one, *_: used.append(one.param_groups[0]["lr"]))
            return optimizer

    class OfCallback(Assigns):
        on_before_optimizer_step = Assigns.assign

    def assigns(self, *args, **kwargs):
        Assigns.assign(self, self.trainer)
        return getattr(super(Net, self), where)(*args, **kwargs)

    ours = adapt(8, 16, 32, 8, max_batch_size=8)
    if hasattr(Net, where):
        setattr(Net, where, assigns)
    callbacks = {"callback behind": [ours, OfCallback()], "callback before": [OfCallback(), ours]}.get(where, [ours])
    trainer = fit(Net(), loader(32, 8), callbacks=callbacks, epochs=1, root=tmp_path, precision=precision)
    assert used == pytest.approx([0.1, 0.05 / 2, 0.1 / 3 / 4, 0.025])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.025
    assert "_after_closure" not in vars(trainer.precision_plugin)


def test_monitor_shows_a_rate_that_was_assigned_after_the_step(tmp_path):
    """The warm-up of Lightning's documentation: the next step's rate has the factor before anybody looks at it."""
    logged, used = {}, []

    class Net(Recorder):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step(closure=closure)
            optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)

    class Logger(CSVLogger):
        def log_metrics(self, metrics, step=None):
            logged.update({step: metrics["lr-SGD"]} if "lr-SGD" in metrics else {})

    flags = {"logger": Logger(tmp_path), "log_every_n_steps": 1}
    callbacks = [adapt(16, max_batch_size=8), LearningRateMonitor("step")]
    fit(Net(), loader(64, 8), callbacks=callbacks, epochs=1, **flags)
    assert used[1:] == pytest.approx([0.0125, 0.025, 0.0375, 0.05, 0.05, 0.05, 0.05])
    assert logged == pytest.approx(dict(enumerate(used)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_below_the_cap(optimizer, rule, factor, tmp_path):
    """C85: below the cap the LR stays by default; the optional rules multiply by B / B0 or its root."""

    class Net(Recorder):
        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=0.1)

    module = Net()
    fit(module, loader(64, 4), callbacks=[adapt(4, 4, 16, lr_scaling=rule)], epochs=1, root=tmp_path)
    assert [batch.lr for batch in module.batches] == pytest.approx([0.1, 0.1] + [0.1 * factor] * 4)


def test_scaling_and_the_cap(tmp_path):
    """With lr_scaling both factors hold: 8/4 for growth to the cap, times 8/wanted beyond it."""
    module = Recorder()
    callback = adapt(4, 8, 16, 64, max_batch_size=8, lr_scaling="linear")
    fit(module, loader(28, 4), callbacks=[callback], epochs=1, root=tmp_path)
    assert module.sizes == [4, 8, 8, 8]
    assert [batch.lr for batch in module.batches] == pytest.approx([0.1, 0.2, 0.1, 0.025])


def test_adapt_lr_leaves_the_loader_alone(tmp_path):
    """adapt="lr": the batch size and the counts stay, the LR takes all of the damping, tails are counted."""
    module = Recorder()
    callback = adapt(4, 8, 16, adapt="lr")
    train = loader(18, 4)
    trainer = fit(module, train, callbacks=[callback], epochs=1, root=tmp_path)
    assert module.sizes == [4, 4, 4, 4, 2]
    assert [batch.lr for batch in module.batches] == [0.1, 0.05, 0.025, 0.025, 0.025]
    assert trainer.train_dataloader is train
    assert (callback.batch_size, callback.samples, callback.updates) == (4, 18, 5)


def test_checkpoints_hold_the_base_rate(tmp_path):
    """A checkpoint written while the factor is on has the LR without it, and the live LR is untouched."""
    module = Recorder(schedule=SCHEDULERS["StepLR"], interval="step")
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    callbacks = [adapt(16, max_batch_size=8), saved]
    fit(module, loader(32, 8), callbacks=callbacks, epochs=1, enable_checkpointing=True, root=tmp_path)
    checkpoint = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1
    assert checkpoint["lr_schedulers"][0]["_last_lr"] == [0.1]
    assert [batch.lr for batch in module.batches] == [0.05] * 4


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_before_backward"])
def test_a_group_that_the_module_adds_steps_with_the_factor(hook, tmp_path):
    """The hooks of a module come after ours: its first step has the factor all the same."""
    used = []

    class Net(Recorder):
        def add(self, *args):
            if self.trainer.global_step == 2:
                extra = torch.nn.Parameter(torch.zeros(1))
                self.optimizers().optimizer.add_param_group({"params": [extra], "lr": 0.8})

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda one, *_: used.append([group["lr"] for group in one.param_groups]))
            return optimizer

    setattr(Net, hook, Net.add)
    fit(Net(), loader(16, 8), callbacks=[adapt(16, max_batch_size=8)], epochs=2, root=tmp_path)
    assert used == [[0.05], [0.05], [0.05, 0.4], [0.05, 0.4]]


def test_assigned_rate_and_added_group(tmp_path):
    """A learning rate that is assigned in mid-run is a new base; a group that is added gets the factor too."""

    class Assigns(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            groups = trainer.optimizers[0].param_groups
            if batch_idx == 2:
                groups[0]["lr"] = 0.4
                extra = torch.nn.Parameter(torch.zeros(1))
                trainer.optimizers[0].add_param_group({"params": [extra], "lr": 0.8})

    used = []

    class Net(Recorder):
        def on_train_batch_end(self, *args):
            pass

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            optimizer.step(closure)
            used.append([group["lr"] for group in copy.copy(optimizer.param_groups)])

    trainer = fit(Net(), loader(32, 8), callbacks=[Assigns(), adapt(16, max_batch_size=8)], epochs=1, root=tmp_path)
    assert used == [[0.05], [0.05], [0.2, 0.4], [0.2, 0.4]]
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.4, 0.8]
