# SPDX-License-Identifier: Apache-2.0
"""The rates of the paper's Table 1, measured: ``python benchmarks/theory.py [--quick] [--out docs/theory]``.

Three test functions, each the mean of n functions f_i(w) = F(w) + ξ_i · w whose ξ_i have mean 0: F, its gradient
and its minimum are known, and the gradient of f_i has a variance that does not vanish at the minimum.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import functools
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from lightning_adabatch.limits import Limits

mpl.use("Agg")
from matplotlib import pyplot as plt

Array = NDArray[np.float64]
#: The exponents of 1/ε and of log(1/ε).
Bound = tuple[float, float]

SAMPLES = 200
METHODS = ("SGD", "adaptive", "gradient descent")
COUNTS = ("model updates", "gradient computations")
MARKS_PER_DECADE = 100
LEVELS_PER_DECADE = 8
MOST, FIRST_HORIZON, HORIZONS_PER_DECADE = 20_000_000, 30, 3
RESAMPLES = 1000
#: Between an exponent's interval and the bound's exponent: what is left of the first updates bends the curves a little.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Problem:
    """One test function, and what Table 1 says of its class.

    Attributes:
        name: Of its class.
        curvatures: Of the quadratic F(w) = ½ Σ curvature · w², per coordinate; the largest is β.
        tail: Where > 0, the first coordinate contributes (1 + x²)^(-tail / 2) / tail instead.
        start: Where all repetitions start.
        noise: The ξ_i, a row each.
        initial_batch_size: B0 of the adaptive batch sizes.
        averaged: Whether the error is that of the mean of the iterates, as theorem 2 has it.
        bounds: Table 1's, per count and method.
    """

    name: str
    curvatures: Array
    tail: float
    start: Array
    noise: Array
    initial_batch_size: int
    averaged: bool
    bounds: dict[str, tuple[Bound, Bound, Bound]]

    def gradient(self, w: Array) -> Array:
        """Return ∇F, a row per repetition."""
        gradient = self.curvatures * w
        if self.tail:
            x = w[:, 0]
            gradient[:, 0] = -x * np.exp((-self.tail / 2 - 1) * np.log1p(x * x))
        return gradient

    def error(self, w: Array) -> Array:
        """Return F - F*, or where F is not convex the norm of ∇F, per repetition."""
        if self.tail:
            gradient: Array = np.linalg.norm(self.gradient(w), axis=1)
            return gradient
        loss: Array = 0.5 * (w * w) @ self.curvatures
        return loss

    def sizes(self, error: Array) -> NDArray[np.int64]:
        """Return Eq. 3's batch sizes, or where F is not convex Eq. 4's, which has the squared norm."""
        limits = Limits(self.initial_batch_size, cap=math.inf)
        dampings = (self.first_error / error) ** (2 if self.tail else 1)
        return np.array([decision.batch_size for d in dampings if (decision := limits.decide(float(d)))])

    @property
    def first_error(self) -> float:
        """The error at the start."""
        return float(self.error(self.start[None])[0])

    @property
    def c(self) -> float:
        """The constant of Eq. 3 or Eq. 4, from B0."""
        return self.initial_batch_size * self.first_error ** (2 if self.tail else 1)

    @property
    def alpha(self) -> float:
        """The PL constant of a quadratic."""
        return float(self.curvatures[self.curvatures > 0].min())

    @property
    def beta(self) -> float:
        """The smoothness; the first coordinate's second derivative is -1 at its largest."""
        return float(self.curvatures.max())

    @property
    def radius_sq(self) -> float:
        """The squared distance of the start from the minimum, for the convex one."""
        return float((self.start**2).sum())

    @property
    def variance(self) -> float:
        """The mean of ‖ξ_i‖²: the variance of one sample's gradient, at any w."""
        return float((self.noise**2).sum(axis=1).mean())

    @property
    def m_sq(self) -> float:
        """M² = variance + ‖∇F‖² as the theorems want it: M_U², at the start, or M_L², where ∇F is 0."""
        return self.variance + (0.0 if self.tail else float((self.gradient(self.start[None]) ** 2).sum()))


def centred(rng: np.random.Generator, scales: Array, variance: float) -> Array:
    """Return the ξ_i: of mean 0, with these relative scales, and with this mean squared norm."""
    noise = rng.standard_normal((SAMPLES, len(scales))) * scales
    noise -= noise.mean(axis=0)
    scaled: Array = noise * math.sqrt(variance / (noise**2).sum(axis=1).mean())
    return scaled


