# SPDX-License-Identifier: Apache-2.0
"""Losses that are zero, negative, missing or not finite, in a real run."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import reference
import torch
from models import Recorder, Scripted, fit, loader, observe

from lightning_adabatch import AdaptiveBatchSize, Constant, Observation, RadaDamp

FIXED = {"min_batch_size": 4, "max_batch_size": 4}

# Lightning says so once in a process, so that only one test would see it.
skips_are_announced = pytest.mark.filterwarnings("ignore:.training_step. returned .None.")


@pytest.mark.parametrize(("cap", "largest"), [(64, 64), (None, 400)])
def test_loss_and_norm_go_to_zero(cap, largest, tmp_path):
    """C74: loss and norm exactly 0 ask for the maximum, without LR decay to 0 and without an exception."""
    module = Scripted([1.0] * 60 + [0.0])
    ours, _ = observe(
        module, loader(400, 4), RadaDamp(rho=0.0), ours={"max_batch_size": cap}, max_steps=80, epochs=-1, root=tmp_path
    )
    assert set(module.sizes[:60]) == {4}
    assert ours.batch_size == largest
    assert {batch.lr for batch in module.batches} == {0.1}


def test_slow_fall_to_zero_keeps_a_finite_rate(tmp_path):
    """C74: while the average falls towards 0 the LR stays finite and above 0."""
    module = Scripted([1.0] * 10 + [0.0])
    observe(module, loader(4000, 4), RadaDamp(rho=0.5), ours={"max_batch_size": 8}, max_steps=200, root=tmp_path)
    assert all(0.0 < batch.lr <= 0.1 for batch in module.batches)
    assert set(module.sizes[15:]) == {8}


def test_negative_losses(tmp_path):
    """C75: a baseline at or below zero changes nothing and warns once, naming optimal_loss; with it the rule works."""
    module = Scripted([-5.0])
    with pytest.warns(UserWarning, match="Set optimal_loss") as caught:
        observe(module, loader(40, 4), root=tmp_path)
    assert sum("optimal_loss" in str(warning.message) for warning in caught) == 1
    assert set(module.sizes) == {4}

    module = Scripted([-5.0, -7.5])
    observe(module, loader(40, 4), RadaDamp(rho=0.0, optimal_loss=-10.0), root=tmp_path)
    assert module.sizes[:3] == [4, 4, 8]  # (-5 + 10) / (-7.5 + 10) = 2


def test_size_never_falls_below_the_minimum(tmp_path):
    """C75: a loss that rises to 100 times its first value asks for 1 sample, and gets min_batch_size."""
    module = Scripted([1.0, 100.0])
    observe(module, loader(60, 8), RadaDamp(rho=0.0), ours={"min_batch_size": 3}, root=tmp_path)
    assert module.sizes[:3] == [8, 8, 3]
    assert set(module.sizes[2:-1]) == {3}


def test_loss_crossing_zero(tmp_path):
    """C75: an average at or below zero later asks for the largest size that needs no LR decay."""
    module = Scripted([1.0, -1.0])
    observe(module, loader(200, 4), RadaDamp(rho=0.0), ours={"max_batch_size": 16}, root=tmp_path)
    assert module.sizes[:4] == [4, 4, 16, 16]
    assert {batch.lr for batch in module.batches} == {0.1}


@skips_are_announced
def test_step_without_loss(tmp_path):
    """C33: a None from every third training_step makes no observation and no update, and is counted as skipped."""

    class Net(Recorder):
        def loss(self, x, y):
            return None if len(self.batches) % 3 == 0 else super().loss(x, y)

    ours, _ = observe(Net(), loader(36, 4), ours=FIXED, root=tmp_path)
    assert (ours.updates, ours.samples, ours._controller.skipped) == (6, 36, 3)


@skips_are_announced
def test_no_loss_at_all(tmp_path):
    """C33: where training_step never returns a loss there is no update and no decision, and one message says why."""

    class Net(Recorder):
        def loss(self, x, y):
            return None

    remedy = "Return the loss from training_step, as a tensor or under 'loss'"
    with pytest.warns(UserWarning, match=rf"no loss was seen, which RadaDamp\(.* follows\. {remedy}") as told:
        ours, _ = observe(Net(), loader(20, 4), epochs=3, root=tmp_path)
    assert sum("no loss was seen" in str(warning.message) for warning in told) == 1
    assert (ours.updates, ours.samples, ours.batch_size, ours._controller.skipped) == (0, 60, 4, 15)
    observe(Net(), loader(20, 4), Constant(), root=tmp_path)  # it follows no loss: nothing is said


def test_step_that_returns_a_dict(tmp_path):
    """C33: the loss may stand under "loss" in a dict."""

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "extra": 1}

    ours, watch = observe(Net(), loader(20, 4), ours=FIXED, root=tmp_path)
    assert ours.updates == 5
    assert watch.observations[0].loss > 0


class Bursts(Scripted):
    """Scripted losses, and the gradient of a parameter that no loss depends on: 3, but inf at update 3."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__(losses)
        self.idle = torch.nn.Parameter(torch.zeros(()))

    def on_after_backward(self):
        self.idle.grad = torch.tensor(math.inf if len(self.batches) == 3 else 3.0)


