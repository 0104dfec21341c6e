# SPDX-License-Identifier: Apache-2.0
"""The variance of single samples' gradients, measured by training, against its definition."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from gradients import gradients_of_samples, variance_of_two
from lightning.pytorch.plugins.precision import MixedPrecision
from models import Indexed, Measuring, Recorder, fit, loader

from lightning_adabatch import AdaptiveBatchSize


def train(sizes, *, samples=64, batch_size=8, requires=("loss", "grad_norm_sq", "grad_variance"), ours=None, **kwargs):
    """Train with weights that stay; return the indices of the parts of each update, and what was observed."""
    policy = Measuring(list(sizes), requires=frozenset(requires))
    module = kwargs.pop("module", None) or Recorder(lr=0.0)
    callback = AdaptiveBatchSize(policy, **(ours or {}))
    counts = []
    module.on_train_batch_end = lambda *_: counts.append(callback.updates)
    shuffle = kwargs.pop("shuffle", True)
    fit(module, loader(samples, batch_size, shuffle=shuffle), callbacks=[callback], **kwargs)
    updates, parts = [], []
    for batch, (before, after) in zip(module.batches, pairwise([0, *counts]), strict=True):
        parts.append(batch.indices)
        if after > before:
            updates.append(parts)
            parts = []
    return updates, policy.seen, callback


def exact(samples: int) -> tuple[float, float]:
    """Return tr Σ over the data set, with n - 1 in the denominator, and |G|²."""
    gradients = gradients_of_samples(Recorder(), Indexed(samples))
    return gradients.var(0).sum().item(), gradients.mean(0).square().sum().item()


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_update_is_its_formula(accumulate, clip, tmp_path):
    """From the first part's mean gradient and the whole update's, whatever the sizes, before clipping."""
    gradients = gradients_of_samples(Recorder(), Indexed(101))
    flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    updates, seen, _ = train([8 * accumulate, 9, 31, 2, 3, 24], samples=101, root=tmp_path, **flags)
    assert len(updates) == len(seen) > 8
    assert min(len(parts) for parts in updates) == 2
    for parts, row in zip(updates, seen, strict=True):
        every = [index for part in parts for index in part]
        assert row.batch_size == len(every)
        assert row.grad_variance == pytest.approx(variance_of_two(gradients, [parts[0]], every), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("adapt", ["batch_size", "lr"])
def test_on_average_it_is_the_trace(adapt, tmp_path):
    """Over 640 updates the mean is tr Σ within four standard errors, and |G|² without its noise is |G|²."""
    split = {"batch_size": 4, "accumulate_grad_batches": 2, "ours": {"adapt": "lr"}} if adapt == "lr" else {}
    torch.manual_seed(3)
    _, seen, _ = train([8], epochs=80, root=tmp_path, **split)
    trace, norm_sq = exact(64)
    found = torch.tensor([row.grad_variance for row in seen], dtype=torch.float64)
    assert len(found) == 640
    assert abs(found.mean().item() - trace) < 4 * found.std().item() / math.sqrt(640)
    signal = torch.tensor([row.grad_norm_sq - row.grad_variance / 8 for row in seen], dtype=torch.float64)
    # A training set of 64 has a mean gradient of its own: batches of it are drawn without repetition.
    assert abs(signal.mean().item() - (norm_sq - trace / 64)) < 4 * signal.std().item() / math.sqrt(640)
    assert 4 * found.std().item() / math.sqrt(640) < 0.25 * trace


def test_windows_of_unequal_batches(tmp_path):
    """With adapt="lr" an epoch's last window, of 4 and 2 samples, weighs its batches alike, and counts so."""
    gradients = gradients_of_samples(Recorder(), Indexed(14))
    updates, seen, _ = train(
        [8], samples=14, batch_size=4, accumulate_grad_batches=2, ours={"adapt": "lr"}, root=tmp_path, shuffle=False
    )
    assert [len(part) for part in updates[1]] == [4, 2]
    one, other = (gradients[part].mean(0) for part in updates[1])
    whole = ((one + other) / 2).square().sum()
    effective = 4 / (1 / 4 + 1 / 2)
    expected = (one.square().sum() - whole) / (1 / 4 - 1 / effective)
    assert seen[1].grad_variance == pytest.approx(expected.item(), rel=1e-4)


def test_under_a_scaler(tmp_path):
    """The factor of a gradient scaler is not in it."""
    results = []
    for plugins in ([], [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4096.0))]):
        _, seen, _ = train([8], shuffle=False, root=tmp_path, plugins=plugins)
        results.append([row.grad_variance for row in seen])
    assert results[1] == pytest.approx(results[0], rel=0.1, abs=0.05)


def test_an_update_of_one_sample_shows_none(tmp_path):
    """An epoch's single last sample has no variance: it is no observation, and is counted."""
    _, seen, ours = train([8], samples=17, epochs=1, root=tmp_path)
    assert [row.batch_size for row in seen] == [8, 8]
    assert ours._controller.skipped == 1
    assert ours.updates == 3


def test_the_norm_is_shown_only_if_asked_for(tmp_path):
    """A policy that asks for the variance alone gets it alone."""
    _, seen, _ = train([8], requires=("grad_variance",), root=tmp_path)
    assert {(row.loss, row.grad_norm_sq) for row in seen} == {(None, None)}
    assert all(math.isfinite(row.grad_variance) for row in seen)


@pytest.mark.parametrize("requires", [("loss",), ("loss", "grad_norm_sq")])
def test_what_is_not_asked_for_costs_nothing(requires, tmp_path):
    """Without a need for the variance batches stay whole."""
    updates, seen, _ = train([8], requires=requires, root=tmp_path)
    assert {len(parts) for parts in updates} == {1}
    assert {row.grad_variance for row in seen} == {None}


def test_the_smallest_batch_has_two_samples(tmp_path):
    """A rule that asks for a single sample gets two: it would see no variance any more."""
    updates, _, _ = train([8, 1, 1], root=tmp_path)
    assert [len(part) for part in updates[1]] == [1, 1]


@pytest.mark.parametrize("rest", [1, 2, 3, 4])
def test_rest_of_an_epoch_is_no_part_of_one_sample(rest, tmp_path):
    """Batch normalization survives what is left: fewer than four samples are one part, and show no variance."""

    class Normalised(Recorder):
        def __init__(self) -> None:
            super().__init__(lr=0.0)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))

    updates, seen, ours = train([10], samples=38 + rest, batch_size=8, module=Normalised(), epochs=1, root=tmp_path)
    last = [len(part) for part in updates[-1]]
    assert last == {1: [6, 5], 2: [2], 3: [3], 4: [2, 2]}[rest]
    assert len(seen) == 4 + (rest == 4)
    assert ours.samples == 38 + rest  # 8 and three times 10, and the rest
