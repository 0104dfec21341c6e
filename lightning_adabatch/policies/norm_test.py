# SPDX-License-Identifier: Apache-2.0
"""NormTest: the batch grows when the noise of its gradient is too large for the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_adabatch.policies.base import Observation, Policy, Progress, is_finite
from lightning_adabatch.policies.checks import average, check_rho, check_warmup


class NormTestState(NamedTuple):
    """Memory of :class:`NormTest`."""

    observations: int  # taken so far
    grad_variance: float  # average of tr Σ
    grad_norm_sq: float  # average
    size: float  # the largest that the test asked for, in samples; 0 before the first


@dataclass(frozen=True)
class NormTest(Policy[NormTestState]):
    r"""Grow the batch size whenever the norm test fails; never shrink it.

    .. math::
        \frac{\operatorname{tr} \Sigma}{B} \le \theta^2 \lVert \nabla \hat L_B(w_k) \rVert_2^2
        \quad \text{or else} \quad
        B \leftarrow \frac{\operatorname{tr} \Sigma}{\theta^2 \lVert \nabla \hat L_B(w_k) \rVert_2^2}, \qquad
        \text{damping} = B / B_0

    The test has the norm of the batch's own gradient, which holds its noise, tr Σ / B, too. On
    average it is passed from (1 / θ² - 1) gradient noise scales on, and a batch whose gradient is nothing but noise
    grows by 1 / θ² at once.

    Args:
        theta: How large the noise may be relative to the gradient, in (0, 1). The smaller, the larger the batch.
        rho: Memory of the averages that the test is made with, in [0, 1). 0: each update's own values.
        warmup: No test before this many updates were observed, ≥ 1.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> policy = NormTest(theta=0.5, warmup=1)
        >>> state = policy.update(policy.init(), Observation(None, 8.0, batch_size=8, grad_variance=32.0))
        >>> policy.damping(state, Progress(1, 8, 0.1, 8, 8, 64, 0.1))  # 32 / (0.25 · 8) = 16 samples
        2.0

    Notes:
        Deviations from the papers:

        1. They test with the values of one batch, which is ``rho=0, warmup=1``. The variance of single samples
           is known better there, from every sample's gradient; a size that never shrinks keeps each outlier, so
           that averages are the default here. They are plain means until they hold 1 / (1 - rho) updates.
        2. The test is made at every update, whatever ``dwell``; the size changes at the decisions.
        3. Byrd et al. use a subsample of the batch for the variance, and correct for a finite training set. We
           do neither.
        4. A squared norm of 0 with a variance asks for the largest batch size that needs no LR decay, as long as it
           lasts. A variance ≤ 0 passes the test.
        5. The papers stop at the largest batch. Here, as for every rule, the learning rate falls past it.

    References:
        Byrd, Chin, Nocedal and Wu, Sample size selection in optimization methods for machine learning, Mathematical
        Programming 134, 2012; Lau, Liu and Kolar, AdAdaGrad: adaptive batch size schemes for adaptive gradient
        methods, arXiv 2402.11215, where θ is called η.
    """

    theta: float = 0.5
    rho: float = 0.9
    warmup: int = 10
    requires = frozenset({"grad_norm_sq", "grad_variance"})

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (is_finite(self.theta) and 0.0 < self.theta < 1.0):
            raise ValueError(f"theta={self.theta!r} must be a number in (0, 1). Set for example theta=0.5.")
        check_rho(self.rho, 0.9)
        check_warmup(self.warmup)

    def init(self) -> NormTestState:
        """Return the state before the first observation."""
        return NormTestState(observations=0, grad_variance=0.0, grad_norm_sq=0.0, size=0.0)

    def update(self, state: NormTestState, observation: Observation) -> NormTestState:
        """Take one update's variance and norm into the averages, and test."""
        count = state.observations + 1
        variance = average(state.grad_variance, observation.grad_variance or 0.0, count, self.rho)
        norm = average(state.grad_norm_sq, observation.grad_norm_sq or 0.0, count, self.rho)
        tested = count >= self.warmup and norm > 0.0
        size = max(state.size, variance / norm / self.theta / self.theta) if tested else state.size
        return NormTestState(count, variance, norm, size)

    def damping(self, state: NormTestState, progress: Progress) -> float:
        """Return the largest size that the test asked for, B0 included, divided by B0."""
        damping = max(state.size / progress.initial_batch_size, 1.0)
        if state.observations >= self.warmup and state.grad_norm_sq <= 0.0 < state.grad_variance:
            return max(damping, progress.cap / progress.initial_batch_size)
        return damping

    def estimates(self, state: NormTestState) -> dict[str, float]:
        """Return the averages that the test is made with."""
        if not state.observations:
            return {}
        return {"grad_norm_sq": state.grad_norm_sq, "grad_variance": state.grad_variance}
