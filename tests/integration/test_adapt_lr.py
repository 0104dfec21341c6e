# SPDX-License-Identifier: Apache-2.0
"""adapt="lr" leaves the loader alone, so every kind of loader may be there; and Lightning's own accumulation."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from models import Indexed, Recorder, Streamed, Watch, adapt, fit, loader, quiet
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize, GeoDamp, GradNormDamp, RadaDamp


def test_first_batches_that_are_none(tmp_path):
    """Nobody knows how large a batch is before one comes; what was none is none."""

    class Late:
        def __iter__(self):
            yield from (None, None, *Batches())

    module, ours = Recorder(), AdaptiveBatchSize(RadaDamp(), adapt="lr")
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        fit(module, Late(), callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 4, 2]
    assert (ours.batch_size, ours.updates, ours.samples) == (4, 3, 10)


@pytest.mark.parametrize("of_module", [True, False])
def test_a_length_that_a_hook_sets(of_module, tmp_path):
    """What is trained is counted, also where the hook of the module comes after ours."""
    lengths = (16, 40, 24)

    class Data(Indexed):
        used = 40

        def __len__(self):
            return self.used

    class Sets(pl.Callback):
        def on_train_epoch_start(self, trainer, *args):
            trainer.train_dataloader.dataset.used = lengths[trainer.current_epoch]

    class Net(Recorder):
        def on_train_epoch_start(self):
            if of_module:
                Sets.on_train_epoch_start(self, self.trainer)

    module, ours = Net(), AdaptiveBatchSize(GeoDamp(2, 1), adapt="lr")
    fit(module, DataLoader(Data(40), 8), callbacks=[ours, *([] if of_module else [Sets()])], epochs=3, root=tmp_path)
    assert ours.samples == sum(module.sizes)
    assert [sum(module.sizes_in(epoch)) for epoch in range(3)] == list(lengths)
    assert ours.epochs == 3.0


class Batches:
    """No DataLoader at all: batches of 4 samples, then one of 2."""

    def __init__(self):
        self.data = Indexed(10)

    def __iter__(self):
        for start in range(0, 10, 4):
            yield self.data.x[start : start + 4], self.data.y[start : start + 4], torch.arange(10)[start : start + 4]


class Grouped:
    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])


class Whole(Indexed):
    """A data set that gives batches of its own."""

    def __len__(self):
        return 3

    def __getitem__(self, number):
        rows = torch.arange(10)[4 * number : 4 * number + 4]
        return self.x[rows], self.y[rows], rows


LOADERS = {
    "a stream": lambda: DataLoader(Streamed(10), 4),
    "batches of the data set's own": lambda: DataLoader(Whole(10), batch_size=None),
    "batches of a sampler's own": lambda: DataLoader(Indexed(10), batch_sampler=Grouped()),
    "no loader": Batches,
    "a loader": lambda: loader(10, 4),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_kind_of_loader(name, tmp_path):
    """The rate follows the wanted size, whatever gives the batches, and samples are counted as they are trained."""
    module, ours = Recorder(), adapt(4, 8, 16, 4, adapt="lr")
    train = LOADERS[name]()
    trainer = fit(module, train, loader(8, 8), callbacks=[ours], epochs=2, root=tmp_path)
    assert module.sizes == [4, 4, 2] * 2
    assert [batch.lr for batch in module.batches] == [0.1, 0.05, 0.025, 0.1, 0.1, 0.1]
    assert (ours.updates, ours.samples, ours.batch_size) == (6, 20, 4)
    assert trainer.train_dataloader is train


def test_several_loaders(tmp_path):
    """Of several loaders the first one's samples count."""

    class Pairs(Recorder):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    module, ours = Pairs(), adapt(4, 8, adapt="lr")
    fit(module, {"a": loader(10, 4), "b": loader(30, 6)}, callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 4, 2, 4, 4]
    assert (ours.updates, ours.samples) == (5, 18)
    assert module.batches[1].lr == 0.05


