# SPDX-License-Identifier: Apache-2.0
"""Flags of the Trainer that limit, cut, check or watch a run, while the batch size moves.

What the batches have to be is written out for each: 64 samples in batches of 4, 8 from the second update on.
"""

from __future__ import annotations

import datetime as dt
import time

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from models import Recorder, adapt, fit, loader

from lightning_adabatch import AdaptiveBatchSize, RadaDamp

EPOCH = [4, *[8] * 7, 4]  # of the first epoch
LATER = [8] * 8


def run(tmp_path, *callbacks, ours=None, samples=64, module=None, epochs=2, **flags):
    """Fit with batches of 4 and then 8, and a validation loader of one batch."""
    module = module or Recorder()
    ours = ours or adapt(4, 8)
    fit(module, loader(samples, 4), loader(8, 8), callbacks=[ours, *callbacks], epochs=epochs, root=tmp_path, **flags)
    assert ours.samples == sum(module.sizes)
    return module, ours


def test_a_strategy_of_the_users_own(tmp_path):
    """A subclass of the strategy for one device trains as the strategy does."""

    class Own(SingleDeviceStrategy):
        pass

    plain, own = run(tmp_path)[0], run(tmp_path, strategy=Own("cpu"))[0]
    assert own.sizes == plain.sizes == EPOCH + LATER


# How much is trained --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "first", "second"),
    [
        (1, [4], [8]),
        (3, [4, 8, 8], [8, 8, 8]),
        (100, EPOCH, LATER),
        (1.0, EPOCH, LATER),
        (0.5, [4, 8, 8, 8, 4], [8] * 4),  # 8 · 4 samples
        (0.1, [4], [4]),  # int(1.6) · 4 samples
    ],
)
def test_limit_train_batches(limit, first, second, tmp_path):
    """An int is batches of any size, a float a share of the data in batches of the first size; validation follows."""
    module, _ = run(tmp_path, limit_train_batches=limit)
    assert (module.sizes_in(0), module.sizes_in(1)) == (first, second)
    assert module.validations == [len(first), len(first) + len(second)]


@pytest.mark.parametrize(("overfit", "samples"), [(2, 8), (5, 20), (0.25, 16), (1.0, 64)])
def test_overfit_batches(overfit, samples, tmp_path):
    """C56: the samples are the first ``overfit_batches`` · 4, or that share of the data, in every epoch, in order."""
    module = Recorder()
    fit(
        module,
        loader(64, 4),
        loader(64, 8),
        callbacks=[adapt(4, 4, 8)],
        epochs=3,
        overfit_batches=overfit,
        root=tmp_path,
    )
    for epoch in range(3):
        seen = [index for batch in module.batches if batch.epoch == epoch for index in batch.indices]
        assert seen == list(range(samples))
    assert module.sizes[:3] == [4, 4, 8]


@pytest.mark.parametrize(("flag", "sizes"), [(True, [4]), (1, [4]), (3, [4, 8, 8])])
def test_fast_dev_run(flag, sizes, tmp_path):
    """C30: a debug run is one batch, or so many, of the sizes that a run begins with, and one validation."""
    module, ours = run(tmp_path, fast_dev_run=flag)
    assert module.sizes == sizes
    assert module.validations == [len(sizes)]
    assert ours.updates == len(sizes)


@pytest.mark.parametrize(("steps", "batches"), [(1, 1), (9, 9), (12, 12)])
def test_max_steps(steps, batches, tmp_path):
    """max_steps counts updates, whatever their sizes: within an epoch, at its end, and in the next one."""
    module, ours = run(tmp_path, epochs=-1, max_steps=steps)
    assert module.sizes == (EPOCH + LATER)[:batches]
    assert ours.updates == steps


