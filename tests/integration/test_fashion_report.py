# SPDX-License-Identifier: Apache-2.0
"""The report over Fashion-MNIST runs says what small CSVs with answers worked out by hand say."""

from __future__ import annotations

import csv
import importlib
import math
from pathlib import Path

import numpy as np
import pytest

COLUMNS = (
    *("method", "seed", "run", "epochs", "updates", "batch_size", "lr"),
    *("train_loss_avg", "grad_norm_sq_avg", "test_loss", "test_accuracy"),
)


@pytest.fixture
def fashion(monkeypatch):
    """The report; it is importable from the folder of the examples only."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("fashion_report")


@pytest.fixture
def figure(fashion):
    """What draws, beside it."""
    return importlib.import_module("fashion_figure")


def rows(method, seed, accuracies, *, name=None, per_epoch=10, step=1.0):
    """Return a row per accuracy, of epochs with so many updates; the last values tell one epoch from the other."""
    return [
        {
            "method": method,
            "seed": seed,
            "run": name or f"{method}/{seed}",
            "epochs": round(step * epoch, 3),
            "updates": per_epoch * epoch,
            "batch_size": 256 + epoch,
            "lr": f"{0.005 / epoch:.7g}",
            "train_loss_avg": f"{1 / epoch:.6g}",
            "grad_norm_sq_avg": "",
            "test_loss": f"{2 / epoch:.6g}",
            "test_accuracy": accuracy,
        }
        for epoch, accuracy in enumerate(accuracies, 1)
    ]


def start(method, seed):
    """Return a row of before training, as the author's runs have it."""
    (row,) = rows(method, seed, ["0.95"])
    return {**row, "epochs": 0.0, "updates": 0, "batch_size": 0, "lr": "", "train_loss_avg": ""}


def write(path, *runs):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for run in runs:
            writer.writerows(run)
    return path


def cells(text):
    """Return the tables in Markdown: for each, a dict of cells by column for every method."""
    tables, lines = [], [line for line in text.splitlines() if line.startswith("|")]
    for line in lines:
        parts = [part.strip() for part in line.strip("|").split("|")]
        if parts[0] == "method":
            head = parts
            tables.append({})
        elif not parts[0].startswith("-"):
            tables[-1][parts[0]] = dict(zip(head, parts, strict=True))
    return tables


def report(fashion, folder, author=None, full=None):
    fashion.report(folder, author, full)
    return cells((folder / "table.md").read_text(encoding="utf-8"))


TWELVE = [0.99, 0.99, *(0.80, 0.81, 0.82, 0.83, 0.84, 0.85, 0.86, 0.87, 0.88, 0.905)]


def test_table_of_two_seeds(fashion, tmp_path, capsys):
    """A row per method and a value per seed; the accuracy is of the last ten epochs; what is printed is the file."""
    write(tmp_path / "b.csv", rows("A", 1001, [0.9] * 12, per_epoch=7))
    write(tmp_path / "c.csv", rows("A", 1000, TWELVE, per_epoch=1000))
    write(tmp_path / "a.csv", rows("B", 1000, [0.5] * 12))
    ends, levels, _ = report(fashion, tmp_path)
    assert list(ends) == list(levels) == ["A", "B"]
    assert ends["A"] == {
        "method": "A",
        "seeds": "1000 / 1001",
        "epochs": "12 / 12",
        "accuracy (%)": "84.65 / 90.00",  # (80 + ... + 88 + 90.5) / 10: without the two 99s
        "updates": "12,000 / 84",
        "batch size": "268 / 268",
        "LR": "0.0004167 / 0.0004167",
        "train loss": "0.0833 / 0.0833",
        "loss ~ accuracy": "- / -",  # too few epochs
    }
    assert ends["B"]["accuracy (%)"] == "50.00"
    assert (tmp_path / "table.md").read_text(encoding="utf-8") in capsys.readouterr().out


def test_first_epochs_at_a_level(fashion, tmp_path):
    """A level counts from the first epoch at it, even if the accuracy falls again; '-' where it never is."""
    write(tmp_path / "a.csv", rows("A", 1, [0.8799, "0.8800", 0.86, "0.9050", 0.87], per_epoch=1000))
    _, levels, _ = report(fashion, tmp_path)
    assert levels["A"] == {
        "method": "A",
        "seeds": "1",
        "88 %": "2,000 (2.0)",
        "89 %": "4,000 (4.0)",
        "90 %": "4,000 (4.0)",
        "90.5 %": "4,000 (4.0)",
        "91 %": "-",
    }


