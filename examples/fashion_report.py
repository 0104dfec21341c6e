# SPDX-License-Identifier: Apache-2.0
"""The report over all runs of fashion_mnist.py: the table, and figure 2 with the paper's curves behind."""

from __future__ import annotations

from pathlib import Path


def report(folder: Path, author: Path | None) -> None:
    """Gather the CSVs of a folder."""
    raise NotImplementedError(folder, author)