def strongly_convex() -> Problem:
    """Return an α-PL function with α = 0.1, β = 1, and directions in which it is flat: not strongly convex."""
    curvatures = np.concatenate([np.geomspace(0.1, 1.0, 10), np.zeros(10)])
    noise = centred(np.random.default_rng(1), np.sqrt(curvatures), 1.0)
    bounds = {COUNTS[0]: ((1.0, 0.0), (0.0, 1.0), (0.0, 1.0)), COUNTS[1]: ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0))}
    return Problem("PL", curvatures, 0.0, np.ones(20), noise, 8, averaged=False, bounds=bounds)


def convex() -> Problem:
    """Return a quadratic whose curvatures go down to 1e-8, evenly on a log scale: gradient descent's loss is ~ 1/k."""
    curvatures = np.geomspace(1.0, 1e-8, 33)
    noise = centred(np.random.default_rng(2), np.ones(33), 4.0)
    bounds = {COUNTS[0]: ((2.0, 0.0), (1.0, 0.0), (1.0, 0.0)), COUNTS[1]: ((2.0, 0.0), (2.0, 0.0), (1.0, 0.0))}
    return Problem("convex", curvatures, 0.0, np.ones(33), noise, 16, averaged=True, bounds=bounds)


def smooth() -> Problem:
    """Return a function that is concave near its start and falls for ever, ever more slowly, along x."""
    curvatures, start = np.ones(20), np.zeros(20)
    start[0] = 1.0
    noise = centred(np.random.default_rng(3), np.ones(20), 0.1)
    bounds = {COUNTS[0]: ((4.0, 0.0), (2.0, 0.0), (2.0, 0.0)), COUNTS[1]: ((4.0, 0.0), (3.0, 0.0), (2.0, 0.0))}
    return Problem("smooth", curvatures, 0.1, start, noise, 8, averaged=False, bounds=bounds)


def steps(problem: Problem, method: str, horizon: int) -> Callable[[int], float]:
    """Return the step size of update k = 0, 1, … of so many that the theorem for this class and method prescribes."""
    alpha, beta, relative = problem.alpha, problem.beta, problem.m_sq / problem.c
    if method == "gradient descent":
        return lambda _: 1 / beta
    if problem.tail:
        if method == "adaptive":
            return lambda _: 1 / (beta * (1 + relative))
        variance = problem.variance
        return lambda k: 1 / (beta + math.sqrt(2 * variance * (k + 1)))
    if problem.averaged:
        inverse = relative if method == "adaptive" else math.sqrt(problem.variance / problem.radius_sq * horizon / 2)
        return lambda _: 1 / (beta + inverse)
    step = alpha / (beta * (alpha + relative / 2))
    return lambda k: step if method == "adaptive" else min(1 / beta, (2 * k + 1) / (2 * alpha * (k + 1) ** 2))


def allowed(problem: Problem, levels: Array) -> Array:
    """Return how many updates theorem 1, 2 or 3 allows adaptive batch sizes, its constants included."""
    relative = problem.m_sq / problem.c
    if problem.tail:
        first_loss = (1 + problem.start[0] ** 2) ** (-problem.tail / 2) / problem.tail
        updates: Array = 2 * first_loss * problem.beta * (relative + 1) / levels**2
    elif problem.averaged:
        updates = (problem.radius_sq * (problem.beta + relative) + problem.first_error) / levels
    else:
        rate = problem.alpha**2 / (problem.beta * (problem.alpha + relative / 2))
        updates = np.log(problem.first_error / levels) / rate
    return updates


@dataclass(frozen=True)
class Curves:
    """What was recorded after each marked number of updates.

    Attributes:
        updates: The marks.
        errors: A row per mark, a column per repetition.
        gradients: Computed so far, of the same shape.
    """

    updates: Array
    errors: Array
    gradients: Array


