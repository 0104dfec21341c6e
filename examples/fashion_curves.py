# SPDX-License-Identifier: Apache-2.0
"""One CSV row per epoch of a run, whole at any moment and the same whether the run was cut or not."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from torch import Tensor
from typing_extensions import override

from lightning_adabatch import AdaptiveBatchSize

COLUMNS = (
    *("method", "seed", "run", "epochs", "updates", "batch_size", "lr"),
    *("train_loss_avg", "grad_norm_sq_avg", "test_loss", "test_accuracy"),
)
RHO = 0.999  # of the rolling average of the training loss


class LastRecord(Logger):
    """Keeps what was logged last: the callback logs at each epoch's last update."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    @property
    def name(self) -> str:
        """No folder of its own."""
        return "last"

    @property
    def version(self) -> int:
        """There is one."""
        return 0

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Take the values over."""
        self.values.update(metrics)

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They are in the checkpoint."""


class Curve(pl.Callback):
    """Writes the rows. They live in the checkpoint, so that a run that goes on rewrites what was before it.

    Args:
        path: The CSV; it is replaced at once after each epoch.
        method: First column.
        seed: Second column.
        adaptive: The callback that counts.
        record: Where the policy's average of the squared gradient norm is logged.
        settings: Of the run; they are kept in the checkpoint to be compared.
    """

    def __init__(
        self,
        path: Path,
        method: str,
        seed: int,
        adaptive: AdaptiveBatchSize,
        record: LastRecord,
        settings: dict[str, str],
    ) -> None:
        self.path, self.settings = path, settings
        self._start = {"method": method, "seed": seed, "run": f"{method}/{seed}"}
        self._adaptive, self._record = adaptive, record
        self.rows: list[dict[str, Any]] = []
        self._loss: float | None = None

    @property
    def state_key(self) -> str:
        """One per run."""
        return type(self).__qualname__

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: list[Tensor], batch_idx: int
    ) -> None:
        """Average the training loss, whatever the rule measures."""
        del trainer, pl_module, batch, batch_idx
        loss = float(outputs["loss"])
        self._loss = loss if self._loss is None else RHO * self._loss + (1 - RHO) * loss

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add a row: the epoch's test accuracy is known by now."""
        del pl_module
        now, tested = self._adaptive, trainer.callback_metrics
        row = {
            **self._start,
            "epochs": round(now.epochs, 6),
            "updates": now.updates,
            "batch_size": now.batch_size,
            "lr": f"{trainer.optimizers[0].param_groups[0]['lr']:.7g}",
            "train_loss_avg": f"{self._record.values.get('adabatch/loss', self._loss):.6g}",
            "grad_norm_sq_avg": ""
            if (norm := self._record.values.get("adabatch/grad_norm_sq")) is None
            else f"{norm:.6g}",
            "test_loss": f"{float(tested['test_loss']):.6g}",
            "test_accuracy": f"{float(tested['test_accuracy']):.4f}",
        }
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Replace the file in one step, so that it is never half written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(part, self.path)  # noqa: PTH105

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far."""
        return {"rows": list(self.rows), "loss": self._loss, "settings": self.settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after them, under this run's name: one may branch off from the checkpoint of another."""
        self.rows = [{**row, **self._start} for row in state_dict["rows"]]
        self._loss = state_dict["loss"]
