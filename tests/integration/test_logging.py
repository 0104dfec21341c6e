# SPDX-License-Identifier: Apache-2.0
"""What loggers, monitors and TensorBoard get (spec section 7), read back from real event files."""

from __future__ import annotations

import csv
import math

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from models import Recorder, Scripted, Sizes, adapt, fit, loader, observe, quiet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_adabatch import AdaptiveBatchSize, Constant, RadaDamp

TAGS = {f"adabatch/{name}" for name in ("batch_size", "updates", "samples", "epochs", "lr_factor", "damping")}


def events(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def series(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(f"adabatch/{tag}")]


@pytest.mark.parametrize("workers", [0, 2])
def test_tensorboard_axis_is_updates(workers, tmp_path):
    """C26, C06: steps strictly increase to the number of updates, and the value at each is the size trained."""
    module = Recorder()
    logger = TensorBoardLogger(tmp_path, version="run")
    callback = adapt(4, 4, 8, 16, max_batch_size=8)
    train = loader(42, 4, num_workers=workers)
    fit(module, train, loader(8, 8), callbacks=[callback], logger=logger, log_every_n_steps=1)
    logged = events(logger.log_dir)
    assert set(logged.Tags()["scalars"]) >= TAGS
    assert series(logged, "batch_size") == list(enumerate(module.sizes, start=1))
    assert series(logged, "updates") == [(k, k) for k in range(1, len(module.sizes) + 1)]
    assert series(logged, "samples")[-1] == (callback.updates, 2 * 42)
    assert series(logged, "epochs")[-1] == (callback.updates, 2.0)
    factors = [value for _, value in series(logged, "lr_factor")]
    assert factors == [batch.lr / 0.1 for batch in module.batches]
    assert [value for _, value in series(logged, "damping")][:4] == [1.0, 1.0, 2.0, 4.0]
    # What says nothing here is not written: nothing was measured or skipped, and there is one device.
    ours = {tag for tag in logged.Tags()["scalars"] if tag.startswith("adabatch/")}
    assert ours == TAGS


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_second_fit_goes_on_along_the_axis(tmp_path):
    """With the same Trainer the curve goes on where the first fit ended, as Lightning's own do; a cut one too."""
    logger = TensorBoardLogger(tmp_path, version="run")
    save = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=7, save_top_k=-1)
    ours = adapt(4, 8, 16)
    flags = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True, "root": tmp_path}
    trainer = fit(Recorder(), loader(40, 4), callbacks=[ours, save], epochs=1, **flags)
    assert ours.updates == 4
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Recorder(), loader(40, 4))
    assert series(events(logger.log_dir), "updates") == [(k, (k - 1) % 4 + 1) for k in range(1, 9)]
    again = TensorBoardLogger(tmp_path, version="again")
    trainer = quiet([adapt(4, 8, 16), save], **{**flags, "logger": again})
    trainer.fit(Recorder(), loader(40, 4), ckpt_path=tmp_path / "saved" / "step=7.ckpt")
    assert series(events(again.log_dir), "updates") == [(8, 4)]


@pytest.mark.parametrize("adapt_what", ["batch_size", "lr"])
def test_steps_are_updates_with_accumulation(adapt_what, tmp_path):
    """C26: two epochs, two batches to an update: one increasing axis of updates, and the samples of each."""
    module, logger = Recorder(), TensorBoardLogger(tmp_path, version="run")
    ours = adapt(8, 8, 16, adapt=adapt_what)
    flags = {"logger": logger, "log_every_n_steps": 1, "accumulate_grad_batches": 2, "root": tmp_path}
    trainer = fit(module, loader(42, 4), callbacks=[ours], **flags)
    logged = events(logger.log_dir)
    steps = [step for step, _ in series(logged, "batch_size")]
    assert steps == list(range(1, trainer.global_step + 1)) == list(range(1, ours.updates + 1))
    sizes = [value for _, value in series(logged, "batch_size")]
    assert sizes == ([8, 8, 16, 10, 16, 16, 10] if adapt_what == "batch_size" else [*[8] * 5, 2] * 2)
    assert sum(sizes) == ours.samples == 84


def test_skipped_and_finite_values(tmp_path):
    """C74, C21: adabatch/skipped appears with the first loss that is dropped, and no value is ever NaN or infinite."""
    logger = TensorBoardLogger(tmp_path, version="run")
    module = Scripted([1.0, 1.0, math.nan, 1.0, math.inf, 1.0, 0.0])
    train = loader(400, 4)
    observe(module, train, RadaDamp(rho=0.0), epochs=-1, max_steps=12, logger=logger, log_every_n_steps=1)
    logged = events(logger.log_dir)
    assert series(logged, "skipped") == [(3, 1), (4, 1)] + [(k, 2) for k in range(5, 13)]
    tags = [tag for tag in logged.Tags()["scalars"] if tag.startswith("adabatch/")]
    assert {"adabatch/loss", "adabatch/grad_norm_sq", "adabatch/damping"} < set(tags)
    for tag in tags:
        assert all(math.isfinite(event.value) for event in logged.Scalars(tag)), tag
    assert series(logged, "damping")[-1][1] > 1.0


