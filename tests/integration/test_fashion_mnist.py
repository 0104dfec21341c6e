# SPDX-License-Identifier: Apache-2.0
"""The paper's Fashion-MNIST runs: one per call, a row per epoch, and the same rows however often it was cut."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Those of the author's published runs.
COLUMNS = "method,seed,run,epochs,updates,batch_size,lr,train_loss_avg,grad_norm_sq_avg,test_loss,test_accuracy"
TINY = ["--limit", "96", "--batch-size", "16", "--max-batch-size", "32", "--epochs", "2", "--accelerator", "cpu"]


@pytest.fixture
def example(monkeypatch):
    """The script as a module; it is importable from its folder only."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("fashion_mnist")


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


def test_every_method_trains(example, tmp_path):
    """Each of the table's rules gives its rows, and moves what it is there to move."""
    for method in example.METHODS:
        out = tmp_path / method
        call(example, out, "--method", method)
        first, last = rows(out)
        assert (first["method"], first["seed"], first["epochs"], last["epochs"]) == (method, "1000", "1.0", "2.0")
        assert first["run"] == f"{method}/1000"
        assert 0 < int(first["updates"]) <= 6
        assert float(last["lr"]) <= 0.005
        assert (last["grad_norm_sq_avg"] != "") == method.startswith("RadaDamp")
        assert 0 <= float(last["test_accuracy"]) <= 1


def test_constant_batch_methods_keep_the_batch(example, tmp_path):
    """The -LR runs and Adagrad have the loader's batches: 96 / 16 updates per epoch."""
    for method in ("GeoDamp-LR (SGD)", "RadaDamp-LR", "Adagrad"):
        out = tmp_path / method
        call(example, out, "--method", method)
        assert [(row["updates"], row["batch_size"]) for row in rows(out)] == [("6", "16"), ("12", "16")]


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
    assert min(rates[7] - 0.5, 0.1 - rates[9]) > 0