class Plain(pl.Callback):
    """Notes gradients and losses of a run without our callback."""

    def __init__(self):
        self.norms, self.losses, self.open = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.open.append((float(outputs["loss"]) * trainer.accumulate_grad_batches, len(batch[0])))
        if trainer.fit_loop._should_accumulate():
            return
        samples = sum(n for _, n in self.open)
        self.losses.append(sum(loss * n for loss, n in self.open) / samples)
        self.norms[-1] *= (trainer.accumulate_grad_batches / len(self.open)) ** 2
        self.open = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(sum(float(p.grad.square().sum()) for p in pl_module.parameters()))


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_batches(accumulate, tmp_path):
    """One update has k of the loader's batches; an epoch's last one may have fewer, and its mean is over those."""
    ours = AdaptiveBatchSize(RadaDamp(rho=0.5, grad_norm_weight=0.0), adapt="lr")
    reference, watch, module = Plain(), Watch(ours), Recorder(lr=0.0)
    norms = AdaptiveBatchSize(GradNormDamp(), adapt="lr")
    flags = {"epochs": 2, "root": tmp_path, "accumulate_grad_batches": accumulate}
    trainer = fit(module, loader(22, 4), callbacks=[ours, watch, reference], **flags)
    per_epoch = -(-6 // accumulate)
    assert trainer.global_step == ours.updates == 2 * per_epoch
    assert ours.batch_size == 4 * accumulate
    assert ours.samples == 44
    seen = list(dict.fromkeys((o.batch_size, o.loss) for o in watch.observations if o is not None))
    assert [loss for _, loss in seen] == pytest.approx(reference.losses[:per_epoch], rel=1e-6)
    assert {size for size, _ in seen} <= {4 * accumulate, 22 - 4 * accumulate * (per_epoch - 1)}
    second, watched = Recorder(lr=0.0), Watch(norms)
    fit(second, loader(22, 4), callbacks=[norms, watched], **flags)
    found = list(dict.fromkeys(o.grad_norm_sq for o in watched.observations if o is not None))
    assert found == pytest.approx(reference.norms[:per_epoch], rel=1e-5)


def test_samples_are_counted_after_a_resume_in_mid_epoch(tmp_path):
    """The loader begins its order anew, and what is counted and logged is what its batches have."""
    cut = quiet(callbacks=[adapt(4, adapt="lr")], epochs=2, max_steps=2, root=tmp_path)
    cut.fit(Recorder(), loader(13, 4))
    cut.save_checkpoint(tmp_path / "two.ckpt")
    module, ours = Recorder(), adapt(4, adapt="lr")
    with pytest.warns(UserWarning, match="leaves the DataLoader to you"):
        quiet(callbacks=[ours], epochs=2, root=tmp_path).fit(module, loader(13, 4), ckpt_path=tmp_path / "two.ckpt")
    assert module.sizes == [4, 4, 4, 4, 4, 1]
    assert ours.samples == 8 + sum(module.sizes)


def test_accumulated_rate_moves_between_windows_only(tmp_path):
    """No decision falls between the batches of one window."""
    module, ours = Recorder(), adapt(8, 16, 32, adapt="lr")
    fit(module, loader(32, 4), callbacks=[ours], epochs=1, root=tmp_path, accumulate_grad_batches=2)
    assert [batch.lr for batch in module.batches] == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.025, 0.025]


def test_attributes_before_the_first_batch(tmp_path):
    """Where only a batch tells its size, the size is None until the first one is there."""
    seen = []

    class Looks(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(ours.batch_size)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(ours.batch_size)

    ours = adapt(4, 8, adapt="lr")
    quiet([ours, Looks()], epochs=1, root=tmp_path).fit(Recorder(), Batches())
    assert seen == [None, 4, 4, 4]


class Pictures(Indexed):
    """Images of several heights, as lists: what a model for detection is given."""

    def __getitem__(self, index):
        return torch.randn(3, 4 + index % 3, 5), {"boxes": torch.zeros(1 + index % 2, 4)}


class InGroups:
    batch_size = 4

    def __init__(self):
        self.sampler = range(10)

    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]])


class Cut(InGroups):
    """Its last batch is a single sample, where three make a batch."""

    def __iter__(self):
        return (list(range(start, min(10, start + self.batch_size))) for start in range(0, 10, self.batch_size))


def as_lists(samples):
    """Collate as torchvision's references do."""
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", [tuple, list])
def test_a_last_batch_is_counted_by_its_rows(form, size, tmp_path):
    """Not by its fields, of which there are as many as samples in a full batch."""

    class Pairs(Recorder):
        def training_step(self, batch, batch_idx):
            return self.loss(batch[0], batch[1])

    def collate(samples):
        columns = [torch.stack([torch.as_tensor(sample[field]) for sample in samples]) for field in range(3)]
        return form(columns[:size])

    ours = adapt(size, adapt="lr")
    sampler = InGroups()
    sampler.batch_size = size
    sampler.__class__ = Cut
    fit(Pairs(), DataLoader(Indexed(10), batch_sampler=sampler, collate_fn=collate), callbacks=[ours], epochs=1)
    assert ours.samples == 10


@pytest.mark.parametrize("collate", [as_lists, lambda samples: {"images": list(samples), "scale": torch.ones(())}])
def test_lists_of_images_are_counted_by_their_number(collate, tmp_path):
    """Not by the three channels of the first one."""

    class Detects(Recorder):
        def training_step(self, batch, batch_idx):
            return self.net(torch.ones(1, 4)).square().sum()

    ours = adapt(4, 8, adapt="lr")
    train = DataLoader(Pictures(10), batch_sampler=InGroups(), collate_fn=collate)
    fit(Detects(), train, callbacks=[ours], epochs=1, root=tmp_path)
    assert (ours.samples, ours.epochs) == (12, 1.2)