def test_cut_runs(fashion, tmp_path):
    """A run with fewer epochs than the longest one, or than it is said to have, is marked."""
    write(tmp_path / "a.csv", rows("A", 10, [0.5] * 3))
    write(tmp_path / "b.csv", rows("A", 9, [0.5] * 5))  # first: seeds are numbers
    assert report(fashion, tmp_path)[0]["A"]["epochs"] == "5 / cut: 3 of 5"
    assert report(fashion, tmp_path, full=4)[0]["A"]["epochs"] == "5 / cut: 3 of 4"
    author = write(tmp_path / "other.txt", rows("B", 1, [0.5] * 8, step=1.01))  # 8.08 are 8 epochs
    ends, _, _, theirs, *_ = report(fashion, tmp_path, author)
    assert ends["A"]["epochs"] == "cut: 5 of 8 / cut: 3 of 8"
    assert theirs["B"]["epochs"] == "8"


def test_missing_cells(fashion, tmp_path):
    """An epoch without accuracy is not one of 0 %, nor are others taken for it; a series without values is '-'."""
    accuracies = [0.99, *[0.90, 0.88] * 5]
    accuracies[-1] = accuracies[1] = ""  # of the last ten the first and the last
    run = rows("A", 1, accuracies)
    write(tmp_path / "a.csv", [{**row, "train_loss_avg": ""} for row in run])
    write(tmp_path / "b.csv", rows("B", 1, [""] * 3))
    ends, levels, _ = report(fashion, tmp_path)
    assert ends["A"]["accuracy (%)"] == "89.00"  # four of 0.90, four of 0.88
    assert ends["A"]["train loss"] == ends["B"]["accuracy (%)"] == "-"
    assert levels["B"]["88 %"] == "-"
    assert (tmp_path / "figure2.png").read_bytes().startswith(b"\x89PNG")


def test_row_before_training_is_left_out(fashion, tmp_path):
    """It has no batch size, and its accuracy counts neither for the mean nor as a level."""
    path = write(tmp_path / "a.csv", [start("A", 1), *rows("A", 1, [0.5, 0.6])])
    (run,) = fashion.read(path)
    assert run.updates == (10, 20)
    ends, levels, _ = report(fashion, tmp_path)
    assert ends["A"]["accuracy (%)"] == "55.00"
    assert levels["A"]["88 %"] == "-"


def test_second_run_of_a_seed(fashion, tmp_path):
    """Both are in the table under their own names, and the one with more accuracies is compared with."""
    short, whole = rows("A", 1001, [0.5, 0.5, ""]), rows("A", 1001, [0.6, 0.6, 0.6], name="A/1001b")
    author = write(tmp_path / "author.txt", [row for pair in zip(short, whole, strict=True) for row in pair])
    write(tmp_path / "a.csv", rows("A", 1001, [0.7] * 3, name="of no such form"))
    ends, _, _, theirs, *_ = report(fashion, tmp_path, author)
    assert theirs["A"]["seeds"] == "1001 / 1001b"
    assert theirs["A"]["accuracy (%)"] == "50.00 / 60.00"
    assert ends["A"]["seeds"] == "1001"
    assert ends["A"]["accuracy - author's (points)"] == "+10.00"
    assert "A 1001 is not compared with" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_differences(fashion, tmp_path):
    """To the same method and seed, after as many epochs, though the author's are a bit longer; '-' without one."""
    author = write(
        tmp_path / "author.csv",
        rows("A", 1, [0.80] * 20 + [0.92] * 20, per_epoch=100, step=1.0026),
        rows("A", 2, [0.88] * 40, per_epoch=100),
    )
    write(tmp_path / "a.csv", rows("A", 1, [0.81] * 19 + [0.93], per_epoch=90))
    write(tmp_path / "b.csv", rows("A", 2, [0.87, *[0.88] * 39], per_epoch=110))
    write(tmp_path / "c.csv", rows("B", 2, [0.88] * 40))
    ends, levels, *_ = report(fashion, tmp_path, author)
    assert list(ends) == ["A", "B"]
    assert ends["A"]["accuracy - author's (points)"] == "+2.20 / +0.00"  # 82.2 against 80, at epoch 20
    assert ends["A"]["updates against author's (%)"] == "-10.0 / +10.0"
    assert ends["B"]["accuracy - author's (points)"] == ends["B"]["updates against author's (%)"] == "-"
    assert levels["A"]["88 %"] == "1,800 (20.0; -14.3 %) / 220 (2.0; +120.0 %)"  # against 2,100 and 100
    assert levels["A"]["91 %"] == "1,800 (20.0; -14.3 %) / -"
    assert levels["B"]["88 %"] == "10 (1.0; -)"


