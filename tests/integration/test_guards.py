# SPDX-License-Identifier: Apache-2.0
"""Every set-up that is not supported is refused by name before the first batch, and nothing stays changed."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, adapt, fit, loader, quiet
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from lightning_adabatch import AdaptiveBatchSize
from lightning_adabatch.loader import ElasticLoader


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Indexed(1)[0]] * 8)


class OwnIter(DataLoader):
    def __iter__(self):
        return super().__iter__()


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


class Buckets(BatchSampler):
    def __iter__(self):
        return super().__iter__()


class Unsized(Sampler):
    def __iter__(self):
        return iter(range(8))


class Batches:
    def __iter__(self):
        return iter([torch.zeros(4)])


def refused(match, *, module=None, train=None, callbacks=(), ours=None, **kwargs):
    """Fit, see it refused before the first batch with a remedy, and see everything given back; return the message."""
    module = Recorder() if module is None else module
    trainer = quiet([adapt(4) if ours is None else ours, *callbacks], **kwargs)
    try:
        with pytest.raises(MisconfigurationException, match=match) as caught:
            trainer.fit(module, train)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert module.batches == []
    for owner, name in ((trainer.strategy, "process_dataloader"), (trainer.fit_loop, "setup_data")):
        assert "lightning_adabatch" not in getattr(vars(owner).get(name), "__module__", "")
    made = trainer.fit_loop._combined_loader
    assert made is None or not any(isinstance(one, ElasticLoader) for one in made.flattened)
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)
    return str(caught.value)


DATA = Indexed(8)
LOADERS = {
    "iterable": (
        lambda: DataLoader(Stream(), 4),
        r"the iterable data set Stream yet\. What to do: use a map-style data set\.",
    ),
    "no batches": (lambda: DataLoader(DATA, batch_size=None), r"batch_size=None\)\. What to do: set a batch_size"),
    "own iter": (lambda: OwnIter(DATA, 4), "OwnIter, which overrides __iter__.* use a plain DataLoader"),
    "own iterator": (lambda: OwnIterator(DATA, 4), "OwnIterator, which overrides _get_iterator.* a plain DataLoader"),
    "own batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 4, drop_last=False)),
        r"the batch sampler Buckets yet\. What to do: pass sampler=\.\.\. and batch_size=\.\.\.",
    ),
    "list of batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "the batch sampler list yet"),
    "no length": (lambda: DataLoader(DATA, 4, sampler=Unsized()), "the sampler Unsized, .* give it a __len__"),
    "any order": (lambda: DataLoader(DATA, 4, num_workers=1, in_order=False), "in_order=False.* remove in_order"),
    "not a loader": (Batches, r"the train loader Batches: .* pass a torch\.utils\.data\.DataLoader"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_refused_loaders(name, tmp_path):
    """C43, C46, C83: the message names the loader, and says what to do."""
    make, match = LOADERS[name]
    refused(match, train=make(), root=tmp_path)


def test_several_loaders_are_refused(tmp_path):
    """A dict of loaders is refused by their number, and the loaders are as they were."""
    train = {"a": loader(8, 4), "b": loader(8, 2)}
    refused("2 train loaders yet.* train on one DataLoader", train=train, root=tmp_path)
    assert [type(one.batch_sampler) for one in train.values()] == [BatchSampler] * 2


FIXED_LOADERS = {
    "no batches": (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
    "iterable": (lambda: DataLoader(Stream(), 4), r"Stream yet\. What to do: use a map-style data set\."),
    "not a loader": (Batches, "the train loader Batches"),
    "own batch sampler": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "the batch sampler list"),
}


@pytest.mark.parametrize("name", FIXED_LOADERS)
def test_adapt_lr_refuses_what_it_cannot_count(name, tmp_path):
    """adapt="lr" needs a loader of which the batch size is known."""
    make, match = FIXED_LOADERS[name]
    refused(match, train=make(), ours=adapt(4, adapt="lr"), root=tmp_path)


@pytest.mark.parametrize("kind", [OwnIter, OwnIterator])
def test_adapt_lr_takes_loaders_that_iterate_in_their_own_way(kind, tmp_path):
    """adapt="lr" leaves the loader alone, so what it overrides does not matter."""
    module = Recorder()
    fit(module, kind(DATA, 4), callbacks=[adapt(4, 8, adapt="lr")], epochs=1, root=tmp_path)
    assert [(batch.size, batch.lr) for batch in module.batches] == [(4, 0.1), (4, 0.05)]


class Replaces(pl.Callback):
    """Puts its own function in the place of ours."""

    def setup(self, trainer, pl_module, stage):
        trainer.strategy.process_dataloader = lambda dataloader: dataloader


CALLBACKS = {
    "GradientAccumulationScheduler": lambda: cb.GradientAccumulationScheduler({0: 1, 1: 4}),
    "StochasticWeightAveraging": lambda: cb.StochasticWeightAveraging(0.1),
    "WeightAveraging": cb.WeightAveraging,
    "BackboneFinetuning": cb.BackboneFinetuning,
    "a callback that replaces the train loader": Replaces,
}


def test_two_callbacks_are_refused(tmp_path):
    """C60: two of them in one Trainer are refused, by Lightning when it is made and by us if one comes later."""
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `AdaptiveBatchSize`"):
        quiet([adapt(4), adapt(8)])
    trainer = quiet([adapt(4)], root=tmp_path)
    trainer.callbacks.append(adapt(8))
    with pytest.raises(MisconfigurationException, match=r"two AdaptiveBatchSize callbacks in one Trainer.* keep one"):
        trainer.fit(Recorder(), loader(8, 4))


@pytest.mark.parametrize("name", CALLBACKS)
def test_refused_callbacks(name, tmp_path):
    """C82, C60: callbacks that change what we change are refused by name."""

    class WithLoader(Recorder):
        batch_size = 4

        def train_dataloader(self):
            return loader(8, self.batch_size)

    message = refused(name, module=WithLoader(), callbacks=[CALLBACKS[name]()], root=tmp_path)
    assert "What to do: " in message


class NoOptimizer(Recorder):
    def configure_optimizers(self):
        return None


class TakesIterator(Recorder):
    def training_step(self, dataloader_iter):
        raise AssertionError


MODULES = {
    "no optimizer": (NoOptimizer, "NoOptimizer, which has no optimizer.* return an optimizer"),
    "dataloader_iter": (TakesIterator, r"training_step\(dataloader_iter\).* take batch and batch_idx"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_refused_modules(name, tmp_path):
    """Ways of training that are not supported are refused by name."""
    kind, match = MODULES[name]
    train = loader(8, 4)
    refused(match, module=kind(), train=train, root=tmp_path)
    assert (type(train.batch_sampler), train.batch_size, len(train)) == (BatchSampler, 4, 2)


BOUNDS = {
    "below the floor": ({"min_batch_size": 8}, "initial batch size 4 is not within 8"),
    "above the cap": ({"max_batch_size": 3}, "max_batch_size=3"),
    "no multiple": ({"multiple_of": 3}, "not a multiple of multiple_of=3"),
    "cap below a multiple": ({"multiple_of": 4, "max_batch_size": 3}, "not within 4 and 0"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_initial_size_out_of_bounds(name, tmp_path):
    """The initial size must be within the bounds; the message says both and what to change."""
    arguments, match = BOUNDS[name]
    train = loader(8, 4)
    refused(match, train=train, ours=AdaptiveBatchSize(**arguments), root=tmp_path)
    assert (train.batch_size, len(train)) == (4, 2)


def test_device_limit_that_is_never_reached(tmp_path):
    """max_device_batch_size at or above the cap changes nothing."""
    module = Recorder()
    fit(module, loader(16, 4), callbacks=[adapt(4, 8, max_batch_size=8, max_device_batch_size=8)], epochs=1)
    assert module.sizes == [4, 8, 4]
