# SPDX-License-Identifier: Apache-2.0
"""The examples run to the end as a user would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(tmp_path):
    """It prints a table that adds up, draws its picture, writes TensorBoard logs, and says how to open them."""
    script = str(ROOT / "examples" / "quickstart.py")
    out = run(script, "--limit", "600", "--epochs", "2", "--batch-size", "50", "--out", "logs", cwd=tmp_path)
    constant = re.search(r"^constant +([\d,]+) +([\d,]+) +([\d.]+) +([\d,]+)", out, re.MULTILINE)
    adaptive = re.search(r"^RadaDamp +([\d,]+) +([\d,]+) +([\d.]+) +([\d,]+)", out, re.MULTILINE)
    assert constant is not None
    assert adaptive is not None
    assert constant.groups() == ("24", "1,200", "2.0", "50")  # 2 · 600 / 50
    assert adaptive[2] == "1,200"
    assert int(adaptive[1]) <= 24
    assert "tensorboard --logdir logs/tensorboard" in out
    assert (tmp_path / "logs" / "quickstart.png").stat().st_size > 10_000
    assert len(list((tmp_path / "logs").rglob("events.out.tfevents*"))) == 2


def test_parameters_of_the_papers_network(monkeypatch):
    """The network has the paper's 111,050 parameters."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from fashion import PaperNet  # noqa: PLC0415  # importable only now

    assert sum(p.numel() for p in PaperNet().parameters()) == 111_050


def test_original_files_are_read(tmp_path, monkeypatch):
    """The four original files are read as they are: sizes from their headers, bytes in order."""
    import gzip  # noqa: PLC0415

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from fashion import read_idx  # noqa: PLC0415

    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in (2, 2, 3))
    with gzip.open(tmp_path / "x.gz", "wb") as file:
        file.write(header + bytes(range(12)))
    assert read_idx(tmp_path / "x.gz").tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


def _python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_python_of_the_readme(tmp_path, monkeypatch):
    """The README's Python runs to the end, with a model and data in place of the reader's."""
    from models import Indexed, Recorder, loader  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    train, own = _python_blocks()
    model = Recorder()
    names = {"model": model, "train_set": Indexed(300), "val_loader": loader(8, 8), "DataLoader": DataLoader}
    short = train.replace("max_epochs=200", "max_epochs=2, accelerator='cpu', logger=False, enable_checkpointing=False")
    assert short != train
    exec(short.replace("num_workers=4", "num_workers=0"), names)
    assert model.sizes[0] == 256
    exec(own, names)
    assert names["Doubling"](every=1.0).damping(None, type("P", (), {"epochs": 2.5})) == 4.0


@pytest.mark.parametrize("script", ["loader.py", "step.py"])
def test_benchmarks_run(script, tmp_path):
    """The benchmarks print a table of ratios beside their targets."""
    out = run(str(ROOT / "benchmarks" / script), "--quick", cwd=tmp_path)
    assert "target" in out
    assert "ratio" in out
