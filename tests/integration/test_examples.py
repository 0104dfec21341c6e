# SPDX-License-Identifier: Apache-2.0
"""The examples run to the end as a user would run them."""

from __future__ import annotations

import csv
import gzip
import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import quiet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def fashion(monkeypatch):
    """The module that the examples share; it is importable from their folder only."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("fashion")


def scalars(folder: Path, tag: str) -> list[float]:
    """Return what TensorBoard would show under a tag."""
    events = EventAccumulator(str(folder)).Reload()
    return [event.value for event in events.Scalars(tag)]


def test_quickstart(tmp_path):
    """Its table agrees with the options, with itself and with TensorBoard's logs; picture and advice are there."""
    script = str(ROOT / "examples" / "quickstart.py")
    out = run(script, "--limit", "600", "--epochs", "2", "--batch-size", "50", "--out", "logs", cwd=tmp_path)
    runs = {}
    for name in ("constant", "RadaDamp", "recommended"):
        (row,) = re.findall(rf"^{name} +(.*)$", out, re.MULTILINE)
        (sizes,) = re.findall(rf"^Batch size after each epoch, {name}: (.*)$", out, re.MULTILINE)
        updates, samples, epochs, batch_size, lr_factor, accuracy, _ = row.replace(",", "").split()
        assert 1200 - int(batch_size) < int(samples) <= 1200  # 2 · 600, less what is carried on at the end
        assert epochs == f"{int(samples) / 600:.1f}"
        assert len(sizes.split()) == 2
        assert sizes.split()[-1] == batch_size
        # None is at its cap, 2 · 50, yet; the last one cools down to a damping of 20 and follows the batch size.
        assert (lr_factor == "1.000") == (name != "recommended")
        logs = tmp_path / "logs" / "tensorboard" / name
        assert scalars(logs, "adabatch/updates")[-1] == int(updates)
        assert scalars(logs, "adabatch/samples")[-1] == int(samples)
        accuracies = scalars(logs, "accuracy")
        assert f"{sum(accuracies) / len(accuracies):.2%}" == accuracy  # of two epochs: of the last ten at most
        runs[name] = int(updates), int(batch_size), int(samples)
    assert runs["constant"] == (24, 50, 1200)  # 2 · 600 / 50
    updates, batch_size, samples = runs["RadaDamp"]
    assert 50 < batch_size < 100
    assert samples / batch_size <= updates <= 24
    assert (tmp_path / "logs" / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert "tensorboard --logdir logs/tensorboard" in out


def test_cli_runs_again_from_its_saved_config(tmp_path):
    """C35: cli.py trains with the config beside it, and the config.yaml that it saves makes the same run again."""
    script, config = str(ROOT / "examples" / "cli.py"), str(ROOT / "examples" / "configs" / "radadamp.yaml")
    short = ["--data.limit=256", "--trainer.max_epochs=1", "--trainer.limit_val_batches=1", "--trainer.accelerator=cpu"]
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=."]
    run(script, "fit", "--config", config, *short, *logger, cwd=tmp_path)
    (saved,) = tmp_path.rglob("config.yaml")
    run(script, "fit", "--config", str(saved), cwd=tmp_path)
    first, second = (path.read_text(encoding="utf-8") for path in tmp_path.rglob("metrics.csv"))
    assert "train_loss" in first
    assert first == second


@pytest.mark.slow
def test_synthetic(tmp_path):
    """AdaDamp comes within 2 % of the least-squares test loss in 130 updates and 17 epochs at most."""
    script = str(ROOT / "examples" / "synthetic.py")
    run(
        script, "--seeds", "2", "--epochs", "15", "--methods", "AdaDamp", "gradient descent", "--out", ".", cwd=tmp_path
    )
    with (tmp_path / "synthetic.csv").open() as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["method"] == "AdaDamp"]
    assert [row["seed"] for row in ours] == ["0", "1"]
    for row in ours:
        assert int(row["first_updates"]) <= int(row["updates"]) <= 130
        assert float(row["epochs"]) <= 17
        assert float(row["evaluated"]) == int(row["updates"]) + 1  # one pass over the data before each decision
    others = [row for row in rows if row["method"] == "gradient descent"]
    assert [row["updates"] for row in others] == ["", ""]  # 15 epochs are 15 updates
    assert (tmp_path / "synthetic.png").read_bytes().startswith(b"\x89PNG")


def test_method_cards(tmp_path):
    """The plots of the cards are drawn by this script."""
    script = str(ROOT / "examples" / "method_cards.py")
    out = run(script, "--rules", "GeoDamp", "CABS", "--epochs", "1", "--out", "cards", cwd=tmp_path)
    assert "GeoDamp: 94 updates, batch size 64" in out
    assert {path.name for path in (tmp_path / "cards").iterdir()} == {"GeoDamp.png", "CABS.png"}


def test_parameters_of_the_papers_network(fashion):
    """The network has the paper's 111,050 parameters."""
    convolutions = (25 + 1) * 30 + (30 * 25 + 1) * 60 + (60 * 9 + 1) * 100
    assert convolutions + (100 + 1) * 100 + (100 + 1) * 10 == 111_050
    assert sum(p.numel() for p in fashion.PaperNet().parameters()) == 111_050


