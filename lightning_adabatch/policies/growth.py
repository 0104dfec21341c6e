# SPDX-License-Identifier: Apache-2.0
"""Rules that grow the batch size with the number of updates, as rates of convergence ask for; nothing is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_adabatch.policies.base import Policy, Progress, is_finite
from lightning_adabatch.policies.checks import SMALLEST_DAMPING


@dataclass(frozen=True)
class PolynomialDamp(Policy[None]):
    r"""Grow the batch size like a power of the number of updates.

    .. math:: \text{damping} = 1 + \text{rate} \cdot k^{\text{power}}

    A linear growth keeps the rate of gradient descent on smooth functions, a quadratic one on convex functions.
    The rate of PadaDamp, in samples per update, is ``rate`` times the initial batch size.

    Args:
        rate: Growth at the first update, relative to the initial batch size; finite, > 0.
        power: Of the number of updates k; finite, > 0.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> PolynomialDamp(rate=0.01).damping(None, Progress(100, 800, 1.0, 8, 8, 64, 0.1))
        2.0

    References:
        Zhou et al., A stochastic gradient method with batch size that increases over time, for the rates;
        Sievert and Charles, Improving the convergence of SGD through adaptive batch sizes, for PadaDamp.
    """

    rate: float
    power: float = 1.0
    requires = frozenset()

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (is_finite(self.rate) and self.rate > 0):
            raise ValueError(f"rate={self.rate!r} must be a finite number > 0, such as 0.01.")
        if not (is_finite(self.power) and self.power > 0):
            raise ValueError(f"power={self.power!r} must be a finite number > 0: 1 for linear, 2 for quadratic growth.")

    def damping(self, state: None, progress: Progress) -> float:
        """Return 1 + rate · k^power."""
        del state
        try:
            growth: float = float(progress.updates) ** float(self.power)
            return 1.0 + float(self.rate) * growth
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class ExponentialDamp(Policy[None]):
    r"""Multiply the batch size by a constant at every update.

    .. math:: \text{damping} = \text{rate}^k

    A geometric growth keeps the linear convergence of gradient descent on strongly convex functions.

    Args:
        rate: What the batch size is multiplied by at each update; finite, > 0, a little above 1.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> ExponentialDamp(rate=2).damping(None, Progress(3, 24, 0.1, 8, 8, 64, 0.1))
        8.0

    References:
        Bottou, Curtis and Nocedal, Optimization methods for large-scale machine learning, section 5.1;
        Friedlander and Schmidt, Hybrid deterministic-stochastic methods for data fitting.
    """

    rate: float
    requires = frozenset()

    def __post_init__(self) -> None:
        """Check the range."""
        if not (is_finite(self.rate) and self.rate > 0):
            raise ValueError(f"rate={self.rate!r} must be a finite number > 0, such as 1.001.")

    def damping(self, state: None, progress: Progress) -> float:
        """Return rate ** k."""
        del state
        try:
            return max(float(self.rate) ** progress.updates, SMALLEST_DAMPING)
        except OverflowError:
            return math.inf
