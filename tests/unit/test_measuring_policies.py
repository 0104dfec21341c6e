# SPDX-License-Identifier: Apache-2.0
"""The policies that measure more than loss and norm, in a training that knows all of it exactly."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from settings_of_policies import MEASURING

from lightning_adabatch import Observation, Policy
from lightning_adabatch.controller import Cadence, Controller
from lightning_adabatch.limits import Decision, Limits

every_policy = pytest.mark.parametrize("name", MEASURING)


class LeastSquares:
    """Fit a slope to 50 points by SGD at a rate of 0.1; every gradient of a single sample is known."""

    def __init__(self, policy: Policy[Any], *, adapt: Any = "batch_size", cap: float = 40) -> None:
        draw = random.Random(3)
        self.points = [(x, 2.0 * x + draw.gauss(0.0, 0.3)) for x in (draw.gauss(0.0, 1.0) for _ in range(50))]
        self.share = round(getattr(policy, "fraction", 1.0) * 50)
        self.slope = 0.0
        self.order = random.Random(4)
        self.pending: list[Observation] = []
        self.asked = 0
        self.controller = Controller(
            policy,
            Limits(4, 4 if adapt == "lr" else cap, adapt=adapt),
            Cadence(),
            training_samples=50,
            observe=self.read,
            notify=pytest.fail,
            evaluate=self.evaluate,
        )

    def read(self) -> list[Observation]:
        pending, self.pending = self.pending, []
        return pending

    def losses_and_gradients(self, points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
        misses = [self.slope * x - y for x, y in points]
        return [miss**2 / 2 for miss in misses], [miss * x for miss, (x, _) in zip(misses, points, strict=True)]

    def evaluate(self, names: frozenset[str]) -> dict[str, float]:
        self.asked += 1
        losses, gradients = self.losses_and_gradients(self.points[: self.share])
        mean, squares = sum(gradients) / self.share, sum(g * g for g in gradients) / self.share
        everything = {"full_loss": sum(losses) / self.share, "gradient_diversity": squares / mean**2}
        return {name: everything[name] for name in names}

    def step(self) -> Decision:
        size, rate = self.controller.decision.batch_size, 0.1 * self.controller.decision.lr_factor
        losses, gradients = self.losses_and_gradients(self.order.sample(self.points, size))
        mean = sum(gradients) / size
        variance = sum((g - mean) ** 2 for g in gradients) / (size - 1)
        self.pending.append(Observation(sum(losses) / size, mean**2, size, variance))
        self.slope -= rate * mean
        return self.controller.end_batch(size, updated=True, learning_rate=lambda: 0.1)


@every_policy
def test_it_moves(name):
    """The batch takes several sizes, within its bounds, and the fit is found."""
    training = LeastSquares(MEASURING[name])
    sizes = [training.controller.start(lambda: 0.1).batch_size, *(training.step().batch_size for _ in range(60))]
    assert len(set(sizes)) >= 3, sizes
    assert min(sizes) >= 2
    assert max(sizes) <= 40
    assert training.slope == pytest.approx(2.0, abs=0.3)
    assert (training.asked > 0) == (name in {"AdaDamp", "DiveBatch"})


@every_policy
def test_it_moves_the_rate_alone(name):
    """With ``adapt="lr"`` the size stays and the rate falls."""
    training = LeastSquares(MEASURING[name], adapt="lr")
    decisions = [training.controller.start(lambda: 0.1), *(training.step() for _ in range(60))]
    assert {decision.batch_size for decision in decisions} == {4}
    assert 0 < min(decision.lr_factor for decision in decisions) < max(d.lr_factor for d in decisions) == 1


@every_policy
@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_it_goes_on_from_json(name, cut):
    """A controller that reads what another wrote in mid-run decides as that one would have, to the last bit."""
    whole, resumed = LeastSquares(MEASURING[name]), LeastSquares(MEASURING[name])
    for training in (whole, resumed):
        training.controller.start(lambda: 0.1)
        for _ in range(cut):
            training.step()
    fresh = LeastSquares(MEASURING[name]).controller
    fresh.load_state_dict(json.loads(json.dumps(resumed.controller.state_dict())))
    fresh._observe, fresh._evaluate = resumed.read, resumed.evaluate
    resumed.controller = fresh
    assert [resumed.step() for _ in range(30)] == [whole.step() for _ in range(30)]
    assert resumed.controller.state_dict() == whole.controller.state_dict()
    assert (resumed.slope, resumed.asked) == (whole.slope, whole.asked)


def test_divebatch_measures_as_often_as_it_says():
    """Every 0.4 epochs: once for each multiple that a decision follows, and never at the start."""
    training, points = LeastSquares(MEASURING["DiveBatch"]), set()
    training.controller.start(lambda: 0.1)
    assert training.asked == 0
    for _ in range(40):
        training.step()
        points.add(int(training.controller.epochs / 0.4 + 1e-9))
    assert training.asked == len(points - {0})
    assert training.asked < 40