def test_difference_to_a_shorter_run_of_the_author(fashion, tmp_path):
    """Ours counts as far as the author's went."""
    author = write(tmp_path / "author.txt", rows("A", 1, [0.80] * 20, step=1.0265))  # ends at 20.53
    write(tmp_path / "a.csv", rows("A", 1, [0.81] * 20 + [0.91] * 10))
    ends, *_ = report(fashion, tmp_path, author)
    assert ends["A"]["accuracy - author's (points)"] == "+1.00"
    assert ends["A"]["updates against author's (%)"] == "+0.0"


def test_other_files_are_skipped_by_name(fashion, tmp_path, capsys):
    """A CSV of other columns, one with no row and one with a broken number are named, and the rest is reported."""
    write(tmp_path / "a.csv", rows("A", 1, [0.5]))
    write(tmp_path / "empty.csv")
    write(tmp_path / "broken.csv", rows("B", 1, ["half"]))
    (tmp_path / "other.csv").write_text("method,seed\nC,1\n")
    assert list(report(fashion, tmp_path)[0]) == ["A"]
    out = capsys.readouterr().out
    for line in ("broken.csv: ", "empty.csv: there is no epoch yet.", "other.csv: there is no column run, epochs, "):
        assert f"Skipped {line}" in out


def test_columns_that_are_not_of_one_run_are_told(fashion, tmp_path):
    """Loss and accuracy of one run rise and fall together, also when both drift; those of two runs do not."""
    draw = np.random.default_rng(0)
    noise, other = draw.normal(size=(2, 60))
    run = rows("A", 1, [0.8 + 0.001 * epoch + 0.01 * one for epoch, one in enumerate(noise)])
    mixed = rows("B", 1, [row["test_accuracy"] for row in run])
    for epoch, (row, mixed_row) in enumerate(zip(run, mixed, strict=True)):
        row["test_loss"] = 0.5 - 0.002 * epoch - 0.02 * noise[epoch]
        mixed_row["test_loss"] = 0.5 - 0.002 * epoch - 0.02 * other[epoch]
    run[3]["test_loss"] = 9.0  # the first epochs say nothing
    run[40]["test_accuracy"] = ""
    write(tmp_path / "a.csv", run, mixed)
    ends, _, _ = report(fashion, tmp_path)
    assert ends["A"]["loss ~ accuracy"] == "-1.00"
    assert abs(float(ends["B"]["loss ~ accuracy"])) < 0.3


def test_no_runs(fashion, tmp_path):
    """A folder without runs, and an author's file that is none, are refused by name and with what to do."""
    (tmp_path / "other.csv").write_text("method,seed\nC,1\n")
    with pytest.raises(SystemExit, match=rf"{tmp_path.name} has no CSV .*train_loss_avg.* Give --report"):
        fashion.report(tmp_path, None)
    write(tmp_path / "a.csv", rows("A", 1, [0.5]))
    for name in ("other.csv", "missing.csv"):
        with pytest.raises(SystemExit, match=rf"--author .*{name}: .* Give a CSV of runs"):
            fashion.report(tmp_path, tmp_path / name)


def test_sum_of_learning_rates(fashion, tmp_path):
    """Each epoch's updates times the rate at its end, added up."""
    (run,) = fashion.read(write(tmp_path / "a.csv", rows("A", 1, [0.1, 0.2, 0.3], per_epoch=10)))
    assert run.lr_sum == pytest.approx([10 * 0.005, 10 * 0.0075, 10 * (0.0075 + 0.005 / 3)], rel=1e-6)


