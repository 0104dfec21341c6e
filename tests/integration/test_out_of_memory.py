# SPDX-License-Identifier: Apache-2.0
"""C61: a run whose growth does not fit into memory ends as one that had the right limit from the start."""

from __future__ import annotations

import random
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Indexed, Recorder, Sizes, Watch, adapt, quiet
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MeanMetric

from lightning_adabatch import AdaptiveBatchSize, GradNormDamp, RadaDamp
from lightning_adabatch.bridge.memory import out_of_memory

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


class Fails(torch.autograd.Function):
    """Runs out of memory on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError(MESSAGE)


class Limited(pl.LightningModule):
    """Has room for so many samples, and draws, counts and logs in every batch; notes what each update was made of.

    Args:
        room: Samples of one forward and backward pass.
        where: In which of the two it fails.
        fail: Whether a batch fails, beside one that is too large: a function of the module and the batch.
    """

    def __init__(self, room=10**9, where="forward", *, fail=None, manual=False, frequency=1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.mean = MeanMetric()
        self.room, self.where, self.fail, self.frequency = room, where, fail, frequency
        self.automatic_optimization = not manual
        self.tries = 0  # batches that were begun
        self.parts: list[tuple] = []
        self.updates: list[list[tuple]] = []
        self.validations: list[int] = []
        self.epochs: list[tuple[float, float]] = []  # what was logged

    def training_step(self, batch, batch_idx):
        self.tries += 1
        x, y, index = batch
        random.random()
        np.random.rand()  # noqa: NPY002
        trainer = self.trainer
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        full = len(x) > self.room or (self.fail is not None and self.fail(self, batch))
        if full and self.where == "forward":
            raise torch.OutOfMemoryError(MESSAGE)
        if full:
            loss = Fails.apply(out).sum()
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.parts.append((trainer.current_epoch, batch_idx, index.tolist(), rate, trainer.is_last_batch))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_before_zero_grad(self, optimizer):
        self.parts = self.parts[-1:]  # what had been tried before is not part of this update

    def on_before_optimizer_step(self, optimizer):
        self.updates.append(self.parts)
        self.parts = []

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        self.epochs.append((float(metrics["loss"]), float(metrics["metric"])))

    def on_validation_epoch_start(self):
        if not self.trainer.sanity_checking:
            self.validations.append(len(self.updates))

    def validation_step(self, batch, batch_idx):
        torch.rand(1)  # a validation too many would be seen

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        scheduler = {"scheduler": StepLR(optimizer, 3, 0.9), "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def own_collate(samples):
    """Make what the library cannot cut."""
    x, y, index = zip(*samples, strict=True)
    return Bag((torch.stack(x), torch.stack(y), torch.tensor(index)))


class Bag(tuple):
    """Nothing that ``default_collate`` makes."""

    __slots__ = ()


class Drawn(Indexed):
    """Draws at random in every sample."""

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return x + torch.randn(4) + random.random() + np.random.rand(), y, index  # noqa: NPY002


def data(samples, size, *, kind=Indexed, **kwargs):
    return DataLoader(kind(samples), size, shuffle=True, **kwargs)


def train(module, ours, train_data, root, *, callbacks=(), ckpt=None, seed=1, **kwargs):
    """Fit; return what is to be the same in two runs, and the warnings of ours."""
    pl.seed_everything(seed, verbose=False)
    watch = Watch(ours)
    trainer = quiet([ours, watch, *callbacks], root=root, **{"epochs": 2, **kwargs})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train_data, DataLoader(Indexed(4), 4), ckpt_path=ckpt)
    batches = trainer.fit_loop.epoch_loop.batch_progress
    seen = {
        "updates": module.updates,
        "validations": module.validations,
        "logged": module.epochs,
        "counts": (ours.updates, ours.samples, ours.batch_size, trainer.global_step),
        "batches": (vars(batches.total), batches.current.ready),
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "drawn": (torch.rand(1).item(), random.random(), np.random.rand()),  # noqa: NPY002
        "observation": watch.observations[-1],
    }
    return seen, [str(w.message) for w in caught if "do not fit into memory" in str(w.message)]


def sizes(seen):
    return [[len(part[2]) for part in update] for update in seen["updates"]]


SCRIPT = (8, 8, 12, 30, 30, 9, 16)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("collate", [None, own_collate], ids=["default", "own"])
@pytest.mark.parametrize("workers", [0, 2])
def test_growth_in_mid_epoch(workers, collate, where, tmp_path):
    """Growth from 12 to 30 fails with room for 13: 15 fails too, 12 is known to have fitted."""

    def run(room, **kwargs):
        ours = adapt(*SCRIPT, max_batch_size=64, **kwargs)
        loader = data(103, 8, num_workers=workers, collate_fn=collate)
        return train(Limited(room, where), ours, loader, tmp_path, val_check_interval=0.3)

    found, said = run(13)
    right, silent = run(10**9, max_device_batch_size=12)
    assert found == right
    assert sizes(found)[:6] == [[8], [8], [12], [10, 10, 10], [10, 10, 10], [9]]
    assert (len(said), silent) == (2, [])
    assert "30 samples in one forward and backward pass" in said[0]
    assert "max_device_batch_size=15" in said[0]
    assert "15 samples" in said[1]
    assert "max_device_batch_size=12" in said[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kwargs", "flags"),
    [
        ({}, {"accumulate_grad_batches": 2}),
        ({"max_device_batch_size": 30}, {"limit_train_batches": 9}),
        ({"tail": "carry"}, {"val_check_interval": 3}),
        ({"tail": "drop"}, {"max_steps": 9}),
        ({"dwell": 2}, {"gradient_clip_val": 0.1, "limit_train_batches": 0.5}),
    ],
    ids=["accumulated", "limited", "carry", "drop", "dwell"],
)
def test_with_other_settings(kwargs, flags, workers, tmp_path):
    """Whatever plans the epoch's batches, lowering ends as the right limit from the start: first window included."""

    def run(room, **more):
        ours = adapt(*SCRIPT, max_batch_size=64, **{**kwargs, **more})
        return train(Limited(room, "backward"), ours, data(103, 8, num_workers=workers), tmp_path, epochs=3, **flags)

    found, said = run(5)
    right, _ = run(10**9, max_device_batch_size=4)
    assert found == right
    assert said
    assert "max_device_batch_size=4 " in said[-1]


