# SPDX-License-Identifier: Apache-2.0
"""Everything is given back, and one fit does not leak into the next (invariant 8)."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, adapt, fit, loader
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize


class BoomError(RuntimeError):
    """Raised by a test in mid-epoch."""


class Fails(pl.Callback):
    """Raises in the third batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            raise BoomError("in mid-epoch")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_everything_is_given_back(fails, workers, tmp_path):
    """After a fit, also one that raised, loader, sampler, scheduler, LR and Trainer are the user's own again."""
    more = {"num_workers": workers, "persistent_workers": True} if workers else {}
    train = loader(64, 4, **more)
    sampler, batch_sampler = train.sampler, train.batch_sampler
    module = Recorder(schedule=lambda o: StepLR(o, 1, 0.5))
    callbacks = [adapt(4, 16, max_batch_size=8), *([Fails()] if fails else [])]
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=tmp_path,
    )
    if fails:
        with pytest.raises(BoomError, match="in mid-epoch"):
            trainer.fit(module, train)
    else:
        trainer.fit(module, train)
    assert (train.sampler, train.batch_sampler, train.batch_size, len(train)) == (sampler, batch_sampler, 4, 16)
    assert trainer.train_dataloader is train
    assert trainer.optimizers[0].param_groups[0]["lr"] == (0.1 if fails else 0.025)
    assert type(trainer.lr_scheduler_configs[0].scheduler) is StepLR
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "setup_data" not in vars(trainer.fit_loop)
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    assert multiprocessing.active_children() == []


def test_combined_loader_is_given_back(tmp_path):
    """A CombinedLoader with one loader works, and holds the user's loader afterwards."""
    train = loader(64, 4)
    combined = CombinedLoader({"a": train}, "max_size_cycle")

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    module = Net()
    fit(module, combined, callbacks=[adapt(4, 16)], reload_dataloaders_every_n_epochs=1, root=tmp_path)
    assert module.sizes == [4, 16, 16, 16, 12] + [16] * 4
    assert combined.flattened == [train]


