# SPDX-License-Identifier: Apache-2.0
"""What several rules share: the ranges of their hyperparameters, the average, the smallest values."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from lightning_adabatch.policies.base import Progress, is_finite

#: Samples; in a batch of one the variance of the gradients cannot be seen.
SMALLEST = 2.0

#: A damping is above 0, also where a quotient or a power is too small for a float.
SMALLEST_DAMPING = 1e-300


def check_rho(rho: Any, usual: float) -> None:
    """Refuse a memory outside of [0, 1)."""
    if not (is_finite(rho) and 0.0 <= rho < 1.0):
        raise ValueError(f"rho={rho!r} must be a number in [0, 1). Set for example rho={usual}.")


def check_positive(name: str, value: Any, usual: float) -> None:
    """Refuse what is not a finite number above 0."""
    if not (is_finite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a finite number > 0, such as {usual}.")


def check_optimal_loss(optimal_loss: Any) -> None:
    """Refuse a smallest loss that is not finite."""
    if not is_finite(optimal_loss):
        raise ValueError(
            f"optimal_loss={optimal_loss!r} must be a finite number. Set the smallest loss that training could reach."
        )


def check_unit(unit: Any) -> None:
    """Refuse what is none of the three counts."""
    if unit not in ("updates", "samples", "epochs"):
        raise ValueError(f"unit={unit!r} must be one of 'updates', 'samples', 'epochs'.")


def check_warmup(warmup: Any) -> None:
    """Refuse what is not a number of updates from 1 on."""
    if isinstance(warmup, bool) or not isinstance(warmup, Integral) or warmup < 1:
        raise ValueError(f"warmup={warmup!r} must be an integer >= 1, a number of updates.")


def check_fraction(fraction: Any) -> None:
    """Refuse a share of the training set outside of (0, 1]."""
    if not (is_finite(fraction) and 0.0 < fraction <= 1.0):
        raise ValueError(
            f"fraction={fraction!r} must be a number in (0, 1], a share of the training set. 1 is all of it."
        )


def count(unit: str, progress: Progress) -> float:
    """Return how far the run has come, in a unit."""
    return {"updates": progress.updates, "samples": progress.samples, "epochs": progress.epochs}[unit]


def ratio(first: float, now: float) -> float:
    """Return the damping first / now of two numbers above 0."""
    return max(first / now, SMALLEST_DAMPING)


def average(before: float, now: float, count: int, rho: float) -> float:
    """Return the average after the ``count``-th value: the plain mean until 1 / count falls below 1 - rho.

    An exponential average that starts with its first value gives that one the weight of the whole memory; one that
    starts at 0 is too small at first. This is neither, and becomes the exponential average with memory rho.
    """
    weight = max(1.0 / count, 1.0 - rho)
    return (1.0 - weight) * before + weight * now
