# SPDX-License-Identifier: Apache-2.0
"""Where a fit stands between two updates, and how the loops of another process are made to go on there.

Lightning's own restart rests on counts of batches, skips a validation and the end of an epoch that were due
when the checkpoint was written, and treats runs that are limited in steps apart. Here the place is written
down in words of our own, and the loops are set to it when training starts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import RestartStage

# What comes next; stored in checkpoints.
EPOCH = "epoch"  # an epoch begins
BATCH = "batch"  # a batch begins
VALIDATION = "validation"  # a batch ended: its validation, if one is due, and what Lightning does after a batch
AFTER_VALIDATION = "after validation"  # what Lightning does after a batch
EPOCH_END = "epoch end"  # the hooks of an epoch's end were called: schedulers that follow a metric

_IN_EPOCH = {BATCH, VALIDATION, AFTER_VALIDATION}


def standing(trainer: pl.Trainer, ended: int, *, over: bool, moved_on: bool, validated: bool) -> dict[str, Any]:
    """Return where a fit stands, as plain numbers and strings.

    Args:
        trainer: While it fits, in any hook.
        ended: Batches of this epoch that ended.
        over: Whether the last of them was the epoch's last.
        moved_on: Whether Lightning did all that follows the last of them.
        validated: Whether the validation that follows it ended.
    """
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress
    batches = fit_loop.epoch_loop.batch_progress
    ready, done = epochs.current.ready, epochs.current.processed
    complete = over or batches.is_last_batch  # a hook that returned -1 ended the epoch too
    if ready == done and ended and not complete:
        # max_steps, max_time or a callback ended the run in the middle of the epoch, which goes on some day.
        following, done = BATCH, done - 1
    elif ready == done:
        following = EPOCH if epochs.current.completed == done else EPOCH_END
        done -= following == EPOCH_END
    elif epochs.current.started < ready:
        following = EPOCH
    elif ended == 0 or moved_on:
        following = BATCH
    else:
        following = AFTER_VALIDATION if validated else VALIDATION
    return {
        "next": following,
        "epoch": done,
        "earlier_epochs": epochs.total.processed - epochs.current.processed,
        "batches": ended,
        "all_batches": batches.total.ready - batches.current.ready + ended,
        # Inside an epoch Lightning's word may be about a batch that has begun and not ended.
        "last": bool(complete if following == EPOCH_END else over) and following != EPOCH,
        "steps": fit_loop.epoch_loop._batches_that_stepped,
        "reloaded": fit_loop._last_train_dl_reload_epoch,
    }


def in_epoch(place: Mapping[str, Any]) -> bool:
    """Whether the place is between the first and the last batch of an epoch, or right after one of them."""
    return place["next"] in _IN_EPOCH


def prepare(checkpoint: dict[str, Any], place: Mapping[str, Any]) -> None:
    """Set the epoch in a checkpoint that was read, so that Lightning does not take a run for finished.

    It counts an epoch that ``max_steps`` or ``max_time`` ended in its middle, and asks that before any hook.
    """
    if in_epoch(place):
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        done = place["epoch"]
        progress["current"].update(ready=done + 1, started=done + 1, processed=done, completed=done)


def take_up(trainer: pl.Trainer, place: dict[str, Any]) -> None:
    """Set the loops to a place; called in ``on_train_start``, after Lightning's own restart did what it does."""
    fit_loop = trainer.fit_loop
    within = in_epoch(place)
    _set_epochs(fit_loop, place["epoch"], place["earlier_epochs"], begun=within)
    fit_loop._last_train_dl_reload_epoch = place["reloaded"]
    # Not by the property, which makes a run that is limited in steps restart at every epoch.
    fit_loop._restarting = fit_loop._loaded_from_state_dict = fit_loop._resuming_from_checkpoint = False
    fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH if within else RestartStage.NONE
    fit_loop.epoch_loop.restarting = within
    fit_loop.epoch_loop._batches_that_stepped = place["steps"]
    if place["next"] == EPOCH_END:
        if place["last"]:
            fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        _set_epochs(fit_loop, place["epoch"] + 1, place["earlier_epochs"], begun=False)


def reset_epoch(trainer: pl.Trainer, place: dict[str, Any]) -> None:
    """Set the epoch's counts; stands in for the epoch loop's ``reset``, which guesses them."""
    epoch_loop = trainer.fit_loop.epoch_loop
    batches: Any = epoch_loop.batch_progress
    for counts, value in ((batches.current, place["batches"]), (batches.total, place["all_batches"])):
        counts.ready = counts.started = counts.processed = counts.completed = value
    batches.is_last_batch = place["last"]
    epoch_loop.scheduler_progress.reset_on_restart()
    epoch_loop.automatic_optimization.optim_progress.reset_on_restart()


def finish_batch(trainer: pl.Trainer, place: dict[str, Any], fetcher: Any) -> None:
    """Do what Lightning had still to do after the last batch, before the next one begins."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.restarting = False  # from here on everything is as in a run that was not cut
    if place["next"] in {VALIDATION, AFTER_VALIDATION}:
        epoch_loop._skip_next_val = place["next"] == AFTER_VALIDATION
        epoch_loop.on_advance_end(fetcher)


def _set_epochs(fit_loop: Any, done: int, earlier: int, *, begun: bool) -> None:
    progress = fit_loop.epoch_progress
    for counts, value in ((progress.current, done), (progress.total, done + earlier)):
        counts.ready = counts.started = value + begun
        counts.processed = counts.completed = value
