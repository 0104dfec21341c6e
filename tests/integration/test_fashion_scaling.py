# SPDX-License-Identifier: Apache-2.0
"""The cost models of examples/fashion_scaling.py agree with what one computes by hand."""

from __future__ import annotations

import csv
import importlib
import math
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
HEADER = "method,seed,run,epochs,updates,batch_size,lr,train_loss_avg,grad_norm_sq_avg,test_loss,test_accuracy\n"


@pytest.fixture
def scaling(monkeypatch):
    """The example; it is importable from its folder only."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("fashion_scaling")


def run_of(scaling, *epochs: tuple[int, int], seed: str = "0"):
    """Return a run of (updates, batch size)."""
    return scaling.Run("a rule", seed, tuple(scaling.Epoch(*epoch, None) for epoch in epochs))


def free(workers: int) -> float:
    return 0.0


@pytest.mark.parametrize("workers", [1, 2, 64])
def test_linear_step_time_and_free_communication(scaling, workers):
    """Wall-clock is samples · c / W then, whatever the batch sizes, and all workers together pay samples · c."""
    times = [scaling.StepTime(4, 4e-3), scaling.StepTime(1024, 1024e-3)]  # c = 1 ms
    run = run_of(scaling, (100, 256), (50, 512))
    cost = scaling.cost(run, partial(scaling.used, pool=workers), partial(scaling.step_seconds, times), free)
    assert cost.updates == 150
    assert cost.seconds == pytest.approx(51.2 / workers)
    assert cost.worker_seconds == pytest.approx(51.2)


def test_fixed_and_elastic_pool(scaling):
    """3 updates of 100 images and 2 of 300, with a step of 2 + b seconds and 10 (W - 1) seconds of communication."""
    run = run_of(scaling, (3, 100), (2, 300))
    fixed, elastic = (
        scaling.cost(run, partial(scaling.used, pool=4, share=share), lambda b: 2.0 + b, lambda w: 10.0 * (w - 1))
        for share in (None, 100)
    )
    assert fixed.seconds == 3 * (2 + 25 + 30) + 2 * (2 + 75 + 30)
    assert fixed.worker_seconds == 4 * fixed.seconds
    assert elastic.seconds == 3 * (2 + 100) + 2 * (2 + 100 + 20)  # 1 worker, then 3
    assert elastic.worker_seconds == 3 * (2 + 100) + 3 * 2 * (2 + 100 + 20)


def test_a_step_lasts_as_long_as_the_largest_part(scaling):
    """10 images on 4 workers are 3 for two of them, and the others wait."""
    cost = scaling.cost(run_of(scaling, (1, 10)), partial(scaling.used, pool=4), float, free)
    assert (cost.seconds, cost.worker_seconds) == (3, 12)


@pytest.mark.parametrize(
    ("size", "pool", "share", "workers"),
    [
        (1, 64, None, 64),  # a fixed pool
        (256, 64, 16, 16),
        (257, 64, 16, 17),
        (1024, 64, 16, 64),
        (1024, 32, 16, 32),  # no more than there are
        (341, 3, Fraction(1024, 3), 1),
        (342, 3, Fraction(1024, 3), 2),
        (1024, 3, Fraction(1024, 3), 3),
    ],
)
def test_workers_in_proportion_to_the_batch_size(scaling, size, pool, share, workers):
    assert scaling.used(size, pool, share) == workers


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (4, 1.0),  # as measured
        (16, 8.0),
        (64, 16.0),
        (8, math.sqrt(1 * 8)),  # half way between two on a logarithmic scale
        (32, math.sqrt(8 * 16)),
        (1, 1.0),  # below: no faster than the smallest
        (160, 16 + (160 - 64) * 8 / 48),  # above: on the line through the last two
    ],
)
def test_step_times_between_and_beside_measured_ones(scaling, size, seconds):
    times = [scaling.StepTime(4, 1.0), scaling.StepTime(16, 8.0), scaling.StepTime(64, 16.0)]
    assert scaling.step_seconds(times, size) == pytest.approx(seconds)


def test_step_time_above_a_single_measured_one(scaling):
    """It is in proportion to the batch size."""
    assert scaling.step_seconds([scaling.StepTime(4, 1.0)], 12) == pytest.approx(3.0)


def test_ring_all_reduce(scaling):
    """Each of 4 workers sends 6 parts of a quarter of the gradient; one worker sends nothing."""
    assert scaling.all_reduce(4, latency=0.01, bandwidth=100, size=400) == pytest.approx(2 * 3 / 4 * 400 / 100 + 0.06)
    assert scaling.all_reduce(1, latency=0.01, bandwidth=100) == 0
    floats = sum(p.numel() for p in importlib.import_module("fashion").PaperNet().parameters())
    assert scaling.all_reduce(2, latency=0, bandwidth=1) == 4 * floats


def rows(*cells: tuple[float, int, str]) -> list[dict[str, str]]:
    names = ("epochs", "updates", "test_accuracy")
    return [dict(zip(names, map(str, row), strict=True)) for row in cells]


def test_mean_batch_size_of_an_epoch(scaling):
    """It is what the epoch saw by its updates; an empty accuracy is none."""
    found = scaling.epochs_of(rows((1.0, 20, "0.5"), (2.0, 30, ""), (2.5, 34, "0.7")), images=1000)
    assert found == [scaling.Epoch(20, 50, 0.5), scaling.Epoch(10, 100, None), scaling.Epoch(4, 125, 0.7)]


def test_a_row_for_epoch_0_changes_nothing(scaling):
    """The author's runs have one, with batch size 0."""
    later = (1.0, 20, "0.5"), (2.0, 30, "0.6")
    start, *found = scaling.epochs_of(rows((0.0, 0, "0.1"), *later), images=1000)
    assert found == scaling.epochs_of(rows(*later), images=1000)
    pool = partial(scaling.used, pool=4, share=10)
    cost = scaling.cost(scaling.Run("a rule", "0", (start,)), pool, lambda b: 1.0 + b, free)
    assert cost == scaling.Cost(0, 0, 0)


