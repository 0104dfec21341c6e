# SPDX-License-Identifier: Apache-2.0
"""Figure 1 of the synthetic experiment: test loss and batch size, mean and quartiles over runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PANELS = (("updates", "test_loss"), ("epochs", "test_loss"), ("updates", "batch_size"))
STYLES = {"AdaGrad": "--"}  # its batch size is that of SGD
LABELS = {"updates": "model updates", "epochs": "epochs", "test_loss": "test loss", "batch_size": "batch size"}


@dataclass(frozen=True)
class Point:
    """Where a run stood."""

    updates: int
    epochs: float
    batch_size: int
    test_loss: float
    evaluated: float  # passes over the training set for the policy alone


@dataclass(frozen=True)
class Band:
    """What the runs of a method had come to, at one place of a panel's axis."""

    method: str
    along: str
    at: float
    value: str
    mean: float
    lower: float  # quartile
    upper: float


def bands_of(method: str, runs: Sequence[Sequence[Point]]) -> Iterator[Band]:
    """Yield a method's curves, as far as its shortest run goes."""
    for along, value in PANELS:
        last = min(getattr(points[-1], along) for points in runs)
        # Batch sizes over a plain axis, on which an exponential is a line; losses fall over decades.
        grid = np.arange(1, min(last, 200) + 1) if value == "batch_size" else np.geomspace(_first(along), last, 100)
        lines = np.array([_interpolate(points, along, value, grid) for points in runs])
        rows = zip(grid, lines.mean(0), *np.quantile(lines, (0.25, 0.75), axis=0), strict=True)
        for at, *numbers in rows:
            yield Band(method, along, float(f"{at:.6g}"), value, *(float(f"{number:.6g}") for number in numbers))


def draw_figure(bands: Sequence[Band], level: float, path: Path) -> None:
    """Draw the three panels.

    Args:
        bands: Of all methods.
        level: The least-squares solution's test loss.
        path: Of the picture.
    """
    import matplotlib as mpl  # noqa: PLC0415  # only where there is something to draw

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for panel, (along, value) in zip(panels, PANELS, strict=True):
        for index, method in enumerate(dict.fromkeys(band.method for band in bands)):
            curve = [band for band in bands if (band.method, band.along, band.value) == (method, along, value)]
            at = [band.at for band in curve]
            panel.plot(at, [band.mean for band in curve], color=f"C{index}", label=method, ls=STYLES.get(method, "-"))
            panel.fill_between(
                at, [b.lower for b in curve], [b.upper for b in curve], alpha=0.25, color=f"C{index}", lw=0
            )
        panel.set(yscale="log", xlabel=LABELS[along], ylabel=LABELS[value])
        if value == "test_loss":
            panel.set_xscale("log")
            panel.axhline(level, color="black", ls=":", lw=1, label="least squares")
    # The paper's figure has such a line. Its caption gives the exponent, and not the base.
    updates = np.array([31, 31 + 13 / 0.17])
    panels[2].plot(updates, 2 ** (0.17 * (updates - 31)), color="black", ls=":", label="$2^{0.17(u-31)}$, of the paper")
    panels[2].set_xlim(0, 150)
    panels[1].legend(fontsize=8)
    panels[2].legend(handles=panels[2].lines[-1:], fontsize=8)
    figure.savefig(path, dpi=120)


def _first(along: str) -> float:
    return 1 if along == "updates" else 0.02


def _interpolate(points: Sequence[Point], along: str, value: str, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.interp(grid, [getattr(point, along) for point in points], [getattr(point, value) for point in points])
