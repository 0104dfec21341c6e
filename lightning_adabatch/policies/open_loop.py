# SPDX-License-Identifier: Apache-2.0
"""Rules that measure nothing: the batch size is a function of how far the run has come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from lightning_adabatch.policies.base import Policy, Progress, is_finite
from lightning_adabatch.policies.checks import SMALLEST_DAMPING, check_unit, count


@dataclass(frozen=True)
class Constant(Policy[None]):
    """Never change the batch size: damping = 1. The neutral element, for comparisons and logging alone.

    Example:
        >>> Constant().damping(None, Progress(5, 40, 0.5, 8, 8, 64, 0.1))
        1.0
    """

    requires = frozenset()

    def damping(self, state: None, progress: Progress) -> float:
        """Return 1."""
        del state, progress
        return 1.0


@dataclass(frozen=True)
class GeoDamp(Policy[None]):
    r"""Multiply the batch size by a constant every few epochs.

    .. math:: \text{damping} = \text{factor}^{\lfloor \text{epochs} / \text{delay} \rfloor}

    With ``AdaptiveBatchSize(adapt="lr")`` it is the step decay of the learning rate that the paper calls SGD.

    Args:
        factor: What the batch size is multiplied by; finite, > 0.
        delay: Epochs from one multiplication to the next; finite, > 0, fractions allowed.

    Raises:
        ValueError: For a value outside of its range.

    Example:
        >>> GeoDamp(factor=2, delay=5).damping(None, Progress(100, 800, 10.0, 8, 8, 64, 0.1))
        4.0

    References:
        Smith et al., Don't decay the learning rate, increase the batch size, ICLR 2018.
    """

    factor: float
    delay: float
    requires = frozenset()
    uses_epochs = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (is_finite(self.factor) and self.factor > 0):
            raise ValueError(f"factor={self.factor!r} must be a finite number > 0, such as 2.")
        if not (is_finite(self.delay) and self.delay > 0):
            raise ValueError(f"delay={self.delay!r} must be a finite number of epochs > 0, such as 10.")

    def damping(self, state: None, progress: Progress) -> float:
        """Return factor ** floor(epochs / delay)."""
        del state
        try:
            # 0.3 / 0.1 is 2.999...: a point that is reached up to float dust is reached.
            exponent = math.floor(progress.epochs / self.delay + 1e-9)
            return max(float(self.factor) ** exponent, SMALLEST_DAMPING)
        except OverflowError:
            return math.inf if self.factor > 1 else 1.0 if self.factor == 1 else SMALLEST_DAMPING


@dataclass(frozen=True)
class Schedule(Policy[None]):
    """Set absolute batch sizes at given points of the run; piecewise constant.

    The batch size is the one of the last point reached; before the first point it is the initial one.
    ``Schedule({0: 8, 4: 16})``: updates 1 to 4 use 8 samples, the fifth uses 16. A size here is what is
    *wanted*: above ``max_batch_size`` the learning rate falls instead.

    Args:
        sizes: From points (finite, ≥ 0, in ``unit``) to batch sizes in samples (integers ≥ 1); not empty.
        unit: What the points count: ``"updates"``, ``"samples"`` or ``"epochs"``.

    Raises:
        ValueError: For an empty mapping, a point or size outside of its range, or an unknown unit.

    Example:
        >>> Schedule({0: 8, 4: 16}).damping(None, Progress(4, 32, 0.5, 8, 8, 64, 0.1))
        2.0
    """

    sizes: Mapping[float, int] = field(hash=False)  # a dict has no hash
    unit: Literal["updates", "samples", "epochs"] = "updates"
    requires = frozenset()

    def __post_init__(self) -> None:
        """Check points, sizes and unit; keep the points in order in a mapping of our own."""
        check_unit(self.unit)
        if not isinstance(self.sizes, Mapping) or not self.sizes:
            raise ValueError(f"sizes={self.sizes!r} must map points to batch sizes, such as {{0: 64, 1000: 128}}.")
        for point, size in self.sizes.items():
            if isinstance(point, bool) or not isinstance(point, (int, float)) or not 0 <= point < math.inf:
                raise ValueError(f"sizes has the point {point!r}; a point must be a finite number of {self.unit} >= 0.")
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise ValueError(
                    f"sizes has the batch size {size!r} at {point!r}; a batch size must be an integer >= 1."
                )
        object.__setattr__(self, "sizes", dict(sorted(self.sizes.items())))

    @property
    def uses_epochs(self) -> bool:  # type: ignore[override]  # depends on the unit
        """Whether the points count epochs."""
        return self.unit == "epochs"

    def damping(self, state: None, progress: Progress) -> float:
        """Return the size of the last point reached, divided by the initial batch size."""
        del state
        now = count(self.unit, progress)
        reached = [size for point, size in self.sizes.items() if point <= now + 1e-9]
        try:
            return reached[-1] / progress.initial_batch_size if reached else 1.0
        except OverflowError:
            return math.inf
