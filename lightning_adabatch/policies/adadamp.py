# SPDX-License-Identifier: Apache-2.0
"""AdaDamp: the batch size follows the loss over the training set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_adabatch.policies.base import Policy, Progress
from lightning_adabatch.policies.checks import check_fraction, check_optimal_loss, ratio


class AdaDampState(NamedTuple):
    """Memory of :class:`AdaDamp`."""

    evaluations: int  # taken so far
    loss: float  # the last, minus nothing
    baseline: float  # the first, minus nothing


@dataclass(frozen=True)
class AdaDamp(Policy[AdaDampState]):
    r"""Grow the batch size as the training loss falls towards its smallest value.

    .. math::
        \text{damping} = \frac{F(w_0) - F^\star}{F(w_k) - F^\star}

    F is the mean loss over the training set, measured before every decision, the first update's included: it
    costs a pass over the data each time.

    Args:
        optimal_loss: F*, the smallest loss that training could reach; any finite number. The closer it is, the
            more the batch grows near the end.
        fraction: Share of the training set that F is measured on, in (0, 1].

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> policy, where = AdaDamp(optimal_loss=1.0), Progress(0, 0, 0.0, 8, 8, 64, 0.1, {"full_loss": 5.0})
        >>> state = policy.take(policy.init(), where)
        >>> state = policy.take(state, Progress(1, 8, 0.1, 8, 8, 64, 0.1, {"full_loss": 3.0}))
        >>> policy.damping(state, where)  # (5 - 1) / (3 - 1)
        2.0

    Notes:
        Deviations from Eq. 3 of the paper:

        1. Eq. 3 has a constant c in place of F(w_0) - F*: here the first batch has the size B0, so that
           c = B0 · (F(w_0) - F*).
        2. w_0 are the weights at the first decision. With ``wait`` that is a later one, of a smaller loss.
        3. ``fraction`` below 1 measures F on a part of the training set, which the theorems do not cover.
        4. F(w_0) ≤ F* has no meaning as a ratio: the damping is then 1 and the user is told once.
           F(w_k) ≤ F* < F(w_0) asks for the largest batch size that needs no LR decay.

    References:
        Improving the convergence of SGD through adaptive batch sizes, Eq. 3, Theorems 1 and 2.
    """

    optimal_loss: float = 0.0
    fraction: float = 1.0
    requires = frozenset({"full_loss"})

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_optimal_loss(self.optimal_loss)
        check_fraction(self.fraction)

    def init(self) -> AdaDampState:
        """Return the state before the first evaluation."""
        return AdaDampState(evaluations=0, loss=0.0, baseline=0.0)

    def take(self, state: AdaDampState, progress: Progress) -> AdaDampState:
        """Take in F(w_k); the first one is the baseline."""
        loss = progress.measured["full_loss"]
        return AdaDampState(state.evaluations + 1, loss, state.baseline if state.evaluations else loss)

    def damping(self, state: AdaDampState, progress: Progress) -> float:
        """Return (F(w_0) - F*) / (F(w_k) - F*)."""
        if state.evaluations == 0 or state.baseline <= self.optimal_loss:
            return 1.0
        if state.loss <= self.optimal_loss:
            return progress.cap / progress.initial_batch_size
        return ratio(state.baseline - self.optimal_loss, state.loss - self.optimal_loss)

    def estimates(self, state: AdaDampState) -> dict[str, float]:
        """Return the last F."""
        return {"loss": state.loss} if state.evaluations else {}

    def notice(self, state: AdaDampState) -> str | None:
        """Say that a first loss at or below F* switches the rule off."""
        if state.evaluations == 0 or state.baseline > self.optimal_loss:
            return None
        return (
            f"AdaDamp: the first loss over the training set is {state.baseline:g} and must be above "
            f"optimal_loss={self.optimal_loss:g}, so the batch size stays as it is. Set optimal_loss to the smallest "
            "loss that training could reach."
        )
