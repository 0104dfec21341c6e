# SPDX-License-Identifier: Apache-2.0
"""CABS: the batch size is coupled to the learning rate, the gradient's variance and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_adabatch.policies.base import Observation, Policy, Progress
from lightning_adabatch.policies.checks import (
    SMALLEST,
    average,
    check_optimal_loss,
    check_positive,
    check_rho,
    check_warmup,
)


class CABSState(NamedTuple):
    """Memory of :class:`CABS`."""

    observations: int  # taken so far
    loss: float  # average, minus nothing
    grad_variance: float  # average of tr Σ
    baseline: float  # the average of the loss when the warm-up was over


@dataclass(frozen=True)
class CABS(Policy[CABSState]):
    r"""Let the batch size follow learning rate times gradient variance divided by loss.

    .. math::
        B = \text{scale} \cdot \alpha \, \frac{\overline{\operatorname{tr} \Sigma}}{\overline{L} - F^\star}, \qquad
        \text{damping} = B / B_0

    α is the learning rate of the first parameter group, before the factor of this callback. The size is absolute:
    the batch moves to it from any B0. Where it is above the cap the learning rate is multiplied by cap / B,
    which is the learning rate for which the equation asks for the cap.

    Args:
        rho: Memory of both averages, in [0, 1). 0.95 remembers about 20 updates.
        scale: What the size is multiplied by; finite, > 0.
        optimal_loss: F*, the smallest loss that training could reach; any finite number. Losses that can
            be negative, such as log-likelihoods, need it.
        warmup: Nothing changes before this many updates were observed, ≥ 1.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> policy = CABS(warmup=1)
        >>> state = policy.update(policy.init(), Observation(2.0, None, batch_size=8, grad_variance=320.0))
        >>> policy.damping(state, Progress(1, 8, 0.1, 8, 8, 64, learning_rate=0.1))  # 0.1 · 320 / 2 = 16 samples
        2.0

    Notes:
        Deviations from the paper, and from its authors' code:

        1. F* is subtracted from the loss; the paper's rule has F* = 0, which is the default.
        2. Their averages begin at tr Σ = 0 and a loss of 1, ours are plain means until they hold 1 / (1 - rho)
           updates.
        3. tr Σ is an estimate without bias; theirs divides by B where it should by B - 1.
        4. They clip the size between 16 and 2,048 and leave the learning rate; bounds are ``min_batch_size`` and
           ``max_batch_size`` here, and past the second one the learning rate falls.
        5. The size is at least 2: in a batch of one sample no variance can be seen, and the rule would end there.
           tr Σ ≤ 0, and a learning rate of 0, ask for these 2; ``min_batch_size`` holds against it.
        6. A first average of the loss at or below F* has no meaning as a denominator: the damping is then 1 and the
           user is told once. One at or below F* later asks for the largest batch size that needs no LR decay.

    References:
        Balles, Romero and Hennig, Coupling adaptive batch sizes with learning rates, UAI 2017, arXiv 1612.05086.
    """

    rho: float = 0.95
    scale: float = 1.0
    optimal_loss: float = 0.0
    warmup: int = 20
    requires = frozenset({"loss", "grad_variance"})

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_rho(self.rho, 0.95)
        check_positive("scale", self.scale, 1.0)
        check_optimal_loss(self.optimal_loss)
        check_warmup(self.warmup)

    def init(self) -> CABSState:
        """Return the state before the first observation."""
        return CABSState(observations=0, loss=0.0, grad_variance=0.0, baseline=0.0)

    def update(self, state: CABSState, observation: Observation) -> CABSState:
        """Take one update's loss and variance into the averages."""
        count = state.observations + 1
        loss = average(state.loss, observation.loss or 0.0, count, self.rho)
        variance = average(state.grad_variance, observation.grad_variance or 0.0, count, self.rho)
        return CABSState(count, loss, variance, loss if count <= self.warmup else state.baseline)

    def damping(self, state: CABSState, progress: Progress) -> float:
        """Return scale · α · tr Σ / (L - F*) / B0, of at least two samples."""
        if state.observations < self.warmup or state.baseline <= self.optimal_loss:
            return 1.0
        if state.grad_variance <= 0.0 or progress.learning_rate <= 0.0:
            return SMALLEST / progress.initial_batch_size
        if state.loss <= self.optimal_loss:
            return progress.cap / progress.initial_batch_size
        size = self.scale * progress.learning_rate * state.grad_variance / (state.loss - self.optimal_loss)
        return max(size, SMALLEST) / progress.initial_batch_size

    def estimates(self, state: CABSState) -> dict[str, float]:
        """Return the averages of the loss and of tr Σ."""
        return {"loss": state.loss, "grad_variance": state.grad_variance} if state.observations else {}

    def notice(self, state: CABSState) -> str | None:
        """Say that a first average of the loss at or below F* switches the rule off."""
        if state.observations < self.warmup or state.baseline > self.optimal_loss:
            return None
        return (
            f"CABS: the average of the first losses is {state.baseline:g} and must be above "
            f"optimal_loss={self.optimal_loss:g}, so the batch size stays as it is. Set optimal_loss to the smallest "
            "loss that training could reach."
        )
