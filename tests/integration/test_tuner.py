# SPDX-License-Identifier: Apache-2.0
"""The tuner and the finders try things out with the user's loader; the fit that follows knows nothing of it."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from models import Recorder, adapt, loader, quiet

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(lr_find|scale_batch_size|Trainer.fit|Failed to compute)"),
    pytest.mark.filterwarnings("ignore:.*num_workers"),
    pytest.mark.filterwarnings("ignore:Found 2 module.s. in eval mode"),  # Lightning leaves it so
]


class WithLoaders(Recorder):
    """A module that the batch size finder can work with."""

    batch_size = 4

    def train_dataloader(self):
        return loader(64, self.batch_size)

    def val_dataloader(self):
        return loader(10, 5)


def tune(trainer, module, kind):
    """Run the trials of one kind."""
    if kind == "lr":
        Tuner(trainer).lr_find(module, num_training=20)
    else:
        Tuner(trainer).scale_batch_size(module, init_val=2, max_trials=3, steps_per_trial=2, method=kind)


@pytest.mark.parametrize("kind", ["lr", "fit", "validate"])
def test_trials_leave_no_trace(kind, tmp_path):
    """C38: trials see batches of the loader's own size; counts, decisions and the user's objects are untouched."""
    with_ours, without, ours = WithLoaders(), WithLoaders(), adapt(4, 8, 16, max_batch_size=64)
    trainer, plain = quiet([ours], root=tmp_path), quiet(root=tmp_path)
    tune(trainer, with_ours, kind)
    tune(plain, without, kind)
    assert with_ours.sizes == without.sizes
    assert (with_ours.lr, with_ours.batch_size) == (without.lr, without.batch_size)
    assert (ours.updates, ours.samples, ours.batch_size) == (0, 0, None)
    assert "process_dataloader" not in vars(trainer.strategy)
    with_ours.batches.clear()
    with_ours.validations.clear()
    with_ours.train()  # trials that validate leave it in evaluation mode, in which it records nothing
    trainer.fit(with_ours)
    first = with_ours.batch_size
    assert with_ours.sizes == {4: [4, 8, 16, 16, 16, 4], 8: [4, 8, 16, 16, 16, 4]}[first] + [16] * 4
    assert with_ours.validations == [6, 10]
    assert ours.updates == trainer.global_step == 10


def test_trials_after_a_fit(tmp_path):
    """What the callback shows of a run is there after trials too, and what it would write into a checkpoint."""
    module, ours = WithLoaders(), adapt(4, 8, 16, max_batch_size=64)
    trainer = quiet([ours], epochs=1, root=tmp_path)
    trainer.fit(module)
    shown, written = (ours.updates, ours.samples, ours.epochs), ours.state_dict()
    assert shown == (6, 64, 1.0)
    tune(trainer, module, "lr")
    assert (ours.updates, ours.samples, ours.epochs) == shown
    assert ours.state_dict()["rule"] == written["rule"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "finder",
    [
        lambda: LearningRateFinder(num_training_steps=20),
        lambda: BatchSizeFinder(init_val=2, max_trials=3, steps_per_trial=2),
    ],
)
def test_finder_in_the_same_trainer(finder, first, tmp_path):
    """A finder among the callbacks runs its trials, and the fit begins afresh with what it found."""
    module, ours = WithLoaders(), adapt(8, 16, max_batch_size=64)
    callbacks = [finder(), ours] if first else [ours, finder()]
    trainer = quiet(callbacks, epochs=1, root=tmp_path)
    trainer.fit(module)
    assert module.sizes[-5:] == [8, 16, 16, 16, 8]
    assert module.validations[-1] == len(module.batches)
    assert ours.updates == 5
