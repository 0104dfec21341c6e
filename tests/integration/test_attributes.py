# SPDX-License-Identifier: Apache-2.0
"""The attributes to read, and the one moment at which they change (spec section 3)."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Recorder, adapt, fit, loader, quiet


def now(ours):
    return (ours.updates, ours.samples, ours.batch_size, ours.lr_factor)


class Reads(pl.Callback):
    """Reads the attributes in the hooks of an update, from before or behind the callback in the list."""

    def __init__(self, ours) -> None:
        self.ours = ours
        self.start: list = []
        self.end: list = []

    def on_train_batch_start(self, *args):
        self.start.append(now(self.ours))

    def on_train_batch_end(self, *args):
        self.end.append(now(self.ours))


def test_attributes_change_at_our_batch_end(tmp_path):
    """Before it the counts are those after k - 1 and the size is update k's; after it, k's and k + 1's."""
    ours = adapt(4, 8, 32, 4, max_batch_size=16)
    before, behind = Reads(ours), Reads(ours)
    validations, checkpoints, early = [], [], []

    class Net(Recorder):
        def on_before_backward(self, loss):
            early.append(now(ours))

        def on_before_optimizer_step(self, optimizer):
            early.append(now(ours))

        def on_save_checkpoint(self, checkpoint):
            checkpoints.append(now(ours))

        def training_step(self, batch, batch_idx):
            assert now(ours) == before.start[-1]
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args):
            assert now(ours) == behind.end[-1]

        def on_validation_start(self):
            if not self.trainer.sanity_checking:
                validations.append(now(ours))

    assert (ours.batch_size, ours.lr_factor, ours.updates, ours.samples, ours.epochs) == (None, 1.0, 0, 0, 0.0)
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    callbacks = [saved, before, ours, behind]
    fit(Net(), loader(32, 4), loader(8, 8), callbacks=callbacks, epochs=1, enable_checkpointing=True)
    states = [(0, 0, 4, 1.0), (1, 4, 8, 1.0), (2, 12, 16, 0.5), (3, 28, 4, 1.0), (4, 32, 4, 1.0)]
    assert before.start == before.end == behind.start == states[:-1]
    assert behind.end == states[1:]
    assert early == [state for state in states[:-1] for _ in range(2)]
    assert checkpoints == states[1:]
    assert validations == states[-1:]
    assert ours.epochs == 1.0
    assert [type(value) for value in (*now(ours), ours.epochs)] == [int, int, int, float, float]


def test_counts_of_a_checkpoint_before_training_goes_on(tmp_path):
    """From the moment that the checkpoint is read, updates, samples and epochs are its own."""
    first = adapt(4, 8)
    trainer = fit(Recorder(), loader(32, 4), callbacks=[first], epochs=1, root=tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    seen = []

    class Looks(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            seen.append((ours.updates, ours.samples, ours.epochs, ours.evaluated))

    ours = adapt(4, 8)
    quiet(callbacks=[ours, Looks()], epochs=2, root=tmp_path).fit(
        Recorder(), loader(32, 4), ckpt_path=tmp_path / "one.ckpt"
    )
    assert seen == [(first.updates, first.samples, 1.0, 0)]
    assert ours.epochs == 2.0


def test_initial_size_may_be_decided_before_the_first_update(tmp_path):
    """A decision at count 0 sets the first batch."""
    module = Recorder()
    fit(module, loader(64, 4, num_workers=2), callbacks=[adapt(16)], epochs=1, root=tmp_path)
    assert module.sizes == [16, 16, 16, 16]
    assert module.batches[0].planned == 4


def test_first_training_batch_counts_are_known_at_train_start(tmp_path):
    """At on_train_start of a callback behind ours, size and factor are what the first update uses."""
    seen = []

    class Behind(pl.Callback):
        def on_train_start(self, *args):
            seen.append(now(ours))

    ours = adapt(32, max_batch_size=16)
    fit(Recorder(), loader(64, 4), callbacks=[ours, Behind()], epochs=1, root=tmp_path)
    assert seen == [(0, 0, 16, 0.5)]
