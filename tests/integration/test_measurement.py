# SPDX-License-Identifier: Apache-2.0
"""What is measured, counted and decided in a real run."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from models import Recorder, Scripted, Sizes, adapt, fit, loader, observe

from lightning_adabatch import AdaptiveBatchSize, RadaDamp

FIXED = {"min_batch_size": 4, "max_batch_size": 4}


def test_loss_and_norm_are_those_of_the_update(tmp_path):
    """The observation is the loss that training_step returned, and the squared norm of its gradient."""
    expected = []

    class Net(Recorder):
        def on_after_backward(self):
            grads = [p.grad.double() for p in self.parameters()]
            expected.append(float(sum((g**2).sum() for g in grads)))

        def loss(self, x, y):
            loss = super().loss(x, y)
            losses.append(float(loss.detach()))
            return loss

    losses = []
    _, watch = observe(Net(), loader(20, 4), ours=FIXED, root=tmp_path)
    assert [o.loss for o in watch.observations] == pytest.approx(losses, rel=1e-6)
    assert [o.grad_norm_sq for o in watch.observations] == pytest.approx(expected, rel=1e-5)
    assert [o.batch_size for o in watch.observations] == [4, 4, 4, 4, 4]


def test_norm_is_read_before_clipping(tmp_path):
    """C65: with gradient_clip_val=0.05 the first norm is that of the run without clipping, to 1e-5."""
    norms = []
    for clip in (None, 0.05):
        torch.manual_seed(0)
        _, watch = observe(Recorder(), loader(20, 4), gradient_clip_val=clip, root=tmp_path)
        norms.append(math.sqrt(watch.observations[0].grad_norm_sq))
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_only_what_is_asked_for_is_measured(tmp_path):
    """λ = 0 leaves the norm out."""
    _, watch = observe(Recorder(), loader(20, 4), RadaDamp(grad_norm_weight=0.0), root=tmp_path)
    assert {o.grad_norm_sq for o in watch.observations} == {None}


def test_epoch_mean_of_a_users_metric_is_weighted(tmp_path):
    """C32: with sizes 4, 4, 32 an on_epoch metric is the mean over samples, and our estimate follows the formula."""

    class Net(Scripted):
        def loss(self, x, y):
            loss = super().loss(x, y)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

    class Ask(Sizes):
        requires = frozenset({"loss"})

    module = Net([1.0, 2.0, 5.0])
    trainer = fit(module, loader(40, 4), callbacks=[AdaptiveBatchSize(Ask([4, 4, 32]))], epochs=1, root=tmp_path)
    assert module.sizes == [4, 4, 32]
    assert float(trainer.callback_metrics["loss"]) == pytest.approx((4 * 1.0 + 4 * 2.0 + 32 * 5.0) / 40)

    ours, _ = observe(Scripted([1.0, 2.0, 5.0]), loader(12, 4), RadaDamp(rho=0.9), root=tmp_path)
    assert ours._controller.state.loss == pytest.approx(0.9 * (0.9 * 1.0 + 0.1 * 2.0) + 0.1 * 5.0, rel=1e-6)


def test_same_seed_same_run(tmp_path):
    """C72: two adaptive runs from one seed have the same batches, sizes and weights."""
    runs = []
    for _ in range(2):
        pl.seed_everything(1, verbose=False)
        module = Recorder()
        observe(module, loader(103, 4, shuffle=True), RadaDamp(rho=0.9), epochs=3, root=tmp_path)
        runs.append(module)
    assert [b.indices for b in runs[0].batches] == [b.indices for b in runs[1].batches]
    assert torch.equal(runs[0].net.weight, runs[1].net.weight)
    assert len(set(runs[0].sizes)) > 2


def test_lbfgs_counts_one_update(tmp_path):
    """Closures that LBFGS calls again belong to one update; the first evaluation counts."""
    first = []

    class Net(Recorder):
        def loss(self, x, y):
            loss = super().loss(x, y)
            first.append((self.global_step, float(loss.detach())))
            return loss

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    ours, watch = observe(Net(), loader(20, 4), ours=FIXED, root=tmp_path)
    assert ours.updates == 5
    assert len(first) > 5
    expected = [next(loss for step, loss in first if step == k) for k in range(5)]
    assert [o.loss for o in watch.observations] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("dwell", "wait", "decided", "sizes"),
    [
        (1, 0, [0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 9, 10, 11]),
        (3, 0, [0, 3, 6], [5, 5, 5, 8, 8, 8, 11]),
        (1, 4, [4, 5, 6, 7], [4, 4, 4, 4, 9, 10, 11]),
        (3, 4, [6], [4, 4, 4, 4, 4, 4, 11]),
    ],
)
def test_dwell_and_wait(dwell, wait, decided, sizes, tmp_path):
    """Decisions fall at count 0 and at multiples of dwell, both only from ``wait`` updates on."""
    asked = []

    class Ask(Sizes):
        def damping(self, state, progress):
            asked.append(progress.updates)
            return super().damping(state, progress)

    module = Recorder()
    ours = AdaptiveBatchSize(Ask([5, 6, 7, 8, 9, 10, 11, 12]), dwell=dwell, wait=wait)
    fit(module, loader(200, 4), callbacks=[ours], max_steps=7, root=tmp_path)
    assert asked == decided
    assert module.sizes == sizes


def test_bfloat16(tmp_path):
    """bf16-mixed trains and measures."""
    ours, watch = observe(Recorder(), loader(20, 4), ours=FIXED, precision="bf16-mixed", root=tmp_path)
    assert ours.updates == 5
    assert watch.observations[0].grad_norm_sq > 0


def test_sizes_are_multiples(tmp_path):
    """multiple_of=8 with wanted 9, 17 and cap 30 gives 16, 24, 24."""
    module = Recorder()
    fit(module, loader(200, 8), callbacks=[adapt(8, 9, 17, 99, multiple_of=8, max_batch_size=30)], epochs=1)
    assert module.sizes[:4] == [8, 16, 24, 24]
    assert module.batches[3].lr == pytest.approx(0.1 * 24 / 99)