@pytest.mark.parametrize("policy", [RadaDamp(rho=0.5), GradNormDamp(rho=0.5)])
def test_measuring_policies(policy, tmp_path):
    """The losses and gradients of an update that failed are measured once, of its parts that went through."""

    def run(room, **kwargs):
        ours = AdaptiveBatchSize(policy, max_batch_size=64, min_batch_size=4, multiple_of=2, **kwargs)
        return train(Limited(room, "backward"), ours, data(104, 16), tmp_path)

    found, said = run(6)
    right, _ = run(10**9, max_device_batch_size=4)
    assert found == right
    assert len(said) == 2
    assert found["observation"] is not None


def test_samples_that_draw(tmp_path):
    """Without workers samples are fetched again, and draw what they would have drawn; an own collate function too."""
    for collate in (None, own_collate):

        def run(room, collate=collate, **kwargs):
            ours = adapt(*SCRIPT, max_batch_size=64, **kwargs)
            return train(Limited(room), ours, data(103, 8, kind=Drawn, collate_fn=collate), tmp_path)

        assert run(13)[0] == run(10**9, max_device_batch_size=12)[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_second_part_fails(workers, tmp_path):
    """Where another part than the first fails, all of the update is done again, its batches counted once."""

    def run(fail, **kwargs):
        ours = adapt(20, 12, max_batch_size=64, **kwargs)
        module = Limited(where="backward", fail=fail)
        return train(module, ours, data(103, 20, num_workers=workers), tmp_path, val_check_interval=3)

    found, said = run(lambda module, batch: module.tries == 3, max_device_batch_size=8)  # of 7, 7 and 6
    right, _ = run(None, max_device_batch_size=3)
    assert found == right
    assert sizes(found)[:2] == [[3, 3, 3, 3, 3, 3, 2], [3] * 4]
    assert len(said) == 1


def test_growth_in_a_tail(tmp_path):
    """A failing last batch of an epoch is its last batch again, in parts; the next epoch begins as it would have."""

    def run(room, workers, **kwargs):
        ours = adapt(8, 16, max_batch_size=64, **kwargs)
        return train(Limited(room), ours, data(8 + 15, 8, num_workers=workers), tmp_path, epochs=3)

    for workers in (0, 2):
        found, said = run(8, workers)
        right, _ = run(10**9, workers, max_device_batch_size=8)
        assert found == right
        assert len(said) == 1
        assert [part[4] for part in found["updates"][1]] == [False, True]


def test_lowered_again_and_again(tmp_path):
    """The very first update may be too large many times over."""
    found, said = train(Limited(3), adapt(64, max_batch_size=64), data(128, 64), tmp_path)
    right, _ = train(Limited(), adapt(64, max_batch_size=64, max_device_batch_size=2), data(128, 64), tmp_path)
    assert found == right
    assert len(said) == 5
    assert sizes(found) == [[2] * 32] * 4


def test_one_sample_does_not_fit(tmp_path):
    """Where not even one sample fits, the error says so, and what was said before is in it."""
    module = Limited(0)
    ours = adapt(4, max_batch_size=64)
    module.net[1] = nn.Identity()
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate(.|\n)*1 sample in one .* do not fit"
    ) as caught:
        train(module, ours, data(16, 4), tmp_path)
    assert str(caught.value.__cause__) == MESSAGE
    assert (ours.updates, module.updates) == (0, [])


