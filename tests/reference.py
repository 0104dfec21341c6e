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


def cooldown(counts: list[float], rule: list[float], *, start: float, length: float, factor: float) -> list[float]:
    """Return the rule's dampings over a rate that goes in ``length`` equal steps from 1 to 1 / ``factor``."""
    end, step = 1 / Fraction(factor), (1 - 1 / Fraction(factor)) / Fraction(length)
    rates = [max(end, 1 - step * max(0, Fraction(count) - Fraction(start))) for count in counts]
    return [damping / float(rate) for damping, rate in zip(rule, rates, strict=True)]


def adadamp(losses: list[float], *, optimal_loss: float, largest: float) -> list[float]:
    """Return the first distance to F* over each, 1 without such a distance, ``largest`` where it has vanished."""
    distances = [Fraction(loss) - Fraction(optimal_loss) for loss in losses]
    if distances and distances[0] <= 0:
        return [1.0] * len(losses)
    return [float(distances[0] / distance) if distance > 0 else largest for distance in distances]


def averages(values: list[float | None], *, rho: float) -> list[Fraction]:
    """Return the average after each value, summed up anew: a mean of the first ones, then one that forgets."""
    terms, decay = [Fraction(value or 0.0) for value in values], Fraction(rho)
    held = int(1 / (1 - decay))  # so many have a weight of at least 1 - rho in a mean
    found = []
    for seen in range(1, len(terms) + 1):
        first, later = terms[: min(held, seen)], terms[held:seen]
        start = decay ** len(later) * sum(first) / len(first)
        found.append(start + sum((1 - decay) * decay ** (len(later) - 1 - i) * t for i, t in enumerate(later)))
    return found


def noise_scale(
    observations: list[Observation], *, rho: float, scale: float, warmup: int, initial: int, cap: float
) -> list[float]:
    """Return the batch size wanted after each observation: the ratio of tr Σ to the norm without its noise."""
    noises = averages([o.grad_variance for o in observations], rho=rho)
    signals = [Fraction(o.grad_norm_sq or 0.0) - Fraction(o.grad_variance or 0.0) / o.batch_size for o in observations]
    sizes: list[float] = []
    for count, (noise, signal) in enumerate(zip(noises, averages(signals, rho=rho), strict=True), 1):
        if count < warmup:
            sizes.append(initial)
        elif noise <= 0:
            sizes.append(2)
        else:
            sizes.append(cap if signal <= 0 else max(2.0, float(Fraction(scale) * noise / signal)))
    return sizes


def cabs(
    observations: list[Observation],
    rates: list[float],
    *,
    rho: float,
    scale: float,
    optimal_loss: float,
    warmup: int,
    initial: int,
    cap: float,
) -> list[float]:
    """Return the batch size wanted after each observation, at each learning rate."""
    distances = [loss - Fraction(optimal_loss) for loss in averages([o.loss for o in observations], rho=rho)]
    noises = averages([o.grad_variance for o in observations], rho=rho)
    sizes: list[float] = []
    for count, (distance, noise, rate) in enumerate(zip(distances, noises, rates, strict=True), 1):
        if count < warmup or distances[warmup - 1] <= 0:
            sizes.append(initial)
        elif noise <= 0 or rate == 0:
            sizes.append(2)
        else:
            sizes.append(cap if distance <= 0 else max(2.0, float(Fraction(scale) * Fraction(rate) * noise / distance)))
    return sizes


def norm_test(
    observations: list[Observation], *, theta: float, rho: float, warmup: int, initial: int, cap: float
) -> list[float]:
    """Return the batch size after each observation: where the test fails at it, the one that would have passed."""
    noises = averages([o.grad_variance for o in observations], rho=rho)
    norms = averages([o.grad_norm_sq for o in observations], rho=rho)
    size, sizes = Fraction(initial), []
    for count, (noise, norm) in enumerate(zip(noises, norms, strict=True), 1):
        vanished = count >= warmup and norm <= 0 < noise
        if count >= warmup and norm > 0 and noise / size > Fraction(theta) ** 2 * norm:
            size = noise / (Fraction(theta) ** 2 * norm)
        sizes.append(max(float(size), cap) if vanished else float(size))
    return sizes


def divebatch(
    epochs: list[float], diversities: list[float], *, delta: float, every: float, initial: int
) -> tuple[list[bool], list[float]]:
    """Return at each decision whether it measures, and the batch size wanted; both lists have one entry for each."""
    measures, sizes, size, point = [], [], float(initial), Fraction(every)
    for epoch, diversity in zip(epochs, diversities, strict=True):
        due = Fraction(epoch) >= point
        if due:
            size = max(1.0, delta * diversity)
            while Fraction(epoch) >= point:
                point += Fraction(every)
        measures.append(due)
        sizes.append(size)
    return measures, sizes


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
