# SPDX-License-Identifier: Apache-2.0
"""The report over all runs of fashion_mnist.py: the table, and figure 2 with the paper's curves behind."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from fashion_curves import COLUMNS

LEVELS = (0.88, 0.89, 0.90, 0.905, 0.91)  # written as in the CSVs, so that 0.9050 is at 90.5 %
LAST = 10  # epochs of which the paper's table takes the mean
SMOOTH = 5  # epochs of the running mean in the figure
NEAR = 0.6  # an epoch: the author counts each last batch as a whole one, and is at 200.53 after 200
SERIES = ("epochs", "updates", "batch_size", "lr", "train_loss_avg", "test_loss", "test_accuracy")
#: Name, x and y of each panel; the first three are the paper's.
PANELS = (
    ("test accuracy (%)", "updates", "test_accuracy"),
    ("test accuracy (%)", "epochs", "test_accuracy"),
    ("batch size", "updates", "batch_size"),
    ("test loss", "updates", "test_loss"),
    ("learning rate", "epochs", "lr"),
    ("batch size", "epochs", "batch_size"),
)


@dataclass(frozen=True)
class Run:
    """A run, with a value per epoch in each series; NaN where the CSV has none."""

    method: str
    seed: int
    label: str  # the seed; for a second run of it more, such as 1001b
    epochs: tuple[float, ...]
    updates: tuple[float, ...]
    batch_size: tuple[float, ...]
    lr: tuple[float, ...]
    train_loss_avg: tuple[float, ...]
    test_loss: tuple[float, ...]
    test_accuracy: tuple[float, ...]

    def upto(self, epochs: float) -> Run:
        """Return the run as it was after so many epochs."""
        keep = max(1, sum(epoch <= epochs + NEAR for epoch in self.epochs))
        return replace(self, **{name: getattr(self, name)[:keep] for name in SERIES})


Pairs = dict[tuple[str, int], Run]  # by method and seed


def read(path: Path) -> list[Run]:
    """Return the runs in a CSV. What was measured before training is left out.

    Raises:
        ValueError: If it is not a CSV of runs, or a number in it is none.
    """
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
            raise ValueError(f"there is no column {', '.join(missing)}")
        for row in reader:
            if float(row["updates"] or 0) > 0:
                groups.setdefault((row["method"], row["seed"], row["run"]), []).append(row)
    if not groups:
        raise ValueError("there is no epoch yet")
    runs = []
    for (method, seed, name), rows in groups.items():
        tail = name.rpartition("/")[2]
        series = {column: tuple(float(row[column] or "nan") for row in rows) for column in SERIES}
        runs.append(Run(method, int(seed), tail if tail.startswith(seed) else seed, **series))
    return in_order(runs)


def read_folder(folder: Path, author: Path | None) -> tuple[list[Run], list[str]]:
    """Return the runs in a folder's CSVs, the author's apart, and why a file was skipped."""
    runs, skipped = [], []
    for path in sorted(folder.glob("*.csv")):
        if author is None or path.resolve() != author.resolve():
            try:
                runs += read(path)
            except ValueError as error:
                skipped.append(f"{path.name}: {error}")
    return in_order(runs), skipped


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Sort by method and seed."""
    return sorted(runs, key=lambda run: (run.method, run.seed, run.label))


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that are in order."""
    return {method: list(group) for method, group in groupby(runs, lambda run: run.method)}


def one_per_seed(runs: Sequence[Run]) -> Pairs:
    """Keep, of several runs of a method and seed, the first of those with the most test accuracies."""
    kept: Pairs = {}
    for run in sorted(runs, key=lambda run: -np.isfinite(run.test_accuracy).sum()):
        kept.setdefault((run.method, run.seed), run)
    return kept


def end_accuracy(run: Run) -> float:
    """Return the mean test accuracy of the last ten epochs, of those that have one; NaN if none has."""
    start = run.epochs[-1] - LAST + 0.5  # half an epoch of room: some rows are a bit more than an epoch apart
    rows = zip(run.epochs, run.test_accuracy, strict=True)
    last = [accuracy for epoch, accuracy in rows if epoch > start and not math.isnan(accuracy)]
    return sum(last) / len(last) if last else math.nan


def first_at(run: Run, level: float) -> tuple[float, float] | None:
    """Return updates and epochs when the test accuracy was at a level for the first time."""
    rows = zip(run.updates, run.epochs, run.test_accuracy, strict=True)
    return next(((updates, epochs) for updates, epochs, accuracy in rows if accuracy >= level), None)


def whole(epochs: float) -> int:
    """Return how many epochs are done; they come rounded."""
    return math.floor(epochs + 1e-3)


def differences(run: Run, author: Run | None) -> tuple[float, float]:
    """Return accuracy in points and updates in % against the author's run, as far as both of them went."""
    if author is None:
        return math.nan, math.nan
    both = min(whole(run.epochs[-1]), whole(author.epochs[-1]))
    ours, theirs = run.upto(both), author.upto(both)
    return 100 * (end_accuracy(ours) - end_accuracy(theirs)), 100 * (ours.updates[-1] / theirs.updates[-1] - 1)


def cell(style: str, value: float) -> str:
    """Format, with a sign for what is not there."""
    return "-" if math.isnan(value) else style.format(value)


