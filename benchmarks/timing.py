# SPDX-License-Identifier: Apache-2.0
"""Ratios of times that were measured side by side, and a table that puts them beside their targets."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import lightning
import torch


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: What was compared.
        ratio: The median over repetitions.
        target: The figure to reach.
        at_least: Whether the ratio should be at or above the target, else at or below.
        detail: The absolute times or rates behind it.
    """

    what: str
    ratio: float
    target: float
    at_least: bool
    detail: str = ""

    def __str__(self) -> str:
        met = self.ratio >= self.target if self.at_least else self.ratio <= self.target
        sign = ">=" if self.at_least else "<="
        verdict = "met" if met else f"missed by {abs(self.ratio - self.target):.3f}"
        return f"{self.what:<66} {self.ratio:>8.3f}   {sign} {self.target:<6.3f} {verdict:<16} {self.detail}"


def interleaved(
    first: Callable[[], float], second: Callable[[], float], repetitions: int
) -> tuple[float, float, float]:
    """Run the two in turn and return the median of second ÷ first, and the median of each.

    Neighbours in time share the machine's mood, so ratios are taken within a repetition; which of the two
    goes first alternates.
    """
    ones, twos = [], []
    for repetition in range(repetitions):
        if repetition % 2:
            two, one = second(), first()
        else:
            one, two = first(), second()
        ones.append(one)
        twos.append(two)
    ratios = [two / one for one, two in zip(ones, twos, strict=True)]
    return statistics.median(ratios), statistics.median(ones), statistics.median(twos)


def header() -> str:
    """Say what ran where and when; the date is UTC."""
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), torch threads {torch.get_num_threads()}"
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    now = dt.datetime.now(tz=dt.timezone.utc).date()
    columns = f"{'median of interleaved ratios':<66} {'ratio':>8}   {'target':<9} {'':<16} detail"
    return f"{now}: {machine}, {versions}\n{columns}"
