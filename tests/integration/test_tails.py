# SPDX-License-Identifier: Apache-2.0
"""The end of an epoch: what is left is kept, carried or dropped, and no sample stands alone (invariant 3)."""

from __future__ import annotations

import math
from itertools import islice

import lightning.pytorch as pl
import pytest
import torch
from models import Indexed, Recorder, Streamed, adapt, fit, loader, quiet
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize, Constant, Schedule


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
    callback = AdaptiveBatchSize(Schedule({0: 4, 2: 500}), max_batch_size=math.inf)
    fit(module, loader(20, 4, drop_last=True), loader(8, 8), callbacks=[callback], epochs=3, root=tmp_path)
    assert module.sizes_in(0) == [4, 4, 4, 4, 4]
    assert module.sizes_in(1) == module.sizes_in(2) == [20]
    assert {batch.lr for batch in module.batches} == {0.1}
    assert callback.batch_size == 20
    assert len(module.validations) == 3


def test_carried_samples_lose_nothing(tmp_path):
    """With "carry" every sample is trained as often as the next one, but for those still carried at the end."""
    module = Recorder()
    script = [8, 8, 8, 10, 7, 7, 12, 5, 9, 11]
    ours = adapt(*script * 3, tail="carry")
    fit(module, loader(53, 8), callbacks=[ours], epochs=4, root=tmp_path)
    order = [index for batch in module.batches for index in batch.indices]
    assert order == [*range(53)] * 3 + [*range(len(order) - 3 * 53)]
    assert 4 * 53 - len(order) < module.sizes[-1]
    assert ours.samples == len(order)


def test_carrying_is_not_dropping(tmp_path):
    """With drop_last on the loader, tail="carry" wins: 21 = 5 · 4 + 1 gives 5, 5 and 5 batches, and 3 are carried."""
    module = Recorder()
    ours = AdaptiveBatchSize(Constant(), tail="carry")
    fit(module, loader(21, 4, drop_last=True), callbacks=[ours], epochs=4, root=tmp_path)
    assert [len(module.sizes_in(epoch)) for epoch in range(4)] == [5, 5, 5, 6]  # 21, 1 + 21, 2 + 21, 3 + 21
    assert {batch.size for batch in module.batches} == {4}


