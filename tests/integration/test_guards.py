# SPDX-License-Identifier: Apache-2.0
"""Every set-up that is not supported is refused by name before the first batch, and nothing stays changed."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, adapt, fit, loader, quiet
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from lightning_adabatch import AdaptiveBatchSize, GeoDamp
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


class Buckets:
    batch_size = property(lambda self: 4)

    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6, 7]])


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
    "iterable": (lambda: DataLoader(Stream(), 4), r"without a length and max_batch_size=None.* set max_batch_size"),
    "no batches": (
        lambda: DataLoader(DATA, batch_size=None),
        r"batch_size=None\): it cannot change the batch size of it\. What to do: set a batch_size.* adapt='lr'",
    ),
    "own iter": (lambda: OwnIter(DATA, 4), "OwnIter, which overrides __iter__.* use a plain DataLoader"),
    "own iterator": (lambda: OwnIterator(DATA, 4), "OwnIterator, which overrides _get_iterator.* a plain DataLoader"),
    "own batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=Buckets()),
        r"the batch sampler Buckets, which has no integer batch_size that can be set: .* pass sampler=\.\.\. and",
    ),
    "list of batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "the batch sampler list, which has no"),
    "no length": (lambda: DataLoader(DATA, 4, sampler=Unsized()), "without a length and max_batch_size=None"),
    "any order": (lambda: DataLoader(DATA, 4, num_workers=1, in_order=False), "in_order=False.* remove in_order"),
    "not a loader": (Batches, r"the train loader Batches: .* pass a torch\.utils\.data\.DataLoader"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_refused_loaders(name, tmp_path):
    """C43, C46, C83: the message names the loader, and says what to do."""
    make, match = LOADERS[name]
    refused(match, train=make(), root=tmp_path)


def several(mode, **sizes):
    return CombinedLoader({name: loader(samples, 4) for name, samples in sizes.items()}, mode)


def beside_a_stream():
    return {"a": loader(8, 4), "b": DataLoader(Stream(), 4)}


SEVERAL = {
    "sequential": (lambda: several("sequential", a=8, b=8), {}, {}, 'mode="sequential".* use the mode min_size'),
    "stream": (beside_a_stream, {"max_batch_size": 8}, {}, "Stream with a length that nobody knows, beside other"),
    "device limit": (lambda: several("min_size", a=8, b=8), {"max_device_batch_size": 4}, {}, "with micro-batches"),
    "accumulated": (lambda: several("min_size", a=8, b=8), {}, {"accumulate_grad_batches": 2}, "with micro-batches"),
    "share": (lambda: several("min_size", a=8, b=8), {}, {"limit_train_batches": 0.5}, "overfit_batches or a fraction"),
    "overfit": (lambda: several("min_size", a=8, b=8), {}, {"overfit_batches": 1}, "overfit_batches or a fraction"),
    "short first": (lambda: several("max_size", a=8, b=12), {}, {}, "put the loader with the most batches first"),
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_several_loaders_that_cannot_go_together(name, tmp_path):
    """C49: what several loaders cannot do together is refused, and they are as they were."""
    make, arguments, flags, match = SEVERAL[name]
    refused(match, train=make(), ours=AdaptiveBatchSize(GeoDamp(2, 9), **arguments), root=tmp_path, **flags)


class Replaces(pl.Callback):
    """Puts its own function in the place of ours."""

    def setup(self, trainer, pl_module, stage):
        trainer.strategy.process_dataloader = lambda dataloader: dataloader


CALLBACKS = {
    "GradientAccumulationScheduler": lambda: cb.GradientAccumulationScheduler({0: 1, 1: 4}),
    "StochasticWeightAveraging": lambda: cb.StochasticWeightAveraging(0.1),
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
    "floor above the data": ({"min_batch_size": 9}, "no batch size is within 9 and 8"),
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
