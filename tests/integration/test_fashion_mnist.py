# SPDX-License-Identifier: Apache-2.0
"""The paper's Fashion-MNIST runs: one per call, a row per epoch, and the same rows however often it was cut."""

from __future__ import annotations

import csv
import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_adabatch import Constant, Cooldown, GeoDamp, RadaDamp

EXAMPLES = Path(__file__).parents[2] / "examples"
# Those of the author's published runs.
COLUMNS = "method,seed,run,epochs,updates,batch_size,lr,train_loss_avg,grad_norm_sq_avg,test_loss,test_accuracy"
TINY = ["--limit", "96", "--batch-size", "16", "--max-batch-size", "32", "--epochs", "2", "--accelerator", "cpu"]


@pytest.fixture
def example(monkeypatch):
    """The script as a module; it is importable from its folder only, and its silence is its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield importlib.import_module("fashion_mnist")
    logger.setLevel(level)


def call(example, out: Path, *more: str) -> None:
    example.main(example.arguments([*TINY, "--out", str(out), *more]))


def rows(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.glob("*.csv")
    text = path.read_text()
    assert text.splitlines()[0] == COLUMNS
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_run_ends_with_the_same_rows(tmp_path):
    """Killed at random calls of any function and started again with ``--resume``: the CSV is the same."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(EXAMPLES.parent / "tests" / "integration" / "kill_example.py")]
    command += [str(tmp_path), "12", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["rows"]) > 3, told
    assert len(set(told["rows"])) > 2, told  # it was cut in different epochs
    uncut, cut = ((tmp_path / name / "RadaDamp_cooldown-3.csv").read_bytes() for name in ("uncut", "cut"))
    assert uncut == cut
    assert len(rows(tmp_path / "cut")) == 6
    assert not list((tmp_path / "cut").glob("*.part"))


ASKED = ["--batch-size", "16", "--max-batch-size", "32", "--epochs", "50"]
# Of the first 5: what the paper's section 5.2 and its code have. λ, the first updates of the baseline, the floor, …
FULL = {"max_batch_size": 32, "min_batch_size": 1, "adapt": "batch_size", "lr_scaling": "none", "tail": "carry"}
RATE = {**FULL, "max_batch_size": None, "adapt": "lr", "tail": None}
ROOT = {**FULL, "min_batch_size": 16, "lr_scaling": "sqrt"}
AUTHOR = RadaDamp(rho=0.999, grad_norm_weight=0.05, warmup=50)
STAGES = GeoDamp(factor=1.219231, delay=10)
TABLE = {
    "RadaDamp": (AUTHOR, {**FULL, "min_batch_size": 16}),
    "GeoDamp": (STAGES, FULL),
    "GeoDamp-LR (SGD)": (STAGES, RATE),
    "RadaDamp-LR": (AUTHOR, RATE),
    "Adagrad": (Constant(), RATE),
    "RadaDamp, cooldown": (Cooldown(AUTHOR, 40, 50), {**FULL, "min_batch_size": 16}),
    "RadaDamp, sqrt LR": (AUTHOR, ROOT),
    "RadaDamp, sqrt LR, cooldown": (Cooldown(AUTHOR, 40, 50), ROOT),
    "RadaDamp, linear LR, cooldown": (Cooldown(AUTHOR, 40, 50), {**ROOT, "lr_scaling": "linear"}),
    "RadaDamp printed, linear LR, cooldown": (Cooldown(RadaDamp(), 40, 50), {**ROOT, "lr_scaling": "linear"}),
    "RadaDamp as printed": (RadaDamp(rho=0.999, grad_norm_weight=1e-3, warmup=1), FULL),
    "RadaDamp printed, floor": (RadaDamp(rho=0.999, grad_norm_weight=1e-3, warmup=1), {**FULL, "min_batch_size": 16}),
    "RadaDamp printed, warmup": (RadaDamp(rho=0.999, grad_norm_weight=1e-3, warmup=50), FULL),
    "RadaDamp printed, lambda": (RadaDamp(rho=0.999, grad_norm_weight=0.05, warmup=1), FULL),
}


def test_methods_are_what_their_names_say(example):
    """Each method's rule and settings, with an optimizer of its own for Adagrad alone."""
    assert list(TABLE) == list(example.METHODS)
    for name, (policy, settings) in TABLE.items():
        made = example.callback(example.arguments(["--method", name, *ASKED])).settings
        assert made.policy == policy, name
        assert {key: getattr(made, key) for key in settings} == settings, name
        optimizer = example.Net(example.METHODS[name].optimizer).configure_optimizers()
        assert optimizer.defaults["lr"] == 0.005
        assert optimizer.defaults["weight_decay"] == 0.003
        assert isinstance(optimizer, torch.optim.Adagrad if name == "Adagrad" else torch.optim.SGD)
    sgd = example.Net(None).configure_optimizers()
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"]) == (0.9, True)