def simulate(problem: Problem, method: str, repetitions: int, most: int, until: float, seed: int) -> Curves:
    """Train until the mean error over the repetitions is below a level, or for so many updates."""
    rng = np.random.default_rng(seed)
    step = steps(problem, method, most)
    chance = np.full(SAMPLES, 1 / SAMPLES)
    marks = set(np.geomspace(1, most, round(MARKS_PER_DECADE * math.log10(most))).round().astype(int).tolist())
    w = np.tile(problem.start, (repetitions, 1))
    total, spent = np.zeros_like(w), np.zeros(repetitions)
    kept: list[tuple[int, Array, Array]] = []
    for k in range(most):
        gradient = problem.gradient(w)
        if method == "SGD":  # a batch of one sample, drawn ahead in blocks for speed
            if k % 1024 == 0:
                drawn = problem.noise[rng.integers(SAMPLES, size=(1024, repetitions))]
            gradient += drawn[k % 1024]
            spent += 1
        elif method == "adaptive":
            sizes = problem.sizes(problem.error(w))
            # How often each sample is drawn, with replacement, makes the mean over the batch.
            gradient += rng.multinomial(sizes, chance) @ problem.noise / sizes[:, None]
            spent += sizes
        else:
            spent += SAMPLES
        gradient *= step(k)
        w -= gradient
        if problem.averaged:
            total += w
        if k + 1 in marks:
            error = problem.error(total / (k + 1) if problem.averaged else w)
            kept.append((k + 1, error, spent.copy()))
            if error.mean() < until:
                break
    updates, errors, gradients = zip(*kept, strict=True)
    return Curves(np.array(updates, dtype=float), np.array(errors), np.array(gradients))


def train(problem: Problem, method: str, repetitions: int, until: float, seed: int) -> Curves:
    """Simulate one run that passes all levels, or where the step depends on the number of updates a run for each."""
    if not (problem.averaged and method == "SGD"):
        return simulate(problem, method, repetitions, MOST, until, seed)
    ends: list[Curves] = []
    while not ends or ends[-1].errors[-1].mean() >= until:
        updates = round(FIRST_HORIZON * 10 ** (len(ends) / HORIZONS_PER_DECADE))
        ends.append(simulate(problem, method, repetitions, updates, 0.0, seed + 1000 * len(ends)))
    return Curves(*(np.array([getattr(end, name)[-1] for end in ends]) for name in ("updates", "errors", "gradients")))


def crossings(curves: Curves, levels: Array, weights: Array) -> tuple[Array, Array]:
    """Return the updates and the gradients it took the weighted mean error to come to each level or below.

    Between two marks both are interpolated on log scales; NaN where a level was not reached.
    """
    mean = curves.errors @ weights
    lowest = np.minimum.accumulate(mean)
    spent = curves.gradients @ weights
    found = np.full((2, len(levels)), math.nan)
    for column, level in enumerate(levels):
        index = int(np.searchsorted(-lowest, -level))
        if not 0 < index < len(mean):
            continue
        before, after = lowest[index - 1], mean[index]
        part = math.log(before / level) / math.log(before / after)
        for row, counts in enumerate((curves.updates, spent)):
            found[row, column] = counts[index - 1] * (counts[index] / counts[index - 1]) ** part
    return found[0], found[1]


def slope(x: Array, y: Array) -> float:
    """Return the slope of the least-squares line through the points that are there; NaN for fewer than three."""
    there = np.isfinite(x) & np.isfinite(y)
    if there.sum() < 3:
        return math.nan
    x, y = x[there] - x[there].mean(), y[there] - y[there].mean()
    return float(x @ y / (x @ x))


def exponent(levels: Array, counts: Array, log_power: float = 0.0) -> float:
    """Return p of counts ~ (1/ε)^p log(1/ε)^log_power."""
    logs = -np.log(levels)
    return slope(logs, np.log(counts / logs**log_power))


def per_e_fold(levels: Array, counts: Array) -> float:
    """Return b of counts = a + b log(1/ε)."""
    return slope(-np.log(levels), counts)


def straightness(levels: Array, counts: Array) -> float:
    """Return R² of counts = a + b log(1/ε)."""
    there = np.isfinite(counts)
    return float(np.corrcoef(np.log(levels[there]), counts[there])[0, 1] ** 2)


