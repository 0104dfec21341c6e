# SPDX-License-Identifier: Apache-2.0
"""Everything is given back, and one fit does not leak into the next (invariant 8)."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
from collections import Counter

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from models import Recorder, adapt, fit, loader, quiet
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler

from lightning_adabatch import AdaptiveBatchSize


class BoomError(RuntimeError):
    """Raised by a test in mid-epoch."""


class Fails(pl.Callback):
    """Raises in the third batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            raise BoomError("in mid-epoch")


def assert_untouched(trainer, train) -> None:
    """The Trainer and the user's loader of 64 samples in batches of 4 are as before the fit."""
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "setup_data" not in vars(trainer.fit_loop)
    assert trainer.train_dataloader is train
    assert type(train.batch_sampler) is BatchSampler
    assert (train.batch_size, train.batch_sampler.batch_size, len(train)) == (4, 4, 16)
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_post_hooks
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("workers", [0, 2])
def test_everything_is_given_back(fails, workers, tmp_path):
    """After a fit, also one that raised, loader, sampler, scheduler, LR and Trainer are the user's own again."""
    more = {"num_workers": workers, "persistent_workers": True} if workers else {}
    train = loader(64, 4, **more)
    sampler, batch_sampler = train.sampler, train.batch_sampler
    module = Recorder(lr=0.3, schedule=lambda o: StepLR(o, 1, 0.7))
    trainer = quiet([adapt(4, 56, max_batch_size=8), *([Fails()] if fails else [])], root=tmp_path)
    if fails:
        with pytest.raises(BoomError, match="in mid-epoch"):
            trainer.fit(module, train)
    else:
        trainer.fit(module, train)
    assert module.batches[1].lr == 0.3 * (8 / 56)
    assert_untouched(trainer, train)
    assert (train.sampler, train.batch_sampler) == (sampler, batch_sampler)
    # Bit for bit: 0.3 · (1/7) · 7 is not 0.3.
    assert trainer.optimizers[0].param_groups[0]["lr"] == (0.3 if fails else 0.3 * 0.7 * 0.7)
    assert type(trainer.lr_scheduler_configs[0].scheduler) is StepLR
    assert trainer.val_check_batch == 16  # what Lightning planned


