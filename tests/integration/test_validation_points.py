# SPDX-License-Identifier: Apache-2.0
"""Where validation, checkpoints and early stopping fall (invariant 4)."""

from __future__ import annotations

import datetime as dt

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from models import Recorder, adapt, fit, loader, quiet

from lightning_adabatch import AdaptiveBatchSize, Constant


def plain_and_constant(train, root, **kwargs):
    """Return the run of plain Lightning and that with a constant size: validations, and what each batch was told."""
    runs = []
    for callbacks in ([], [AdaptiveBatchSize(Constant())]):
        module = Recorder()
        fit(module, train(), loader(8, 8), callbacks=callbacks, root=root, **kwargs)
        batches = [(batch.epoch, batch.indices, batch.planned, batch.last) for batch in module.batches]
        runs.append((module.validations, batches))
    assert runs[0][0], "there must be validations, or the test says nothing"
    return runs


@pytest.mark.parametrize("samples", [37, 40])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.3, 0.5, 0.7, 0.99, 1.0])
@pytest.mark.parametrize("drop_last", [False, True])
def test_constant_size_gives_the_points_of_lightning(samples, fraction, drop_last, tmp_path):
    """C50: at a constant size a fraction validates exactly where plain Lightning does."""
    runs = plain_and_constant(
        lambda: loader(samples, 4, drop_last=drop_last), tmp_path, val_check_interval=fraction, log_every_n_steps=1
    )
    assert runs[0] == runs[1]


@pytest.mark.parametrize("limit", [7, 0.5, 0.77])
@pytest.mark.parametrize("interval", [1.0, 0.4, 3])
def test_limited_epochs_at_constant_size(limit, interval, tmp_path):
    """limit_train_batches, a number or a share, ends and validates the epochs where plain Lightning does."""
    runs = plain_and_constant(lambda: loader(42, 4), tmp_path, val_check_interval=interval, limit_train_batches=limit)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "flags",
    [
        {"val_check_interval": 4},
        {"val_check_interval": 7, "check_val_every_n_epoch": None, "epochs": 3},
        {"check_val_every_n_epoch": 2, "epochs": 4},
        {"max_steps": 15},
        {"fast_dev_run": 3},
        {"overfit_batches": 3},
    ],
    ids=lambda flags: next(iter(flags)) + str(len(flags)),
)
def test_flags_at_constant_size(flags, tmp_path):
    """Flags that count batches, epochs or steps mean what they mean without the callback."""
    runs = plain_and_constant(lambda: loader(42, 4), tmp_path, **flags)
    assert runs[0] == runs[1]


def test_half_of_the_data_after_growth(tmp_path):
    """C50: with 0.5 and growth 4 to 16 there are two validations per epoch, the second at its end."""
    module = Recorder()
    callback = adapt(4, 4, 4, 4, 16)
    fit(module, loader(64, 4), loader(8, 8), callbacks=[callback], val_check_interval=0.5, root=tmp_path)
    assert module.sizes == [4, 4, 4, 4, 16, 16, 16] + [16] * 4
    assert module.validations == [5, 7, 9, 11]  # 32 samples: 4 · 4 + 16


def test_quarters_of_the_data_after_shrinking(tmp_path):
    """C50: with 0.25 and 16 to 4 validation follows every 16 samples: batches 1, 5, 9, 13, then every fourth."""
    module = Recorder()
    fit(module, loader(64, 16), loader(8, 8), callbacks=[adapt(16, 4)], val_check_interval=0.25, root=tmp_path)
    assert module.validations == [1, 5, 9, 13, *(13 + k for k in (4, 8, 12, 16))]


def test_a_batch_that_crosses_several_points(tmp_path):
    """Points every 8 samples and batches 4, 4, 4, 32, 20: one validation after the batch that crosses, if any."""
    module = Recorder()
    callback = adapt(4, 4, 4, 32)
    fit(module, loader(64, 4), loader(8, 8), callbacks=[callback], epochs=1, val_check_interval=0.125, root=tmp_path)
    assert module.sizes == [4, 4, 4, 32, 20]
    assert module.validations == [2, 4, 5]


def test_dropped_tail_keeps_the_last_validation(tmp_path):
    """A tail that growth drops does not cost the validation planned at the epoch's end."""
    module = Recorder()
    callback = adapt(4, 4, 10)
    train = loader(64, 4, drop_last=True)
    fit(module, train, loader(8, 8), callbacks=[callback], epochs=1, val_check_interval=0.5, root=tmp_path)
    assert module.sizes == [4, 4, 10, 10, 10, 10, 10]  # 58 of 64
    assert module.validations == [5, 7]


