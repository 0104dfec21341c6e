# SPDX-License-Identifier: Apache-2.0
"""Data that hooks change after the callback planned the epoch, and what is planned before the first one."""

from __future__ import annotations

import math
from collections import Counter

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from models import Indexed, Recorder, adapt, fit, loader
from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch import AdaptiveBatchSize, Constant, NoiseScale, Schedule


class Curriculum(Indexed):
    """Data of which a hook says how much is used."""

    def __init__(self, used):
        super().__init__(256)
        self.used = used

    def __len__(self):
        return self.used


class InModule(Recorder):
    """Sets the length in the hook of the module, which comes after all callbacks'."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths = lengths

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.used = self.lengths[self.current_epoch]


class InCallback(pl.Callback):
    """Sets the length in the hook of a callback."""

    def __init__(self, lengths):
        self.lengths = lengths

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.dataset.used = self.lengths[trainer.current_epoch]


@pytest.mark.parametrize("interval", [1.0, 0.5])
@pytest.mark.parametrize("where", ["module", "callback before", "callback after"])
@pytest.mark.parametrize(
    ("start", "lengths"), [(256, (64, 128, 256)), (256, (256, 8, 256)), (64, (64, 48, 256)), (64, (256, 64, 64))]
)
def test_a_length_that_a_hook_sets(start, lengths, where, interval, tmp_path):
    """Each epoch has all of its samples once, in batches of the size decided, and is validated as often as asked."""
    ours, theirs = adapt(8, 8, 8, 8, 8, 8, 8, 8, 8, 16), InCallback(lengths)
    module = InModule(lengths) if where == "module" else Recorder()
    callbacks = {"module": [ours], "callback before": [theirs, ours], "callback after": [ours, theirs]}[where]
    data = DataLoader(Curriculum(start), 8, shuffle=True)
    flags = {"val_check_interval": interval, "epochs": 3, "root": tmp_path}
    fit(module, data, loader(8, 8), callbacks=callbacks, **flags)
    assert [module.seen_in(epoch) for epoch in range(3)] == [Counter(range(length)) for length in lengths]
    ends, before = [], 0
    for epoch in range(3):
        sizes = module.sizes_in(epoch)
        half = next(i for i, _ in enumerate(sizes) if sum(sizes[: i + 1]) >= lengths[epoch] / 2) + 1
        ends += sorted({before + half, before + len(sizes)} if interval == 0.5 else {before + len(sizes)})
        before += len(sizes)
    assert module.validations == ends
    assert set(module.sizes) <= {8, 16}
    assert [batch.last for batch in module.batches] == [_ends(module, i) for i in range(before)]


def _ends(module, position):
    """Whether an epoch ends with the batch at a position."""
    following = module.batches[position + 1 : position + 2]
    return not following or following[0].epoch != module.batches[position].epoch


class Rebuilt(pl.Callback):
    """Has the loaders made anew in the hook that begins an epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch > 0:
            trainer.fit_loop._combined_loader = None
            trainer.fit_loop.setup_data()