def test_validation_and_test_measure_the_accuracy(fashion, tmp_path):
    """Both report the share of the 1,000 test images that the network gets right."""
    model, data = fashion.PaperNet(), fashion.FashionData()
    trainer = quiet(root=tmp_path)
    validated = trainer.validate(model, datamodule=data, verbose=False)
    tested = trainer.test(model, datamodule=data, verbose=False)
    with torch.no_grad():
        right = model.eval().net(data.test_set.images).argmax(1) == data.test_set.labels
    assert len(right) == 1000
    assert validated[0]["accuracy"] == tested[0]["accuracy"] == pytest.approx(right.double().mean().item())


def test_images_that_come_with_the_examples(fashion):
    """600 training and 100 test images of each class, scaled to [0, 1] and normalised as the paper does."""
    data = fashion.FashionData()
    data.setup("fit")
    for images, per_class in ((data.train_set, 600), (data.test_set, 100)):
        assert images.labels.bincount().tolist() == [per_class] * 10
        assert images.images.shape == (10 * per_class, 1, 28, 28)
        assert images.images.aminmax() == pytest.approx(((0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081))


def test_training_images_are_mirrored_at_random(fashion):
    """A training image comes as it is or mirrored, each about half of the time; a test image comes as it is."""
    data = fashion.FashionData()
    data.setup("fit")
    torch.manual_seed(0)
    mirrored = 0
    for index in range(400):
        image, label = data.train_set[index]
        stored = data.train_set.images[index]
        assert label == data.train_set.labels[index]
        assert torch.equal(image, stored) or torch.equal(image, stored.flip(-1))
        mirrored += not torch.equal(image, stored)
        assert torch.equal(data.test_set[index][0], data.test_set.images[index])
    assert 160 < mirrored < 240  # 200 ± 4 · 10, the standard deviation


def idx(path: Path, *shape: int, first: int) -> None:
    """Write bytes that count up, in the original files' format."""
    header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    with gzip.open(path, "wb") as file:
        file.write(header + bytes(range(first, first + math.prod(shape))))


def test_original_files_are_read(fashion, tmp_path):
    """The four original files are read as they are: sizes from their headers, bytes in order, each in its place."""
    idx(tmp_path / "train-images-idx3-ubyte.gz", 2, 2, 3, first=0)
    idx(tmp_path / "train-labels-idx1-ubyte.gz", 2, first=20)
    idx(tmp_path / "t10k-images-idx3-ubyte.gz", 1, 2, 3, first=30)
    idx(tmp_path / "t10k-labels-idx1-ubyte.gz", 1, first=40)
    arrays = fashion.FashionData(data=str(tmp_path)).arrays()
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "train_images": [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]],
        "train_labels": [20, 21],
        "test_images": [[[30, 31, 32], [33, 34, 35]]],
        "test_labels": [40],
    }


def _python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_python_of_the_readme(tmp_path, monkeypatch):
    """The README's Python runs to the end, with a model and data in place of the reader's."""
    from models import Indexed, Recorder, loader  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    train, best, own = _python_blocks()
    model = Recorder()
    names = {"model": model, "train_set": Indexed(300), "val_loader": loader(8, 8), "DataLoader": DataLoader}
    short = train.replace("max_epochs=200", "max_epochs=2, accelerator='cpu', logger=False, enable_checkpointing=False")
    assert short != train
    exec(short.replace("num_workers=4", "num_workers=0"), names)
    assert model.sizes[0] == 256
    exec(best, names)
    assert names["adaptive"].policy == names["rule"]
    exec(own, names)
    assert names["Doubling"](every=1.0).damping(None, type("P", (), {"epochs": 2.5})) == 4.0


@pytest.mark.parametrize("script", ["loader.py", "step.py"])
def test_benchmarks_run(script, tmp_path):
    """The benchmarks print a table of ratios beside their targets."""
    out = run(str(ROOT / "benchmarks" / script), "--quick", cwd=tmp_path)
    assert "target" in out
    assert "ratio" in out


def test_ddp(tmp_path):
    """Two processes started by torchrun train alike, and a second start goes on from the checkpoint of the first."""
    script = str(ROOT / "examples" / "ddp.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    options = ("--limit", "600", "--batch-size", "8", "--out", "logs")
    lines = [
        run(*torchrun, *options, "--epochs", epochs, *more, cwd=tmp_path) for epochs, *more in ("2", ("3", "--resume"))
    ]
    for rank in (0, 1):
        told = [
            re.findall(rf"rank {rank}, epoch (\d+): (\d+) updates, batch size (\d+) = 2 x (\d+)", out) for out in lines
        ]
        assert [[int(line[0]) for line in part] for part in told] == [[1, 2], [3]]
        updates = [int(line[1]) for part in told for line in part]
        assert updates == sorted(set(updates))
        assert updates[0] < 600 / 16  # it grew
        assert all(int(total) == 2 * int(each) for part in told for _, _, total, each in part)
