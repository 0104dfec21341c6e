# SPDX-License-Identifier: Apache-2.0
"""All that a run does to a Trainer, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_adabatch.bridge.accumulation import Accumulation, Windows
from lightning_adabatch.bridge.counts import Counts
from lightning_adabatch.bridge.epoch import Epoch
from lightning_adabatch.bridge.memory import Memory
from lightning_adabatch.bridge.patches import Patches
from lightning_adabatch.bridge.resume import Resume
from lightning_adabatch.bridge.slot import Slot


class Bridge:
    """The parts that touch a Trainer.

    Args:
        trainer: The Trainer.

    Attributes:
        slot: Where its train loaders are.
        epoch: Where the epoch stands.
        counts: Its counts.
        accumulation: The parts of an update.
        memory: Updates that do not fit into it.
        windows: The batches of an update, where Lightning accumulates them itself.
        resume: Where the fit stands.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._patches = Patches()
        self.slot = Slot(trainer, self._patches)
        self.epoch = Epoch(self.slot)
        self.counts = Counts(trainer, self.slot, self.epoch)
        self.accumulation = Accumulation(trainer, self.slot)
        self.windows = Windows(trainer)
        self.memory = Memory(trainer, self.slot, self.counts)
        self.resume = Resume(trainer, self.slot, self.epoch, self.counts, self._patches)
        self._published: int | None = None
        self._metric = torch.tensor(0.0)

    @property
    def steps(self) -> int:
        """Steps by which Lightning places its own metrics, over all fits of this Trainer so far."""
        return int(self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    def begin_epoch(self) -> None:
        """Plan an epoch that starts now."""
        self.resume.begin_epoch()
        self.counts.begin_epoch()
        self.memory.begin_epoch()

    def accumulate(self) -> None:
        """Have updates of several parts, from now on."""
        self.accumulation.install(self._patches)

    def before_step(self, ready: Callable[[], None]) -> None:
        """Call ``ready`` right before any optimizer steps, after every hook of others and the clipping."""
        plugin = self._trainer.precision_plugin
        after_closure = plugin._after_closure

        def ready_after_closure(*args: Any, **kwargs: Any) -> None:
            after_closure(*args, **kwargs)
            ready()

        self._patches.put(plugin, "_after_closure", ready_after_closure)

    def watch_memory(self, divide: Callable[[int], None] | None, setting: str) -> None:
        """Have updates that do not fit into memory done again in smaller parts, or their error say what to do."""
        self.memory.install(self._patches, divide, setting)

    def end_batch(self, batch_idx: int) -> None:
        """Follow a batch, or a part of one, that ended."""
        if self.accumulation.complete and self.windows.complete:
            self.accumulation.end_update()
            if self.slot.loader is not None:
                self.memory.end_update()
            self.resume.end_batch(batch_idx)
        self.counts.end_batch(batch_idx)

    def publish(self, name: str, batch_size: int) -> None:
        """Show the size to ``monitor=`` and on the progress bar.

        Written past the public properties: reading those computes all metrics of the module, and would wait
        for the device where one is on the progress bar.
        """
        connector = self._trainer._logger_connector
        if batch_size != self._published:
            self._published = batch_size
            self._metric = torch.tensor(float(batch_size))
        connector._callback_metrics[name] = self._metric
        connector._progress_bar_metrics["batch_size"] = batch_size

    def give_back(self) -> None:
        """Put back all that was replaced; safe to call twice."""
        self._patches.undo()
        self.counts.give_back()
        self.epoch.forget()
        self.slot.give_back()
