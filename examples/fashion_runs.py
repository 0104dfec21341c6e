# SPDX-License-Identifier: Apache-2.0
"""The runs in the CSVs of fashion_mnist.py, and the paper's in the same columns."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from fashion_curves import COLUMNS

NEAR = 0.6  # an epoch: the author's seem to have been a bit longer, for he is at 200.53 after 200
SERIES = ("epochs", "updates", "batch_size", "lr", "train_loss_avg", "test_loss", "test_accuracy")


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

    @property
    def lr_sum(self) -> tuple[float, ...]:
        """The learning rates of all updates so far, added up: how far the weights could have come."""
        lengths = np.diff(np.array([0.0, *self.updates]))
        return tuple(np.cumsum(lengths * np.array(self.lr)))

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
