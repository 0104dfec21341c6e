# SPDX-License-Identifier: Apache-2.0
"""Exact sizes, every sample once, and Lightning's own counts (invariants 1, 3 and 4)."""

from __future__ import annotations

import random

import pytest
import torch
from models import Recorder, adapt, fit, loader

from lightning_adabatch import AdaptiveBatchSize, Schedule

GROW = [4, 4, 4, 4, 16]


@pytest.mark.parametrize("workers", [0, 2])
def test_growth_keeps_validation_and_counts(workers, tmp_path):
    """C01, C03: after a growth every epoch validates once, at its end, and the next epoch's counts are right."""
    module = Recorder()
    fit(module, loader(64, 4, num_workers=workers), loader(8, 8), callbacks=[adapt(*GROW)], root=tmp_path)
    assert module.sizes_in(0) == [4, 4, 4, 4, 16, 16, 16]
    assert module.sizes_in(1) == [16, 16, 16, 16]
    assert module.validations == [7, 7 + 4]
    assert [batch.planned for batch in module.batches] == [16] * 4 + [7] * 3 + [4] * 4
    assert [batch.last for batch in module.batches] == [False] * 6 + [True] + [False] * 3 + [True]


def test_shrink_trains_all_samples(tmp_path):
    """C02: after a shrink both epochs train all 64 samples exactly once, in 2 + 8 and in 16 batches."""
    module = Recorder()
    fit(module, loader(64, 16), loader(8, 8), callbacks=[adapt(16, 16, 4)], root=tmp_path)
    assert module.sizes_in(0) == [16, 16] + [4] * 8
    assert module.sizes_in(1) == [4] * 16
    assert module.seen_in(0) == module.seen_in(1) == dict.fromkeys(range(64), 1)
    assert module.validations == [10, 10 + 16]


def test_shrink_then_constant_epochs(tmp_path):
    """A shrink is followed by epochs that are complete too (64 = 4 · 16 = 16 · 4)."""
    module = Recorder()
    fit(module, loader(64, 16), callbacks=[adapt(16, 16, 4)], epochs=3, root=tmp_path)
    assert [len(module.sizes_in(epoch)) for epoch in range(3)] == [2 + 8, 16, 16]


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_with_shuffle(drop_last, tmp_path):
    """C04: with four changes an epoch every sample is seen once; drop_last misses fewer than one batch."""
    rng = random.Random(0)
    script = [8]
    while len(script) < 200:
        script += [rng.choice([3, 5, 8, 13, 21])] * rng.randint(2, 4)
    module = Recorder()
    fit(module, loader(103, 8, shuffle=True, drop_last=drop_last), callbacks=[adapt(*script)], epochs=3, root=tmp_path)
    for epoch in range(3):
        seen = module.seen_in(epoch)
        assert set(seen.values()) == {1}
        missing = 103 - len(seen)
        assert missing == 0 if not drop_last else missing < module.sizes_in(epoch)[-1]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_next_batch_has_the_new_size(workers, persistent, tmp_path):
    """C05, C06: the batch after the decision has its size, and the batches are those of 0 workers."""
    runs = []
    for count in (0, workers):
        module = Recorder()
        more = {"prefetch_factor": 2, "persistent_workers": persistent} if count else {}
        torch.manual_seed(1)
        train = loader(80, 8, num_workers=count, shuffle=True, **more)
        callback = adapt(8, 8, 12, 4, 16)
        fit(module, train, callbacks=[callback], epochs=1, root=tmp_path)
        runs.append([batch.indices for batch in module.batches])
    assert [len(indices) for indices in runs[1]] == [8, 8, 12, 4, 16, 16, 16]
    assert runs[0] == runs[1]


def test_order_changes_each_epoch(tmp_path):
    """C10: with shuffle, epochs have different orders."""
    module = Recorder()
    fit(module, loader(64, 8, shuffle=True), callbacks=[adapt(8, 16)], root=tmp_path)
    orders = [[i for batch in module.batches if batch.epoch == epoch for i in batch.indices] for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_leftover_of_one_joins_the_batch_before(tmp_path):
    """C25: BatchNorm on 33 samples survives sizes that would leave one sample, one above the cap at most."""

    class Normalised(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))

    for size, expected in ((4, [12, 4, 4, 4, 4, 4 + 1]), (10, [12, 10, 10 + 1]), (16, [12, 16, 5])):
        module = Normalised()
        fit(module, loader(33, 12), callbacks=[adapt(12, size)], epochs=1, root=tmp_path)
        assert sum(module.sizes) == 33
        assert min(module.sizes) > 1
        assert module.sizes == expected


