# SPDX-License-Identifier: Apache-2.0
"""The signals at a checkpoint are their definitions, summed up image by image."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).parents[2]


@pytest.fixture
def signals(monkeypatch):
    """The script as a module; it is importable from its folder only."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("signals")


@pytest.fixture
def images(signals):
    """Forty images that nothing mirrors."""
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (40, 28, 28), dtype=torch.uint8, generator=draw)
    return signals.WholeBatches(pixels, torch.randint(0, 10, (40,), generator=draw), flip=False)


def single_gradients(net, images):
    rows = []
    for index in range(len(images)):
        pictures, labels = images.__getitems__([index])
        gradient = torch.autograd.grad(cross_entropy(net.net(pictures), labels), list(net.parameters()))
        rows.append(torch.cat([part.flatten() for part in gradient]).double())
    return torch.stack(rows)


def test_signals_are_their_definitions(signals, images):
    """In batches of one: F, tr Σ without bias, and the squared mean less its share of the noise."""
    torch.manual_seed(0)
    net = signals.Net(None)
    found, rows = signals.measure(net, images, 1), single_gradients(net, images)
    variance = float((rows - rows.mean(0)).square().sum() / 39)
    assert found.loss == pytest.approx(float(cross_entropy(net.net(images.images), images.labels).detach()), rel=1e-5)
    assert found.grad_variance == pytest.approx(variance, rel=1e-4)
    assert found.grad_norm_sq == pytest.approx(float(rows.mean(0).square().sum()) - variance / 40, rel=1e-4)
    assert found.noise_scale == pytest.approx(found.grad_variance / found.grad_norm_sq)


def test_larger_batches_estimate_the_same(signals, images):
    """Over many orders the mean from batches of five is that of single images; a rest of a batch is left out."""
    torch.manual_seed(0)
    net = signals.Net(None)
    exact = signals.measure(net, images, 1)
    found = [signals.measure(net, images, 5) for _ in range(60)]
    assert sum(one.grad_variance for one in found) / 60 == pytest.approx(exact.grad_variance, rel=0.05)
    with pytest.raises(ValueError, match=r"40 images make no two batches of 30\. Set a smaller --batch-size"):
        signals.measure(net, images, 30)


def test_script(signals, tmp_path, monkeypatch, capsys):
    """A checkpoint of a run gives a line of numbers."""
    example = importlib.import_module("fashion_mnist")
    small = ["--limit", "96", "--batch-size", "16", "--max-batch-size", "32", "--epochs", "1", "--accelerator", "cpu"]
    example.train(example.arguments([*small, "--out", str(tmp_path)]))
    path = tmp_path / "RadaDamp-1000" / "last.ckpt"
    monkeypatch.setattr("sys.argv", ["signals", str(path), "--limit", "96", "--batch-size", "16"])
    signals.main()
    assert re.search(r"^RadaDamp-1000/last.ckpt +2\.[23]\d+ +-?\d", capsys.readouterr().out, re.MULTILINE)
