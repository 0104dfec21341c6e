# SPDX-License-Identifier: Apache-2.0
"""What an update is when optimizers are several, are stepped by hand, or are skipped by a gradient scaler."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Recorder, Watch, adapt, fit, loader, observe

from lightning_adabatch import AdaptiveBatchSize, RadaDamp


class Two(Recorder):
    """Two networks with an optimizer each, stepped by hand; the second one only in every n-th batch."""

    def __init__(self, every: int = 1, *, first: bool = True, bare: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.other = torch.nn.Linear(4, 2)
        self.every, self.first, self.bare = every, first, bare
        self.norms: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        x, y, _ = batch
        losses = [loss, torch.nn.functional.cross_entropy(self.other(x), y)]
        total = 0.0
        for number, (optimizer, one) in enumerate(zip(self.optimizers(), losses, strict=True)):
            if (number == 0 and not self.first) or (number == 1 and batch_idx % self.every):
                continue
            optimizer.zero_grad()
            one.backward() if self.bare else self.manual_backward(one)
            total += sum(float(p.grad.square().sum()) for g in optimizer.param_groups for p in g["params"])
            optimizer.step()
        self.norms.append(total)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.2)]


def test_several_optimizers_are_one_update(tmp_path):
    """C27: two optimizers that step in a batch are one update; the norm is over both, the factor on both rates."""
    module = Two()
    ours, watch = observe(module, loader(64, 8), RadaDamp(), root=tmp_path)
    assert ours.updates == len(module.batches) == len(watch.observations)
    assert [o.grad_norm_sq for o in watch.observations] == pytest.approx(module.norms, rel=1e-5)
    rates = []

    class Rates(Two):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            rates.append([o.param_groups[0]["lr"] for o in self.trainer.optimizers])

    capped = Rates()
    trainer = fit(capped, loader(64, 8), callbacks=[adapt(8, 16, max_batch_size=8)], epochs=1, root=tmp_path)
    assert rates[0] == [0.05, 0.1]
    assert [o.param_groups[0]["lr"] for o in trainer.optimizers] == [0.1, 0.2]


def test_only_what_stepped_is_measured(tmp_path):
    """The norm is over the optimizers that stepped; a batch in which none did is no update, and its samples count."""
    module = Two(every=2)
    ours, watch = observe(module, loader(64, 8), RadaDamp(), root=tmp_path)
    assert [o.grad_norm_sq for o in watch.observations] == pytest.approx(module.norms, rel=1e-5)
    rare = Two(every=2, first=False)
    ours = adapt(8, 12, 16, 16)
    fit(rare, loader(64, 8), callbacks=[ours], epochs=1, root=tmp_path)
    assert rare.sizes == [8, 12, 12, 16, 16]  # decisions follow updates, in the first, third and fifth batch
    assert (ours.updates, ours.samples) == (3, 64)


def test_backward_past_lightning(tmp_path):
    """A policy that follows the loss says once that it does not see it; one that does not is served."""
    ours = AdaptiveBatchSize(RadaDamp(), max_batch_size=64)
    with pytest.warns(UserWarning, match=r"no loss was seen.*Call self\.manual_backward\(loss\)") as told:
        fit(Two(bare=True), loader(64, 8), callbacks=[ours], epochs=1, root=tmp_path)
    assert sum("no loss was seen" in str(warning.message) for warning in told) == 1
    assert ours.updates == 8
    module = Two(bare=True)
    fit(module, loader(64, 8), callbacks=[adapt(8, 16)], epochs=1, root=tmp_path)
    assert module.sizes == [8, 16, 16, 16, 8]


# A gradient scaler ----------------------------------------------------------------------------------------


def half(**kwargs):
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **kwargs))]


def test_scaled_gradients_are_measured_unscaled(tmp_path):
    """C20: with a scale of 2 ** 12 loss and norm are those of 32-bit training, to half precision."""
    seen = []
    for plugins in ([], half(init_scale=4096.0)):
        ours = AdaptiveBatchSize(RadaDamp(), min_batch_size=8, max_batch_size=8)
        watch = Watch(ours)
        fit(Recorder(), loader(64, 8), callbacks=[ours, watch], epochs=1, plugins=plugins, root=tmp_path)
        seen.append(watch.observations)
    assert len(seen[0]) == len(seen[1]) == 8
    for full, scaled in zip(*seen, strict=True):
        assert (scaled.loss, scaled.grad_norm_sq) == pytest.approx((full.loss, full.grad_norm_sq), rel=0.05)


def test_step_that_the_scaler_skipped_is_no_update(tmp_path):
    """C21: gradients that overflow in the third batch: no update, no observation; its samples count."""

    class Overflows(Recorder):
        def loss(self, x, y):
            loss = super().loss(x, y)
            return loss * (torch.inf if len(self.batches) == 3 else 1.0)

    module = Overflows()
    ours, watch = observe(module, loader(64, 8), RadaDamp(rho=0.5), plugins=half(), root=tmp_path)
    assert ours.updates == len(module.batches) - 1
    assert ours.samples == 64
    assert watch.observations[2] == watch.observations[1]
    assert watch.sizes[2] == watch.sizes[1]
    assert ours._controller.skipped == 1


def test_fused_optimizer_under_a_scaler_is_refused(tmp_path):
    """C20: a fused optimizer unscales inside of its step, where nobody can measure: refused by name."""

    class Fused(Recorder):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, fused=True)

    with pytest.raises(MisconfigurationException, match=r"a fused optimizer with precision='16-mixed'.*fused=False"):
        fit(Fused(), loader(64, 8), callbacks=[adapt(8)], plugins=half(), root=tmp_path)
    fit(Fused(), loader(64, 8), callbacks=[adapt(8)], epochs=1, root=tmp_path)


class ByHand(Recorder):
    """Steps its optimizer by hand: the one that Lightning wrapped, or the one inside of it."""

    def __init__(self, *, wrapped: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.wrapped = wrapped

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers(use_pl_optimizer=self.wrapped)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_gradients_of_an_optimizer_that_is_not_wrapped(tmp_path):
    """The same observations and decisions as with the wrapped one."""
    rows = []
    for wrapped in (True, False):
        ours = AdaptiveBatchSize(RadaDamp(rho=0.5, grad_norm_weight=5.0), max_batch_size=32)
        watch = Watch(ours)
        fit(ByHand(wrapped=wrapped), loader(60, 4), callbacks=[ours, watch], epochs=2, root=tmp_path)
        rows.append((watch.observations, watch.sizes))
    assert rows[0] == rows[1]
    assert len(set(rows[0][1])) > 2


def test_gradients_that_nobody_shows_are_named(tmp_path):
    """A step past Lightning, with its closure, shows no gradients: one warning, with the remedy."""

    class Past(Recorder):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.optimizer.step(optimizer_closure)

    with pytest.warns(UserWarning, match="no gradients were seen.*optimizer_step gives you") as told:
        fit(Past(), loader(20, 4), callbacks=[AdaptiveBatchSize(RadaDamp())], epochs=1, root=tmp_path)
    assert sum("no gradients were seen" in str(one.message) for one in told) == 1


class Custom(torch.optim.SGD):
    def step(self, closure=None, more=None):
        assert more == [1]
        return super().step(closure)


def test_arguments_of_a_step_by_hand_are_its_own(tmp_path):
    """What else an optimizer of the user's takes is not looked at."""

    class Takes(ByHand):
        def configure_optimizers(self):
            return Custom(self.parameters(), 0.1)

        def training_step(self, batch, batch_idx):
            loss = Recorder.training_step(self, batch, batch_idx)
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step(None, [1])

    ours = AdaptiveBatchSize(RadaDamp(rho=0.5, grad_norm_weight=5.0), max_batch_size=32)
    fit(Takes(wrapped=False), loader(60, 4), callbacks=[ours], epochs=2, root=tmp_path)
    assert ours.batch_size > 4


class Unfreezes(BaseFinetuning):
    """Unfreezes the first layer in the third epoch, at a tenth of the first group's learning rate."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer)


class Layers(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)

    def loss(self, x, y):
        return super().loss(self.first(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda parameter: parameter.requires_grad, self.parameters()), 0.1)


def test_finetuning_takes_the_rate_without_the_factor(tmp_path):
    """The rate of a group that is added is made of the first one's: the factor counts once, and is given back."""
    seen = []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    finetuning = Unfreezes()
    ours = adapt(4, 16, max_batch_size=8)
    trainer = fit(Layers(), loader(32, 4), callbacks=[finetuning, ours, Looks()], epochs=4, root=tmp_path)
    assert seen[-1] == pytest.approx([0.05, 0.005])
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.01]
    assert "finetune_function" not in vars(finetuning)