def test_non_finite_observations_are_dropped(tmp_path):
    """C21: inf gradients at update 3, NaN loss at 7: the averages are those of a run without the two; skipped is 2."""
    losses = [10.0, 9.0, 1.0, 8.0, 7.0, 6.0, math.nan, 5.0, 4.0, 3.0]
    policy = RadaDamp(rho=0.5, grad_norm_weight=0.1)
    ours, watch = observe(Bursts(losses), loader(400, 4), policy, max_steps=10, root=tmp_path)
    average = 10.0
    for loss in (9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0):
        average = 0.5 * average + 0.5 * loss
    assert ours._controller.state.loss == pytest.approx(average)
    assert ours._controller.state.grad_norm_sq == pytest.approx(9.0)
    assert ours._controller.skipped == 2
    # ceil(4 · (10 + 0.9) / (average + 0.9)); updates 3 and 7 leave the size as it was.
    assert watch.sizes == [4, 5, 5, 5, 5, 6, 6, 7, 8, 9]
    assert ours.updates == 10


class Trembles(Bursts):
    """The gradient of the first five updates is 100 times that of the others; the loss falls slowly."""

    def __init__(self) -> None:
        super().__init__([2.0 * 0.99**k for k in range(90)])

    def on_after_backward(self):
        self.idle.grad = torch.tensor(300.0 if len(self.batches) <= 5 else 3.0)


def test_first_gradients_are_not_typical(tmp_path):
    """C73: with warmup=50 the first 50 updates have the first size; then the damping is the formula's, to 1e-6."""
    module = Trembles()
    rule = {"rho": 0.95, "grad_norm_weight": 0.05, "optimal_loss": 0.0, "warmup": 50}
    dampings = []

    class Noted(RadaDamp):
        def damping(self, state, progress):
            dampings.append(super().damping(state, progress))
            return dampings[-1]

    _, watch = observe(module, loader(5000, 4), Noted(**rule), ours={"max_batch_size": 64}, max_steps=80, root=tmp_path)
    assert module.sizes[:50] == [4] * 50
    assert [o.grad_norm_sq for o in watch.observations[4:6]] == [90_000.0, 9.0]
    expected = reference.radadamp(watch.observations, **rule, largest=16.0)
    assert dampings == pytest.approx(expected, rel=1e-6)
    bounds = {"floor": 1, "cap": 64, "multiple": 1, "epoch_samples": 5000}
    sizes = [reference.batch_size(reference.wanted(4, damping), **bounds) for damping in expected]
    assert module.sizes == [4, *sizes[:-1]]
    assert sizes[49] == 4
    assert len(set(module.sizes)) > 10


@pytest.mark.parametrize(
    ("bad", "name"), [(math.nan, "nan"), (math.inf, "inf"), (0.0, "zero"), (-3.0, "negative"), (1e38, "huge")]
)
@pytest.mark.parametrize("first", [0, 1, 5])
def test_losses_from_some_update_on(first, bad, name, tmp_path):
    """C21, C74, C75: whatever the loss is from some update on, each decision is the formula's over the finite ones."""
    module, policy = Scripted([*[2.0, 1.9, 1.8, 1.7, 1.6][:first], bad]), RadaDamp(rho=0.5, grad_norm_weight=0.0)
    notices = pytest.warns(UserWarning, match="Set optimal_loss") if first == 0 and bad <= 0.0 else nullcontext()
    with notices:
        ours, watch = observe(module, loader(400, 4), policy, ours={"max_batch_size": 16}, max_steps=12, root=tmp_path)
    finite = [Observation(loss, None, 4) for loss in module.losses[:-1]]
    finite += [Observation(bad, None, 4)] * (12 - first) if math.isfinite(bad) else []
    rule = {"rho": 0.5, "grad_norm_weight": 0.0, "optimal_loss": 0.0, "warmup": 1}
    dampings = reference.radadamp(finite, **rule, largest=4.0)
    dampings += [dampings[-1] if dampings else 1.0] * (12 - len(dampings))
    bounds = {"floor": 1, "cap": 16, "multiple": 1, "epoch_samples": 400}
    wanted = [reference.wanted(4, damping) for damping in dampings]
    assert watch.sizes == [reference.batch_size(one, **bounds) for one in wanted]
    assert [batch.lr for batch in module.batches[1:]] == pytest.approx([0.1 * min(1, 16 / one) for one in wanted[:-1]])
    assert ours.updates == 12
    assert ours._controller.skipped == (0 if math.isfinite(bad) else 12 - first)


class ByHand(Recorder):
    """Steps its optimizer itself, and returns what it is told to."""

    def __init__(self, returns) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.returns = returns
        self.true: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.true.append(loss.item())
        return self.returns(loss)


RETURNS = {"nothing": lambda loss: None, "tensor": lambda loss: loss, "dict": lambda loss: {"loss": loss, "extra": 1}}


@pytest.mark.parametrize("returns", RETURNS)
def test_what_manual_optimization_returns(returns, tmp_path):
    """C33: under manual optimization the loss is that of manual_backward, whatever training_step returns."""
    module = ByHand(RETURNS[returns])
    _, watch = observe(module, loader(20, 4), ours=FIXED, root=tmp_path)
    assert [o.loss for o in watch.observations] == pytest.approx(module.true, rel=1e-6)


def test_batch_that_is_none(tmp_path):
    """A batch that the collate function gave up makes no update and no observation, and is counted as skipped."""

    def collate(samples):
        return None if samples[0][2] == 8 else torch.utils.data.default_collate(samples)

    ours = AdaptiveBatchSize(RadaDamp(), max_batch_size=4)
    module = Recorder()
    with pytest.warns(UserWarning, match="yielded None"):
        fit(module, loader(20, 4, collate_fn=collate), callbacks=[ours], epochs=1, root=tmp_path)
    assert len(module.batches) == 4
    assert (ours.updates, ours.samples, ours._controller.skipped) == (4, 20, 1)
    assert ours._controller.state.observations == 4
