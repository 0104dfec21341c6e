# SPDX-License-Identifier: Apache-2.0
"""DiveBatch: the batch size follows the diversity of the gradients of single samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightning_adabatch.policies.base import Policy, Progress
from lightning_adabatch.policies.checks import check_fraction, check_positive

_MOST = 1e15  # intervals are counted up to here, where floats still tell integers apart


class DiveBatchState(NamedTuple):
    """Memory of :class:`DiveBatch`."""

    interval: int  # the one that it was measured in last; 0, in which nothing is measured, before the first
    diversity: float  # n · Δ as measured last; 0 before the first


@dataclass(frozen=True)
class DiveBatch(Policy[DiveBatchState]):
    r"""Set the batch size to a multiple of the gradient diversity, measured once in a while.

    .. math::
        n \Delta(w) = n \frac{\sum_i \lVert \nabla f_i(w) \rVert_2^2}{\lVert \sum_i \nabla f_i(w) \rVert_2^2}
        = \frac{\operatorname{mean}_i \lVert \nabla f_i(w) \rVert_2^2}
        {\lVert \operatorname{mean}_i \nabla f_i(w) \rVert_2^2}, \qquad
        \text{damping} = \text{delta} \cdot n \Delta(w_k) / B_0

    n Δ is 1 where all samples have the same gradient, n where their gradients are orthogonal, and larger where they
    cancel; it is 1 plus the gradient noise scale. The size is absolute: the batch moves to it from any B0.

    Args:
        delta: The batch size relative to n Δ; finite, > 0.
        every: Epochs from one measurement to the next, finite, > 0, fractions allowed. The first epochs, up to
            this one, have the initial batch size.
        fraction: Share of the training set that it is measured on, in (0, 1].

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> policy, where = DiveBatch(delta=0.5), Progress(9, 72, 1.0, 8, 8, 64, 0.1, {"gradient_diversity": 32.0})
        >>> policy.needs(policy.init(), where)
        frozenset({'gradient_diversity'})
        >>> policy.damping(policy.take(policy.init(), where), where)  # 0.5 · 32 = 16 samples
        2.0

    Notes:
        Deviations from the papers. The rule is that of the definition in appendix A of the first paper below:

        1. DiveBatch estimates n Δ from the gradients that an epoch's batches had anyway, while the weights
           moved. Here it is measured at the weights of the decision: exact, and at a price.
        2. In its authors' code the batch never shrinks; here it may, down to ``min_batch_size``.
        3. DiveBatch also scales the learning rate with the batch size, which is ``lr_scaling="linear"``.
        4. Yin et al. bound the batch size by delta · n Δ + 1 over all steps of a run; here each step has its own.
        5. On a fraction with m samples noise adds about 1/m of the mean squared norm to the denominator, so that
           values near m and above cannot be told apart.

    References:
        Yin, Pananjady, Lam, Papailiopoulos, Ramchandran and Bartlett, Gradient diversity: a key ingredient for
        scalable distributed learning, AISTATS 2018, arXiv 1706.05699, for the definition and the bound; Chen, Wang
        and Sundaram, DiveBatch: accelerating model training through gradient-diversity aware batch size
        adaptation, arXiv 2509.16173; Improving the convergence of SGD through adaptive batch sizes, appendix A.
    """

    delta: float = 1.0
    every: float = 1.0
    fraction: float = 1.0
    requires = frozenset({"gradient_diversity"})
    uses_epochs = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_positive("delta", self.delta, 1.0)
        check_positive("every", self.every, 1.0)
        check_fraction(self.fraction)

    def init(self) -> DiveBatchState:
        """Return the state before the first measurement."""
        return DiveBatchState(interval=0, diversity=0.0)

    def needs(self, state: DiveBatchState, progress: Progress) -> frozenset[str]:
        """Ask for the diversity once in each interval, the first one apart."""
        return self.requires if self._interval(progress) > state.interval else frozenset()

    def take(self, state: DiveBatchState, progress: Progress) -> DiveBatchState:
        """Take in the diversity, and when it was measured."""
        del state
        return DiveBatchState(self._interval(progress), progress.measured["gradient_diversity"])

    def damping(self, state: DiveBatchState, progress: Progress) -> float:
        """Return delta · n Δ / B0, of at least one sample, from the last measurement."""
        if state.interval == 0:
            return 1.0
        return max(self.delta * state.diversity, 1.0) / progress.initial_batch_size

    def estimates(self, state: DiveBatchState) -> dict[str, float]:
        """Return the last n Δ."""
        return {"gradient_diversity": state.diversity} if state.interval else {}

    def _interval(self, progress: Progress) -> int:
        # 0.3 / 0.1 is 2.999...: a point that is reached up to float dust is reached.
        return math.floor(min(progress.epochs / self.every + 1e-9, _MOST))
