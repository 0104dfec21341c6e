# SPDX-License-Identifier: Apache-2.0
"""NoiseScale: the batch size at which the gradient's noise is as large as the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_adabatch.policies.base import Observation, Policy, Progress
from lightning_adabatch.policies.checks import SMALLEST, average, check_positive, check_rho, check_warmup


class NoiseScaleState(NamedTuple):
    """Memory of :class:`NoiseScale`."""

    observations: int  # taken so far
    grad_variance: float  # average of tr Σ
    grad_norm_sq: float  # average of |G|², of the gradient without its noise; noise may make it negative


@dataclass(frozen=True)
class NoiseScale(Policy[NoiseScaleState]):
    r"""Set the batch size to the gradient noise scale: there noise and gradient are of one size.

    .. math::
        \lvert G \rvert^2_k &= \lVert \nabla \hat L_{B_k}(w_k) \rVert_2^2 - \operatorname{tr} \Sigma_k / B_k \\
        B_{\text{noise}} &= \overline{\operatorname{tr} \Sigma} \, / \, \overline{\lvert G \rvert^2}, \qquad
        \text{damping} = \text{scale} \cdot B_{\text{noise}} / B_0

    The squared norm of a batch's gradient is too large by tr Σ / B, on average; taking that off leaves an
    estimate that is right on average, whatever the batch size. Numerator and denominator are averaged apart, for
    the average of their ratio would not be right. The size is absolute: the batch moves to it from any B0.

    Args:
        rho: Memory of both averages, in [0, 1). 0.99 remembers about 100 updates.
        scale: The batch size in noise scales; finite, > 0.
        warmup: Nothing changes before this many updates were observed, ≥ 1.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> policy = NoiseScale(warmup=1)
        >>> state = policy.update(policy.init(), Observation(None, 6.0, batch_size=8, grad_variance=32.0))
        >>> policy.damping(state, Progress(1, 8, 0.1, 8, 8, 64, 0.1))  # 32 / (6 - 32 / 8) = 16 samples
        2.0

    Notes:
        Deviations from the paper:

        1. The paper measures the noise scale during a run and compares it with the best batch size; that the batch
           follows it is what it proposes as a use.
        2. It is the simple noise scale, without the Hessian.
        3. The averages are plain means until they hold 1 / (1 - rho) updates. Each update counts alike,
           whatever its batch size; averages of several sizes lag when the gradient changes fast.
        4. The size is at least 2: in a batch of one sample no variance can be seen, and the rule would end there.
           tr Σ ≤ 0, no noise to be seen, asks for these 2; ``min_batch_size`` holds against it.
           |G|² ≤ 0 < tr Σ: the noise hides the gradient, which asks for the largest batch size that needs no LR
           decay: how much more would help is not known.
        5. Past the cap the learning rate falls as for every rule. The paper has it otherwise: the best learning rate
           rises with the batch size up to the noise scale. Where the first noise scale is already above the cap,
           the LR is decayed from the start: set ``scale`` so that the first size wanted is about B0.

    References:
        McCandlish, Kaplan, Amodei et al., An empirical model of large-batch training, arXiv 1812.06162: the simple
        noise scale of section 2.2, the estimators and the separate averages of appendix A.1.
    """

    rho: float = 0.99
    scale: float = 1.0
    warmup: int = 50
    requires = frozenset({"grad_norm_sq", "grad_variance"})

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_rho(self.rho, 0.99)
        check_positive("scale", self.scale, 1.0)
        check_warmup(self.warmup)

    def init(self) -> NoiseScaleState:
        """Return the state before the first observation."""
        return NoiseScaleState(observations=0, grad_variance=0.0, grad_norm_sq=0.0)

    def update(self, state: NoiseScaleState, observation: Observation) -> NoiseScaleState:
        """Take one update's variance and norm into the averages."""
        count = state.observations + 1
        variance = observation.grad_variance or 0.0
        signal = (observation.grad_norm_sq or 0.0) - variance / observation.batch_size
        return NoiseScaleState(
            count,
            average(state.grad_variance, variance, count, self.rho),
            average(state.grad_norm_sq, signal, count, self.rho),
        )

    def damping(self, state: NoiseScaleState, progress: Progress) -> float:
        """Return scale · B_noise / B0, of at least two samples."""
        if state.observations < self.warmup:
            return 1.0
        if state.grad_variance <= 0.0:
            return SMALLEST / progress.initial_batch_size
        if state.grad_norm_sq <= 0.0:
            return progress.cap / progress.initial_batch_size
        return max(self.scale * state.grad_variance / state.grad_norm_sq, SMALLEST) / progress.initial_batch_size

    def estimates(self, state: NoiseScaleState) -> dict[str, float]:
        """Return the averages: of the squared norm of the gradient without its noise, and of tr Σ."""
        if not state.observations:
            return {}
        return {"grad_norm_sq": state.grad_norm_sq, "grad_variance": state.grad_variance}
