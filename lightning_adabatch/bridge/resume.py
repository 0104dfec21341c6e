# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of a fit between two updates, and how another process goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_adabatch.bridge import drawn, progress
from lightning_adabatch.bridge.counts import Counts
from lightning_adabatch.bridge.epoch import Epoch
from lightning_adabatch.bridge.patches import Patches
from lightning_adabatch.bridge.slot import Slot
from lightning_adabatch.loader import known_length


class Resume:
    """Knows at every moment where the fit stands.

    Args:
        trainer: The Trainer.
        slot: Where its loaders are.
        epoch: Where the epoch stands.
        counts: Its counts.
        patches: Takes note of what is replaced.

    Attributes:
        ended: Batches of this epoch that ended.
    """

    def __init__(self, trainer: pl.Trainer, slot: Slot, epoch: Epoch, counts: Counts, patches: Patches) -> None:
        self.ended = 0
        self._trainer = trainer
        self._slot = slot
        self._epoch = epoch
        self._counts = counts
        self._patches = patches
        self._steps_at_end = 0  # Lightning's count of steps when the last batch ended
        self._validated = False  # whether the validation that follows the last batch ended
        self._before_validation: dict[str, Any] | None = None  # generators, as the validation now running found them
        self._to_restore: dict[str, Any] | None = None  # generators, until training begins
        self._watch_validation()

    def begin_epoch(self) -> None:
        """Note that an epoch begins."""
        self.ended = 0

    def end_batch(self, batch_idx: int) -> None:
        """Note that a batch ended."""
        self.ended = batch_idx + 1
        self._steps_at_end = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        self._validated = False

    @property
    def batch_begun(self) -> bool:
        """Whether Lightning has fetched a batch that has not ended here."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        if epochs.started <= epochs.processed:
            return False
        if self._slot.loader is not None:  # Lightning counts it only once it is on its device
            return self._epoch.begun
        return bool(_batches(self._trainer).ready > self.ended)

    @property
    def batch_processed(self) -> bool:
        """Whether Lightning is through with such a batch but for the hooks that end it."""
        batches = _batches(self._trainer)
        return self.batch_begun and batches.ready == batches.processed > self.ended

    def state(self, *, settled: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return where the fit stands: what is the same on all ranks, and what is this rank's own.

        Args:
            settled: The batch in hand counts as ended.
        """
        ended = _batches(self._trainer).ready if settled else self.ended
        place = progress.standing(
            self._trainer,
            ended,
            over=self._is_last(settled=settled),
            moved_on=not settled and self._trainer.fit_loop.epoch_loop._batches_that_stepped != self._steps_at_end,
            validated=not settled and self._validated,
        )
        own: dict[str, Any] = {"generators": self._generators(place, settled=settled)}
        if self._slot.loader is not None:
            first, *others = self._loaders(place, settled=settled)
            own.update(first)
            if others:
                own["others"] = others
                own["joined"] = self._epoch.state(at_mark=not settled)[1]
        return {**place, **self._counts.validation_state(ended, settled=settled)}, own

    def _loaders(self, place: Mapping[str, Any], *, settled: bool) -> list[dict[str, Any]]:
        """Return what each loader needs to go on."""
        another_follows = not progress.in_epoch(place) and self._slot.live.plan.batches > 0
        loaders, passes = self._slot.loaders, self._slot.passes
        if another_follows:
            for loader, ended in zip(loaders, passes, strict=True):
                loader.carry_from(ended)
            states: list[Any] = [None] * len(loaders)
        else:
            states, _ = self._epoch.state(at_mark=not settled)
        found = []
        for loader, state in zip(loaders, states, strict=True):
            entry = {
                "carried": list(loader.carried),
                "data": known_length(loader.dataset),
                "shuffle_seed": loader.shuffle_seed,
                "pass": state,
            }
            found.append({**entry, "own_generators": loader.own_generators} if another_follows else entry)
        return found

    def metrics(self, *, alone: bool) -> dict[str, torch.Tensor]:
        """Return the single values among ``callback_metrics``; computing them may take all ranks."""
        connector = self._trainer._logger_connector
        found: Mapping[str, Any] = connector._callback_metrics if alone else self._trainer.callback_metrics
        values = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return {name: value.detach().cpu().clone() for name, value in values.items() if value.numel() == 1}

    def go_on(
        self,
        place: dict[str, Any],
        own: Mapping[str, Any],
        metrics: Mapping[str, Any],
        end: Callable[[], None],
        *,
        divided_anew: bool,
    ) -> None:
        """Go on where another process stood; called in ``on_train_start``.

        Args:
            place: What :meth:`state` returned.
            own: The same, of this rank.
            metrics: What ``callback_metrics`` held: schedulers and callbacks that follow one ask for it.
            end: Called once the generators are as they were.
            divided_anew: The epoch's batches are others than they were.
        """
        self._trainer._logger_connector._callback_metrics.update(metrics)
        progress.take_up(self._trainer, place)
        if progress.in_epoch(place):
            if self._slot.loader is not None:
                if "joined" in own:
                    self._epoch.go_on(own["joined"])
                place = {**place, "last": self._epoch.over}  # the limits may be others now
            self.ended = place["batches"]
            self._steps_at_end = place["steps"] - (place["next"] == progress.BATCH)
            self._validated = place["next"] == progress.AFTER_VALIDATION
            self._counts.go_on(place, divided_anew=divided_anew)
            self._stand_in_for_reset(place)
        self._restore_last(own["generators"], end)

    def restore(self, own: Mapping[str, Any]) -> None:
        """Set the generators alone."""
        drawn.restore(self._trainer, own["generators"])

    def _watch_validation(self) -> None:
        """Remember the generators before each validation: a checkpoint written inside of it begins it again."""
        val_loop = self._trainer.fit_loop.epoch_loop.val_loop
        begin, end = val_loop.run, val_loop._on_evaluation_end

        def run() -> Any:
            self._before_validation = drawn.capture(self._trainer)
            done = begin()
            self._before_validation = None  # not after an exception: its hooks may write a checkpoint
            return done

        def on_evaluation_end(*args: Any, **kwargs: Any) -> None:
            self._validated = not self._trainer.sanity_checking  # before any hook of this name
            end(*args, **kwargs)

        self._patches.put(val_loop, "run", run)
        self._patches.put(val_loop, "_on_evaluation_end", on_evaluation_end)

    def _is_last(self, *, settled: bool) -> bool:
        if self._slot.loader is None:
            batches = self._trainer.fit_loop.epoch_loop.batch_progress
            return bool(batches.is_last_batch and (settled or batches.current.ready <= self.ended))
        return self._epoch.over if settled else self._epoch.marked.over

    def _generators(self, place: Mapping[str, Any], *, settled: bool) -> dict[str, Any]:
        if self._to_restore is not None:
            return self._to_restore
        if place["next"] == progress.VALIDATION and self._before_validation is not None:
            return self._before_validation
        state = drawn.capture(self._trainer)
        within = place["next"] == progress.BATCH and self._slot.loader is not None and not settled
        if within and self.batch_begun:
            # What the batch that was begun drew is drawn again. Python's and NumPy's generators stay where they
            # are: to remember them at every batch would cost more than a small step.
            state["torch"] = self._epoch.marked.passes[0].generator
        return state

    def _stand_in_for_reset(self, place: dict[str, Any]) -> None:
        """Have the epoch loop begin the epoch where it stood, once, and finish what follows a batch."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        begin = epoch_loop.on_run_start

        def reset() -> None:
            self._patches.take_off(epoch_loop, "reset")
            progress.reset_epoch(self._trainer, place)

        def on_run_start(fetcher: Any) -> None:
            self._patches.take_off(epoch_loop, "on_run_start")
            begin(fetcher)
            if self._slot.loader is not None:
                self._counts.set(self._epoch.length)
            progress.finish_batch(self._trainer, place, fetcher)

        self._patches.put(epoch_loop, "reset", reset)
        self._patches.put(epoch_loop, "on_run_start", on_run_start)

    def _restore_last(self, state: dict[str, Any], end: Callable[[], None]) -> None:
        """Set the generators after all ``on_train_start`` hooks, which drew in the first process long ago."""
        strategy = self._trainer.strategy
        original = strategy.on_train_start
        self._to_restore = state

        def on_train_start() -> None:
            original()
            self._patches.take_off(strategy, "on_train_start")
            drawn.restore(self._trainer, state)
            self._to_restore = None
            end()

        self._patches.put(strategy, "on_train_start", on_train_start)


def _batches(trainer: pl.Trainer) -> Any:
    """Return Lightning's counts of the epoch's batches."""
    return trainer.fit_loop.epoch_loop.batch_progress.current