def test_everything_is_given_back_after_an_interrupt(tmp_path):
    """Ctrl-C ends the run and gives everything back, with workers in the middle of an epoch."""

    class Interrupts(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise KeyboardInterrupt

    train = loader(64, 4, num_workers=2)
    trainer = quiet([adapt(4, 16, max_batch_size=8), Interrupts()], root=tmp_path)
    with pytest.raises(SystemExit, match="1"):
        trainer.fit(Recorder(), train)
    assert_untouched(trainer, train)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_end"])
def test_everything_is_given_back_outside_of_epochs(hook, tmp_path):
    """An exception before the first batch or after the last one leaves nothing changed either."""

    class Net(Recorder):
        pass

    def fails(self, *args, **kwargs):
        raise BoomError(hook)

    setattr(Net, hook, fails)
    train = loader(64, 4)
    trainer = quiet([adapt(4, 16, max_batch_size=8)], epochs=1, root=tmp_path)
    with pytest.raises(BoomError, match=hook):
        trainer.fit(Net(), train)
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "setup_data" not in vars(trainer.fit_loop)
    if hook != "setup" and trainer.train_dataloader is not None:
        assert_untouched(trainer, train)
    assert all(group["lr"] == 0.1 for optimizer in trainer.optimizers for group in optimizer.param_groups)


def test_an_exception_that_another_callback_answered_with_one(tmp_path):
    """Lightning then asks no callback behind it: everything is given back when the callback's next fit begins."""

    class Answers(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            raise RuntimeError("another one") from exception

    train, ours = loader(64, 4), adapt(4, 56, 8, max_batch_size=8)
    first = quiet([Fails(), Answers(), ours], root=tmp_path)
    with pytest.raises(RuntimeError, match="another one"):
        first.fit(Recorder(), train)
    assert "process_dataloader" in vars(first.strategy)
    module = Recorder()
    fit(module, train, callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 8, 8, 8, 8, 8, 8, 8, 4]
    assert_untouched(first, train)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_combined_loader_is_given_back(fails, tmp_path):
    """A CombinedLoader with one loader works, and holds the user's loader afterwards."""
    train = loader(64, 4)
    combined = CombinedLoader({"a": train}, "max_size_cycle")

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    module = Net()
    trainer = quiet([adapt(4, 16), *([Fails()] if fails else [])], reload_dataloaders_every_n_epochs=1, root=tmp_path)
    if fails:
        with pytest.raises(BoomError, match="in mid-epoch"):
            trainer.fit(module, combined)
    else:
        trainer.fit(module, combined)
        assert module.sizes == [4, 16, 16, 16, 12] + [16] * 4
    assert combined.flattened == [train]
    assert combined.iterables == {"a": train}


def test_what_another_callback_put_there_is_given_back(tmp_path):
    """A function that somebody else had put in the place of process_dataloader is called, and is there afterwards."""
    seen = []
    trainer = quiet([adapt(4, 8)], epochs=1, root=tmp_path)
    original = trainer.strategy.process_dataloader

    def theirs(dataloader):
        seen.append(dataloader)
        return original(dataloader)

    trainer.strategy.process_dataloader = theirs
    module, train = Recorder(), loader(16, 4)
    trainer.fit(module, train)
    assert seen == [train]
    assert module.sizes == [4, 8, 4]
    assert vars(trainer.strategy)["process_dataloader"] is theirs


def test_workers_of_replaced_loaders_end(tmp_path):
    """With a new loader every epoch, only the workers of the one in use are alive."""
    alive = []

    class Net(Recorder):
        def train_dataloader(self):
            return loader(32, 4, num_workers=2, persistent_workers=True)

        def on_train_batch_start(self, *args):
            alive.append(len(multiprocessing.active_children()))

    fit(Net(), None, callbacks=[adapt(4, 16)], epochs=3, reload_dataloaders_every_n_epochs=1, root=tmp_path)
    assert set(alive) == {2}
    assert multiprocessing.active_children() == []


def test_second_fit_with_other_loader_trainer_and_callback(tmp_path):
    """C59: a second fit uses its own loader and starts at its own size, with the same Trainer or another."""
    ours = adapt(4, 16)
    first, second, third = Recorder(), Recorder(), Recorder()
    trainer = fit(first, loader(64, 4), callbacks=[ours], epochs=1, root=tmp_path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, loader(32, 4))
    assert second.sizes == [4, 16, 12]
    assert second.seen_in(1) == dict.fromkeys(range(32), 1)
    assert (ours.updates, ours.samples) == (3, 32)
    fit(third, loader(20, 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert third.sizes == [4, 16]


@pytest.mark.parametrize("hook", ["configure_optimizers", "on_train_start"])
def test_a_second_fit_that_fails_before_it_trains(hook, tmp_path):
    """What is shown and saved is the run before: its weights are those that are there."""

    class Net(Recorder):
        fails = False

    def fail(self, *args):
        if self.fails:
            raise BoomError(hook)
        return getattr(super(Net, self), hook)(*args)

    setattr(Net, hook, fail)
    module, ours = Net(), adapt(4, 8, 16)
    trainer = fit(module, loader(64, 4), callbacks=[ours], epochs=1, root=tmp_path)
    shown, state = (ours.updates, ours.samples, ours.batch_size), ours.state_dict()
    module.fails, trainer.fit_loop.max_epochs = True, 2
    with pytest.raises(BoomError, match=hook):
        trainer.fit(module, loader(64, 4))
    assert (ours.updates, ours.samples, ours.batch_size) == shown
    assert ours.state_dict() == state


def test_weights_of_another_epoch_are_tested(tmp_path):
    """A checkpoint that is tested brings nothing of its run: what is shown and saved is the fit's."""

    class Net(Recorder):
        def test_step(self, batch, batch_idx):
            pass

    ours, save = adapt(4, 8, 16), ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1)
    trainer = quiet([ours, save], enable_checkpointing=True, root=tmp_path)
    module = Net()
    trainer.fit(module, loader(64, 4))
    shown, state = (ours.updates, ours.samples, ours.epochs, ours.batch_size), ours.state_dict()
    trainer.test(module, loader(8, 4), ckpt_path=tmp_path / "saved" / "epoch=0.ckpt", verbose=False)
    assert (ours.updates, ours.samples, ours.epochs, ours.batch_size) == shown
    assert ours.state_dict()["rule"] == state["rule"]


def test_fit_after_an_exception(tmp_path):
    """C59: after an exception the same callback and loader train again."""
    ours, train = adapt(4, 16), loader(64, 4)
    with pytest.raises(BoomError, match="in mid-epoch"):
        fit(Recorder(), train, callbacks=[ours, Fails()], root=tmp_path)
    module = Recorder()
    fit(module, train, callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 16, 16, 16, 12]


@pytest.mark.parametrize("workers", [1, 2])
def test_no_process_or_handle_is_leaked(workers, tmp_path):
    """C40: 50 changes of size over 5 epochs leave the numbers of processes and file handles where they were."""
    counts = []

    class Count(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208
            counts.append((len(multiprocessing.active_children()), handles, threading.active_count()))

    script = [4 + (k % 7) for k in range(200)]
    train = loader(80, 4, num_workers=workers, persistent_workers=True)
    ours = adapt(*script)
    fit(Recorder(), train, callbacks=[ours, Count()], epochs=5, root=tmp_path)
    assert ours.updates > 50
    assert counts[0][0] == workers
    assert abs(counts[-1][0] - counts[1][0]) == 0
    assert counts[-1][2] == counts[1][2]
    assert abs(counts[-1][1] - counts[1][1]) <= 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies(copied, tmp_path):
    """The callback can be copied and pickled before and after a fit."""
    ours = AdaptiveBatchSize(min_batch_size=4, max_batch_size=4)
    for original in (ours, copied(ours)):
        fit(Recorder(), loader(16, 4), callbacks=[original], epochs=1, root=tmp_path)
    assert copied(ours).updates == ours.updates == 4


def test_copy_in_mid_fit_leaves_the_fit_alone(tmp_path):
    """A copy made while training knows the counts, and the Trainer stays with the original."""
    copies = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            copies.append(copy.deepcopy(ours))

    ours = adapt(4, 8)
    fit(Recorder(), loader(16, 4), callbacks=[ours, Copies()], epochs=1, root=tmp_path)
    assert [c.updates for c in copies] == [1, 2, 3]
    assert [c.batch_size for c in copies] == [8, 8, 8]
    assert all(c._run is None for c in copies)


def test_workers_that_are_spawned(tmp_path):
    """Workers that start from nothing serve exact sizes as forked ones do."""
    train = loader(24, 4, num_workers=1, multiprocessing_context="spawn")
    module = Recorder()
    fit(module, train, callbacks=[adapt(4, 9, 3)], epochs=1, root=tmp_path)
    assert module.sizes == [4, 9, 3, 3, 3, 2]
    assert module.seen_in(0) == Counter(range(24))
