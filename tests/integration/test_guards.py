# SPDX-License-Identifier: Apache-2.0
"""Every set-up that is not supported is refused by name before the first batch, and nothing stays changed."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, adapt, fit, loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from lightning_adabatch import AdaptiveBatchSize


class Stream(IterableDataset):
    def __iter__(self):
        return iter([self[0]] * 8)

    def __getitem__(self, index):
        return Indexed(1)[0]


class OwnIter(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Buckets(BatchSampler):
    pass


class Unsized(Sampler):
    def __iter__(self):
        return iter(range(8))


class Manual(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class NoOptimizer(Recorder):
    def configure_optimizers(self):
        return None


class TakesIterator(Recorder):
    def training_step(self, dataloader_iter):
        raise AssertionError


DATA = Indexed(8)
LOADERS = {
    "iterable": (lambda: DataLoader(Stream(), 4), "the iterable data set Stream"),
    "no batches": (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
    "own iter": (lambda: OwnIter(DATA, 4), "OwnIter, which overrides __iter__"),
    "own batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 4, drop_last=False)),
        "the batch sampler Buckets",
    ),
    "list of batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "the batch sampler list"),
    "no length": (lambda: DataLoader(DATA, 4, sampler=Unsized()), "the sampler Unsized, which has no length"),
    "any order": (lambda: DataLoader(DATA, 4, num_workers=1, in_order=False), "in_order=False"),
    "not a loader": (lambda: [torch.zeros(4)], "the train loader Tensor|train loader"),
    "two loaders": (lambda: {"a": loader(8, 4), "b": loader(8, 4)}, "2 train loaders"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_refused_loaders(name, tmp_path):
    """The message names the loader, and says what to do."""
    make, match = LOADERS[name]
    module = Recorder()
    with pytest.raises(MisconfigurationException, match=match) as caught:
        fit(module, make(), callbacks=[adapt(4)], root=tmp_path)
    assert "What to do: " in str(caught.value)
    assert module.batches == []


CALLBACKS = {
    "GradientAccumulationScheduler": lambda: cb.GradientAccumulationScheduler({0: 1, 1: 4}),
    "StochasticWeightAveraging": lambda: cb.StochasticWeightAveraging(0.1),
    "WeightAveraging": cb.WeightAveraging,
    "BatchSizeFinder": cb.BatchSizeFinder,
    "LearningRateFinder": cb.LearningRateFinder,
    "BackboneFinetuning": cb.BackboneFinetuning,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_refused_callbacks(name, tmp_path):
    """Callbacks that change what we change are refused by name."""

    class WithLoader(Recorder):
        batch_size = 4

        def train_dataloader(self):
            return loader(8, self.batch_size)

    module = WithLoader()
    with pytest.raises(MisconfigurationException, match=name):
        fit(module, None, callbacks=[adapt(4), CALLBACKS[name]()], root=tmp_path)
    assert module.batches == []


MODULES = {
    "manual": (Manual, "manual optimization"),
    "two optimizers": (TwoOptimizers, "manual optimization"),
    "no optimizer": (NoOptimizer, "0 optimizers"),
    "dataloader_iter": (TakesIterator, r"training_step\(dataloader_iter\)"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_refused_modules(name, tmp_path):
    """Ways of training that are not supported are refused by name."""
    kind, match = MODULES[name]
    module = kind()
    with pytest.raises(MisconfigurationException, match=match):
        fit(module, loader(8, 4), callbacks=[adapt(4)], root=tmp_path)
    assert module.batches == []


def test_accumulation_is_refused(tmp_path):
    """accumulate_grad_batches is refused by name."""
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=4"):
        fit(Recorder(), loader(8, 4), callbacks=[adapt(4)], accumulate_grad_batches=4, root=tmp_path)


def test_several_devices_are_refused(tmp_path):
    """A strategy of several processes is refused by name."""
    try:
        with pytest.raises(MisconfigurationException, match="DDPStrategy"):
            fit(Recorder(), loader(8, 4), callbacks=[adapt(4)], strategy="ddp", devices=1, root=tmp_path)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_is_refused(tmp_path):
    """A fit from a checkpoint is refused: it would not find its place in the epoch."""
    saved = ModelCheckpoint(tmp_path, filename="c")
    fit(Recorder(), loader(8, 4), callbacks=[adapt(4), saved], enable_checkpointing=True, epochs=1)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[adapt(4)],
    )
    with pytest.raises(MisconfigurationException, match="resuming a fit from a checkpoint"):
        trainer.fit(Recorder(), loader(8, 4), ckpt_path=saved.best_model_path)
    trainer.validate(Recorder(), loader(8, 4), ckpt_path=saved.best_model_path, verbose=False)


BOUNDS = {
    "below the floor": ({"min_batch_size": 8}, "initial batch size 4 is not within 8"),
    "above the cap": ({"max_batch_size": 3}, "max_batch_size=3"),
    "no multiple": ({"multiple_of": 3}, "not a multiple of multiple_of=3"),
    "cap below a multiple": ({"multiple_of": 4, "max_batch_size": 3}, "not within 4 and 0"),
    "device limit": ({"max_device_batch_size": 6}, "max_device_batch_size=6"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_initial_size_out_of_bounds(name, tmp_path):
    """The initial size must be within the bounds; the message says both and what to change."""
    arguments, match = BOUNDS[name]
    module, train = Recorder(), loader(8, 4)
    with pytest.raises(MisconfigurationException, match=match):
        fit(module, train, callbacks=[AdaptiveBatchSize(**arguments)], root=tmp_path)
    assert module.batches == []
    assert (train.batch_size, len(train)) == (4, 2)


def test_device_limit_that_is_never_reached(tmp_path):
    """max_device_batch_size at or above the cap changes nothing."""
    module = Recorder()
    fit(module, loader(16, 4), callbacks=[adapt(4, 8, max_batch_size=8, max_device_batch_size=8)], epochs=1)
    assert module.sizes == [4, 8, 4]


def test_adapt_lr_refuses_what_it_cannot_count(tmp_path):
    """adapt="lr" needs a loader of which the batch size is known."""
    with pytest.raises(MisconfigurationException, match="batch_size=None"):
        fit(Recorder(), DataLoader(DATA, batch_size=None), callbacks=[adapt(4, adapt="lr")], root=tmp_path)