@dataclass(frozen=True)
class Rate:
    """One cell of Table 1.

    Attributes:
        problem: Its class of functions.
        count: What is counted.
        method: How it was trained.
        bound: Table 1's.
        levels: The ε.
        counts: What it took to come to each.
        fit: The exponent, or for a bound of log(1/ε) the updates per e-fold of ε.
        low: The lower end of its 95 % interval, over resampled repetitions.
        high: The upper end.
        late: The same fit on the smaller half of the ε.
    """

    problem: str
    count: str
    method: str
    bound: Bound
    levels: Array
    counts: Array
    fit: float
    low: float
    high: float
    late: float

    @property
    def logarithmic(self) -> bool:
        """Whether the bound grows like log(1/ε) alone."""
        return self.bound[0] == 0

    def row(self) -> list[str]:
        """Return the table's row."""
        power, log = self.bound
        bound = ("log(1/ε)" if log else "1") + {0.0: "", 1.0: "/ε"}.get(power, f"/ε^{power:g}")
        spread = "" if self.low == self.high else f" [{self.low:.2f}, {self.high:.2f}]"
        there = self.levels[np.isfinite(self.counts)]
        decades = f"{math.log10(there[0] / there[-1]):.1f}" if len(there) else "0"
        if self.logarithmic:
            straight = straightness(self.levels, self.counts)
            spread = spread and f" [{self.low:.1f}, {self.high:.1f}]"
            fit = f"{self.fit:.1f} per e-fold{spread}"
            verdict = f"a line in log(1/ε): R² = {straight:.4f}" if straight > 0.99 else f"no line: R² = {straight:.4f}"
            return [self.problem, self.count, self.method, bound, fit, f"{self.late:.1f}", decades, verdict]
        if math.isnan(self.fit):
            verdict = "not reached"
        elif self.low - TOLERANCE <= power <= self.high + TOLERANCE:
            verdict = "as the bound"
        else:
            verdict = "below the bound" if self.fit < power else "ABOVE the bound"
        return [
            *(self.problem, self.count, self.method, bound),
            *(f"{self.fit:.2f}{spread}", f"{self.late:.2f}", decades, verdict),
        ]


def rates(problem: Problem, method: str, curves: Curves, levels: Array, seed: int) -> list[Rate]:
    """Fit both counts of one method."""
    repetitions = curves.errors.shape[1]
    even = np.full(repetitions, 1 / repetitions)
    resampled = np.random.default_rng(seed).multinomial(repetitions, even, size=RESAMPLES) / repetitions
    measured = crossings(curves, levels, even)
    if method == "gradient descent":  # nothing is random
        resampled = even[None]
    again = [crossings(curves, levels, weights) for weights in resampled]
    found = []
    for row, count in enumerate(COUNTS):
        bound = problem.bounds[count][METHODS.index(method)]
        fit = per_e_fold if bound[0] == 0 else functools.partial(exponent, log_power=bound[1])
        reached = np.isfinite(measured[row])
        used = levels[reached]
        low, high = np.nanpercentile([fit(levels, each[row]) for each in again], [2.5, 97.5])
        half = len(used) // 2
        late = fit(used[half:], measured[row][reached][half:])
        value = fit(levels, measured[row])
        found.append(
            Rate(problem.name, count, method, bound, levels, measured[row], value, float(low), float(high), late)
        )
    return found


#: Per class and method: the largest ε, and how many decades lie below it in a full run and in a quick one.
RANGES = {
    "PL": {"SGD": (1e-2, 3.0, 1.5), "adaptive": (1e-2, 3.0, 2.0), "gradient descent": (1e-2, 3.0, 2.0)},
    "convex": {"SGD": (5e-2, 2.0, 0.7), "adaptive": (2e-2, 2.5, 1.0), "gradient descent": (2e-2, 2.5, 1.0)},
    "smooth": {"SGD": (1.6e-1, 1.2, 0.5), "adaptive": (1.6e-1, 2.2, 1.0), "gradient descent": (1.6e-1, 2.2, 1.0)},
}


def measure(*, quick: bool, repetitions: int) -> list[Rate]:
    """Run everything."""
    found = []
    for number, problem in enumerate((strongly_convex(), convex(), smooth())):
        for index, method in enumerate(METHODS):
            largest, *spans = RANGES[problem.name][method]
            span = spans[quick]
            levels = largest * np.logspace(0, -span, round(LEVELS_PER_DECADE * span) + 1)
            # Nothing is random in gradient descent, and much in SGD.
            count = {"SGD": 4 * repetitions, "adaptive": repetitions, "gradient descent": 1}[method]
            seed = 10 * number + index
            curves = train(problem, method, count, 0.98 * levels[-1], seed)
            found += rates(problem, method, curves, levels, seed)
    return found


