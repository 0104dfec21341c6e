# SPDX-License-Identifier: Apache-2.0
"""Figure 2 of the paper, with its curves behind ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fashion_runs import Run, by_method, in_order, one_per_seed

ADAPTIVE_RATES = frozenset({"Adagrad"})  # methods whose learning rates are of another kind
SMOOTH = 5  # epochs of the running mean in the figure
#: Name, x and y of each panel; the first three are the paper's.
PANELS = (
    ("test accuracy (%)", "updates", "test_accuracy"),
    ("test accuracy (%)", "epochs", "test_accuracy"),
    ("batch size", "updates", "batch_size"),
    ("test loss", "lr_sum", "test_loss"),
    ("learning rate", "epochs", "lr"),
    ("batch size", "epochs", "batch_size"),
)


def running_mean(epochs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return at each row the mean of the rows at most half of the window away, fewer at both ends."""
    near = np.abs(epochs[:, None] - epochs) <= SMOOTH / 2
    return (near * values).sum(1) / near.sum(1)


def on_grid(runs: Sequence[Run], x: str, y: str, *, smooth: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid that ends with the shortest run, and a row of values on it per run."""
    tables = [np.array([getattr(run, name) for name in (x, y, "epochs")]) for run in runs]
    known = [table[:, ~np.isnan(table[1])] for table in tables if not np.isnan(table[1]).all()]
    curves = [(across, running_mean(epochs, values) if smooth else values) for across, values, epochs in known]
    if not curves:
        return np.empty(0), np.empty((1, 0))
    start, stop = max(across[0] for across, _ in curves), min(across[-1] for across, _ in curves)
    longest = max(curves, key=lambda curve: len(curve[0]))[0]
    grid = longest if len(curves) == 1 else np.linspace(start, max(start, stop), len(longest))
    return grid, np.array([np.interp(grid, across, values) for across, values in curves])


def draw(runs: Sequence[Run], author: Sequence[Run], path: Path) -> None:
    """Draw the mean over seeds and the band from the least to the most; the author's runs behind, dashed."""
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415 a training run needs no matplotlib
    from matplotlib.lines import Line2D  # noqa: PLC0415

    behind = in_order(one_per_seed(author).values())  # of our seeds, where it has them: the paper's figure is of two
    behind = [run for run in behind if run.seed in {own.seed for own in runs}] or behind
    drawn = [*behind, *runs]
    twenty = colormaps["tab20"].colors
    colour = dict(zip(sorted({run.method for run in drawn}), (*twenty[::2], *twenty[1::2]), strict=False))
    dashed: dict[str, Any] = {"ls": (0, (4, 2)), "lw": 1.2, "alpha": 0.5}
    figure = Figure(figsize=(15, 8.6), layout="constrained")
    for axis, letter, (title, x, y) in zip(figure.subplots(2, 3).flat, "abcdef", PANELS, strict=True):
        noisy, scale = y.startswith("test"), 100 if y == "test_accuracy" else 1
        without = ADAPTIVE_RATES if x == "lr_sum" else set()
        for name, group in by_method([run for run in behind if run.method not in without]).items():
            grid, values = on_grid(group, x, y, smooth=noisy)
            axis.plot(grid, scale * values.mean(0), color=colour[name], zorder=2, **dashed)
        for name, group in by_method([run for run in runs if run.method not in without]).items():
            grid, values = on_grid(group, x, y, smooth=noisy)
            axis.plot(grid, scale * values.mean(0), color=colour[name], lw=1.6, zorder=4)
            low, high = scale * values.min(0), scale * values.max(0)
            axis.fill_between(grid, low, high, color=colour[name], alpha=0.2, lw=0, zorder=3)
            if noisy:
                grid, values = on_grid(group, x, y)
                axis.plot(grid, scale * values.mean(0), color=colour[name], lw=0.7, alpha=0.25, zorder=3)
        across = {"lr_sum": "sum of the learning rates"}.get(x, x)
        axis.set(xlabel=across, ylabel=title, title=f"({letter}) {title} against {across}")
        axis.grid(alpha=0.3)
        axis.locator_params("x", nbins=6)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        limit(axis, x, y, drawn)
        if behind and (x, y) == ("updates", "batch_size"):
            for slope, start in ((0.5, 8), (0.3, 7)):  # r and g of the paper's caption, until 2^r and 2^g are 1,024
                until = np.array([8 - start, 10 - start]) / slope
                axis.plot(1000 * until, 2 ** (slope * until + start), color="0.3", ls=":", lw=1.3, zorder=5)
    lines = [Line2D([], [], color=shade, lw=2, label=name) for name, shade in colour.items()]
    if behind:
        lines.append(Line2D([], [], color="0.2", label="the author's runs", **dashed))
        lines.append(Line2D([], [], color="0.3", ls=":", lw=1.3, label="$2^r$ and $2^g$ of the paper"))
    figure.legend(handles=lines, loc="outside lower center", ncols=min(len(lines), 5), frameon=False)
    figure.savefig(path, dpi=110)


def limit(axis: Any, x: str, y: str, runs: Sequence[Run]) -> None:
    """Leave out what is far from all the rest, and show sizes and rates in powers."""
    if y in {"batch_size", "lr"}:
        axis.set_yscale("log", base=2 if y == "batch_size" else 10)
        axis.yaxis.set_major_formatter("{x:g}")
        if (x, y) == ("updates", "batch_size"):  # the constant ones go on and on
            axis.set_xlim(0, 1.03 * max((run.batch_size[-1], run.updates[-1]) for run in runs)[1])
    else:
        known = [value for run in runs for value in getattr(run, y) if not math.isnan(value)]
        low, high = np.quantile(known or [0, 1], (0.04, 1) if y == "test_accuracy" else (0, 0.96))
        scale, room = 100 if y == "test_accuracy" else 1, 0.04 * (high - low) + 1e-6
        axis.set_ylim(scale * (low - room), scale * (high + room))
