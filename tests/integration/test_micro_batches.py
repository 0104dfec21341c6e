# SPDX-License-Identifier: Apache-2.0
"""Updates of several micro-batches: the gradients are the mean over the update's samples, whatever the parts are."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, Watch, adapt, fit, loader, quiet
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, default_collate

from lightning_adabatch import AdaptiveBatchSize, Constant, RadaDamp


class Net(Recorder):
    """Counts what Lightning calls, and notes the gradients of each update."""

    def __init__(self, optimizer="sgd", **kwargs) -> None:
        super().__init__(schedule=lambda o: StepLR(o, 3, 0.9), interval="step", **kwargs)
        self.kind = optimizer
        self.gradients: list[torch.Tensor] = []
        self.zeroed = 0

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in self.parameters()]))

    def on_before_zero_grad(self, optimizer):
        self.zeroed += 1

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        if self.kind == "adam":
            optimizer = torch.optim.Adam(self.parameters(), 0.05)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.9), "interval": "step"},
            }
        return configured


@pytest.mark.parametrize("workers", [0, 2])
def test_constant_with_whole_windows_is_the_plain_run(workers, tmp_path):
    """Invariant 7 with accumulation: where windows are whole, weights, order and rates are bitwise the plain ones."""
    results = []
    for callbacks in ([], [AdaptiveBatchSize(Constant())]):
        pl.seed_everything(3, verbose=False)
        module = Net(momentum=0.9)
        train = loader(48, 4, shuffle=True, num_workers=workers)
        trainer = fit(
            module, train, loader(8, 4), callbacks=callbacks, accumulate_grad_batches=3, epochs=3, root=tmp_path
        )
        results.append((module, trainer))
    (plain, one), (ours, other) = results
    assert [b.indices for b in ours.batches] == [b.indices for b in plain.batches]
    assert [b.lr for b in ours.batches] == [b.lr for b in plain.batches]
    assert [(b.planned, b.last) for b in ours.batches] == [(b.planned, b.last) for b in plain.batches]
    assert ours.validations == plain.validations
    assert ours.zeroed == plain.zeroed
    assert one.global_step == other.global_step == 12
    assert torch.equal(ours.net.weight, plain.net.weight)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "accumulate"), [(16, 3), (22, 2), (22, 3), (29, 4), (7, 2), (9, 3)])
def test_constant_has_the_batches_of_the_plain_run(samples, accumulate, drop_last, tmp_path):
    """The last window has the batches that it has without us, an incomplete one too or not; their weights differ."""
    ours, plain = Recorder(), Recorder()
    flags = {"epochs": 2, "root": tmp_path, "accumulate_grad_batches": accumulate}
    data = loader(samples, 4, drop_last=drop_last)
    callback = AdaptiveBatchSize(Constant())
    one = fit(ours, data, loader(8, 4), callbacks=[callback], **flags)
    other = fit(plain, data, loader(8, 4), **flags)
    assert [batch.indices for batch in ours.batches] == [batch.indices for batch in plain.batches]
    assert [(b.planned, b.last) for b in ours.batches] == [(b.planned, b.last) for b in plain.batches]
    assert one.global_step == other.global_step == callback.updates
    assert ours.validations == plain.validations
    assert callback.samples == sum(ours.sizes)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("limits", [{"max_device_batch_size": 2}, {"trainer": {"accumulate_grad_batches": 2}}])
def test_part_without_a_loss_is_left_out_of_the_mean(limits, tmp_path):
    """C33: where one of several parts returns None, the loss is the mean over the others, and not less."""

    class Silent(Recorder):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 5 == 1 else 0.0 * loss + 1.0

    flags = dict(limits)
    trainer = flags.pop("trainer", {})
    ours = AdaptiveBatchSize(RadaDamp(rho=0.5, grad_norm_weight=0.0), max_batch_size=64, **flags)
    watch = Watch(ours)
    fit(Silent(), loader(60, 4), callbacks=[ours, watch], epochs=2, root=tmp_path, **trainer)
    losses = {o.loss for o in watch.observations if o is not None}
    assert max(losses) == pytest.approx(1.0)
    assert min(losses) == pytest.approx(1.0)
    assert len(watch.observations) > 10


def test_short_last_window(tmp_path):
    """C22: 7 batches in windows of 3: three observations per epoch, and the last one is the mean over its samples."""

    class Flat(Recorder):
        def loss(self, x, y):
            return (self.net.weight * torch.arange(8.0).view(2, 4)).sum() + self.net.bias.sum()  # a constant gradient

    ours = AdaptiveBatchSize(RadaDamp(rho=0.9), max_batch_size=64)
    watch = Watch(ours)
    module = Flat(lr=0.0)
    fit(module, loader(28, 4), callbacks=[ours, watch], accumulate_grad_batches=3, epochs=5, root=tmp_path)
    assert ours.updates == 15
    norms = {round(o.grad_norm_sq, 3) for o in watch.observations if o is not None}
    assert norms == {142.0}  # 0 + 1 + 4 + ... + 49 + 2, each time
    assert set(watch.sizes) == {12}
    assert [o.batch_size for o in watch.observations[2::7]][:1] == [12]
    assert ours.samples == 5 * 28


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("limit", [3, 5, 8])
def test_parts_are_one_big_batch(limit, kind, clip, tmp_path):
    """Micro-batches of unequal sizes give the gradients, weights and steps of one big batch, clipping included."""
    script = [8, 8, 13, 20, 7, 9, 16, 16]
    results = []
    for settings in ({}, {"max_device_batch_size": limit}):
        module = Net(kind, **({"momentum": 0.9} if kind == "sgd" else {}))
        ours = AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=20, **settings) if clip is None else None
        ours = ours or adapt(*script, max_batch_size=20, **settings)
        watch = Watch(ours)
        trainer = fit(module, loader(103, 8), callbacks=[ours, watch], gradient_clip_val=clip, epochs=2, root=tmp_path)
        results.append((module, ours, trainer))
    (big, one, first), (small, other, second) = results
    assert max(small.sizes) <= limit
    assert len(small.sizes) > len(big.sizes) or (limit, clip) == (8, None)  # where RadaDamp did not grow
    assert len(big.gradients) == len(small.gradients) == one.updates == other.updates
    for mine, theirs in zip(small.gradients, big.gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert torch.allclose(big.net.weight, small.net.weight, atol=1e-5)
    assert first.global_step == second.global_step == other.updates
    assert small.zeroed == big.zeroed
    assert [o.param_groups[0]["lr"] for o in first.optimizers] == [o.param_groups[0]["lr"] for o in second.optimizers]
    assert one.samples == other.samples == 206
    for epoch in range(2):
        assert small.seen_in(epoch) == big.seen_in(epoch)


def test_parts_are_of_about_equal_size(tmp_path):
    """65 over 64 is 33 and 32; the last part of the epoch is its last batch, and validation comes after it."""
    module = Recorder()
    ours = adapt(64, 65, 65, max_batch_size=65, max_device_batch_size=64)
    fit(module, loader(64 + 65 + 20, 64), loader(8, 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [64, 33, 32, 20]
    assert [batch.last for batch in module.batches] == [False, False, False, True]
    assert [batch.planned for batch in module.batches] == [3, 4, 4, 4]
    assert module.validations == [4]
    assert ours.updates == 3


def test_decisions_fall_between_updates(tmp_path):
    """C82: with accumulate_grad_batches=4 the first update has 4 · 4 samples; no decision falls inside of a window."""
    module = Recorder()
    ours = adapt(16, 24, 24, 12, max_batch_size=64)
    watch = Watch(ours)
    fit(module, loader(96, 4), callbacks=[ours, watch], accumulate_grad_batches=4, epochs=1, root=tmp_path)
    assert module.sizes == [4] * 4 + [4] * 6 + [4] * 6 + [4] * 3 + [4] * 3 + [4] * 2
    assert watch.sizes[:5] == [16, 16, 16, 24, 24]
    assert (ours.updates, ours.samples) == (6, 96)


def test_whole_number_of_batches(tmp_path):
    """An int limit_train_batches counts what Lightning counts: micro-batches; the last update has what is left."""
    module = Recorder()
    ours = adapt(8, 20, max_batch_size=20, max_device_batch_size=8)
    fit(module, loader(200, 8), loader(8, 4), callbacks=[ours], limit_train_batches=6, root=tmp_path)
    assert module.sizes_in(0) == [8, 7, 7, 6, 8, 8]
    assert module.sizes_in(1) == [7, 7, 6, 7, 7, 6]
    assert module.validations == [6, 12]
    assert ours.updates == 3 + 2


def test_size_is_not_more_than_the_parts_of_an_epoch(tmp_path):
    """Of two parts of at most 8 samples an epoch has 16: neither size nor learning rate says more."""
    module = Recorder(lr=0.1)
    ours = adapt(8, 40, max_batch_size=64, max_device_batch_size=8, lr_scaling="linear")
    watch = Watch(ours)
    fit(module, loader(200, 8), callbacks=[ours, watch], limit_train_batches=2, root=tmp_path)
    assert [module.sizes_in(epoch) for epoch in (0, 1)] == [[8, 8], [8, 8]]
    assert watch.sizes == [16, 16, 16, 16]  # that of the next update
    assert [batch.lr for batch in module.batches] == pytest.approx([0.1, 0.2, 0.2, 0.2])
    assert ours.batch_size == 16


@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_tails(tail, tmp_path):
    """Whether a tail is dropped or carried goes by whole updates, not by their parts."""
    module = Recorder()
    ours = adapt(8, 20, max_batch_size=20, max_device_batch_size=7, tail=tail)
    fit(module, loader(50, 8), callbacks=[ours], root=tmp_path)
    assert module.sizes_in(0) == [4, 4, 7, 7, 6, 7, 7, 6]  # 8, 20, 20, and 2 left
    assert module.sizes_in(1) == [7, 7, 6, 7, 7, 6]  # 20, 20, and 10 left, or 12
    assert module.batches[8].indices[0] == {"drop": 0, "carry": 48}[tail]
    assert ours.updates == 5


class Dropping(Net):
    """Draws at random in every part."""

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.net(torch.nn.functional.dropout(x, 0.3)), y)


class Saves(pl.Callback):
    """Writes a checkpoint in a hook of the n-th micro-batch."""

    def __init__(self, path, hook, number) -> None:
        self.path, self.hook, self.left = path, hook, number

    def _count(self, hook, trainer) -> None:
        if hook == self.hook:
            self.left -= 1
            if self.left == 0:
                trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._count("start", trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._count("end", trainer)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self._count("validation", trainer)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [True, False], ids=["saver first", "callback first"])
@pytest.mark.parametrize(
    ("hook", "number"),
    [*(("end", n) for n in (1, 2, 3, 4, 5, 9, 16)), *(("start", n) for n in (1, 2, 5, 6)), ("validation", 1)],
)
def test_resume_in_the_middle_of_an_update(hook, number, first, workers, tmp_path):
    """C11: a checkpoint written between two parts goes on with the first part of the same update, bitwise."""
    path = tmp_path / "cut.ckpt"

    def train(seed, ckpt=None, saver=None):
        pl.seed_everything(seed, verbose=False)
        module = Dropping(momentum=0.9)
        ours = adapt(8, 8, 13, 20, 7, 9, 16, max_batch_size=20, max_device_batch_size=5, tail="carry")
        watch = Watch(ours)
        callbacks = [ours, watch] if saver is None else [saver, ours, watch] if first else [ours, watch, saver]
        trainer = quiet(callbacks, epochs=3, val_check_interval=0.5, root=tmp_path)
        train = loader(50, 8, shuffle=True, num_workers=workers)
        trainer.fit(module, train, loader(8, 4), ckpt_path=ckpt)
        return module, ours, trainer

    whole, one, first_trainer = train(1, saver=Saves(path, hook, number))
    rest, other, second_trainer = train(2, ckpt=path)
    behind = len(rest.batches)
    assert 0 < behind <= len(whole.batches)
    assert [(b.epoch, b.indices, b.lr, b.last) for b in rest.batches] == [
        (b.epoch, b.indices, b.lr, b.last) for b in whole.batches[-behind:]
    ]
    assert torch.equal(rest.net.weight, whole.net.weight)
    assert (one.updates, one.samples, one.batch_size) == (other.updates, other.samples, other.batch_size)
    assert first_trainer.global_step == second_trainer.global_step == one.updates


def test_refused(tmp_path):
    """Manual optimization, and a scheduler with a frequency, do not go together with micro-batches."""

    class Manual(Recorder):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    class Rare(Recorder):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            scheduler = {"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    small = {"max_device_batch_size": 4}
    for module, ours, flags, match in (
        (Manual(), adapt(8, **small), {}, "max_device_batch_size with manual optimization"),
        (Rare(), adapt(8, **small), {}, "a scheduler with a frequency other than 1"),
    ):
        with pytest.raises(MisconfigurationException, match=match):
            quiet([ours], root=tmp_path, **flags).fit(module, loader(16, 8))


def without_bad_ones(samples):
    """Leave out the samples 16 to 23: a part that has no others is None."""
    good = [sample for sample in samples if not 16 <= sample[2] < 24]
    return default_collate(good) if good else None


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_first_part_that_is_none_leaves_no_gradients_behind(tmp_path):
    """Lightning sets gradients to zero with the first part; where that is skipped, the next one does it."""

    class Keeps(Recorder):
        found = ()

        def on_before_optimizer_step(self, optimizer):
            self.found = (*self.found, self.net.weight.grad.clone())

    module, data = Keeps(lr=0.0), Indexed(48)
    train = DataLoader(data, 16, collate_fn=without_bad_ones)
    fit(module, train, callbacks=[AdaptiveBatchSize(Constant(), max_device_batch_size=8)], epochs=1, root=tmp_path)
    second = range(24, 32)
    module.zero_grad()
    (0.5 * module.loss(data.x[second], data.y[second])).backward()  # of its share of the update's samples
    assert torch.allclose(module.found[1], module.net.weight.grad, atol=1e-7)
