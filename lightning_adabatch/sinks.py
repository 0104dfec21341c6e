# SPDX-License-Identifier: Apache-2.0
"""Where records and totals go, by what Lightning's loggers and progress bars offer in public."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_adabatch.report import PREFIX, Record

_LAYOUT = {
    "adabatch": {
        name: ["Multiline", [f"^{PREFIX}{name}$"]] for name in ("batch_size", "lr_factor", "loss", "grad_norm_sq")
    }
}


def write(loggers: Sequence[Logger], record: Record, step: int) -> None:
    """Write a record to every logger, at a place on the x axis."""
    for logger in loggers:
        logger.log_metrics(record.metrics(), step=step)


def lay_out(loggers: Sequence[Logger]) -> None:
    """Put batch size, LR factor and loss side by side on TensorBoard's page of custom scalars."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            add = getattr(logger.experiment, "add_custom_scalars", None)
            if add is not None:
                add(_LAYOUT)


def show_total(bar: Any, batches: float) -> None:
    """Tell the training bar how many batches the epoch has now; ``math.inf`` where nobody knows."""
    total = None if batches == math.inf else batches
    if bar is None or not bar.is_enabled:
        return
    if isinstance(bar, RichProgressBar):
        if bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, total=total)
    elif isinstance(bar, TQDMProgressBar):
        with suppress(TypeError):  # the bar is not there yet: it will ask for the total itself
            bar.train_progress_bar.total = total