def test_a_look_between_epochs_takes_nothing_that_was_carried(tmp_path):
    """A batch that users' code looks at after an epoch does not use up the samples carried into the next one."""

    class Peek(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            next(iter(trainer.train_dataloader))

    module = Recorder()
    fit(module, loader(74, 8), callbacks=[adapt(8, tail="carry"), Peek()], root=tmp_path)
    order = [index for batch in module.batches for index in batch.indices]
    assert order == [*range(74), *range(70)]  # 2 · 74 = 18 · 8 + 4


def test_keeping_wins_over_drop_last(tmp_path):
    """With drop_last on the loader, tail="keep" trains what is left."""
    module = Recorder()
    ours = AdaptiveBatchSize(Constant(), tail="keep")
    fit(module, loader(22, 4, drop_last=True), loader(8, 8), callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 4, 4, 4, 4, 2]
    assert module.batches[-1].last
    assert module.validations == [6]


def test_last_batch_is_settled_when_it_is_handed_out(tmp_path):
    """A smaller size decided after the last batch does not add batches to its epoch."""
    module = Recorder()
    fit(module, loader(32, 16), loader(8, 8), callbacks=[adapt(16, 16, 4)], root=tmp_path)
    assert module.sizes == [16, 16] + [4] * 8
    assert module.validations == [2, 10]


@pytest.mark.parametrize("reload", [0, 1])
def test_carried_samples_survive_a_reload(reload, tmp_path):
    """33 samples in batches of 8 over 9 epochs are 37 batches, and one sample is left, reloaded or not."""
    module = Recorder()
    ours = AdaptiveBatchSize(Constant(), tail="carry")
    flags = {"reload_dataloaders_every_n_epochs": reload}
    fit(module, loader(33, 8), callbacks=[ours], epochs=9, root=tmp_path, **flags)
    assert sum(module.sizes) == ours.samples == 296


def said(ours: AdaptiveBatchSize, train, caplog, tmp_path) -> list[str]:
    """Return what is said of small last batches in a run of three epochs."""
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(Recorder(), train, callbacks=[ours], epochs=3, root=tmp_path)
    return [message for message in caplog.messages if "last batch" in message]


def test_small_last_batch_is_named_once(caplog, tmp_path):
    """A rest of 2 at a size of 20 is a noisy update right before validation: with a remedy, once in a run."""
    (message,) = said(adapt(4, 20), loader(66, 4), caplog, tmp_path)  # 4 + 3 · 20 + 2
    assert "an epoch's last batch had 2 samples instead of 20" in message
    assert "tail='carry'" in message


@pytest.mark.parametrize(
    ("ours", "train"),
    [
        (lambda: adapt(4, 20), lambda: loader(67, 4)),  # a rest of 3 is more than a tenth
        (lambda: adapt(4, 20, tail="keep"), lambda: loader(66, 4)),  # as it was asked for
        (lambda: adapt(4, 20, tail="carry"), lambda: loader(66, 4)),
        (lambda: adapt(4, 20, tail="drop"), lambda: loader(66, 4)),
        (lambda: adapt(4, 20), lambda: loader(66, 4, drop_last=True)),
        (
            lambda: adapt(4, 20, max_batch_size=64),
            lambda: DataLoader(Streamed(66), 4),
        ),  # what a stream left cannot be carried
        (lambda: AdaptiveBatchSize(Constant()), lambda: loader(42, 20)),
        (lambda: AdaptiveBatchSize(Schedule({0: 40}), adapt="lr"), lambda: loader(42, 20)),
    ],
    ids=["larger", "keep", "carry", "drop", "drop_last", "stream", "Constant", "lr"],
)
def test_other_last_batches_are_not_worth_a_word(ours, train, caplog, tmp_path):
    """Tails that are not small, were asked for, are not trained, are of the user's own size, or cannot be carried."""
    assert said(ours(), train(), caplog, tmp_path) == []


def test_small_last_batch_in_parts_is_named(caplog, tmp_path):
    """An update in micro-batches is one batch, of all its samples."""
    ours = adapt(4, 20, max_device_batch_size=4)
    (message,) = said(ours, loader(66, 4), caplog, tmp_path)
    assert "had 2 samples instead of 20" in message


@pytest.mark.parametrize("tail", ["keep", "drop"])
def test_what_was_carried_is_trained_once_by_a_run_that_carries_no_longer(tail, tmp_path):
    """A checkpoint of a run with tail="carry", gone on from with another: no sample is trained again and again."""
    first = adapt(4, 20, tail="carry")
    trainer = fit(Recorder(), loader(66, 4), callbacks=[first], epochs=1, root=tmp_path)
    trainer.save_checkpoint(tmp_path / "carried.ckpt")
    assert first.samples == 64
    module, ours = Recorder(), adapt(4, 20, tail=tail)
    trainer = quiet(callbacks=[ours], epochs=4, root=tmp_path)
    trainer.fit(module, loader(66, 4), ckpt_path=tmp_path / "carried.ckpt")
    assert [len(module.seen_in(epoch)) for epoch in (1, 2, 3)] == ([66, 66, 66] if tail == "keep" else [60, 60, 60])
    assert sum(module.seen_in(1).values()) == (68 if tail == "keep" else 60)
    assert [max(module.seen_in(epoch).values()) for epoch in (2, 3)] == [1, 1]


@pytest.mark.parametrize("steps", [4, 6])
def test_indices_that_are_not_positions(steps, tmp_path):
    """A sampler gives numbers beyond the length of the data, which are its keys: what is carried is not lost.

    Resumed at an epoch's end and in its middle.
    """

    class Keyed(Indexed):
        def __getitem__(self, key):
            return super().__getitem__(key - 1000)

    keys = range(1000, 1066)
    train = [DataLoader(Keyed(66), 4, sampler=keys) for _ in range(3)]
    whole = Recorder()
    fit(whole, train[0], callbacks=[adapt(4, 20, tail="carry")], epochs=3, root=tmp_path)
    trainer = quiet(callbacks=[adapt(4, 20, tail="carry")], max_steps=steps, root=tmp_path)
    first, second = Recorder(), Recorder()
    trainer.fit(first, train[1])
    trainer.save_checkpoint(tmp_path / "keys.ckpt")
    quiet(callbacks=[adapt(4, 20, tail="carry")], epochs=3, root=tmp_path).fit(
        second, train[2], ckpt_path=tmp_path / "keys.ckpt"
    )
    assert [b.indices for b in first.batches + second.batches] == [b.indices for b in whole.batches]


@pytest.mark.parametrize(
    ("steps", "says"), [(4, "2 of the samples that the checkpoint had left"), (6, "order of the epoch")]
)
def test_what_was_carried_may_be_gone(steps, says, tmp_path):
    """A checkpoint of an epoch's end or middle, gone on from with fewer data: all are trained, and it is said."""
    trainer = quiet(callbacks=[adapt(4, 20, tail="carry")], max_steps=steps, root=tmp_path)
    trainer.fit(Recorder(), loader(66, 4, shuffle=False))
    trainer.save_checkpoint(tmp_path / "carried.ckpt")  # with 64 and 65 carried
    resumed = Recorder()
    trainer = quiet(callbacks=[adapt(4, 20, tail="carry")], epochs=3, root=tmp_path)
    with pytest.warns(UserWarning, match=says):
        trainer.fit(resumed, loader(40, 4), ckpt_path=tmp_path / "carried.ckpt")
    assert [len(resumed.seen_in(epoch)) for epoch in (1, 2)] == [40, 40]


@pytest.mark.parametrize("batches", [1, None])
def test_a_look_at_the_data_carries_nothing(batches, tmp_path):
    """Statistics of the training set, taken in on_train_epoch_start: the epochs have the same samples."""

    class Looks(Recorder):
        def on_train_epoch_start(self):
            assert [len(batch) for batch in islice(self.trainer.train_dataloader, batches)]

    plain, looks = Recorder(), Looks()
    for module in (plain, looks):
        fit(module, loader(103, 10), callbacks=[adapt(10, 13, 17, 9, 12, tail="carry")], epochs=4, root=tmp_path)
    assert [batch.indices for batch in looks.batches] == [batch.indices for batch in plain.batches]