def shares(found: list[Rate]) -> str:
    """Say how much adaptive batch sizes took of what the theorems and corollaries 1 to 3 allow, at the worst ε."""
    lines = []
    for number, problem in enumerate((strongly_convex(), convex(), smooth()), 1):
        updates, gradients = (
            next(r for r in found if (r.problem, r.method, r.count) == (problem.name, "adaptive", count))
            for count in COUNTS
        )
        most = allowed(problem, updates.levels)
        share = np.nanmax(updates.counts / most)
        parts = [f"{share:.3f} of the updates that theorem {number} allows"]
        for power in (1, 2) if problem.tail else (1,):
            share = np.nanmax(gradients.counts / (4 * problem.c * most / gradients.levels**power))
            what = f"the gradients that corollary {number} allows" if power == 1 else "4cr/ε^4 gradients"
            parts.append(f"{share:.3f} of {what}")
        lines.append(f"{problem.name}, adaptive, at the worst ε: " + ", ".join(parts))
    return "\n".join(lines)


def table(found: list[Rate]) -> str:
    """Return the table of exponents in Markdown."""
    head = ["class", "count", "method", "Table 1", "measured [95 %]", "smaller ε", "decades", "verdict"]
    ordered = sorted(found, key=lambda rate: (list(RANGES).index(rate.problem), COUNTS.index(rate.count)))
    rows = [head, *(rate.row() for rate in ordered)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def draw(found: list[Rate], path: Path) -> None:
    """Draw both counts against ε, a column per class, with the lines of Table 1's bounds."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), sharex="col", layout="constrained")
    colours = dict(zip(METHODS, ("tab:orange", "tab:blue", "tab:green"), strict=True))
    for rate in found:
        axis = axes[COUNTS.index(rate.count), list(RANGES).index(rate.problem)]
        axis.loglog(rate.levels, rate.counts, "o", markersize=3.5, color=colours[rate.method], label=rate.method)
        power, log = rate.bound
        there = np.isfinite(rate.counts)
        if there.any():
            line = (1 / rate.levels) ** power * np.log(1 / rate.levels) ** log
            if rate.logarithmic:  # a line in log(1/ε) has two constants, a power law has one
                line = rate.counts[there][0] + rate.fit * np.log(rate.levels[there][0] / rate.levels)
            line *= rate.counts[there][0] / line[there][0]
            axis.loglog(rate.levels, line, "-", linewidth=0.9, color=colours[rate.method], alpha=0.6)
    for column, name in enumerate(RANGES):
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("ε, of " + ("the norm of ∇F" if name == "smooth" else "F - F*"))
        axes[1, column].invert_xaxis()
    for row, count in enumerate(COUNTS):
        axes[row, 0].set_ylabel(count)
    for axis in axes.flat:
        axis.grid(visible=True, which="major", alpha=0.3)
    (last,) = (r for r in found if (r.problem, r.count, r.method) == ("smooth", COUNTS[1], "adaptive"))
    line = last.counts[0] * (last.levels[0] / last.levels) ** 4
    dashed = axes[1, 2].loglog(last.levels, line, "--", color=colours["adaptive"], label="1/ε⁴")
    axes[0, 0].legend(title="points: measured; lines: Table 1", fontsize=9)
    axes[1, 2].legend(handles=dashed, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save(found: list[Rate], path: Path) -> None:
    """Write the counts and the fits, a line per ε."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["class", "count", "method", "epsilon", "needed", "fit", "low", "high"])
        for rate in found:
            fit = [f"{value:.4f}" for value in (rate.fit, rate.low, rate.high)]
            for level, needed in zip(rate.levels, rate.counts, strict=True):
                writer.writerow([rate.problem, rate.count, rate.method, f"{level:.4e}", f"{needed:.4e}", *fit])


def main() -> None:
    """Print the table; write the figure and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds, over fewer decades")
    parser.add_argument("--repetitions", type=int, default=8, help="independent runs per stochastic method")
    parser.add_argument("--out", type=Path, default=Path("docs/theory"), help="folder of the figure and the CSV")
    options = parser.parse_args()
    start = time.perf_counter()
    found = measure(quick=options.quick, repetitions=options.repetitions)
    options.out.mkdir(parents=True, exist_ok=True)
    print(
        f"{dt.datetime.now(tz=dt.timezone.utc).date()}: {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"numpy {np.__version__}, Python {platform.python_version()}, {time.perf_counter() - start:.0f} s, "
        f"{options.repetitions} repetitions, of SGD {4 * options.repetitions}"
    )
    print(table(found))
    print(shares(found))
    draw(found, options.out / "rates.png")
    save(found, options.out / "rates.csv")
    print(f"Wrote {options.out / 'rates.png'} and {options.out / 'rates.csv'}.")


if __name__ == "__main__":
    main()
