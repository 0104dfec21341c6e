# SPDX-License-Identifier: Apache-2.0
"""Exact sizes, every sample once, and Lightning's own counts (invariants 1, 3 and 4)."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import pytest
import torch
from models import Recorder, adapt, fit, loader

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


@pytest.mark.parametrize(("initial", "script"), [(4, GROW), (16, [16, 16, 4]), (64, [64, 16])])
def test_counts_of_lightning_agree(initial, script, tmp_path):
    """At every batch's start and end the loop, the combined loader, its iterator and the fetcher count alike."""
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.look(trainer, batch_idx)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.look(trainer, batch_idx)

        def look(self, trainer, batch_idx):
            fit_loop = trainer.fit_loop
            combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
            assert combined.limits == combined._iterator.limits == [fit_loop.max_batches]
            assert len(combined) == len(trainer.train_dataloader) == fetcher.length == fit_loop.max_batches
            assert fetcher.done == (batch_idx + 1 == fit_loop.max_batches)
            seen.append(fit_loop.max_batches)

    module = Recorder()
    fit(module, loader(64, initial), callbacks=[adapt(*script), Look()], epochs=3, root=tmp_path)
    assert len(seen) == 2 * len(module.batches)
    assert seen[-1] == len(module.sizes_in(2)) == 64 // script[-1]


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


@pytest.mark.parametrize("prefetch", [1, 5])
@pytest.mark.parametrize("persistent", [False, True])
def test_exact_sizes_with_drop_last(prefetch, persistent, tmp_path):
    """Invariant 1: with drop_last every size is the one decided, however far the workers run ahead."""
    module = Recorder()
    train = loader(90, 8, num_workers=2, drop_last=True, prefetch_factor=prefetch, persistent_workers=persistent)
    callback = adapt(8, 3, 20, 21, 5, 9)
    fit(module, train, loader(8, 8), callbacks=[callback], root=tmp_path)
    assert module.sizes_in(0) == [8, 3, 20, 21, 5] + [9] * 3  # 84 of 90
    assert module.sizes_in(1) == [9] * 10
    assert [i for batch in module.batches for i in batch.indices] == [*range(84), *range(90)]
    assert module.validations == [8, 18]


def test_order_changes_each_epoch(tmp_path):
    """C10: with shuffle, epochs have different orders."""
    module = Recorder()
    fit(module, loader(64, 8, shuffle=True), callbacks=[adapt(8, 16)], root=tmp_path)
    orders = [[i for batch in module.batches if batch.epoch == epoch for i in batch.indices] for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


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