def test_last_observation_stands_in_for_an_estimate(tmp_path):
    """For a rule without an estimate of its own, what it measures is logged as it is, and nothing else."""

    class Ask(Sizes):
        requires = frozenset({"loss"})

    logger = TensorBoardLogger(tmp_path, version="run")
    module = Scripted([3.0, 2.0, 1.0])
    fit(module, loader(12, 4), callbacks=[AdaptiveBatchSize(Ask([4]))], epochs=1, logger=logger, log_every_n_steps=1)
    logged = events(logger.log_dir)
    assert series(logged, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert "adabatch/grad_norm_sq" not in logged.Tags()["scalars"]


def test_tensorboard_layout(tmp_path):
    """TensorBoard's page of custom scalars puts batch size, LR factor and loss side by side."""
    logger = TensorBoardLogger(tmp_path, version="run")
    fit(Recorder(), loader(16, 4), callbacks=[adapt(4)], logger=logger, log_every_n_steps=1)
    tensors = events(logger.log_dir)
    assert "custom_scalars__config__" in tensors.Tags()["tensors"]
    layout = tensors.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    for name in (b"adabatch/batch_size", b"adabatch/lr_factor", b"adabatch/loss"):
        assert name in layout


def test_estimates_of_the_rule(tmp_path):
    """adabatch/loss and adabatch/grad_norm_sq are RadaDamp's rolling averages."""
    logger = TensorBoardLogger(tmp_path, version="run")
    rows: list[tuple[float, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            state = ours._controller.state
            rows.append((state.loss, state.grad_norm_sq))

    ours = AdaptiveBatchSize(RadaDamp(rho=0.5))
    fit(Recorder(), loader(16, 4), callbacks=[ours, Watch()], logger=logger, log_every_n_steps=1)
    logged = events(logger.log_dir)
    assert [value for _, value in series(logged, "loss")] == pytest.approx([row[0] for row in rows])
    assert [value for _, value in series(logged, "grad_norm_sq")] == pytest.approx([row[1] for row in rows])


def test_rows_that_are_written(tmp_path):
    """A row at multiples of log_every_n_steps, at each epoch's last update, and when the size moved by 10 %."""
    sizes = [20] * 3 + [21] * 3 + [22] * 4
    logger = TensorBoardLogger(tmp_path, version="run")
    fit(Recorder(), loader(sum(sizes), 20), callbacks=[adapt(*sizes)], epochs=1, logger=logger, log_every_n_steps=4)
    # Updates 4 and 8; 10 is the last. 21 is 5 % above 20 and 22 not 10 % above 21: nothing more.
    assert [step for step, _ in series(events(logger.log_dir), "batch_size")] == [4, 8, 10]
    sizes = [20] * 6 + [30] * 4
    logger = TensorBoardLogger(tmp_path, version="jump")
    fit(Recorder(), loader(sum(sizes), 20), callbacks=[adapt(*sizes)], epochs=1, logger=logger, log_every_n_steps=4)
    assert [step for step, _ in series(events(logger.log_dir), "batch_size")] == [4, 7, 8, 10]


def test_last_update_of_a_run_cut_by_max_steps(tmp_path):
    """The update that reaches max_steps is logged."""
    logger = TensorBoardLogger(tmp_path, version="run")
    fit(Recorder(), loader(64, 4), callbacks=[adapt(4)], max_steps=7, logger=logger, log_every_n_steps=5)
    assert [step for step, _ in series(events(logger.log_dir), "batch_size")] == [5, 7]


@pytest.mark.parametrize("before", [True, False], ids=["stopped before us", "stopped behind us"])
def test_last_update_of_a_run_that_is_stopped(before, tmp_path):
    """The last update of an epoch that should_stop ends early is logged."""

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 3

    logger = TensorBoardLogger(tmp_path, version="run")
    module = Recorder()
    callbacks = [Stops(), adapt(4)] if before else [adapt(4), Stops()]
    fit(module, loader(64, 4), callbacks=callbacks, epochs=1, logger=logger, log_every_n_steps=5)
    assert len(module.batches) == 4
    logged = events(logger.log_dir)
    assert "adabatch/batch_size" in logged.Tags()["scalars"]
    assert [step for step, _ in series(logged, "batch_size")] == [4]


def test_device_size_of_a_last_update_that_is_logged_after_a_resume(tmp_path):
    """The record of an epoch's last update, written by the process that goes on, is what the first one would write."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_last_batch:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    found = []
    for name, more, path in (("uncut", [Saves()], None), ("resumed", [], tmp_path / "last.ckpt")):
        logger = TensorBoardLogger(tmp_path, version=name)
        callbacks = [AdaptiveBatchSize(Constant()), *more]
        trainer = quiet(
            callbacks=callbacks, logger=logger, epochs=1, accumulate_grad_batches=2, log_every_n_steps=50, root=tmp_path
        )
        trainer.fit(Recorder(), loader(70, 12), ckpt_path=path)
        found.append(series(events(logger.log_dir), "device_batch_size"))
    assert found == [[(3, 12.0)], [(3, 12.0)]]  # 12 and 10 of the last samples: not 10 % less, and logged at the end


def test_no_change_is_hidden_before_the_first_line(tmp_path):
    """An epoch shorter than the logging interval shows its moves: the first size is what the next compare with."""
    logger = TensorBoardLogger(tmp_path)
    callbacks = [adapt(8, 8, 8, 8, 16, 16, 64, 64, 16)]
    fit(Recorder(), loader(256, 8), callbacks=callbacks, logger=logger, epochs=1, max_steps=11, root=tmp_path)
    assert series(events(logger.log_dir), "batch_size") == [(5, 16.0), (7, 64.0), (9, 16.0), (11, 16.0)]


@pytest.mark.parametrize("hook", ["setup", "on_fit_start"])
def test_a_logger_that_another_hook_puts_in(hook, tmp_path):
    """It is written to, though it was not there when the fit was set up."""
    found = []

    class Keeps(CSVLogger):
        def log_metrics(self, metrics, step=None):
            found.append(metrics.get("adabatch/batch_size"))

    class Puts(pl.Callback):
        pass

    setattr(Puts, hook, lambda self, trainer, *args, **kwargs: setattr(trainer, "loggers", [Keeps(tmp_path)]))
    fit(Recorder(), loader(32, 8), callbacks=[adapt(8, 16), Puts()], epochs=1, log_every_n_steps=1, root=tmp_path)
    assert found == [8, 16, 8]


def test_monitors_and_two_loggers(tmp_path):
    """C28: our metric can be monitored, is in callback_metrics after the first update, and in both loggers."""
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(float(trainer.callback_metrics["adabatch/batch_size"]))

    saved = ModelCheckpoint(tmp_path / "c", monitor="adabatch/batch_size", mode="max")
    loggers = [CSVLogger(tmp_path, version="csv"), TensorBoardLogger(tmp_path, version="board")]
    module = Recorder()
    fit(
        module,
        loader(64, 4),
        loader(8, 8),
        callbacks=[adapt(4, 4, 16), Look(), saved],
        logger=loggers,
        log_every_n_steps=1,
        enable_checkpointing=True,
    )
    assert seen == module.sizes
    assert float(saved.best_model_score) == 16.0
    with open(f"{loggers[0].log_dir}/metrics.csv", newline="") as file:  # noqa: PTH123
        rows = [row for row in csv.DictReader(file) if row["adabatch/batch_size"]]
    assert [float(row["adabatch/batch_size"]) for row in rows] == module.sizes
    assert [value for _, value in series(events(loggers[1].log_dir), "batch_size")] == module.sizes


class Bare(Logger):
    """A logger with nothing but what it must have."""

    name = "bare"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def test_debug_runs_and_loggers(tmp_path):
    """C30: fast_dev_run and logger=False write no files; a logger without ``experiment`` gets its rows."""
    fit(Recorder(), loader(16, 4), loader(8, 8), callbacks=[adapt(4)], fast_dev_run=True, logger=True, root=tmp_path)
    fit(Recorder(), loader(16, 4), loader(8, 8), callbacks=[adapt(4)], logger=False, root=tmp_path)
    fit(Recorder(), loader(16, 4), callbacks=[adapt(4)], root=tmp_path, barebones=True, logger=None)
    assert list(tmp_path.iterdir()) == []
    logger = Bare()
    fit(Recorder(), loader(16, 4), callbacks=[adapt(4)], logger=logger, log_every_n_steps=1)
    assert [step for step, row in logger.rows if "adabatch/batch_size" in row] == list(range(1, 9))


def test_logging_switched_off(tmp_path):
    """log_every_n_steps=0 logs nothing, as in Lightning."""
    logger = Bare()
    fit(Recorder(), loader(16, 4), callbacks=[adapt(4)], logger=logger, log_every_n_steps=0)
    assert not [row for _, row in logger.rows if "adabatch/batch_size" in row]