def test_loss_at_a_sum_of_learning_rates(fashion, tmp_path):
    """Interpolated between epochs, of the mean over five; '-' beyond the end; Adagrad's rates are not comparable."""
    run = rows("A", 1, [0.5] * 7, per_epoch=1000)
    for epoch, row in enumerate(run, 1):
        row.update(lr="0.005", test_loss=[1, 1, 1, 0.5, 0.5, 0.5, 0.5][epoch - 1])  # 5 an epoch
    write(tmp_path / "a.csv", run, rows("Adagrad", 1, [0.5] * 7, per_epoch=1000))
    tables = report(fashion, tmp_path)
    assert list(tables[2]) == ["A"]
    # Means of epochs 2 to 6 at 20, of 4 to 7 at 30, of 5 to 7 at 35, which is the end.
    assert tables[2]["A"] == {"method": "A", "seeds": "1", "20": "0.7000", "30": "0.5000", "40": "-"} | dict.fromkeys(
        ("50", "60"), "-"
    )


def test_almost_complete_epochs_are_complete(fashion, tmp_path):
    """Samples that are carried into an epoch that never comes do not make a run a cut one; half an epoch does."""
    write(tmp_path / "a.csv", rows("A", 1, TWELVE, step=0.986))
    write(tmp_path / "b.csv", rows("B", 1, TWELVE, step=0.97))
    ends, _, _ = report(fashion, tmp_path, full=12)
    assert (ends["A"]["epochs"], ends["B"]["epochs"]) == ("12", "cut: 11 of 12")


def test_running_mean(figure):
    """Over five epochs, fewer at both ends."""
    mean = figure.running_mean(np.arange(1.0, 8), np.array([0, 0, 5, 0, 10, 0, 3.0]))
    assert mean == pytest.approx([5 / 3, 5 / 4, 3, 3, 18 / 5, 13 / 4, 13 / 3])


def test_curves_end_with_the_shortest_run(fashion, figure, tmp_path):
    """Curves of several seeds are on one grid; one alone stays as it is, without epochs that have no value."""
    path = write(
        tmp_path / "a.csv",
        rows("A", 1, [0.1, "", 0.3, 0.4, 0.5], per_epoch=10),
        rows("A", 2, [0.1, 0.2, 0.3], per_epoch=15),
    )
    first, second = fashion.read(path)
    grid, values = figure.on_grid([first], "updates", "test_accuracy")
    assert grid.tolist() == [10, 30, 40, 50]
    assert values.tolist() == [[0.1, 0.3, 0.4, 0.5]]
    grid, values = figure.on_grid([first, second], "updates", "test_accuracy")
    assert (grid[0], grid[-1]) == (15, 45)
    assert values[:, 0] == pytest.approx([0.15, 0.1])
    assert values[:, -1] == pytest.approx([0.45, 0.3])
    grid, values = figure.on_grid([first], "epochs", "test_accuracy", smooth=True)
    assert values[0] == pytest.approx([0.2, 1.3 / 4, 0.4, 0.4])  # of epochs 1 and 3; 1, 3, 4 and 5; 3 to 5, twice
    assert not math.isnan(values.sum())


def test_figure(fashion, tmp_path, monkeypatch):
    """Six panels, with a line for each method of ours and of the author's, whose seeds are the ones that we have."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    write(tmp_path / "a.csv", rows("A", 1, TWELVE), rows("A", 2, TWELVE), rows("B", 1, TWELVE))
    author = write(tmp_path / "author.txt", rows("A", 1, TWELVE), rows("A", 3, TWELVE[:4]), rows("C", 1, TWELVE))
    fashion.report(tmp_path, author)
    assert (tmp_path / "figure2.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    assert len(figure.axes) == 6
    panel = next(axis for axis in figure.axes if axis.get_title() == "(f) batch size against epochs")
    dashed = [line for line in panel.lines if line.get_linestyle() == "--"]
    solid = [line for line in panel.lines if line.get_linestyle() == "-"]
    assert [len(dashed), len(solid)] == [2, 2]
    assert dashed[0].get_color() == solid[0].get_color()  # A
    assert dashed[1].get_color() not in {line.get_color() for line in solid}
    assert max(line.get_zorder() for line in dashed) < min(line.get_zorder() for line in solid)
    assert dashed[0].get_xdata()[-1] == 12  # not seed 3's 4
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:4] == ["A", "B", "C", "the author's runs"]