@pytest.mark.parametrize(
    ("interval", "points"), [(0.5, [13, 26]), (0.25, [6, 12, 18, 24]), (1.0, [26])], ids=["half", "quarter", "whole"]
)
def test_an_epoch_that_begins_again_is_validated_as_such(interval, points, tmp_path):
    """Where the order of a checkpoint cannot be made again, the points are those of the epoch that is trained."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5 and not path.exists():
                trainer.save_checkpoint(path)

    path, flags = tmp_path / "x.ckpt", {"val_check_interval": interval, "num_sanity_val_steps": 0, "root": tmp_path}
    fit(Recorder(), loader(104, 8, shuffle=True), loader(8, 8), callbacks=[adapt(8), Saves()], epochs=1, **flags)
    module, trainer = Recorder(), quiet([adapt(8)], epochs=1, **flags)
    with pytest.warns(UserWarning, match="the epoch begins again, with all of its samples"):
        trainer.fit(module, loader(208, 8, shuffle=True), loader(8, 8), ckpt_path=path)
    assert module.validations == points


def test_int_interval_larger_than_the_epoch(tmp_path):
    """C50: an int interval that the epoch has become too short for validates at its end, with one warning."""
    module = Recorder()
    callback = adapt(4, 4, 4, 4, 16)
    with pytest.warns(UserWarning, match=r"fewer than val_check_interval=10") as caught:
        fit(module, loader(64, 4), loader(8, 8), callbacks=[callback], val_check_interval=10, root=tmp_path)
    assert sum("val_check_interval=10" in str(warning.message) for warning in caught) == 1
    assert module.validations == [7, 11]


def test_int_interval_without_validation(tmp_path):
    """Where nothing validates, an epoch that became short for an int interval is no reason for a warning."""
    module = Recorder()
    fit(module, loader(64, 4), callbacks=[adapt(4, 4, 16)], val_check_interval=10, epochs=1, root=tmp_path)
    assert module.sizes == [4, 4, 16, 16, 16, 8]


def test_int_interval_that_fits(tmp_path):
    """An int interval that fits counts batches, as Lightning says."""
    module = Recorder()
    fit(module, loader(64, 16), loader(8, 8), callbacks=[adapt(16, 4)], val_check_interval=3, root=tmp_path)
    assert len(module.sizes_in(0)) == 1 + 12
    assert [point for point in module.validations if point <= 13] == [3, 6, 9, 12]


def test_int_interval_over_epochs(tmp_path):
    """C50: with check_val_every_n_epoch=None an int interval counts batches over all epochs."""
    module = Recorder()
    fit(
        module,
        loader(64, 4),
        loader(8, 8),
        callbacks=[adapt(4, 4, 4, 4, 16)],
        val_check_interval=5,
        check_val_every_n_epoch=None,
        root=tmp_path,
    )
    assert module.validations == [5, 10]


def test_every_second_epoch(tmp_path):
    """check_val_every_n_epoch=2 validates after the second epoch's last batch."""
    module = Recorder()
    callback = adapt(4, 4, 16)
    fit(module, loader(64, 4), loader(8, 8), callbacks=[callback], check_val_every_n_epoch=2, root=tmp_path)
    assert module.validations == [len(module.batches)]


def test_time_based_interval_is_left_alone(tmp_path):
    """A time-based interval stays Lightning's business."""
    module = Recorder()
    never = dt.timedelta(days=1)
    fit(module, loader(64, 4), loader(8, 8), callbacks=[adapt(4, 16)], val_check_interval=never, root=tmp_path)
    assert module.validations == []


def test_checkpoints_and_early_stopping_on_short_epochs(tmp_path):
    """C51: one checkpoint per epoch, early stopping after three flat epochs, and save_last from the last step."""

    class Flat(Recorder):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

    module = Flat()
    saved = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=-1, save_last=True)
    callbacks = [EarlyStopping("val_loss", patience=2), saved, adapt(4, 4, 8, 8, 8, 8, 8, 8, 16, 16, 32)]
    trainer = fit(
        module,
        loader(64, 4),
        loader(8, 8),
        callbacks=callbacks,
        epochs=10,
        enable_checkpointing=True,
        root=tmp_path,
    )
    assert trainer.current_epoch == 3
    assert len(module.validations) == 3
    assert len(list((tmp_path / "best").glob("epoch*.ckpt"))) == 3
    last = torch.load(saved.last_model_path, weights_only=True)
    assert last["global_step"] == len(module.batches)
    assert len(module.sizes_in(0)) > len(module.sizes_in(2))


def test_share_of_a_number_of_batches(tmp_path):
    """With limit_train_batches=8 the epoch is 8 batches whatever their size, and 0.5 is every fourth of them."""
    module = Recorder()
    callback = adapt(4, 8)
    fit(
        module,
        loader(200, 4),
        loader(8, 8),
        callbacks=[callback],
        val_check_interval=0.5,
        limit_train_batches=8,
        root=tmp_path,
    )
    assert module.sizes_in(0) == [4] + [8] * 7
    assert module.validations == [4, 8, 12, 16]


@pytest.mark.parametrize("before", [True, False], ids=["theirs first", "ours first"])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("interval", [1.0, 0.5, 4])
def test_an_interval_that_is_assigned_in_mid_run(interval, before, epoch, tmp_path):
    """``trainer.val_check_batch`` is Lightning's plan: whoever sets it is followed, as without the callback."""

    class Assigns(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == epoch:
                trainer.val_check_batch = 2

    runs = []
    for ours in ([], [AdaptiveBatchSize(Constant())]):
        module = Recorder()
        callbacks = [Assigns(), *ours] if before else [*ours, Assigns()]
        flags = {"epochs": 3, "val_check_interval": interval, "root": tmp_path}
        trainer = fit(module, loader(64, 8), loader(8, 8), callbacks=callbacks, **flags)
        runs.append((module.validations, trainer.val_check_batch))
    assert runs[1] == runs[0]


@pytest.mark.parametrize("interval", [1.0, 0.5, 4])
def test_an_interval_that_is_changed_in_mid_run(interval, tmp_path):
    """``trainer.val_check_interval`` is read when loaders are made, as without the callback."""

    class Assigns(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.val_check_interval = 0.25

    runs = []
    for ours in ([], [AdaptiveBatchSize(Constant())]):
        module = Recorder()
        flags = {"epochs": 3, "val_check_interval": interval, "root": tmp_path}
        fit(module, loader(64, 8), loader(8, 8), callbacks=[Assigns(), *ours], **flags)
        runs.append(module.validations)
    assert runs[1] == runs[0]