class Forgotten(pl.Callback):
    """Has Lightning forget its loaders at an epoch's end: the next one begins with others."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.fit_loop._combined_loader = None


@pytest.mark.parametrize("theirs", [Rebuilt, Forgotten])
@pytest.mark.parametrize("before", [True, False], ids=["theirs first", "ours first"])
def test_loaders_that_are_made_anew_by_hand(theirs, before, tmp_path):
    """Nothing is lost, in whichever order: neither samples nor a validation."""
    ours = adapt(8, 8, 8, 16)
    module = Recorder()
    callbacks = [theirs(), ours] if before else [ours, theirs()]
    trainer = fit(module, loader(64, 8), loader(8, 8), callbacks=callbacks, epochs=3, val_check_interval=0.5)
    assert [module.sizes_in(epoch) for epoch in range(3)] == [[8, 8, 8, 16, 16, 8], [16] * 4, [16] * 4]
    assert [module.seen_in(epoch) for epoch in range(3)] == [Counter(range(64))] * 3
    assert module.validations == [4, 6, 8, 10, 12, 14]
    assert ours.state_dict()["rule"]["samples"] == 192
    assert trainer.global_step == 14


def test_a_combined_loader_of_the_user_is_given_back(tmp_path):
    """Also if Lightning was told to forget it in the last epoch."""
    combined = CombinedLoader({"a": loader(64, 8)}, "max_size_cycle")

    class First(Recorder):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    fit(First(), combined, callbacks=[adapt(8, 16), Forgotten()], epochs=1, root=tmp_path)
    assert [type(one) for one in combined.flattened] == [DataLoader]
    fit(First(), combined, epochs=1, root=tmp_path)


@pytest.mark.parametrize("where", ["module", "callback before"])
def test_rule_and_learning_rate_follow_a_length_that_a_hook_sets(where, tmp_path):
    """A batch that an epoch cannot hold any more is smaller, and its rate with it; epochs count what there is."""

    class Looks(InModule if where == "module" else Recorder):
        looked = ()

        def training_step(self, batch, batch_idx):
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.looked = (*self.looked, (len(batch[0]), round(rate / 0.1, 6)))
            return super().training_step(batch, batch_idx)

    lengths = (64, 24, 60)
    module = Looks(lengths) if where == "module" else Looks()
    ours = AdaptiveBatchSize(Schedule({0: 16, 2: 32}), lr_scaling="linear")
    callbacks = [ours] if where == "module" else [InCallback(lengths), ours]
    fit(module, DataLoader(Curriculum(64), 16), callbacks=callbacks, epochs=2, root=tmp_path)
    assert module.looked == ((16, 1.0), (16, 1.0), (32, 2.0), (24, 1.5))
    assert ours.epochs == 2.0


class InOrder:
    """A batch sampler that reads its size for each batch."""

    def __init__(self, data):
        self.data, self.batch_size = data, 8

    def __len__(self):
        return math.ceil(len(self.data) / self.batch_size)

    def __iter__(self):
        start = 0
        while start < len(self.data):
            stop = min(len(self.data), start + self.batch_size)
            yield list(range(start, stop))
            start = stop


class Flowing(IterableDataset):
    """A stream with a stated length."""

    def __init__(self, data):
        self.data = data

    @property
    def used(self):
        return self.data.used

    @used.setter
    def used(self, used):
        self.data.used = used

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (lambda data: DataLoader(data, 8), {}),
        (lambda data: DataLoader(data, batch_sampler=InOrder(data)), {}),
        (lambda data: DataLoader(Flowing(data), 8), {}),
        (lambda data: DataLoader(data, 8), {"limit_train_batches": 2, "accumulate_grad_batches": 2}),
    ],
    ids=["sampler", "batch sampler", "stream", "so many parts"],
)
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_epochs_of_a_length_that_a_hook_sets(make, flags, tmp_path):
    """Each sample counts as a share of the data that there is then, whatever the kind of data."""
    lengths, counted = (16, 32, 64), []

    class Counts(Recorder):
        def on_train_epoch_end(self):
            counted.append(ours.epochs)

    ours = AdaptiveBatchSize(Constant(), max_batch_size=32)
    fit(Counts(), make(Curriculum(16)), callbacks=[InCallback(lengths), ours], epochs=3, root=tmp_path, **flags)
    assert counted == ([1.0, 1.5, 1.75] if flags else [1.0, 2.0, 3.0])


class Replaced(pl.Callback):
    """Puts a loader of its own into Lightning's place for them."""

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.fit_loop._combined_loader.flattened = [loader(64, 8)]


@pytest.mark.filterwarnings("ignore:AdaptiveBatchSize. its state could not be taken")
def test_a_loader_that_was_put_in_past_lightning(tmp_path):
    """It is refused by name."""
    with pytest.raises(MisconfigurationException, match=r"another loader.*reload_dataloaders_every_n_epochs"):
        fit(Recorder(), loader(64, 8), callbacks=[adapt(8, 16), Replaced()], epochs=2, root=tmp_path)


class Plans(Recorder):
    """Reads what Lightning plans."""

    def configure_optimizers(self):
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("tail", ["keep", "drop"])
@pytest.mark.parametrize("limit", [{}, {"limit_train_batches": 0.5}, {"max_steps": 5}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("arguments", [{}, {"max_device_batch_size": 4}, {"max_device_batch_size": 16}], ids=str)
@pytest.mark.parametrize("policy", [Constant(), NoiseScale()], ids=repr)
def test_estimated_steps_are_those_at_the_initial_size(policy, arguments, accumulate, limit, tail, tmp_path):
    """Updates are what schedules are planned in, whatever the parts that these have."""
    flags = {"epochs": 2, "root": tmp_path, "accumulate_grad_batches": accumulate, **limit}
    train = loader(70, 8, drop_last=tail == "drop")
    plain, module = Plans(), Plans()
    fit(plain, train, **flags)
    ours = AdaptiveBatchSize(policy, min_batch_size=8 * accumulate, max_batch_size=8 * accumulate, **arguments)
    trainer = fit(module, train, callbacks=[ours], **flags)
    assert module.planned == plain.planned
    if policy == Constant():
        assert trainer.global_step == plain.planned


def test_estimated_steps_under_a_limit_of_micro_batches(tmp_path):
    """Six micro-batches per epoch are three updates of two."""
    module, flags = Plans(), {"epochs": 2, "root": tmp_path, "limit_train_batches": 6}
    trainer = fit(module, loader(70, 8), callbacks=[AdaptiveBatchSize(Constant(), max_device_batch_size=4)], **flags)
    assert module.planned == trainer.global_step == 6