def test_size_that_had_fitted(tmp_path):
    """Memory may be in pieces, or samples not alike: nothing is lost, though what was drawn is not drawn again."""

    def fail(module, batch):
        return len(module.updates) == 5 and len(batch[0]) > 4

    for workers in (0, 2):
        found, said = train(Limited(fail=fail), adapt(8), data(80, 8, num_workers=workers), tmp_path, epochs=1)
        assert sizes(found) == [[8]] * 5 + [[4, 4]] * 5
        assert len({i for update in found["updates"] for part in update for i in part[2]}) == 80
        assert len(said) == 1
        assert "no copy was kept" in said[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_keeps_what_was_found(workers, tmp_path):
    """The lowered limit is in the checkpoint: the run that goes on makes the same parts, and fails no more."""

    def run(**kwargs):
        ours = adapt(*SCRIPT, max_batch_size=64)
        module = Limited(13)
        return (*train(module, ours, data(103, 8, num_workers=workers), tmp_path, epochs=3, **kwargs), module)

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole, _, _ = run(callbacks=[saver], enable_checkpointing=True)
    rest, said, _ = run(ckpt=tmp_path / "step=5.ckpt", seed=2)
    assert said == []
    assert rest["updates"] == whole["updates"][5:]
    assert rest["state"] == whole["state"]
    state = torch.load(tmp_path / "step=5.ckpt", weights_only=True)["callbacks"]["AdaptiveBatchSize"]
    assert state["device_limit"] == 12


def test_loaders_that_are_made_again(tmp_path):
    """A loader of a reload has the lowered limit too."""
    flags = {"epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    found, said = train(Limited(10), adapt(8, 16), data(72, 8), tmp_path, **flags)
    right, _ = train(Limited(), adapt(8, 16, max_device_batch_size=8), data(72, 8), tmp_path, **flags)
    assert found == right
    assert len(said) == 1


def test_error_elsewhere_is_left_alone(tmp_path):
    """Memory that runs out in validation, in a hook or in the optimizer's step ends the run; so do other errors."""

    class InValidation(Limited):
        def validation_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError(MESSAGE)

    class InHook(Limited):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise torch.OutOfMemoryError(MESSAGE)

    class Another(Limited):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("shapes do not match")

    class InStep(Limited):
        def on_before_optimizer_step(self, optimizer):
            raise torch.OutOfMemoryError(MESSAGE)

    for kind, match, tries in (
        (InValidation, rf"^{MESSAGE}$", 0),
        (InHook, rf"^{MESSAGE}$", 1),
        (Another, "^shapes do not match$", 0),
        (InStep, r"Set max_device_batch_size=4, and resume from the last checkpoint", 1),
    ):
        module = kind()
        with pytest.raises(RuntimeError, match=match):
            train(module, adapt(8), data(32, 8), tmp_path)
        assert module.tries == tries


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        (Limited(6, "backward", manual=True), "max_batch_size=4"),
        (Limited(6, frequency=2), "max_batch_size=4"),
    ],
    ids=["manual", "frequency"],
)
def test_cannot_be_divided(module, remedy, tmp_path):
    """Where updates cannot have parts the error names the size that was tried, what fitted, and what to set."""
    ours = AdaptiveBatchSize(Sizes([4, 4, 8]), max_batch_size=64)
    match = rf"(?s)Tried to allocate.*8 samples .* do not fit .* the most that fitted is 4\. Set {remedy}, and resume"
    with pytest.raises(torch.OutOfMemoryError, match=match):
        train(module, ours, data(32, 4), tmp_path)
    assert ours.updates == 2


