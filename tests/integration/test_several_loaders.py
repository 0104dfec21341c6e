# SPDX-License-Identifier: Apache-2.0
"""Dicts and lists of train loaders: the first one's size is the batch size, the others follow in proportion."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from models import adapt, fit, loader

from lightning_adabatch import AdaptiveBatchSize, Constant


class Pairs(pl.LightningModule):
    """Records what each loader gave, in every step."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = torch.nn.Linear(4, 2)
        self.steps = []  # of the epochs: of the steps: the indices from each loader, None where it gave nothing
        self.last = []
        self.validations = []

    def training_step(self, batch, batch_idx):
        while len(self.steps) <= self.trainer.current_epoch:
            self.steps.append([])
        parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
        self.steps[-1].append([None if part is None else part[2].tolist() for part in parts])
        self.last.append(self.trainer.is_last_batch)
        return sum(torch.nn.functional.cross_entropy(self.net(part[0]), part[1]) for part in parts if part is not None)

    def on_validation_epoch_start(self):
        if not self.trainer.sanity_checking:
            self.validations.append(sum(map(len, self.steps)))

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def sizes(self, epoch=0):
        return [[None if part is None else len(part) for part in step] for step in self.steps[epoch]]


def run(mode, *sizes, first=(64, 4), second=(64, 8), epochs=2, ours=None, root=None, shuffle=False, **kwargs):
    module = Pairs()
    train = {"a": loader(*first, shuffle=shuffle), "b": loader(*second, shuffle=shuffle)}
    callback = ours or adapt(*sizes)
    settings = {"num_sanity_val_steps": 0, "root": root, "epochs": epochs, **kwargs}
    callbacks = [*([callback] if callback != "none" else []), *settings.pop("more", ())]
    trainer = fit(module, CombinedLoader(train, mode), loader(8, 8), callbacks=callbacks, **settings)
    return module, callback, trainer


def ends(module):
    steps = [len(epoch) for epoch in module.steps]
    return [sum(steps[: number + 1]) for number in range(len(steps))]


def test_cycle(tmp_path):
    """C49: a grows from 4 to 16 at its fifth batch and b from 8 to 32; b is begun again, as the mode says."""
    module, ours, _ = run("max_size_cycle", 4, 4, 4, 4, 16, root=tmp_path)
    # b's first end comes after 4 * 8 + 32 = 64, with a's 4 * 4 + 16 = 32; so it is begun again for two steps
    assert module.sizes(0) == [[4, 8]] * 4 + [[16, 32]] * 3
    assert module.sizes(1) == [[16, 32]] * 4
    for epoch in range(2):
        assert sorted(index for step in module.steps[epoch] for index in step[0]) == list(range(64))
        assert sorted(index for step in module.steps[epoch] for index in step[1]) == sorted([*range(64)] * 2)
    assert module.validations == ends(module)
    assert [number for number, last in enumerate(module.last, 1) if last] == ends(module)
    assert (ours.updates, ours.samples) == (11, 128)


def test_cycle_of_the_first(tmp_path):
    """The first loader may be the one that is begun again: its samples count as often as they are trained."""
    module, ours, _ = run("max_size_cycle", 4, 8, first=(16, 4), second=(64, 4), root=tmp_path)
    assert module.sizes(0) == [[4, 4], [8, 8], [4, 8], *[[8, 8]] * 5, [8, 4]]
    assert ours.samples == sum(step[0] for epoch in range(2) for step in module.sizes(epoch))
    assert sorted(index for step in module.steps[0] for index in step[1]) == list(range(64))
    assert module.validations == ends(module)


def test_smallest(tmp_path):
    """The epoch ends with the loader that ends first."""
    module, _, trainer = run("min_size", 4, 4, 16, second=(40, 8), root=tmp_path)
    assert module.sizes(0) == [[4, 8], [4, 8], [16, 24]]
    assert module.sizes(1) == [[16, 32], [16, 8]]
    assert module.validations == ends(module) == [3, 5]
    assert trainer.num_training_batches == 2


def test_largest(tmp_path):
    """A loader that has ended gives None until the longest one ends."""
    module, _, _ = run("max_size", 4, 4, 16, second=(24, 8), root=tmp_path)
    assert module.sizes(0) == [[4, 8], [4, 8], [16, 8], [16, None], [16, None], [8, None]]
    assert module.validations == ends(module)


def test_list_of_loaders(tmp_path):
    """A list works as a dict does, in Lightning's own mode."""
    module = Pairs()
    fit(module, [loader(64, 4), loader(64, 7)], loader(8, 8), callbacks=[adapt(4, 10)], epochs=1, root=tmp_path)
    assert module.sizes(0)[:3] == [[4, 7], [10, 18], [10, 18]]  # ceil(7 * 10 / 4) = 18


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize("flags", [{}, {"val_check_interval": 0.5}, {"limit_train_batches": 5}])
def test_constant_size_is_a_plain_run(mode, flags, tmp_path):
    """A rule that keeps the size gives the run without the callback, bit for bit."""
    runs = []
    for ours in ("none", AdaptiveBatchSize(Constant())):
        pl.seed_everything(3, verbose=False)
        module, _, _ = run(mode, ours=ours, second=(50, 8), shuffle=True, epochs=3, root=tmp_path, **flags)
        runs.append((module.steps, module.last, module.validations, module.net.weight.tolist()))
    assert runs[0] == runs[1]


def test_half_epochs(tmp_path):
    """A share of the epoch is one of the first loader's data."""
    module, _, _ = run("max_size_cycle", 4, 4, 8, second=(24, 8), val_check_interval=0.5, epochs=1, root=tmp_path)
    assert [step[0] for step in module.sizes(0)] == [4, 4, 8, 8, 8, 8, 8, 8, 8]
    assert module.validations == [5, 9]  # 4 + 4 + 8 * 3 = 32 samples of 64, and the end


class Saves(pl.Callback):
    def __init__(self, path, at):
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize("at", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("order", ["behind", "before"])
def test_resume(mode, at, order, tmp_path):
    """C11: cut anywhere, also where one of the loaders was begun again, and resumed: the same steps, bit for bit."""
    second, path = (56 if mode == "min_size" else 24, 8), tmp_path / "cut.ckpt"

    def train(seed, ckpt=None, save=False):
        pl.seed_everything(seed, verbose=False)
        module, ours = Pairs(), adapt(4, 4, 8, 5, 6)
        data = {"a": loader(64, 4, shuffle=True), "b": loader(*second, shuffle=True)}
        savers = [Saves(path, at)] if save else []
        callbacks = [*savers, ours] if order == "before" else [ours, *savers]
        settings = {"num_sanity_val_steps": 0, "root": tmp_path, "ckpt_path": ckpt}
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=callbacks,
            num_sanity_val_steps=settings["num_sanity_val_steps"],
        )
        trainer.fit(module, CombinedLoader(data, mode), loader(8, 8), ckpt_path=ckpt)
        return module, ours

    whole, one = train(1, save=True)
    rest, other = train(2, ckpt=path)
    flat = [step for epoch in whole.steps for step in epoch]
    again = [step for epoch in rest.steps for step in epoch]
    assert again == flat[len(flat) - len(again) :]
    assert len(again) == len(flat) - at
    assert rest.last == whole.last[at:]
    assert torch.equal(rest.net.weight, whole.net.weight)
    assert (one.updates, one.samples, one.batch_size) == (other.updates, other.samples, other.batch_size)
