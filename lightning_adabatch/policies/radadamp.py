# SPDX-License-Identifier: Apache-2.0
"""RadaDamp: the batch size follows a rolling average of the training loss and the gradient norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_adabatch.policies.base import Observation, Policy, Progress, is_finite
from lightning_adabatch.policies.checks import check_optimal_loss, check_rho, check_warmup, ratio


class RadaDampState(NamedTuple):
    """Memory of :class:`RadaDamp`.

    The rolling average of t_k is linear in its two parts, so they are kept apart: their weighted sum is
    the paper's d̂_k, and each is worth a curve of its own in the logs.
    """

    observations: int  # taken so far
    loss: float  # average of the loss, minus nothing
    grad_norm_sq: float  # average of the squared gradient norm
    baseline: float  # d̂_0; moves until the warm-up is over


@dataclass(frozen=True)
class RadaDamp(Policy[RadaDampState]):
    r"""Grow the batch size as a rolling average of loss and squared gradient norm falls.

    .. math::
        t_k &= \hat L_B(w_k) - F^\star + \lambda \lVert \nabla \hat L_B(w_k) \rVert_2^2 \\
        \hat d_0 &= t_0, \qquad \hat d_k = \rho \hat d_{k-1} + (1 - \rho) t_k \\
        \text{damping} &= \hat d_0 / \hat d_k

    Args:
        rho: Memory of the rolling average, in [0, 1). 0.999 remembers about 1,000 updates.
        grad_norm_weight: The paper's λ, ≥ 0. With 0 the gradient norm is not measured.
        optimal_loss: F*, the smallest loss that training could reach; any finite number. Losses that can
            be negative, such as log-likelihoods, need it.
        warmup: d̂_0 is the mean over this many first updates, ≥ 1, and nothing changes before. With small first
            batches take more than one: a single loss may be far from the mean.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> policy = RadaDamp(rho=0.5, grad_norm_weight=0.0)
        >>> state = policy.init()
        >>> for loss in (2.0, 1.0):
        ...     state = policy.update(state, Observation(loss, None, batch_size=8))
        >>> policy.damping(state, Progress(2, 16, 0.1, 8, 8, 64, 0.1))  # 2 / (0.5 · 2 + 0.5 · 1)
        1.3333333333333333

    Notes:
        Deviations from Algorithm 1 of the paper, and from the code that made its published numbers:

        1. F* is subtracted from the loss, as Eq. 3 does; Algorithm 1 has F* = 0, which is the default.
        2. ``warmup=1``, λ = 1e-3 is Algorithm 1 as printed. The published numbers were made with
           ``warmup=50``, λ = 0.05 and a batch size that never falls below B0; that code also cut B0 · damping off to
           a whole number, where Algorithm 1 and this package round up: one sample at most.
        3. d̂_0 ≤ 0 has no meaning as a ratio: the damping is then 1 and the user is told once. d̂_k ≤ 0 < d̂_0
           asks for the largest batch size that needs no LR decay.

    References:
        Improving the convergence of SGD through adaptive batch sizes, Algorithm 1.
    """

    rho: float = 0.999
    grad_norm_weight: float = 1e-3
    optimal_loss: float = 0.0
    warmup: int = 1

    def __post_init__(self) -> None:
        """Check the ranges, and ask only for what the weights need."""
        check_rho(self.rho, 0.999)
        if not (is_finite(self.grad_norm_weight) and self.grad_norm_weight >= 0.0):
            raise ValueError(
                f"grad_norm_weight={self.grad_norm_weight!r} must be a finite number >= 0. "
                "Set 0 to leave the gradient norm out."
            )
        check_optimal_loss(self.optimal_loss)
        check_warmup(self.warmup)
        if self.grad_norm_weight > 0.0:
            object.__setattr__(self, "requires", frozenset({"loss", "grad_norm_sq"}))

    def init(self) -> RadaDampState:
        """Return the state before the first observation."""
        return RadaDampState(observations=0, loss=0.0, grad_norm_sq=0.0, baseline=0.0)

    def update(self, state: RadaDampState, observation: Observation) -> RadaDampState:
        """Take one update's loss and norm into the averages."""
        count = state.observations + 1
        # A plain mean up to the end of the warm-up, the exponential average of Algorithm 1 from then on.
        weight = 1.0 / count if count <= self.warmup else 1.0 - self.rho
        keep = 1.0 - weight if count <= self.warmup else self.rho
        averaged = RadaDampState(
            observations=count,
            loss=keep * state.loss + weight * (observation.loss or 0.0),
            grad_norm_sq=keep * state.grad_norm_sq + weight * (observation.grad_norm_sq or 0.0),
            baseline=state.baseline,
        )
        return averaged._replace(baseline=self._average(averaged)) if count <= self.warmup else averaged

    def damping(self, state: RadaDampState, progress: Progress) -> float:
        """Return d̂_0 / d̂_k."""
        if state.baseline <= 0.0:
            return 1.0
        average = self._average(state)
        if average <= 0.0:
            return progress.cap / progress.initial_batch_size
        return ratio(state.baseline, average)

    def estimates(self, state: RadaDampState) -> dict[str, float]:
        """Return the rolling averages of the loss and, where measured, of the squared gradient norm."""
        if not state.observations:
            return {}
        if self.grad_norm_weight > 0.0:
            return {"loss": state.loss, "grad_norm_sq": state.grad_norm_sq}
        return {"loss": state.loss}

    def notice(self, state: RadaDampState) -> str | None:
        """Say that a baseline at or below zero switches the rule off."""
        if state.observations < self.warmup or state.baseline > 0.0:
            return None
        return (
            f"RadaDamp: the baseline, loss - optimal_loss + {self.grad_norm_weight:g} * squared gradient norm, is "
            f"{state.baseline:g} and must be > 0, so the batch size stays as it is. Set optimal_loss (now "
            f"{self.optimal_loss:g}) to the smallest loss that training could reach."
        )

    def _average(self, state: RadaDampState) -> float:
        return state.loss - self.optimal_loss + self.grad_norm_weight * state.grad_norm_sq
