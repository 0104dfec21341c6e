# SPDX-License-Identifier: Apache-2.0
"""Optimizers that wrap another one, that have no learning rate, or that evaluate their closure again."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Recorder, Watch, adapt, fit, loader
from torch.optim import SGD, Optimizer

from lightning_adabatch import AdaptiveBatchSize, Constant, NormTest, RadaDamp


class Bare(Optimizer):
    """Wraps another optimizer, as some Lookaheads do: ``Optimizer.__init__`` never ran, and there are no hooks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class Furnished(Bare):
    """Has places for hooks, which nobody calls."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        for name in ("step_pre", "step_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{name}_hooks", type(optimizer._optimizer_step_post_hooks)())


class Delegating(Bare):
    """Asks the optimizer inside for whatever it lacks, its hooks too."""

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class Ours(Recorder):
    """Steps what a function makes of SGD."""

    def __init__(self, make: Any, *, manual: bool = False, raw: bool = False) -> None:
        super().__init__()
        self.make = make
        self.automatic_optimization = not manual
        self.raw = raw

    def configure_optimizers(self):
        return self.make(SGD(self.parameters(), self.lr))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers(use_pl_optimizer=not self.raw)
        optimizer.zero_grad()
        self.manual_backward(loss)
        return optimizer.step()


@pytest.mark.parametrize("wrap", [Bare, Furnished, Delegating])
@pytest.mark.parametrize("manual", [False, True])
def test_wrappers_train_as_what_they_wrap(wrap, manual, tmp_path):
    """Batches, measurements, decisions, learning rates and weights are those of the optimizer inside by itself."""
    runs = []
    for make in (lambda inner: inner, wrap):
        module, ours = Ours(make, manual=manual), AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=6)
        watch = Watch(ours)
        trainer = fit(module, loader(64, 4), callbacks=[ours, watch], root=tmp_path)
        runs.append((module.batches, watch.observations, watch.sizes, watch.updates, module.net.weight.tolist()))
        assert ours.updates == trainer.global_step == len(module.batches)
    assert runs[0] == runs[1]
    assert max(runs[0][2]) > 4, "the size must move, or the test says nothing"


def test_raw_steps_of_wrappers(tmp_path):
    """Past Lightning: where hooks reach the optimizer inside all is seen; else a warning says so."""
    module, ours = Ours(Delegating, manual=True, raw=True), AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=6)
    fit(module, loader(64, 4), callbacks=[ours], root=tmp_path)
    assert ours.updates == len(module.batches)
    assert ours.batch_size == 6
    for wrap in (Bare, Furnished):
        ours = AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=6)
        with pytest.warns(UserWarning, match=r"no optimizer was seen to step, .* step what self\.optimizers\(\) gives"):
            fit(Ours(wrap, manual=True, raw=True), loader(64, 4), callbacks=[ours], root=tmp_path)
        assert (ours.updates, ours.batch_size) == (0, 4)


class Breaks(SGD):
    """Its third step raises."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            closure()
            raise RuntimeError("it broke")
        return super().step(closure)


@pytest.mark.parametrize("wrap", [lambda inner: inner, Bare, Furnished, Delegating])
def test_a_step_that_raises_is_no_update(wrap, tmp_path):
    """A checkpoint written by the exception knows of the two updates before."""

    class Saves(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            trainer.save_checkpoint(tmp_path / "broken.ckpt")

    class Module(Ours):
        def configure_optimizers(self):
            return self.make(Breaks(self.parameters(), self.lr))

    ours = AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=6)
    with pytest.raises(RuntimeError, match="it broke"):
        fit(Module(wrap), loader(64, 4), callbacks=[ours, Saves()], root=tmp_path)
    state = torch.load(tmp_path / "broken.ckpt", weights_only=True)["callbacks"]["AdaptiveBatchSize"]
    assert state["rule"]["updates"] == 2


def test_a_state_loaded_into_a_wrapper(tmp_path):
    """A snapshot of its own that a module loads in mid-run: the epoch goes on."""

    class Module(Ours):
        def on_train_batch_end(self, *args):
            if self.trainer.global_step == 5:
                optimizer = self.trainer.optimizers[0]
                optimizer.load_state_dict(optimizer.state_dict())

    module, ours = Module(Delegating), AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=4)
    fit(module, loader(64, 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert len(module.batches) == 16


class NoRate(SGD):
    """Works its learning rate out by itself, and shows none, as Adafactor does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure=None):
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-0.1)
        return loss


class WithoutRate(Recorder):
    def configure_optimizers(self):
        return NoRate(self.parameters())

    def training_step(self, batch, batch_idx):
        return self.loss(*batch[:2])


def test_an_optimizer_without_a_learning_rate(tmp_path):
    """Where the learning rate never has to move it trains; else it is refused when the fit begins."""
    for ours in (AdaptiveBatchSize(RadaDamp(rho=0.5), float("inf")), AdaptiveBatchSize(Constant(), 4)):
        trainer = fit(WithoutRate(), loader(16, 4), callbacks=[ours], root=tmp_path)
        trainer.save_checkpoint(tmp_path / "rate.ckpt")
        assert ours.samples == 32
    with pytest.raises(
        MisconfigurationException, match=r"NoRate without a learning rate .* or set max_batch_size=math"
    ):
        fit(WithoutRate(), loader(16, 4), callbacks=[AdaptiveBatchSize(max_batch_size=8)], root=tmp_path)


class Twice(SGD):
    """Evaluates its closure twice per step, as SAM does."""

    def step(self, closure=None):
        closure()
        with torch.enable_grad():
            return super().step(closure)


class Sharp(Recorder):
    def configure_optimizers(self):
        return Twice(self.parameters(), 0.1)


@pytest.mark.parametrize(
    "ours", [adapt(8, max_device_batch_size=4), AdaptiveBatchSize(NormTest(), max_batch_size=16)], ids=["parts", "rule"]
)
def test_closures_that_are_evaluated_again(ours, tmp_path):
    """With whole batches they are right; of several parts the optimizer would see the last one alone."""
    whole = Sharp()
    fit(whole, loader(32, 8), callbacks=[adapt(8, max_batch_size=16)], epochs=1, root=tmp_path)
    assert len(whole.batches) == 2 * 4
    with pytest.raises(MisconfigurationException, match="evaluates its closure more than once per step"):
        fit(Sharp(), loader(32, 8), callbacks=[ours], epochs=1, root=tmp_path)
