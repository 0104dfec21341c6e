# SPDX-License-Identifier: Apache-2.0
"""The report over all runs of fashion_mnist.py: the table, and figure 2 with the paper's curves behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from fashion_curves import COLUMNS
from fashion_figure import ADAPTIVE_RATES, draw, on_grid
from fashion_runs import Pairs, Run, by_method, in_order, one_per_seed, read

LEVELS = (0.88, 0.89, 0.90, 0.905, 0.91)  # written as in the CSVs, so that 0.9050 is at 90.5 %
LAST = 10  # epochs of which the paper's table takes the mean
SUMS = (20, 30, 40, 50, 60)  # of learning rates
SETTLED = 20  # epochs from which on both loss and accuracy are mostly noise from one epoch to the next


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


def end_accuracy(run: Run) -> float:
    """Return the mean test accuracy of the last ten epochs, of those that have one; NaN if none has."""
    start = run.epochs[-1] - LAST + 0.5  # half an epoch of room: some rows are a bit more than an epoch apart
    rows = zip(run.epochs, run.test_accuracy, strict=True)
    last = [accuracy for epoch, accuracy in rows if epoch > start and not math.isnan(accuracy)]
    return sum(last) / len(last) if last else math.nan


def agreement(run: Run) -> float:
    """Return the correlation of the changes of test loss and test accuracy from epoch to epoch, after the first 20.

    Both are of the same weights on the same images: when one epoch is bad for one of them it is for the other, and the
    number is near to -1. Near to 0, the two columns are not of one run. NaN for fewer than 20 changes.
    """
    loss, accuracy = (np.array(series)[np.array(run.epochs) > SETTLED] for series in (run.test_loss, run.test_accuracy))
    changes = np.diff(np.array([loss, accuracy])[:, np.isfinite(loss + accuracy)])
    return float(np.corrcoef(changes)[0, 1]) if changes.shape[1] >= 20 else math.nan


def first_at(run: Run, level: float) -> tuple[float, float] | None:
    """Return updates and epochs when the test accuracy was at a level for the first time."""
    rows = zip(run.updates, run.epochs, run.test_accuracy, strict=True)
    return next(((updates, epochs) for updates, epochs, accuracy in rows if accuracy >= level), None)


def whole(epochs: float) -> int:
    """Return how many epochs are done: samples may be carried over the end of the last one, a batch of them at most."""
    return math.floor(epochs + 0.2)


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
        "loss ~ accuracy": cell("{:.2f}", agreement(run)),
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


def progress_row(run: Run) -> dict[str, str]:
    """Return the cells of the third table: the test loss, a mean over five epochs, at sums of learning rates."""
    sums, (losses,) = on_grid([run], "lr_sum", "test_loss", smooth=True)
    last = sums[-1] if len(sums) else 0.0
    there = [float(np.interp(total, sums, losses)) if total <= last else math.nan for total in SUMS]
    return {"seeds": run.label} | {str(total): cell("{:.4f}", loss) for total, loss in zip(SUMS, there, strict=True)}


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
    """Return the three tables, compared with the author's runs if there are any."""
    more = "; updates against the author's" if author else ""
    told = f"Updates (epochs{more}) at which the test accuracy is first at"
    ends = markdown(runs, lambda run: end_row(run, full, author))
    parts = [ends, told, markdown(runs, lambda run: level_row(run, author))]
    if plain := [run for run in runs if run.method not in ADAPTIVE_RATES]:
        parts += ["Test loss when the learning rates of all updates so far add up to", markdown(plain, progress_row)]
    return parts


def text(runs: Sequence[Run], author: Sequence[Run], full: int) -> str:
    """Return all of the tables with what has to be known to read them."""
    kept = one_per_seed(author)
    more = " The differences of a cut one are to the author's run after as many epochs." if author else ""
    told = (
        f"Accuracy is the mean over the last {LAST} epochs that a run has.{more} Loss ~ accuracy is the correlation of "
        "their changes on the test images from epoch to epoch: near to 0, they are not of one and the same run."
    )
    parts = [told, *both(runs, full, kept)]
    if author:
        parts += ["The author's runs:", *both(author, full, {})]
        fewer = [run for run in author if kept[run.method, run.seed] is not run]
        parts += [f"{run.method} {run.label} is not compared with: its seed has a fuller run." for run in fewer]
    return "\n\n".join(parts) + "\n"


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