def end_row(run: Run, full: int, author: Pairs) -> dict[str, str]:
    """Return the cells of the first table, by column."""
    done = whole(run.epochs[-1])
    accuracy, updates = differences(run, author.get((run.method, run.seed)))
    cells = {
        "seeds": run.label,
        "epochs": f"cut: {done} of {full}" if done < full else f"{done}",
        "accuracy (%)": cell("{:.2f}", 100 * end_accuracy(run)),
        "accuracy - author's (points)": cell("{:+.2f}", accuracy),
        "updates": f"{run.updates[-1]:,.0f}",
        "updates against author's (%)": cell("{:+.1f}", updates),
        "batch size": cell("{:.0f}", run.batch_size[-1]),
        "LR": cell("{:.4g}", run.lr[-1]),
        "train loss": cell("{:.4f}", run.train_loss_avg[-1]),
    }
    return {name: value for name, value in cells.items() if author or "author" not in name}


def level_row(run: Run, author: Pairs) -> dict[str, str]:
    """Return the cells of the second table: ``updates (epochs)``, or ``updates (epochs; difference)``."""
    cells, other = {"seeds": run.label}, author.get((run.method, run.seed))
    for level in LEVELS:
        here, there = first_at(run, level), first_at(other, level) if other else None
        more = "" if not author else f"; {100 * (here[0] / there[0] - 1):+.1f} %" if here and there else "; -"
        cells[f"{100 * level:g} %"] = f"{here[0]:,.0f} ({here[1]:.1f}{more})" if here else "-"
    return cells


def markdown(runs: Sequence[Run], row: Callable[[Run], dict[str, str]]) -> str:
    """Return a table with a row per method and a value per seed in a cell, aligned so that it can be read as it is."""
    rows = [["method", *row(runs[0])]]
    for method, group in by_method(runs).items():
        columns = zip(*(row(run).values() for run in group), strict=True)
        rows.append([method, *(" / ".join(column) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ["| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in rows]
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])


def both(runs: Sequence[Run], full: int, author: Pairs) -> list[str]:
    """Return the two tables, compared with the author's runs if there are any."""
    more = "; updates against the author's" if author else ""
    told = f"Updates (epochs{more}) at which the test accuracy is first at"
    ends = markdown(runs, lambda run: end_row(run, full, author))
    return [ends, told, markdown(runs, lambda run: level_row(run, author))]


def text(runs: Sequence[Run], author: Sequence[Run], full: int) -> str:
    """Return all of the tables with what has to be known to read them."""
    kept = one_per_seed(author)
    more = " The differences of a cut one are to the author's run after as many epochs." if author else ""
    parts = [f"Accuracy is the mean over the last {LAST} epochs that a run has.{more}", *both(runs, full, kept)]
    if author:
        parts += ["The author's runs:", *both(author, full, {})]
        fewer = [run for run in author if kept[run.method, run.seed] is not run]
        parts += [f"{run.method} {run.label} is not compared with: its seed has a fuller run." for run in fewer]
    return "\n\n".join(parts) + "\n"


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
    from matplotlib.figure import Figure  # noqa: PLC0415 a training run needs no matplotlib
    from matplotlib.lines import Line2D  # noqa: PLC0415

    behind = in_order(one_per_seed(author).values())  # of our seeds, where it has them: the paper's figure is of two
    behind = [run for run in behind if run.seed in {own.seed for own in runs}] or behind
    drawn = [*behind, *runs]
    colour = {name: f"C{index}" for index, name in enumerate(sorted({run.method for run in drawn}))}
    dashed: dict[str, Any] = {"ls": (0, (4, 2)), "lw": 1.2, "alpha": 0.5}
    figure = Figure(figsize=(15, 8.6), layout="constrained")
    for axis, letter, (title, x, y) in zip(figure.subplots(2, 3).flat, "abcdef", PANELS, strict=True):
        noisy, scale = y.startswith("test"), 100 if y == "test_accuracy" else 1
        for name, group in by_method(behind).items():
            grid, values = on_grid(group, x, y, smooth=noisy)
            axis.plot(grid, scale * values.mean(0), color=colour[name], zorder=2, **dashed)
        for name, group in by_method(runs).items():
            grid, values = on_grid(group, x, y, smooth=noisy)
            axis.plot(grid, scale * values.mean(0), color=colour[name], lw=1.6, zorder=4)
            low, high = scale * values.min(0), scale * values.max(0)
            axis.fill_between(grid, low, high, color=colour[name], alpha=0.2, lw=0, zorder=3)
            if noisy:
                grid, values = on_grid(group, x, y)
                axis.plot(grid, scale * values.mean(0), color=colour[name], lw=0.7, alpha=0.25, zorder=3)
        axis.set(xlabel=x, ylabel=title, title=f"({letter}) {title} against {x}")
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
    figure.legend(handles=lines, loc="outside lower center", ncols=min(len(lines), 6), frameon=False)
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


def report(folder: Path, author: Path | None, full: int | None = None) -> None:
    """Gather the CSVs of a folder, print the tables, and write them and the figure into it.

    Args:
        folder: Has a CSV per run.
        author: A CSV of runs to compare with.
        full: Epochs of a run that was not cut; default: the most that any run has.
    """
    runs, skipped = read_folder(folder, author)
    print("".join(f"Skipped {why}.\n" for why in skipped), end="")
    columns = ", ".join(COLUMNS)
    if not runs:
        raise SystemExit(f"{folder} has no CSV with the columns {columns}. Give --report the --out of a training.")
    try:
        theirs = [] if author is None else read(author)
    except (ValueError, OSError) as error:
        raise SystemExit(f"--author {author}: {error}. Give a CSV of runs, with the columns {columns}.") from error
    full = full or max(whole(run.epochs[-1]) for run in (*runs, *theirs))
    told = text(runs, theirs, full)
    print(told)
    (folder / "table.md").write_text(told, encoding="utf-8")
    draw(runs, theirs, folder / "figure2.png")
    print(f"Table: {folder / 'table.md'}; picture: {folder / 'figure2.png'}")
