# SPDX-License-Identifier: Apache-2.0
"""What an update is when optimizers are several, are stepped by hand, or are skipped by a gradient scaler."""

from __future__ import annotations

import pytest
import torch
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