def test_second_fit_with_other_loader_trainer_and_callback(tmp_path):
    """C59: a second fit uses its own loader and starts at its own size, with the same Trainer or another."""
    ours = adapt(4, 16)
    first, second, third = Recorder(), Recorder(), Recorder()
    trainer = fit(first, loader(64, 4), callbacks=[ours], epochs=1, root=tmp_path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, loader(32, 4))
    assert second.sizes == [4, 16, 12]
    assert (ours.updates, ours.samples) == (3, 32)
    fit(third, loader(20, 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert third.sizes == [4, 16]


def test_fit_after_an_exception(tmp_path):
    """C59: after an exception the same callback and loader train again."""
    ours, train = adapt(4, 16), loader(64, 4)
    with pytest.raises(BoomError, match="in mid-epoch"):
        fit(Recorder(), train, callbacks=[ours, Fails()], root=tmp_path)
    module = Recorder()
    fit(module, train, callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 16, 16, 16, 12]


def test_other_loaders_are_untouched(tmp_path):
    """C38: validation, test and predict keep their own sizes, and add no observations."""

    class Net(Recorder):
        def test_step(self, batch, batch_idx):
            self.validation_sizes.append(len(batch[0]))

        def predict_step(self, batch, batch_idx):
            self.validation_sizes.append(len(batch[0]))
            return batch[0]

    module, ours = Net(), adapt(4, 8, 16, 4, 32, 8)
    trainer = fit(module, loader(80, 4), loader(50, 10), callbacks=[ours], root=tmp_path)
    count = ours.updates
    assert module.validation_sizes == [10] * (2 + 2 * 5)  # two of them in the sanity check
    module.validation_sizes.clear()
    trainer.test(module, loader(30, 10), verbose=False)
    trainer.predict(module, loader(20, 10))
    trainer.validate(module, loader(10, 10), verbose=False)
    assert module.validation_sizes == [10] * (3 + 2 + 1)
    assert ours.updates == count == len(module.batches)


def test_size_is_kept_over_a_reload(tmp_path):
    """C39: with a new loader every epoch the size goes on, and each is asked for once."""
    asked = []

    class Net(Recorder):
        def train_dataloader(self):
            asked.append(1)
            return loader(64, 4)

        def val_dataloader(self):
            return loader(8, 8)

    module = Net()
    fit(module, None, callbacks=[adapt(4, 16)], epochs=3, reload_dataloaders_every_n_epochs=1, root=tmp_path)
    assert [module.sizes_in(epoch)[0] for epoch in range(3)] == [4, 16, 16]
    assert len(asked) == 3
    assert len(module.validations) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_no_process_or_handle_is_leaked(workers, tmp_path):
    """C40: 50 changes of size over 5 epochs leave the numbers of processes and file handles where they were."""
    counts = []

    class Count(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208
            counts.append((len(multiprocessing.active_children()), handles))

    script = [4 + (k % 7) for k in range(200)]
    train = loader(80, 4, num_workers=workers, persistent_workers=True)
    ours = adapt(*script)
    fit(Recorder(), train, callbacks=[ours, Count()], epochs=5, root=tmp_path)
    assert ours.updates > 50
    assert counts[0][0] == workers
    assert abs(counts[-1][0] - counts[1][0]) == 0
    assert abs(counts[-1][1] - counts[1][1]) <= 2


def test_two_callbacks_are_refused(tmp_path):
    """C60: two instances in one Trainer are refused at the start of the fit."""
    with pytest.raises(MisconfigurationException, match="two AdaptiveBatchSize"):
        fit(Recorder(), loader(8, 4), callbacks=[adapt(4), adapt(8)], root=tmp_path)


@pytest.mark.parametrize("where", ["hard-coded", "bs", "fit", "module"])
def test_wherever_the_loader_comes_from(where, tmp_path):
    """C37, C36: the initial size is the loader's, from a datamodule, the module or fit; attributes are left alone."""

    class Data(pl.LightningDataModule):
        bs = 4

        def train_dataloader(self):
            return DataLoader(Indexed(64), batch_size=self.bs if where == "bs" else 4)

    class WithLoader(Recorder):
        def train_dataloader(self):
            return loader(64, 4)

    module = WithLoader() if where == "module" else Recorder()
    train = {"fit": loader(64, 4), "module": None}.get(where, Data())
    fit(module, train, callbacks=[adapt(4, 8)], epochs=1, root=tmp_path)
    assert module.sizes == [4] + [8] * 7 + [4]
    assert Data.bs == 4


def test_loader_asked_for_before_our_setup(tmp_path):
    """A callback that reads estimated_stepping_batches in its setup does not keep the plain loader in place."""

    class Early(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            self.steps = trainer.estimated_stepping_batches

    early, module = Early(), Recorder()
    fit(module, loader(64, 4), loader(8, 8), callbacks=[early, adapt(4, 16)], root=tmp_path)
    assert early.steps == 2 * 16
    assert module.sizes == [4, 16, 16, 16, 12] + [16] * 4
    assert module.validations == [5, 9]


def test_planned_schedule_with_growth(tmp_path):
    """C19: OneCycleLR over estimated_stepping_batches is planned at the initial size and survives growth."""

    class Net(Recorder):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.total = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=self.total)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Net()
    fit(module, loader(64, 4), callbacks=[adapt(4, 4, 16)], root=tmp_path)
    assert module.total == 32
    assert len(module.batches) < 32


def test_looking_at_a_batch_leaves_the_epoch_alone(tmp_path):
    """Users' code may take a batch of trainer.train_dataloader at any time."""

    class Peek(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            next(iter(trainer.train_dataloader))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert len(next(iter(trainer.train_dataloader))[0]) == trainer.train_dataloader.batch_size

    module = Recorder()
    fit(module, loader(64, 4, shuffle=True), loader(8, 8), callbacks=[adapt(4, 4, 8), Peek()], root=tmp_path)
    assert module.seen_in(0) == module.seen_in(1) == dict.fromkeys(range(64), 1)
    assert len(module.validations) == 2


def test_loader_in_use_answers_like_a_data_loader(tmp_path):
    """C48: size, length and settings of the loader in use can be read at any time; len is delivered and to come."""
    lengths = []

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            train = self.trainer.train_dataloader
            assert train.batch_sampler.batch_size == train.batch_size == len(batch[0])
            assert (train.num_workers, train.pin_memory, len(train.dataset)) == (0, False, 64)
            lengths.append(len(train))
            return super().training_step(batch, batch_idx)

    fit(Net(), loader(64, 4), callbacks=[adapt(4, 4, 4, 4, 16)], epochs=1, root=tmp_path)
    assert lengths == [16] * 4 + [7] * 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies(copied, tmp_path):
    """The callback can be copied and pickled before and after a fit."""
    ours = AdaptiveBatchSize()
    for original in (ours, copied(ours)):
        fit(Recorder(), loader(16, 4), callbacks=[original], epochs=1, root=tmp_path)
    assert copied(ours).updates == ours.updates == 4