@pytest.mark.parametrize("method", ["GeoDamp", "GeoDamp-LR (SGD)", "RadaDamp, sqrt LR", "Adagrad"])
def test_a_method_trains(example, method, tmp_path):
    """Twelve epochs of 96 images: GeoDamp moves once, after ten; with -LR the rate does; a row per epoch says so."""
    call(example, tmp_path, "--method", method, "--epochs", "12")
    history = rows(tmp_path)
    assert [row["epochs"] for row in history if method == "Adagrad"] in ([], [f"{n}.0" for n in range(1, 13)])
    assert {(row["method"], row["seed"], row["run"]) for row in history} == {(method, "1000", f"{method}/1000")}
    last = history[-1]
    moved = {"GeoDamp": ("20", 1.0), "GeoDamp-LR (SGD)": ("16", 16 / 20)}.get(method, (last["batch_size"], None))
    assert last["batch_size"] == moved[0]
    rate = float(last["lr"]) / 0.005
    if moved[1] is not None:
        assert rate == pytest.approx(moved[1], rel=1e-5)
        assert history[8]["batch_size"] == "16"
    if method == "RadaDamp, sqrt LR":
        assert int(last["batch_size"]) >= 16
        assert rate == pytest.approx((int(last["batch_size"]) / 16) ** 0.5, rel=0.05)
    assert (last["grad_norm_sq_avg"] != "") == method.startswith("RadaDamp")
    assert 0.5 < float(last["test_loss"]) < 2.5
    assert 0.0 < float(last["test_accuracy"]) < 1.0


def test_a_run_is_not_overwritten(example, tmp_path):
    """Without ``--resume`` a second call is refused; with it a run that is complete stays as it is."""
    call(example, tmp_path)
    (before,) = tmp_path.glob("*.csv")
    text = before.read_text()
    with pytest.raises(SystemExit, match=r"has a run already\. Go on with it by --resume, or give another --out"):
        call(example, tmp_path)
    call(example, tmp_path, "--resume")
    assert before.read_text() == text


def test_a_run_of_other_settings_is_not_gone_on_with(example, tmp_path):
    """A checkpoint of another batch size, data or precision is refused by name; more epochs are none of these."""
    call(example, tmp_path)
    with pytest.raises(SystemExit, match=r"'batch_size': '16'.*'batch_size': '8'.*Give the same ones"):
        call(example, tmp_path, "--resume", "--batch-size", "8")
    call(example, tmp_path, "--resume", "--epochs", "3")
    assert [row["epochs"] for row in rows(tmp_path)] == ["1.0", "2.0", "3.0"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_branches_off_from_another(example, tmp_path):
    """The checkpoint of RadaDamp's run at the cooldown's start goes on as the run that had a cooldown all along."""
    ten = ["--epochs", "10"]
    call(example, tmp_path / "whole", *ten, "--method", "RadaDamp, cooldown")
    call(example, tmp_path / "trunk", "--epochs", "8")
    (tmp_path / "branch").mkdir()
    (tmp_path / "trunk" / "RadaDamp-1000").rename(tmp_path / "branch" / "RadaDamp_cooldown-1000")
    call(example, tmp_path / "branch", *ten, "--method", "RadaDamp, cooldown", "--resume")
    assert rows(tmp_path / "branch") == rows(tmp_path / "whole")
    rates = [float(row["lr"]) / 0.005 for row in rows(tmp_path / "whole")]
    assert rates[7] == 1.0
    assert rates[9] < 0.5


def test_a_cooldown_is_not_changed_once_it_has_begun(example, tmp_path):
    """Other epochs or another length are another run, unless the checkpoint is of before both."""
    call(example, tmp_path, "--method", "RadaDamp, cooldown", "--epochs", "5")
    for other in (["--epochs", "10"], ["--epochs", "5", "--cooldown", "0.5"]):
        with pytest.raises(
            SystemExit, match=r"a cooldown of 1 epochs until 5, after 5 epochs; this one has .*checkpoint"
        ):
            call(example, tmp_path, "--method", "RadaDamp, cooldown", "--resume", *other)
    with pytest.raises(SystemExit):
        example.arguments(["--cooldown", "0"])


def test_rows_without_a_checkpoint_are_not_overwritten(example, tmp_path):
    """A CSV alone, as runs are kept in a repository; one row may be that of a run that was cut at once."""
    call(example, tmp_path)
    (tmp_path / "RadaDamp-1000" / "last.ckpt").unlink()
    for more in ([], ["--resume"]):
        with pytest.raises(
            SystemExit, match=r"RadaDamp-1000.csv is of a run without a checkpoint, .*Give another --out"
        ):
            call(example, tmp_path, *more)


def test_a_checkpoint_is_whole_or_not_there(example, tmp_path, monkeypatch):
    """A write that is cut leaves the checkpoint before it as it was."""
    call(example, tmp_path)
    last = tmp_path / "RadaDamp-1000" / "last.ckpt"
    before = last.read_bytes()

    def half(self, checkpoint, path, storage_options=None):
        Path(path).write_bytes(before[:100])
        raise OSError("cut")

    monkeypatch.setattr(example.TorchCheckpointIO, "save_checkpoint", half)
    with pytest.raises(OSError, match="cut"):
        call(example, tmp_path, "--resume", "--epochs", "3")
    assert last.read_bytes() == before
