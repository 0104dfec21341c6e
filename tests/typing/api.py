# SPDX-License-Identifier: Apache-2.0
"""Intended uses. Never run: ``mypy --strict`` checks it, and an ignore that is not needed is an error too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.pytorch import Callback, Trainer
from typing_extensions import assert_type

from lightning_adabatch import (
    CABS,
    AdaDamp,
    AdaptiveBatchSize,
    Constant,
    DiveBatch,
    GeoDamp,
    NoiseScale,
    NormTest,
    Observation,
    Policy,
    Progress,
    RadaDamp,
    Schedule,
)

# The callback is one of Lightning's, and every argument has a default.
callback: Callback = AdaptiveBatchSize()
Trainer(callbacks=[AdaptiveBatchSize(RadaDamp(), max_batch_size=1024)])
AdaptiveBatchSize(
    policy=GeoDamp(factor=2, delay=10),
    max_batch_size=math.inf,
    min_batch_size=8,
    adapt="batch_size",
    dwell=10,
    wait=50,
    multiple_of=8,
    max_device_batch_size=256,
    lr_scaling="sqrt",
    tail="carry",
)
AdaptiveBatchSize(adapt="lr", max_batch_size=None, max_device_batch_size=None, tail=None)
AdaptiveBatchSize(Schedule({0: 64, 1.5: 128}, unit="epochs"))
AdaptiveBatchSize(Constant())
AdaptiveBatchSize(AdaDamp(optimal_loss=0.1, fraction=0.25), dwell=50)
AdaptiveBatchSize(NoiseScale(rho=0.99, scale=1, warmup=50))
AdaptiveBatchSize(CABS(rho=0.95, scale=1, optimal_loss=0, warmup=20))
AdaptiveBatchSize(NormTest(theta=0.5, rho=0.0, warmup=1))
AdaptiveBatchSize(DiveBatch(delta=0.1, every=0.5, fraction=0.1), lr_scaling="linear")

# What it shows are plain numbers.
adaptive = AdaptiveBatchSize(RadaDamp(rho=0.99, grad_norm_weight=0.0, optimal_loss=-1.0, warmup=50))
assert_type(adaptive.batch_size, int | None)
assert_type(adaptive.lr_factor, float)
assert_type(adaptive.updates, int)
assert_type(adaptive.samples, int)
assert_type(adaptive.epochs, float)


# A user's own policy: without a state,
@dataclass(frozen=True)
class Double(Policy[None]):
    """Double the batch size every so many updates."""

    every: int = 100
    requires = frozenset()

    def damping(self, state: None, progress: Progress) -> float:
        """Return a power of 2."""
        return float(2.0 ** (progress.updates // self.every))


# with one,
class Best(NamedTuple):
    """The first and the lowest loss so far."""

    first: float
    lowest: float


@dataclass(frozen=True)
class LossRatio(Policy[Best]):
    """The first loss over the lowest."""

    def init(self) -> Best:
        """Return the state before the first observation."""
        return Best(math.inf, math.inf)

    def update(self, state: Best, observation: Observation) -> Best:
        """Keep the lowest loss."""
        assert observation.loss is not None
        first = observation.loss if state.first == math.inf else state.first
        return Best(first, min(state.lowest, observation.loss))

    def damping(self, state: Best, progress: Progress) -> float:
        """Return the ratio."""
        return state.first / state.lowest

    def estimates(self, state: Best) -> dict[str, float]:
        """Return what is worth a curve."""
        return {"loss": state.lowest}

    def notice(self, state: Best) -> str | None:
        """Say that the ratio has no meaning any more."""
        return "The loss is not above 0." if state.lowest <= 0 else None


# and without saying what the state is.
class Anything(Policy):
    """Its state may be anything."""

    def damping(self, state: Any, progress: Progress) -> float:
        """Read what a policy can read."""
        assert_type(progress.cap, int | float)
        return progress.measured.get("loss", progress.learning_rate) + progress.epochs


# One that has the loss over the training set measured, at every hundredth update.
@dataclass(frozen=True)
class Rare(Policy[float]):
    """The inverse of the last loss over a tenth of the training set."""

    fraction: float = 0.1
    requires = frozenset({"full_loss"})

    def init(self) -> float:
        """Return the state before the first evaluation."""
        return 1.0

    def needs(self, state: float, progress: Progress) -> frozenset[str]:
        """Ask for it once in a while."""
        return frozenset() if progress.updates % 100 else super().needs(state, progress)

    def take(self, state: float, progress: Progress) -> float:
        """Remember it."""
        return progress.measured["full_loss"]

    def damping(self, state: float, progress: Progress) -> float:
        """Return the inverse."""
        return 1 / state


for policy in (Double(every=10), LossRatio(), Anything(), Rare()):
    AdaptiveBatchSize(policy)

# By hand, as a loop of one's own would use a policy.
rule = LossRatio()
memory = rule.update(rule.init(), Observation(loss=1.0, grad_norm_sq=None, batch_size=8))
assert_type(memory, Best)
assert_type(Observation(1.0, 2.0, 8, grad_variance=-0.5).grad_variance, float | None)
assert_type(AdaDamp().needs(AdaDamp().init(), Progress(0, 0, 0.0, 8, 8, 64, 0.1)), frozenset[str])
where = Progress(1, 8, 0.1, initial_batch_size=8, batch_size=8, cap=64, learning_rate=0.1)
assert_type(rule.damping(memory, where), float)
assert_type(RadaDamp().requires, frozenset[str])

# What is refused before anything runs.
AdaptiveBatchSize(adapt="both")  # type: ignore[arg-type]
AdaptiveBatchSize(lr_scaling="cubic")  # type: ignore[arg-type]
AdaptiveBatchSize(tail="pad")  # type: ignore[arg-type]
AdaptiveBatchSize(policy="RadaDamp")  # type: ignore[arg-type]
AdaptiveBatchSize(dwell=1.5)  # type: ignore[arg-type]
AdaptiveBatchSize(max_size=64)  # type: ignore[call-arg]
Schedule({0: 8}, unit="steps")  # type: ignore[arg-type]
Policy()  # type: ignore[abstract]
RadaDamp().rho = 0.5  # type: ignore[misc]