def test_own_size_may_leave_one(tmp_path):
    """A leftover of one at the loader's own size is the user's: 33 = 4 · 8 + 1."""
    module = Recorder()
    fit(module, loader(33, 8), callbacks=[adapt(8)], epochs=1, root=tmp_path)
    assert module.sizes == [8, 8, 8, 8, 1]


@pytest.mark.parametrize(
    ("tail", "first", "second"),
    [
        ("keep", [8] * 8 + [10], [16] * 4 + [10]),
        ("drop", [8] * 9, [16] * 4),
        ("carry", [8] * 9, [16] * 4),  # 2 carried + 74 = 4 · 16 + 12
    ],
)
def test_tails(tail, first, second, tmp_path):
    """Invariant 3: 74 samples, 16 wanted with 10 left: one more batch of 8 where the rest is not kept."""
    module = Recorder()
    script = [8] * 8 + [16]
    fit(module, loader(74, 8), callbacks=[adapt(*script, tail=tail)], root=tmp_path)
    assert module.sizes_in(0) == first
    assert module.sizes_in(1) == second
    if tail == "carry":
        assert module.batches[len(first)].indices[:2] == [72, 73]


def test_size_never_exceeds_an_epoch(tmp_path):
    """Without a cap the size is limited by the data: one batch of all 20 samples, and no LR decay."""
    module = Recorder()
    callback = AdaptiveBatchSize(Schedule({0: 4, 2: 500}), max_batch_size=float("inf"))
    fit(module, loader(20, 4, drop_last=True), loader(8, 8), callbacks=[callback], epochs=3, root=tmp_path)
    assert module.sizes_in(0) == [4, 4, 4, 4, 4]
    assert module.sizes_in(1) == module.sizes_in(2) == [20]
    assert {batch.lr for batch in module.batches} == {0.1}
    assert callback.batch_size == 20
    assert len(module.validations) == 3


def test_limit_train_batches_counts_batches(tmp_path):
    """limit_train_batches=3 is three batches, whatever their size; validation follows the third."""
    module = Recorder()
    fit(module, loader(64, 4), loader(8, 8), callbacks=[adapt(4, 8, 16)], limit_train_batches=3, root=tmp_path)
    assert module.sizes == [4, 8, 16, 16, 16, 16]
    assert module.validations == [3, 6]


def test_limit_train_batches_as_a_share_is_of_the_data(tmp_path):
    """limit_train_batches=0.5 is half of the batches at the initial size, as samples: 8 · 4 = 32."""
    module = Recorder()
    fit(module, loader(64, 4), loader(8, 8), callbacks=[adapt(4, 4, 8)], limit_train_batches=0.5, root=tmp_path)
    assert module.sizes_in(0) == [4, 4, 8, 8, 8]
    assert module.sizes_in(1) == [8, 8, 8, 8]
    assert module.validations == [5, 9]


def test_overfit_batches_fixes_the_samples(tmp_path):
    """C56: overfit_batches=2 trains the same 2 · 4 samples in every epoch, in batches of the size in force."""
    module = Recorder()
    fit(module, loader(64, 4), callbacks=[adapt(4, 4, 8)], overfit_batches=2, epochs=3, root=tmp_path)
    assert module.sizes == [4, 4, 8, 8]
    for epoch in range(3):
        assert module.seen_in(epoch) == dict.fromkeys(range(8), 1)


def test_max_steps(tmp_path):
    """max_steps counts updates and ends in mid-epoch."""
    module = Recorder()
    callback = adapt(4, 8)
    fit(module, loader(64, 4), callbacks=[callback], epochs=-1, max_steps=10, root=tmp_path)
    assert module.sizes == [4] + [8] * 7 + [4] + [8]  # 64 = 4 + 7 · 8 + 4
    assert callback.updates == 10