def test_rows_out_of_order_are_refused(scaling):
    with pytest.raises(ValueError, match="20 updates come after 30"):
        scaling.epochs_of(rows((1.0, 30, ""), (2.0, 20, "")), images=1000)


def test_a_run_counts_up_to_the_first_epoch_with_the_accuracy(scaling):
    """Also if it is lost again; a missing accuracy does not count, and a run without it costs nothing but '-'."""
    epochs = tuple(scaling.Epoch(1, 1, value) for value in (0.1, None, 0.8999, 0.9, 0.85, 0.95))
    run = scaling.Run("a rule", "0", epochs)
    assert scaling.until(run, 0.9).epochs == epochs[:4]
    assert scaling.until(run, 0.96) is None


def test_mean_over_seeds(scaling):
    """A seed that has two runs counts once: 10 and 30 updates, and 40, are 30 on average."""
    runs = [run_of(scaling, (updates, 1), seed=seed) for updates, seed in ((10, "a"), (30, "a"), (40, "b"))]
    cost = scaling.mean_cost(runs, partial(scaling.used, pool=2), lambda _: 3.0, free)
    assert cost == scaling.Cost(30, 90, 180)


def test_table(scaling):
    """A method that some runs of reach the accuracy has their mean, and one of none has '-'."""
    run = run_of(scaling, (1200, 1))
    runs = {"some": [run, None], "none": [None]}
    costs = {"some": [scaling.Cost(1200, 90, 1800), scaling.Cost(1200, 60, 3600)], "none": []}
    assert scaling.table(runs, costs, [1, 2]).splitlines() == [
        "| method |   runs | updates |         1 |     2 |",
        "| ------ | -----: | ------: | --------: | ----: |",
        "| some   | 1 of 2 |   1,200 | 1.5 / 0.5 | 1 / 1 |",
        "| none   | 0 of 1 |       - |         - |     - |",
    ]


def write(path: Path, method: str, *lines: str, seed: int = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEADER + "".join(f"{method},{seed},{method}/{seed},{line}\n" for line in lines))
    return path


