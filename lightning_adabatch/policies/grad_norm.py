# SPDX-License-Identifier: Apache-2.0
"""GradNormDamp: the batch size follows the squared norm of the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_adabatch.policies.base import Observation, Policy, Progress
from lightning_adabatch.policies.checks import check_rho, ratio


class GradNormDampState(NamedTuple):
    """Memory of :class:`GradNormDamp`."""

    observations: int  # taken so far
    grad_norm_sq: float  # rolling average
    baseline: float  # the first observation


@dataclass(frozen=True)
class GradNormDamp(Policy[GradNormDampState]):
    r"""Grow the batch size as a rolling average of the squared gradient norm falls.

    .. math::
        \hat g_0 = \lVert \nabla \hat L_B(w_0) \rVert_2^2, \qquad
        \hat g_k = \rho \hat g_{k-1} + (1 - \rho) \lVert \nabla \hat L_B(w_k) \rVert_2^2, \qquad
        \text{damping} = \hat g_0 / \hat g_k

    Args:
        rho: Memory of the rolling average, in [0, 1). 0.999 remembers about 1,000 updates.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> policy = GradNormDamp(rho=0.5)
        >>> state = policy.init()
        >>> for norm in (4.0, 1.0):
        ...     state = policy.update(state, Observation(None, norm, batch_size=8))
        >>> policy.damping(state, Progress(2, 16, 0.1, 8, 8, 64, 0.1))  # 4 / (0.5 · 4 + 0.5 · 1)
        1.6

    Notes:
        Deviations from Eq. 4 of the paper:

        1. Eq. 4 has the gradient of the whole training set. The squared norm of one batch's gradient is larger
           by the variance of the gradients over the batch size, so that the ratio falls short of Eq. 4's once
           that variance dominates, and rises when the batch grows for that alone.
        2. A first norm of 0 has no meaning as a ratio: the damping is then 1, and the user is told once. An
           average of 0 later asks for the largest batch size that needs no LR decay.

    References:
        Improving the convergence of SGD through adaptive batch sizes, Eq. 4 and Theorem 3.
    """

    rho: float = 0.999
    requires = frozenset({"grad_norm_sq"})

    def __post_init__(self) -> None:
        """Check the range."""
        check_rho(self.rho, 0.999)

    def init(self) -> GradNormDampState:
        """Return the state before the first observation."""
        return GradNormDampState(observations=0, grad_norm_sq=0.0, baseline=0.0)

    def update(self, state: GradNormDampState, observation: Observation) -> GradNormDampState:
        """Take one update's squared norm into the average."""
        now = observation.grad_norm_sq or 0.0
        if state.observations == 0:
            return GradNormDampState(1, now, now)
        average = self.rho * state.grad_norm_sq + (1.0 - self.rho) * now
        return GradNormDampState(state.observations + 1, average, state.baseline)

    def damping(self, state: GradNormDampState, progress: Progress) -> float:
        """Return ĝ_0 / ĝ_k."""
        if state.baseline <= 0.0:
            return 1.0
        if state.grad_norm_sq <= 0.0:
            return progress.cap / progress.initial_batch_size
        return ratio(state.baseline, state.grad_norm_sq)

    def estimates(self, state: GradNormDampState) -> dict[str, float]:
        """Return the rolling average of the squared gradient norm."""
        return {"grad_norm_sq": state.grad_norm_sq} if state.observations else {}

    def notice(self, state: GradNormDampState) -> str | None:
        """Say that a first norm of 0 switches the rule off."""
        if state.observations == 0 or state.baseline > 0.0:
            return None
        return (
            "GradNormDamp: the first squared gradient norm is 0 and must be > 0, so the batch size stays as it is. "
            "Start from weights at which the loss has a gradient."
        )
