# SPDX-License-Identifier: Apache-2.0
"""Slow oracles, written from the formulas and not from the code: a list of what happened in, a list out."""

from __future__ import annotations

import math
from fractions import Fraction

from lightning_adabatch import Observation


def radadamp(
    observations: list[Observation],
    *,
    rho: float,
    grad_norm_weight: float,
    optimal_loss: float,
    warmup: int,
    largest: float,
) -> list[float]:
    """Return the damping of Algorithm 1 after each observation; ``largest`` is the one that needs no LR decay.

    Every average is summed up again from the first observation, in exact arithmetic, by its closed form.
    """
    decay, weight, shift = Fraction(rho), Fraction(grad_norm_weight), Fraction(optimal_loss)
    terms = [Fraction(o.loss or 0.0) - shift + weight * Fraction(o.grad_norm_sq or 0.0) for o in observations]
    dampings: list[float] = []
    for seen in range(1, len(terms) + 1):
        first = sum(terms[:warmup]) / min(seen, warmup)
        later = terms[warmup:seen]
        if not later or first <= 0:
            dampings.append(1.0)
            continue
        n = len(later)
        average = decay**n * first + sum((1 - decay) * decay ** (n - 1 - i) * t for i, t in enumerate(later))
        dampings.append(float(first / average) if average > 0 else largest)
    return dampings


def grad_norm_damp(norms: list[float], *, rho: float) -> list[float]:
    """Return the first squared norm over the average after each, every average summed up from the first one."""
    decay, terms = Fraction(rho), [Fraction(norm) for norm in norms]
    dampings = []
    for last in range(len(terms)):
        later = sum((1 - decay) * decay ** (last - i) * terms[i] for i in range(1, last + 1))
        dampings.append(float(terms[0] / (decay**last * terms[0] + later)))
    return dampings


def geodamp(epochs: list[float], *, factor: float, delay: float) -> list[float]:
    """Return one multiplication for each delay that fits into the epochs."""
    dampings = []
    for epoch in epochs:
        damping, point = 1.0, 1
        while point * Fraction(delay) <= Fraction(epoch):
            damping, point = damping * factor, point + 1
        dampings.append(damping)
    return dampings


def schedule(counts: list[float], *, sizes: dict[float, int], initial: int) -> list[float]:
    """Return the size of the largest point at or below each count, over the initial size."""
    dampings = []
    for count in counts:
        point = max((p for p in sizes if p <= count), default=None)
        dampings.append(1.0 if point is None else sizes[point] / initial)
    return dampings


def wanted(initial: int, damping: float) -> int:
    """Return the smallest integer that is not below the product, but for float dust of half a millionth."""
    product = min(max(damping, 0.0), 1e12) * initial
    return max(1, next(n for n in range(math.floor(product), math.floor(product) + 2) if n >= product - 5.1e-7))


def batch_size(size: int, *, floor: int, cap: float, multiple: int, epoch_samples: float) -> int:
    """Return the first multiple at or above ``size`` within the bounds, by trying one after the other."""
    candidate = multiple
    while candidate < size or candidate < floor:
        candidate += multiple
        if candidate >= cap or candidate > epoch_samples:
            break
    while candidate > cap or candidate > epoch_samples:
        candidate -= multiple
    return candidate if candidate > 0 else int(epoch_samples)