def test_runs_of_files_and_folders(scaling, tmp_path):
    """All are read, other tables of a folder are passed over, and no run is counted twice."""
    first = write(tmp_path / "one.csv", "A", "1.0,4,25,,,,,0.5")
    write(tmp_path / "more" / "b.csv", "B", "1.0,2,50,,,,,")
    write(tmp_path / "more" / "c.csv", "B", "1.0,1,100,,,,,0.7", seed=1)
    (tmp_path / "more" / "step_times.csv").write_text("batch_size,seconds\n4,1.0\n")
    assert scaling.read_runs([first, tmp_path / "more"], images=100) == [
        scaling.Run("A", "0", (scaling.Epoch(4, 25, 0.5),)),
        scaling.Run("B", "0", (scaling.Epoch(2, 50, None),)),
        scaling.Run("B", "1", (scaling.Epoch(1, 100, 0.7),)),
    ]
    again = write(tmp_path / "again.csv", "A", "1.0,5,20,,,,,0.6")
    with pytest.raises(SystemExit, match=r"again.csv has a run that another file has too: A/0"):
        scaling.read_runs([first, again], images=100)
    with pytest.raises(SystemExit, match="There is no run"):
        scaling.read_runs([tmp_path / "more" / "step_times.csv"], images=100)


def call(folder: Path, *options: str) -> str:
    script = str(EXAMPLES / "fashion_scaling.py")
    done = subprocess.run([sys.executable, script, *options], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_the_measurement_to_the_figure(tmp_path):
    """The cells of scaling.md follow from the step times that were measured; the second call does without measuring."""
    write(tmp_path / "runs" / "a.csv", "A", "0.0,0,0,,,,2.3,0.1", "1.0,10,64,,,,0.5,0.9", "2.0,20,64,,,,0.4,0.95")
    write(tmp_path / "runs" / "b.csv", "B", "1.0,10,64,,,,0.5,0.8")
    options = ("runs", "--images", "640", "--workers", "1", "16", "--max-batch-size", "64", "--out", "out")
    call(tmp_path, "--measure", "--sizes", "64", "4", "--repeats", "10", *options)
    out = tmp_path / "out"
    with (out / "step_times.csv").open() as file:
        small, large = csv.DictReader(file)
    assert list(small) == ["batch_size", "seconds", "repeats", "hardware"]
    assert [(row["batch_size"], row["repeats"]) for row in (small, large)] == [("4", "10"), ("64", "10")]
    assert "1 thread" in small["hardware"]
    t4, t64 = float(small["seconds"]), float(large["seconds"])
    assert 0 < t4 < t64
    ring = 2 * 15 * (4 * 111_050 / 16 / 1.25e9 + 50e-6)
    text = (out / "scaling.md").read_text(encoding="utf-8")
    assert "Time and cost to 90 % test accuracy" in text
    assert "Fixed pool** of W workers" in text
    for each, kind in ((ring, "ring all-reduce"), (0.0, "free communication")):
        wall = 10 * t64 / 60, 10 * (t4 + each) / 60
        cells = [f"{minutes:.3g} / {minutes / 60 * count:.3g}" for minutes, count in zip(wall, (1, 16), strict=True)]
        for pool in ("Fixed", "Elastic"):  # alike: the batch is the largest there is
            (part,) = (part for part in text.split("## ") if part.startswith(f"{pool} pool, {kind}\n"))
            a, b = ([cell.strip() for cell in line.split("|")[1:-1]] for line in part.strip().splitlines()[-2:])
            assert a == ["A", "1 of 1", "10", *cells]
            assert b == ["B", "0 of 1", "-", "-", "-"]
    assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
    second = call(tmp_path, *options, "--per-worker", "64", "--accuracy", "0.95")
    (elastic,) = (part for part in second.split("## ") if part.startswith("Elastic pool, ring"))
    one = f"{20 * t64 / 60:.3g} / {20 * t64 / 3600:.3g}"  # one worker is enough for 64 images
    (line,) = (line for line in elastic.splitlines() if line.startswith("| A"))
    assert [cell.strip() for cell in line.split("|")[4:-1]] == [one, one]


def test_step_times_must_have_been_measured(scaling, tmp_path):
    """Without them the second call says what to do."""
    with pytest.raises(SystemExit, match=r"step_times.csv is not there\. Measure step times first, with --measure"):
        scaling.main(scaling.arguments([str(tmp_path), "--out", str(tmp_path)]))