class Stops(pl.Callback):
    """Asks for the end of the run after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.update:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("flags", "batches", "validations"),
    [
        ({}, 3, [3]),
        ({"min_steps": 12}, 12, [9, 12]),
        ({"min_epochs": 2}, 9 + 8, [9, 17]),
        ({"min_epochs": 1, "min_steps": 20}, 20, [9, 17, 20]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*min_epochs")
def test_should_stop(flags, batches, validations, tmp_path):
    """A run that is asked to stop ends at once, but not before min_steps updates and min_epochs whole epochs."""
    module, ours = run(tmp_path, Stops(3), epochs=5, **flags)
    assert module.sizes == (EPOCH + LATER * 4)[:batches]
    assert module.validations == validations
    assert ours.updates == batches


# Time -----------------------------------------------------------------------------------------------------


class Clock:
    """A clock by which every training sample takes a second."""

    def __init__(self, monkeypatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Timed(Recorder):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def loss(self, x, y):
        self.clock.now += len(x) if self.training else 0
        return super().loss(x, y)


@pytest.mark.parametrize("interval", ["00:00:00:20", dt.timedelta(seconds=20), {"seconds": 20}])
def test_validation_by_time(interval, tmp_path, monkeypatch):
    """Validation comes after the batch in which 20 seconds have passed since the last one, whatever the sizes."""
    module, _ = run(tmp_path, module=Timed(Clock(monkeypatch)), val_check_interval=interval)
    assert module.sizes == EPOCH + LATER
    # Batches end at 4, 12, 20 | 28, 36, 44 | 52, 60, 64 | 72, 80, 88 | 96, 104, 112 | 120, 128.
    assert module.validations == [3, 6, 9, 12, 15]


@pytest.mark.parametrize("limit", ["00:00:00:30", dt.timedelta(seconds=30)])
def test_max_time(limit, tmp_path, monkeypatch):
    """max_time ends the run after the batch in which it is reached: 4 + 8 + 8 + 8 + 8 are more than 30 seconds."""
    module, ours = run(tmp_path, module=Timed(Clock(monkeypatch)), epochs=-1, max_time=limit)
    assert module.sizes == [4, 8, 8, 8, 8]
    assert ours.updates == 5


# When validation comes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "validations"),
    [
        ({"val_check_interval": 3}, [3, 6, 9, 12, 15, 20, 23]),
        ({"val_check_interval": 1.0}, [9, 17, 25]),
        ({"val_check_interval": 0.5}, [5, 9, 13, 17, 21, 25]),  # from 32 and from 64 samples on
        ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [7, 14, 21]),
        ({"check_val_every_n_epoch": 2}, [17]),
        ({"check_val_every_n_epoch": 3, "val_check_interval": 0.5}, [21, 25]),
        ({"num_sanity_val_steps": 0}, [9, 17, 25]),
        ({"num_sanity_val_steps": -1}, [9, 17, 25]),
        ({"limit_val_batches": 0}, []),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_validation_points(flags, validations, tmp_path):
    """C50: an int counts batches, a fraction is one of the data, over epochs or every n-th; a sanity check is none."""
    module, _ = run(tmp_path, epochs=3, samples=64, **flags)
    assert module.sizes == EPOCH + LATER * 2
    assert module.validations == validations


# What watches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["barebones", "detect_anomaly", "deterministic", "plain logger", "inference_mode"])
@pytest.mark.filterwarnings("ignore:.*barebones")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_flags_that_change_no_batch(flag, tmp_path):
    """Batches, decisions and weights are those of the run without the flag."""
    flags = {"barebones": {"barebones": True, "enable_model_summary": False}, "plain logger": {"logger": True}}
    flags["inference_mode"] = {"inference_mode": False}
    runs = []
    for chosen in ({}, flags.get(flag, {flag: True})):
        ours = AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=32)
        module, _ = run(tmp_path, ours=ours, **chosen)
        runs.append((module.sizes, [b.lr for b in module.batches], module.net.weight.tolist(), ours.updates))
        assert ours.updates == len(module.batches)
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) > 1