def test_lr_alone_is_left_alone(tmp_path):
    """With ``adapt="lr"`` the batches are the user's, and so is the error."""
    with pytest.raises(torch.OutOfMemoryError, match=f"^{MESSAGE}$"):
        train(Limited(3), AdaptiveBatchSize(adapt="lr"), data(32, 4), tmp_path)


def test_everything_is_given_back(tmp_path):
    """After the fit nothing stands over Lightning's own methods, and the user's settings are as they were."""
    ours, module, names = adapt(4, 16), Limited(8), []

    def collate(samples):
        names.append(module._current_fx_name)
        return default_collate(samples)

    trainer = quiet([ours], root=tmp_path, epochs=1)
    with pytest.warns(UserWarning, match="max_device_batch_size=8 to have that"):
        trainer.fit(module, data(32, 4, collate_fn=collate))
    assert set(names) == {None}  # no hook is thought to be running after the one that failed
    loop = trainer.fit_loop.epoch_loop
    for owner in (loop, loop.automatic_optimization, loop.manual_optimization):
        assert {"advance", "run", "_make_closure", "_accumulated_batches_reached"}.isdisjoint(vars(owner))
    assert ours.settings.max_device_batch_size is None


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), False),
        (RuntimeError(3), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error, is_one):
    """Errors of every device are known by their class or by what they say."""
    assert out_of_memory(error) is is_one


class Plain(Recorder):
    """Runs out of memory in a batch that is larger than its room."""

    room = 4

    def loss(self, x, y):
        if len(x) > self.room:
            raise torch.OutOfMemoryError(MESSAGE)
        return super().loss(x, y)


def test_memory_that_is_held(tmp_path):
    """In a steady run nothing is kept: no copy of the state, and none of the samples of an update of several parts."""
    held = []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            run = ours._run
            live = run._bridge.slot.live
            held.append((run._bridge.memory._kept is not None, live.again._pieces is not None))

    ours = adapt(8, 8, 8, 8, 12, 12)
    quiet([ours, Looks()], root=tmp_path, epochs=1, accumulate_grad_batches=2).fit(
        Plain(), DataLoader(Indexed(16 * 4), 4, num_workers=2)
    )
    assert held[:4] == [(True, True)] * 4
    assert set(held[4:]) == {(False, False)}


class Allocates(Recorder):
    """Needs a twenty-fourth of the device's memory for every sample."""

    def loss(self, x, y):
        share = torch.cuda.get_device_properties(self.device).total_memory // 24
        torch.empty(len(x) * share, dtype=torch.uint8, device=self.device)
        return super().loss(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu(tmp_path):
    """Twice the start size does not fit into a real device's memory."""
    pl.seed_everything(1, verbose=False)
    module, ours = Allocates(), adapt(16, 32)
    trainer = quiet([ours], root=tmp_path, epochs=1, accelerator="gpu", devices=1)
    with pytest.warns(UserWarning, match="32 samples .* max_device_batch_size=16"):
        trainer.fit(module, data(16 + 64, 16))
    assert [size for size in module.sizes if size <= 16] == [16] * 5
    assert (ours.updates, ours.samples) == (3, 80)
