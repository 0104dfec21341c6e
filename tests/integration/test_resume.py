# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from a checkpoint is, bit for bit, the run that was not cut (invariant 5)."""

from __future__ import annotations

import csv
import io
import logging
import os
import random
import signal
import warnings
from dataclasses import replace
from itertools import chain
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from models import Recorder, Sizes, adapt, fit, loader, quiet
from resuming import (
    SAMPLES,
    Augmented,
    Cut,
    Learner,
    Outcome,
    Separable,
    Setup,
    assert_equal,
    assert_goes_on,
    assert_same_end,
    resume,
    run,
    same,
    train_loader,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler, default_collate

from lightning_adabatch import AdaptiveBatchSize, RadaDamp

SCRIPT = [4, 4, 8, 6, 6, 12, 16, 5, 5, 3, 11, 11, 2, 20, 4, 4, 9, 9, 30, 6]  # up and down
GROWTH = [4, 4, 5, 6, 6, 8, 8, 10, 12]

# The notice about planned schedules has tests of its own.
pytestmark = pytest.mark.filterwarnings("ignore:AdaptiveBatchSize changes the number of updates")


def scripted(*sizes: int, **kwargs):
    return lambda: adapt(*(sizes or SCRIPT), **kwargs)


def radadamp(**kwargs):
    return lambda: AdaptiveBatchSize(RadaDamp(rho=0.5), **kwargs)


BASE = Setup(scripted(tail="keep"))

PLANS = {
    "radadamp": Setup(radadamp()),
    "radadamp-dwell-7": Setup(radadamp(dwell=7), trainer={"val_check_interval": 0.5}),
    "keep": replace(BASE, trainer={"val_check_interval": 0.25}),
    "carry": Setup(scripted(tail="carry"), trainer={"val_check_interval": 0.5}),
    "drop": Setup(scripted(tail="drop")),
}

CUTS = [
    Cut("train_start"),
    Cut("train_batch_start", 0, 0),
    Cut("train_batch_start", 1, 2, "before"),
    Cut("train_batch_start", 1, 2),
    Cut("train_batch_end", 0, 0, "before"),  # the first update
    Cut("train_batch_end", 0, 0),
    Cut("train_batch_end", 0, 3, "before"),  # in the middle of an epoch, and of a dwell window
    Cut("train_batch_end", 0, 3),
    Cut("train_batch_end", 1, 1),
    Cut("train_batch_end", 1, -1, "before"),  # an epoch's last update
    Cut("train_batch_end", 1, -1),
    Cut("train_batch_end", 2, -1, "before"),  # the last update
    Cut("train_batch_end", 2, -1),
    Cut("validation_start", 1),
    Cut("validation_batch_end", 1),
    Cut("validation_end", 1, 0, "before"),
    Cut("validation_end", 1),
    Cut("validation_end", 2),
    Cut("train_epoch_end", 0, 0, "before"),
    Cut("train_epoch_end", 0),
    Cut("train_epoch_end", 1),
    Cut("train_epoch_start", 1, 0, "before"),
    Cut("train_epoch_start", 1),
]
SECOND_VALIDATION = [
    Cut("validation_start", 0, 1),
    Cut("validation_batch_end", 0, 1, "before"),
    Cut("validation_end", 0, 1, "before"),
    Cut("validation_end", 0, 1),
    Cut("validation_end", 1, 1),
]
WITH_WORKERS = [
    Cut("train_start"),  # the sampler has begun where there are workers, and has not where there are none
    Cut("train_batch_start", 0, 0),
    Cut("train_batch_end", 0, 0),  # the first update
    Cut("train_batch_end", 0, 3),  # in the middle of an epoch, and of a dwell window
    Cut("train_batch_end", 1, -1, "before"),  # an epoch's last batch
    Cut("validation_end", 1),
    Cut("train_epoch_end", 0),
    Cut("train_batch_end", 2, -1),  # the last update
]
FEW = [Cut("train_batch_end", 1, 2), Cut("train_batch_end", 0, -1), Cut("train_epoch_end", 0)]


def state_of(path) -> dict:
    """Return our part of a checkpoint, read as strictly as torch can."""
    return torch.load(path, weights_only=True)["callbacks"]["AdaptiveBatchSize"]


def reader(state) -> AdaptiveBatchSize:
    """Return a callback that was given a state, as Lightning gives it."""
    ours = adapt(4)
    ours.load_state_dict(state)
    return ours


def several_validations(name: str) -> bool:
    return "val_check_interval" in PLANS[name].trainer


@pytest.fixture(scope="module")
def uncut_run(tmp_path_factory):
    """Return a function that gives the uncut run of a set-up, made once, with a checkpoint for every cut."""
    made: dict[str, tuple[Outcome, object]] = {}

    def get(name: str, setup: Setup, cuts) -> tuple[Outcome, object]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = run(setup, root, cuts), root
        return made[name]

    return get


# The matrix of moments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in PLANS for cut in CUTS + (SECOND_VALIDATION if several_validations(name) else [])],
    ids=str,
)
def test_resume_is_bitwise(name, cut, uncut_run, tmp_path):
    """C11, C12, C14: whenever a checkpoint is written, steps, decisions, weights and generators are the uncut run's."""
    uncut, root = uncut_run(name, PLANS[name], CUTS + SECOND_VALIDATION)
    assert_goes_on(uncut, resume(PLANS[name], root / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


@pytest.mark.parametrize("name", ["radadamp-dwell-7", "keep", "carry"])
@pytest.mark.parametrize("cut", WITH_WORKERS, ids=str)
@pytest.mark.parametrize("workers", [(2, 2), (0, 2), (2, 0)], ids=lambda w: f"{w[0]}-to-{w[1]}-workers")
def test_resume_is_bitwise_with_workers(name, cut, workers, uncut_run, tmp_path):
    """The number of workers is not part of the run, before the cut and behind it."""
    before, behind = (PLANS[name].with_workers(count) for count in workers)
    uncut, root = uncut_run(f"{name}-{workers[0]}-workers", before, CUTS)
    assert_goes_on(uncut, resume(behind, root / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


def test_carried_samples_leave_the_order_independent_of_workers(tmp_path):
    """Where an epoch begins with carried samples alone, its order is the same with 0 and with 2 workers (C11)."""
    none, two = (run(PLANS["carry"].with_workers(workers), tmp_path) for workers in (0, 2))
    assert_equal("steps", two.steps, none.steps)
    assert_same_end(none, two)


@pytest.mark.parametrize("name", PLANS)
def test_the_runs_that_are_cut_are_interesting(name, uncut_run, tmp_path):
    """Sizes move in every plan, and the run that writes checkpoints is the one that writes none."""
    uncut, _ = uncut_run(name, PLANS[name], CUTS + SECOND_VALIDATION)
    assert len({step.size for step in uncut.steps}) > 3
    assert {step.epoch for step in uncut.steps} == {0, 1, 2}
    plain = run(PLANS[name], tmp_path)
    assert plain.steps == uncut.steps
    assert_same_end(uncut, plain)


@pytest.mark.parametrize(
    "cut", [Cut("train_epoch_end", 2, 0, "before"), Cut("train_epoch_end", 2), Cut("train_end", 3)], ids=str
)
def test_resume_of_a_finished_run_trains_nothing(cut, uncut_run, tmp_path):
    """A checkpoint from the end of the last epoch brings the weights back, and no batch is trained."""
    cuts = [Cut("train_epoch_end", 2, 0, "before"), Cut("train_epoch_end", 2), Cut("train_end", 3)]
    uncut, root = uncut_run("finished", BASE, cuts)
    resumed = resume(BASE, root / f"{cut}.ckpt", tmp_path)
    assert resumed.steps == []
    assert same(resumed.weights, uncut.weights)
    assert (resumed.ours.updates, resumed.ours.samples) == (uncut.ours.updates, uncut.ours.samples)


@pytest.mark.parametrize("limit", [{"epochs": 2}, {"max_steps": 10}, {"max_steps": 15}], ids=str)
def test_a_finished_run_is_made_longer(limit, tmp_path):
    """Resumed with a later end, a run that was over goes on as one that had that end from the beginning."""
    longer = replace(BASE, trainer={"epochs": 4})
    uncut = run(longer, tmp_path)
    cuts = [Cut("train_end", epoch) for epoch in range(4)]
    first = run(replace(BASE, trainer={**longer.trainer, **limit}), tmp_path, cuts)
    ((cut, mark),) = first.marks.items()
    assert 0 < mark.steps < len(uncut.steps)
    resumed = resume(longer, tmp_path / f"{cut}.ckpt", tmp_path)
    assert_equal("steps", first.steps + resumed.steps, uncut.steps)
    assert_same_end(uncut, resumed)


# Set-ups ------------------------------------------------------------------------------------------------------


def one_cycle(optimizer, trainer):
    return OneCycleLR(optimizer, 0.2, total_steps=int(trainer.estimated_stepping_batches))


def falls_to_the_end(optimizer, trainer):
    """A schedule whose length is not in its state, as of most that are made of a function."""
    total = trainer.estimated_stepping_batches
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def falls_with_the_loader(optimizer, trainer):
    trainer.fit_loop.setup_data()
    total = len(trainer.train_dataloader) * trainer.max_epochs
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def plateau(optimizer, trainer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def weighted(generator=None):
    weights = torch.linspace(1, 2, SAMPLES)
    return lambda: train_loader(sampler=WeightedRandomSampler(weights, SAMPLES, generator=generator and generator()))


class SecretSampler(torch.utils.data.Sampler):
    """Keeps the epoch that it is told to itself."""

    told = 0

    def __len__(self):
        return SAMPLES

    def set_epoch(self, epoch):
        self.told = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.told).permutation(SAMPLES).tolist())


class NumPySampler(torch.utils.data.Sampler):
    """Its indices and its epoch are NumPy's integers."""

    epoch = np.int64(0)

    def __len__(self):
        return SAMPLES

    def set_epoch(self, epoch):
        self.epoch = np.int64(epoch)

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(SAMPLES))


def own_generator(start: int = 5):
    return lambda: torch.Generator().manual_seed(start)


VARIANTS = {
    "augmented by torch": replace(BASE, train=lambda: train_loader(data=Augmented("torch"))),
    "augmented by random": replace(BASE, train=lambda: train_loader(data=Augmented("python"))),
    "augmented by numpy": replace(BASE, train=lambda: train_loader(data=Augmented("numpy"))),
    "augmented by all": replace(BASE, train=lambda: train_loader(data=Augmented("torch", "python", "numpy"))),
    "OneCycleLR over estimated_stepping_batches": Setup(
        scripted(*GROWTH), module=lambda: Learner(one_cycle, interval="step")
    ),
    "LambdaLR over estimated_stepping_batches": Setup(
        scripted(*GROWTH), module=lambda: Learner(falls_to_the_end, interval="step")
    ),
    "LambdaLR over the loader's length": Setup(
        scripted(*GROWTH), module=lambda: Learner(falls_with_the_loader, interval="step")
    ),
    "LambdaLR, limited, carried": Setup(
        scripted(*GROWTH, tail="carry"),
        module=lambda: Learner(falls_to_the_end, interval="step"),
        trainer={"limit_train_batches": 9},
    ),
    "StepLR per step": replace(BASE, module=lambda: Learner(lambda o, _: StepLR(o, 3, 0.9), interval="step")),
    "StepLR per epoch": replace(BASE, module=lambda: Learner(lambda o, _: StepLR(o, 1, 0.5))),
    "ReduceLROnPlateau": replace(BASE, module=lambda: Learner(plateau)),
    "ReduceLROnPlateau per step": replace(BASE, module=lambda: Learner(plateau, interval="step", strict=False)),
    "StepLR under the cap": Setup(
        scripted(max_batch_size=8), module=lambda: Learner(lambda o, _: StepLR(o, 3, 0.9), interval="step")
    ),
    "reload": replace(BASE, trainer={"reload_dataloaders_every_n_epochs": 1}),
    "max_steps": replace(BASE, trainer={"epochs": -1, "max_steps": 25}),
    "limit_train_batches": replace(BASE, trainer={"limit_train_batches": 5}),
    "check_val_every_n_epoch": replace(BASE, trainer={"check_val_every_n_epoch": 2, "epochs": 4}),
    "no validation": replace(BASE, validation=None),
    "no sanity check": replace(BASE, trainer={"num_sanity_val_steps": 0}),
    "drop_last": Setup(scripted(), train=lambda: train_loader(drop_last=True)),
    "WeightedRandomSampler": replace(BASE, train=weighted()),
    "WeightedRandomSampler, own generator": replace(BASE, train=weighted(own_generator())),
    "DataLoader(generator=...)": replace(BASE, train=lambda: train_loader(generator=own_generator()())),
    "sampler whose epoch is not called epoch": replace(BASE, train=lambda: train_loader(sampler=SecretSampler())),
    "NumPy's sampler, carried": Setup(
        scripted(tail="carry"), train=lambda: train_loader(sampler=NumPySampler()), trainer={"epochs": 4}
    ),
    "not shuffled": replace(BASE, train=lambda: train_loader(shuffle=False)),
    "RadaDamp under the cap": Setup(radadamp(max_batch_size=6)),
    "wait, multiples and linear scaling": Setup(radadamp(wait=5, multiple_of=2, dwell=3, lr_scaling="linear")),
}


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric")  # before the first validation
@pytest.mark.parametrize("cut", FEW, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_resume_of_set_ups(name, cut, uncut_run, tmp_path):
    """C11: whatever the data, the schedulers and the Trainer's limits are, the resumed run is the uncut one."""
    uncut, root = uncut_run(name, VARIANTS[name], FEW)
    assert uncut.marks[cut].steps < len(uncut.steps)
    assert_goes_on(uncut, resume(VARIANTS[name], root / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


class DrawsAfterOurs(Learner):
    """Draws from torch in hooks that come after the callback's."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        torch.rand(3)

    def on_validation_end(self):
        super().on_validation_end()
        torch.rand(2)


FETCHED = {
    "augmented by torch": VARIANTS["augmented by torch"],
    "after a validation": replace(BASE, trainer={"val_check_interval": 1}),
    "hooks that draw after ours": replace(BASE, module=DrawsAfterOurs),
}


@pytest.mark.parametrize(
    "cut",
    [
        Cut("train_batch_start", 0, 0),
        Cut("train_batch_start", 1, 0, "before"),
        Cut("train_batch_start", 1, 2, "before"),
        Cut("train_batch_start", 1, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FETCHED)
def test_batch_that_was_fetched_but_not_trained_is_drawn_again(name, cut, tmp_path):
    """What was drawn from torch for a batch that had begun, and nothing else, is drawn again in the resumed run."""
    uncut = run(FETCHED[name], tmp_path, [cut])
    assert_goes_on(uncut, resume(FETCHED[name], tmp_path / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


@pytest.mark.parametrize(
    "second",
    [Cut("train_start", 0, 0, "before"), Cut("train_start"), Cut("train_batch_start", 0, 4)],
    ids=str,
)
@pytest.mark.parametrize("name", ["radadamp-dwell-7", "carry"])
def test_resumed_run_that_ends_before_its_first_update(name, second, tmp_path):
    """A checkpoint that a resumed run writes before it made an update is as good as the one that it came from."""
    first = Cut("train_batch_end", 0, 3)
    uncut = run(PLANS[name], tmp_path, [first])
    again = resume(PLANS[name], tmp_path / f"{first}.ckpt", tmp_path, [second], stop=True)
    assert again.steps == []
    resumed = resume(PLANS[name], tmp_path / f"{second}.ckpt", tmp_path, start=78)
    assert_goes_on(uncut, resumed, uncut.marks[first])


def test_checkpoint_from_before_training_began(tmp_path):
    """A checkpoint from before the first decision holds nothing to go on from: the run begins, with all samples."""
    cut = Cut("train_start", 0, 0, "before")
    run(BASE, tmp_path, [cut], stop=True)
    resumed = resume(BASE, tmp_path / f"{cut}.ckpt", tmp_path)
    assert [step.size for step in resumed.steps][:5] == SCRIPT[:5]
    for epoch in range(3):
        seen = sorted(index for step in resumed.steps if step.epoch == epoch for index in step.indices)
        assert seen == list(range(SAMPLES))


class Shuffles(torch.utils.data.Sampler):
    """Shuffles by what ``shuffled`` returns, and holds any attributes."""

    def __init__(self, shuffled, **attributes):
        vars(self).update(attributes)
        self.shuffled = shuffled

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(list(self.shuffled(self)))


def by_random(sampler):
    return sampler.rng.sample(range(SAMPLES), SAMPLES)


def by_numpy(sampler):
    return sampler.rng.permutation(SAMPLES).tolist()


def by_parts(sampler):
    return [index for part in sampler.parts for index in part]


def in_parts(start: int):
    """Return two samplers of one half of the samples each, with one generator."""
    generator = own_generator(start)()
    halves = range(SAMPLES // 2), range(SAMPLES // 2, SAMPLES)
    return [SubsetRandomSampler(half, generator=generator) for half in halves]


OWN_GENERATORS = {
    "loader": lambda start: train_loader(generator=own_generator(start)()),
    "sampler": lambda start: weighted(own_generator(start))(),
    "any name": lambda start: train_loader(
        sampler=Shuffles(lambda one: torch.randperm(SAMPLES, generator=one.rng).tolist(), rng=own_generator(start)())
    ),
    "random.Random": lambda start: train_loader(sampler=Shuffles(by_random, rng=random.Random(start))),
    "np.random.Generator": lambda start: train_loader(sampler=Shuffles(by_numpy, rng=np.random.default_rng(start))),
    "np.random.RandomState": lambda start: train_loader(sampler=Shuffles(by_numpy, rng=np.random.RandomState(start))),
    "samplers by name": lambda start: train_loader(
        sampler=Shuffles(lambda one: chain(*one.named.values()), named=dict(zip("ab", in_parts(start), strict=True)))
    ),
    "samplers of a sampler": lambda start: train_loader(sampler=Shuffles(by_parts, parts=in_parts(start))),
}


@pytest.mark.parametrize("cut", FEW, ids=str)
@pytest.mark.parametrize("kind", OWN_GENERATORS)
def test_own_generator_goes_on_where_it_stood(kind, cut, uncut_run, tmp_path):
    """The order of this epoch and of the next ones comes from the checkpoint, wherever the new generator began."""

    def setup(start: int) -> Setup:
        return replace(BASE, train=lambda: OWN_GENERATORS[kind](start))

    uncut, root = uncut_run(f"own-generator-{kind}", setup(5), FEW)
    assert_goes_on(uncut, resume(setup(6), root / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


class Noisy(Separable):
    """Adds noise to its samples, from a generator of its own."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def __getitem__(self, index):
        x, *rest = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape, generator=self.rng), *rest


class Jitter:
    """Adds noise to a batch, or to a sample."""

    def __init__(self, start, collate=None):
        self.rng, self.collate = np.random.default_rng(start), collate

    def __call__(self, given):
        x, *rest = given if self.collate is None else self.collate(given)
        return x + 0.1 * torch.tensor(self.rng.standard_normal(x.shape), dtype=x.dtype), *rest


class Jittered(torch.utils.data.Dataset):
    """Puts its samples through a transform, which knows whose it is."""

    def __init__(self, transform):
        self.data, self.transform = Separable(), transform
        transform.dataset = self

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.transform(self.data[index])


class Sampling(Learner):
    """Draws from a generator of a submodule's own."""

    def __init__(self, start):
        super().__init__()
        self.net.rng = own_generator(start)()

    def loss(self, x, y):
        return super().loss(x + 0.1 * torch.randn(x.shape, generator=self.net.rng), y)


def of_a_subset(start):
    data = Noisy(own_generator(start)())
    return train_loader(data=torch.utils.data.Subset(data, range(SAMPLES)))


def shared(start):
    data = Noisy(own_generator(start)())
    return train_loader(data=data, generator=data.rng)


NOISE = {
    "data set": lambda start: {"train": lambda: train_loader(data=Noisy(own_generator(start)()))},
    "data set of a subset": lambda start: {"train": lambda: of_a_subset(start)},
    "transform": lambda start: {"train": lambda: train_loader(data=Jittered(Jitter(start)))},
    "collate_fn": lambda start: {"train": lambda: train_loader(collate_fn=Jitter(start, default_collate))},
    "collate_fn, workers": lambda start: {
        "train": lambda: train_loader(collate_fn=Jitter(start, default_collate), num_workers=1)
    },
    "module": lambda start: {"module": lambda: Sampling(start)},
    "shared with the order": lambda start: {"train": lambda: shared(start)},
}


@pytest.mark.parametrize("cut", FEW, ids=str)
@pytest.mark.parametrize("kind", NOISE)
def test_generators_that_samples_and_module_hold(kind, cut, uncut_run, tmp_path):
    """What the process itself draws from goes on where it stood, whoever holds it."""
    uncut, root = uncut_run(f"noise-{kind}", replace(BASE, **NOISE[kind](5)), FEW)
    resumed = resume(replace(BASE, **NOISE[kind](6)), root / f"{cut}.ckpt", tmp_path)
    assert_goes_on(uncut, resumed, uncut.marks[cut])


class Growing(torch.utils.data.Sampler):
    """Each epoch has more samples."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 16 + 12 * self.epoch

    def __iter__(self):
        return iter(torch.randperm(40, generator=own_generator(self.epoch)()).tolist()[: len(self)])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_a_sampler_whose_length_depends_on_the_epoch(tmp_path):
    """It is told which epoch it goes on in before anybody asks how long that is."""

    def train(ckpt=None, *callbacks):
        module, ours = Recorder(), adapt(4, 8, 4, 8, 4, 8)
        trainer = quiet([ours, *callbacks], epochs=3, enable_checkpointing=bool(callbacks), root=tmp_path)
        trainer.fit(module, loader(40, 4, sampler=Growing()), ckpt_path=ckpt)
        return module.batches, ours.epochs

    uncut, epochs = train(None, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1))
    assert [len(batch.indices) for batch in uncut] == [4, 8, 4, *(8, 4, 8, 8), *(8, 8, 8, 8, 8)]
    assert epochs == 3.0
    for step in range(1, len(uncut)):
        assert train(tmp_path / f"step={step}.ckpt") == (uncut[step:], epochs)


def test_adapt_lr_resumes_at_the_end_of_an_epoch(tmp_path):
    """With adapt="lr" a checkpoint from the end of an epoch resumes bitwise."""
    setup = Setup(lambda: AdaptiveBatchSize(RadaDamp(rho=0.5), adapt="lr", dwell=3))
    cut = Cut("train_epoch_end", 0)
    uncut = run(setup, tmp_path, [cut])
    assert len({step.lr for step in uncut.steps}) > 3
    assert_goes_on(uncut, resume(setup, tmp_path / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


# The cases by number --------------------------------------------------------------------------------------------


def test_size_averages_and_counters_come_back(tmp_path):
    """C11: 40 updates, or 20 and 20 with a new Trainer, callback and process state: the same sizes and averages."""
    setup = Setup(radadamp(dwell=7), trainer={"epochs": 20, "max_steps": 40})
    uncut = run(setup, tmp_path)
    assert len(uncut.steps) == 40
    at = uncut.steps[19]
    cut = Cut("train_batch_end", at.epoch, at.batch_idx)
    first = run(setup, tmp_path, [cut], stop=True)
    resumed = resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)
    assert len(first.steps) == 20
    assert resumed.steps[0].decision[2] == 21
    assert [step.size for step in first.steps + resumed.steps] == [step.size for step in uncut.steps]
    assert_equal("steps", resumed.steps, uncut.steps[20:])
    assert_same_end(uncut, resumed)


@pytest.mark.parametrize("workers", [0, 2])
def test_position_counts_samples(workers, tmp_path):
    """C12: 4, 4, 4, 4, 16 of 64 samples are done at the cut: the resumed run trains the other 32, each once."""
    setup = Setup(
        scripted(4, 4, 4, 4, 16), lambda: train_loader(data=Separable(64), num_workers=workers), trainer={"epochs": 1}
    )
    cut = Cut("train_batch_end", 0, 4)
    first = run(setup, tmp_path, [cut], stop=True)
    resumed = resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)
    assert [step.size for step in first.steps] == [4, 4, 4, 4, 16]
    assert [step.size for step in resumed.steps] == [16, 16]
    assert sorted(index for step in first.steps + resumed.steps for index in step.indices) == list(range(64))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("position", ["before", "behind"])
def test_model_checkpoint_on_either_side(position, tmp_path):
    """C14: ModelCheckpoint(every_n_train_steps=5) on either side of ours saves the moment after update 5.

    Lightning moves it behind ours; savers that stay where they are: test_resume_is_bitwise.
    """

    def callbacks():
        saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1, save_last=True)
        return [saved, adapt(*SCRIPT)] if position == "before" else [adapt(*SCRIPT), saved]

    setup = Setup(lambda: None, callbacks=callbacks, trainer={"enable_checkpointing": True})
    uncut = run(setup, tmp_path)
    state = state_of(tmp_path / "step=5.ckpt")
    assert reader(state).updates == 5
    resumed = resume(setup, tmp_path / "step=5.ckpt", tmp_path)
    assert resumed.steps[0].size == uncut.steps[5].size == SCRIPT[5]
    assert_equal("steps", resumed.steps, uncut.steps[5:])
    assert_same_end(uncut, resumed)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_save_last_resumes(tmp_path):
    """A last.ckpt that ModelCheckpoint(save_last=True) wrote is as good as any other."""

    def setup(**limit):
        return replace(
            PLANS["radadamp"],
            callbacks=lambda: [ModelCheckpoint(tmp_path, every_n_train_steps=7, save_last=True)],
            trainer={"enable_checkpointing": True, **limit},
        )

    uncut = run(replace(PLANS["radadamp"], trainer={}), tmp_path)
    first = run(setup(max_steps=9), tmp_path)
    saved = int(torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"])
    resumed = resume(setup(), tmp_path / "last.ckpt", tmp_path)
    assert_equal("steps", first.steps[:saved] + resumed.steps, uncut.steps)
    assert_same_end(uncut, resumed)


@pytest.mark.parametrize(
    "cut", [Cut("train_epoch_end", 0), Cut("train_batch_end", 0, -1), Cut("train_batch_end", 1, 1)]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_no_warning_about_an_order_that_is_lost(cut, workers, tmp_path):
    """C79: epochs of 7 and 4 steps, resumed at an epoch's end or inside: no sample is lost, nothing is warned of."""
    setup = Setup(
        scripted(4, 4, 8, 12, 12, 12, 12, 16),
        lambda: train_loader(data=Separable(64), num_workers=workers),
        trainer={"epochs": 2},
    )
    uncut = run(setup, tmp_path, [cut])
    assert [sum(step.epoch == epoch for step in uncut.steps) for epoch in (0, 1)] == [7, 4]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)
    said = [str(warning.message) for warning in caught]
    assert [text for text in said if "resum" in text or "epoch ended" in text or "AdaptiveBatchSize" in text] == []
    assert_goes_on(uncut, resumed, uncut.marks[cut])
    steps = uncut.steps[: uncut.marks[cut].steps] + resumed.steps
    for epoch in (0, 1):
        assert sorted(i for step in steps if step.epoch == epoch for i in step.indices) == list(range(64))


@pytest.mark.parametrize("name", ["radadamp-dwell-7", "carry"])
def test_resume_from_resume_from_resume(name, tmp_path):
    """A run that is cut three times within one epoch, each time for good, is the uncut run."""
    setup = PLANS[name]
    uncut = run(setup, tmp_path)
    cuts = [Cut("train_batch_end", 0, 1), Cut("train_batch_end", 0, 2, "before"), Cut("train_batch_end", 0, 4)]
    parts = [run(setup, tmp_path, cuts[:1], stop=True)]
    for previous, cut in zip(cuts, [*cuts[1:], None], strict=True):
        path = tmp_path / f"{previous}.ckpt"
        parts.append(resume(setup, path, tmp_path, [cut] if cut else [], start=50 + len(parts), stop=bool(cut)))
    # The hook of the module, which notes the decision, was not reached in a step that was cut.
    strip = [step._replace(decision=None) for part in parts for step in part.steps]
    assert strip == [step._replace(decision=None) for step in uncut.steps]
    assert parts[-1].steps == uncut.steps[-len(parts[-1].steps) :]
    assert_same_end(uncut, parts[-1])


# Exceptions and signals -------------------------------------------------------------------------------------------


class BoomError(RuntimeError):
    """Raised in the middle of an epoch."""


class Boom(Learner):
    """Raises in a hook of its own, in the third batch of the second epoch."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _raise_at(self, hook: str, batch_idx: int) -> None:
        if hook == self.hook and self.trainer.current_epoch == 1 and batch_idx == 2:
            raise BoomError(hook)

    def on_train_batch_start(self, batch, batch_idx):
        self._raise_at("on_train_batch_start", batch_idx)

    def training_step(self, batch, batch_idx):
        self._raise_at("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self._raise_at("on_after_backward", self.trainer.fit_loop.epoch_loop.batch_idx)


class SavesOnException(pl.Callback):
    """Writes a checkpoint at an exception, from its place in the list."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.folder / "cut.ckpt")


def saves_on_exception(kind: str, folder) -> pl.Callback:
    if kind == "ModelCheckpoint":
        return ModelCheckpoint(folder, filename="cut", save_on_exception=True, every_n_epochs=100)
    return OnExceptionCheckpoint(folder, "cut") if kind == "OnExceptionCheckpoint" else SavesOnException(folder)


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    # Lightning looks for a last checkpoint wherever there is an OnExceptionCheckpoint.
    "ignore:..fit.ckpt_path=None.. was called without a model",
    "ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint",
)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "training_step", "on_after_backward"])
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "OnExceptionCheckpoint", "before ours", "behind ours"])
def test_resume_after_an_exception(kind, hook, tmp_path, caplog):
    """A checkpoint of an exception inside a step resumes after the last complete update, and a notice says so."""

    def callbacks():
        both = [AdaptiveBatchSize(RadaDamp(rho=0.5)), saves_on_exception(kind, tmp_path)]
        return both[::-1] if kind == "before ours" else both

    setup = Setup(lambda: None, callbacks=callbacks, trainer={"enable_checkpointing": kind.endswith("Checkpoint")})
    uncut = run(PLANS["radadamp"], tmp_path)
    done = sum(step.epoch == 0 for step in uncut.steps) + 2
    failed = run(replace(setup, module=lambda: Boom(hook)), tmp_path, raises=BoomError)
    assert isinstance(failed.error, BoomError)
    with caplog.at_level(logging.INFO):
        resumed = resume(setup, tmp_path / "cut.ckpt", tmp_path)
    assert_equal("steps", resumed.steps, uncut.steps[done:])
    assert resumed.module.validations == uncut.module.validations[1:]
    assert_same_end(uncut, resumed)
    assert f"after update {done}" in caplog.text


class BoomInLastBatch(Learner):
    """Raises in the first epoch's last step."""

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.current_epoch == 0 and self.trainer.is_last_batch:
            raise BoomError("in the last step")


@pytest.mark.parametrize("adapt", ["batch_size", "lr"])
@pytest.mark.filterwarnings("ignore:AdaptiveBatchSize.adapt='lr'. leaves the DataLoader to you")
def test_resume_after_an_exception_in_an_epochs_last_step(adapt, tmp_path):
    """The batch that failed is trained: that it was the epoch's last one does not end the epoch (C12)."""

    def ours():
        return AdaptiveBatchSize(RadaDamp(rho=0.5), adapt=adapt)

    setup = Setup(ours, train=lambda: train_loader(shuffle=False))
    uncut = run(setup, tmp_path)
    done = sum(step.epoch == 0 for step in uncut.steps) - 1
    failing = replace(setup, module=BoomInLastBatch, callbacks=lambda: [SavesOnException(tmp_path)])
    assert isinstance(run(failing, tmp_path, raises=BoomError).error, BoomError)
    resumed = resume(replace(setup, callbacks=lambda: [SavesOnException(tmp_path)]), tmp_path / "cut.ckpt", tmp_path)
    assert [step.epoch for step in resumed.steps] == [step.epoch for step in uncut.steps[done:]]
    if adapt == "batch_size":
        assert_equal("steps", resumed.steps, uncut.steps[done:])
        assert_same_end(uncut, resumed)
        assert resumed.counts == uncut.counts
    else:  # the loader began its order anew: what is counted is what was trained
        assert resumed.ours.samples == sum(step.size for step in [*uncut.steps[:done], *resumed.steps])
        assert resumed.ours.updates == uncut.ours.updates


class Terminated(pl.Callback):
    """Sends SIGTERM to this process at the end of a batch."""

    def __init__(self, epoch: int, *, last: bool) -> None:
        self.epoch = epoch
        self.last = last

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == self.epoch and (trainer.is_last_batch if self.last else batch_idx == 2):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.skipif(os.name == "nt", reason="SIGTERM does not reach a handler there")
@pytest.mark.parametrize("last", [False, True], ids=["mid-epoch", "last batch"])
@pytest.mark.parametrize("name", ["radadamp", "carry"])
def test_resume_after_sigterm(name, last, tmp_path):
    """A run that is told to end, as a cluster does, saves after the update in hand and goes on bitwise from there."""
    setup = replace(
        PLANS[name],
        callbacks=lambda: [saves_on_exception("ModelCheckpoint", tmp_path)],
        trainer={**PLANS[name].trainer, "enable_checkpointing": True},
    )
    uncut = run(setup, tmp_path)
    ended = replace(setup, callbacks=lambda: [Terminated(1, last=last), *setup.callbacks()])
    first = run(ended, tmp_path, raises=SIGTERMException)
    assert isinstance(first.error, SIGTERMException)
    assert 0 < len(first.steps) < len(uncut.steps)
    resumed = resume(setup, tmp_path / "cut.ckpt", tmp_path)
    assert_equal("steps", first.steps + resumed.steps, uncut.steps)
    assert first.module.validations + resumed.module.validations == uncut.module.validations
    assert_same_end(uncut, resumed)


# What a checkpoint holds --------------------------------------------------------------------------------------------


def assert_plain(value) -> None:
    """Only what every reader of checkpoints knows: numbers, strings, containers and tensors of the plain classes."""
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) in {str, int}, key
            assert_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            assert_plain(item)
    assert type(value) in {dict, list, tuple, str, int, float, bool, type(None), torch.Tensor}, type(value)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", ["radadamp-dwell-7", "carry"])
def test_state_is_plain_and_small(name, cut, uncut_run):
    """A checkpoint loads with weights_only=True, and our state in it is plain values of less than 100 KB."""
    _, root = uncut_run(name, PLANS[name], CUTS + SECOND_VALIDATION)
    state = state_of(root / f"{cut}.ckpt")
    assert_plain(state)
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 100_000


def test_state_does_not_grow_with_the_data_or_the_run(tmp_path):
    """After many updates on many samples, in mid-window and with a carried tail, the state is below 100 KB too."""
    setup = Setup(
        lambda: AdaptiveBatchSize(RadaDamp(rho=0.5), tail="carry", dwell=100),
        lambda: train_loader(data=Separable(100_000)),
        validation=None,
        trainer={"epochs": 1},
    )
    cut = Cut("train_batch_end", 0, 199)
    run(setup, tmp_path, [cut], stop=True)
    file = io.BytesIO()
    torch.save(state_of(tmp_path / f"{cut}.ckpt"), file)
    assert file.tell() < 100_000


@pytest.mark.parametrize("interval", [None, "step"])
def test_checkpoint_holds_the_base_learning_rates(interval, tmp_path):
    """With an LR factor of 1/4 in force the checkpoint's optimizer has the base rate, and the live one goes on."""
    schedule = {} if interval is None else {"schedule": lambda o, _: StepLR(o, 1, 0.5), "interval": interval}
    setup = Setup(scripted(4, 16, 32, max_batch_size=8), module=lambda: Learner(**schedule))
    cut = Cut("train_batch_end", 0, 2)
    uncut = run(setup, tmp_path, [cut])
    checkpoint = torch.load(tmp_path / f"{cut}.ckpt", weights_only=True)
    base = 0.1 if interval is None else 0.1 * 0.5**3
    assert [group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]] == [base]
    assert uncut.steps[3].lr == base * 0.25
    resumed = resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)
    assert resumed.steps[0].lr == base * 0.25
    assert_goes_on(uncut, resumed, uncut.marks[cut])


def test_weights_can_be_used_without_a_fit(tmp_path):
    """A checkpoint of ours is an ordinary one: it can be loaded and validated, and a callback can look at it."""
    cut = Cut("train_batch_end", 1, 2)
    uncut = run(BASE, tmp_path, [cut])
    module = Learner.load_from_checkpoint(tmp_path / f"{cut}.ckpt", weights_only=True)
    assert module.state_dict().keys() == uncut.weights.keys()
    ours = reader(state_of(tmp_path / f"{cut}.ckpt"))
    steps = uncut.marks[cut].steps
    assert (ours.updates, ours.samples) == (steps, sum(step.size for step in uncut.steps[:steps]))
    trainer = quiet([adapt(4)], root=tmp_path)
    trainer.validate(Learner(), train_loader(shuffle=False), ckpt_path=tmp_path / f"{cut}.ckpt", verbose=False)
    assert trainer.callback_metrics["val_loss"] > 0


# What is refused ----------------------------------------------------------------------------------------------------


def test_checkpoint_of_another_policy_is_refused(tmp_path):
    """The state of a run with another policy is refused, with both names and what to do, before the first batch."""
    cut = Cut("train_batch_end", 0, 2)
    run(PLANS["radadamp"], tmp_path, [cut], stop=True)
    setup = replace(BASE, ours=lambda: AdaptiveBatchSize(Sizes([4, 8])))
    with pytest.raises(MisconfigurationException, match=r"AdaptiveBatchSize.*RadaDamp.*Sizes.*What to do: .*policy"):
        resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)


@pytest.mark.parametrize("cut", [Cut("train_batch_end", 0, 2), Cut("train_epoch_end", 0)], ids=str)
def test_checkpoint_without_our_state_is_refused(cut, tmp_path):
    """A checkpoint that was written without the callback is refused with what to do, before the first batch."""
    run(replace(BASE, ours=lambda: None), tmp_path, [cut], stop=True)
    with pytest.raises(MisconfigurationException, match=r"AdaptiveBatchSize.*checkpoint.*without.*load_from_ch"):
        resume(BASE, tmp_path / f"{cut}.ckpt", tmp_path)


def test_refused_resume_leaves_everything_as_it_was(tmp_path):
    """After a refusal the user's loader is their own again, and the same callback trains from the beginning."""
    cut = Cut("train_batch_end", 0, 2)
    run(replace(BASE, ours=lambda: None), tmp_path, [cut], stop=True)
    ours, train = adapt(4, 8), loader(32, 4)
    trainer = quiet([ours], epochs=1, root=tmp_path)
    with pytest.raises(MisconfigurationException):
        trainer.fit(Learner(), train, ckpt_path=tmp_path / f"{cut}.ckpt")
    assert (train.batch_size, len(train)) == (4, 8)
    module = Recorder()
    fit(module, train, callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 8, 8, 8, 4]


# Logs ---------------------------------------------------------------------------------------------------------------


def csv_lines(logger: CSVLogger) -> list[tuple]:
    path = Path(logger.experiment.metrics_file_path)
    if not path.exists():  # nothing was logged
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("adabatch/batch_size")]
    ours = [{key: text for key, text in row.items() if key == "step" or key.startswith("adabatch/")} for row in rows]
    return [tuple(sorted((key, text) for key, text in row.items() if text)) for row in ours]


def tensorboard_lines(logger: TensorBoardLogger) -> list[tuple]:
    logger.finalize("success")
    events = EventAccumulator(str(logger.log_dir))
    events.Reload()
    tags = sorted(tag for tag in events.Tags()["scalars"] if tag.startswith("adabatch/"))
    return sorted((event.step, tag, event.value) for tag in tags for event in events.Scalars(tag))


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "cut", [Cut("train_batch_end", 0, 2), Cut("train_batch_end", 0, 5), Cut("train_batch_end", 0, -1)], ids=str
)
@pytest.mark.parametrize(("kind", "read"), [(CSVLogger, csv_lines), (TensorBoardLogger, tensorboard_lines)])
def test_log_lines_of_both_parts_are_those_of_the_uncut_run(kind, read, cut, every, tmp_path):
    """What a cut run and the run resumed from it wrote is together what the uncut run wrote, no line twice."""

    def train(version, **kwargs):
        logger = kind(tmp_path, name="logs", version=version)
        setup = Setup(radadamp(dwell=3), trainer={"logger": logger, "log_every_n_steps": every, "epochs": 2})
        run(setup, tmp_path, **kwargs)
        return read(logger)

    uncut = train("uncut")
    first = train("first", cuts=[cut], stop=True)
    second = train("second", ckpt_path=tmp_path / f"{cut}.ckpt", start=77)
    assert uncut
    assert first + second == uncut


# That the tests can fail --------------------------------------------------------------------------------------------


def test_another_cut_is_another_state(uncut_run, tmp_path):
    """Control: states of different cuts differ, and a run resumed at one of them does not go on from another."""
    cuts = [Cut("train_batch_end", 0, 3), Cut("train_batch_end", 1, 1)]
    uncut, root = uncut_run("keep", PLANS["keep"], CUTS + SECOND_VALIDATION)
    a, b = (state_of(root / f"{cut}.ckpt") for cut in cuts)
    assert not same(a, b)
    assert same(a, state_of(root / f"{cuts[0]}.ckpt"))
    resumed = resume(PLANS["keep"], root / f"{cuts[0]}.ckpt", tmp_path)
    assert_goes_on(uncut, resumed, uncut.marks[cuts[0]])
    with pytest.raises(AssertionError):
        assert_goes_on(uncut, resumed, uncut.marks[cuts[1]])


def test_comparison_sees_another_seed_and_lightnings_own_resume(tmp_path):
    """Control: without the callback equal runs are equal, another seed is seen, and so is the order that is lost."""
    plain = Setup(lambda: None)
    cut = Cut("train_batch_end", 0, 3)
    one, two, other = run(plain, tmp_path, [cut]), run(plain, tmp_path), run(plain, tmp_path, start=2)
    assert one.steps == two.steps
    assert_same_end(one, two)
    for changed in (lambda: assert_same_end(one, other), lambda: assert_goes_on(one, other, one.marks[cut])):
        with pytest.raises(AssertionError):
            changed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the loader is not resumable
        resumed = resume(plain, tmp_path / f"{cut}.ckpt", tmp_path)
    with pytest.raises(AssertionError):
        assert_goes_on(one, resumed, one.marks[cut])


def test_cuts_are_where_they_say(uncut_run):
    """Control: the harness wrote its checkpoints after as many batches and validations as the cuts' names tell."""
    uncut, _ = uncut_run("keep", PLANS["keep"], CUTS + SECOND_VALIDATION)
    first_epoch = sum(step.epoch == 0 for step in uncut.steps)
    assert uncut.marks[Cut("train_start")] == (0, 0)
    assert uncut.marks[Cut("train_batch_start", 0, 0)].steps == 0
    assert uncut.marks[Cut("train_batch_end", 0, 0, "before")].steps == 1
    assert uncut.marks[Cut("train_batch_end", 0, 3)].steps == 4
    assert uncut.marks[Cut("train_batch_start", 1, 2)].steps == first_epoch + 2
    assert uncut.marks[Cut("train_batch_end", 2, -1)].steps == len(uncut.steps)
    assert uncut.marks[Cut("validation_start", 0, 1)].validations == 1
    assert uncut.marks[Cut("validation_end", 0, 1)].validations == 2
    assert uncut.marks[Cut("train_epoch_end", 0)].steps == first_epoch


# What a review found ----------------------------------------------------------------------------------------------


class SavesLate(pl.Callback):
    """Writes checkpoints in the hooks that come after training."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def on_fit_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / "fit_end.ckpt")

    def teardown(self, trainer, pl_module, stage):
        trainer.save_checkpoint(self.folder / "teardown.ckpt")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["fit_end", "teardown"])
def test_checkpoints_after_training(name, first, tmp_path):
    """A checkpoint of on_fit_end or teardown, after Lightning took the loops down, goes on like any other."""
    uncut = run(PLANS["radadamp"], tmp_path)

    def callbacks():
        both = [AdaptiveBatchSize(RadaDamp(rho=0.5)), SavesLate(tmp_path)]
        return both[::-1] if first else both

    plan = replace(PLANS["radadamp"], ours=lambda: None, callbacks=callbacks, trainer={"epochs": 1})
    run(plan, tmp_path)
    resumed = resume(PLANS["radadamp"], tmp_path / f"{name}.ckpt", tmp_path)
    assert_equal("steps", resumed.steps, uncut.steps[-len(resumed.steps) :])
    assert_same_end(uncut, resumed)


class RaisesOnce(RadaDamp):
    """A policy that raises at its fifth observation, in one of its functions, as Ctrl-C or a fault of it may."""

    where = "update"
    raised = False

    def update(self, state, observation):
        state = super().update(state, observation)
        self._raise("update", state)
        return state

    def damping(self, state, progress):
        self._raise("damping", state)
        return super().damping(state, progress)

    def _raise(self, where, state) -> None:
        if where == RaisesOnce.where and state.observations == 5 and not RaisesOnce.raised:
            RaisesOnce.raised = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["update", "damping"])
def test_an_interrupt_of_a_decision_counts_the_update_once(where, tmp_path):
    """Ctrl-C while a decision is made, where a device is waited for: the update counts once, and the run goes on."""
    RaisesOnce.where, RaisesOnce.raised = where, True
    setup = Setup(lambda: AdaptiveBatchSize(RaisesOnce(rho=0.5)))
    uncut = run(setup, tmp_path)
    RaisesOnce.raised = False
    failing = replace(setup, callbacks=lambda: [SavesOnException(tmp_path)])
    error = run(failing, tmp_path, raises=SystemExit).error
    assert isinstance(error, SystemExit)
    resumed = resume(failing, tmp_path / "cut.ckpt", tmp_path)
    assert_equal("steps", resumed.steps, uncut.steps[5:])
    assert_same_end(uncut, resumed)


class Interrupts(Augmented):
    """Ctrl-C in the middle of fetching a batch, as it mostly comes; draws at random."""

    fetched = 0

    def __getitem__(self, index: int):
        sample = super().__getitem__(index)
        Interrupts.fetched += 1
        if Interrupts.fetched == 30:
            raise KeyboardInterrupt
        return sample


def test_an_interrupt_of_a_fetch(tmp_path, caplog):
    """What a batch that was not fetched to its end drew is drawn again, and a notice says where the run goes on."""
    setup = Setup(PLANS["radadamp"].ours, train=lambda: train_loader(data=Interrupts("torch")))
    Interrupts.fetched = 10**6
    uncut = run(setup, tmp_path)
    Interrupts.fetched = 0
    failing = replace(setup, callbacks=lambda: [SavesOnException(tmp_path)])
    assert isinstance(run(failing, tmp_path, raises=SystemExit).error, SystemExit)
    Interrupts.fetched = 10**6
    with caplog.at_level(logging.INFO):
        resumed = resume(setup, tmp_path / "cut.ckpt", tmp_path)
    assert "was written inside a step" in caplog.text
    assert 0 < len(resumed.steps) < len(uncut.steps)
    assert_equal("steps", resumed.steps, uncut.steps[-len(resumed.steps) :])
    assert_same_end(uncut, resumed)


@pytest.mark.parametrize(("before", "behind"), [("lr", "batch_size"), ("batch_size", "lr")])
def test_another_mode_goes_on_from_an_epochs_end(before, behind, tmp_path):
    """A run of one mode goes on in the other from the end of an epoch."""
    cut = Cut("train_epoch_end", 0)
    first, second = (
        Setup(lambda mode=mode: AdaptiveBatchSize(RadaDamp(rho=0.5), adapt=mode)) for mode in (before, behind)
    )
    run(first, tmp_path, [cut])
    resumed = resume(second, tmp_path / f"{cut}.ckpt", tmp_path)
    assert resumed.error is None
    assert {step.epoch for step in resumed.steps} == {1, 2}


@pytest.mark.filterwarnings("ignore:AdaptiveBatchSize.adapt='lr'. leaves the DataLoader to you")
def test_a_mode_that_moves_sizes_needs_the_place(tmp_path):
    """In mid-epoch the -LR mode does not know its place in the data: refused by name, with what to do."""
    cut = Cut("train_batch_end", 0, 2)
    run(Setup(lambda: AdaptiveBatchSize(RadaDamp(rho=0.5), adapt="lr")), tmp_path, [cut])
    with pytest.raises(MisconfigurationException, match=r"with adapt='lr'.*at the end of an epoch"):
        resume(Setup(lambda: AdaptiveBatchSize(RadaDamp(rho=0.5))), tmp_path / f"{cut}.ckpt", tmp_path)


@pytest.mark.parametrize("setting", [{"val_check_interval": 3}, {"val_check_interval": 0.5}, {}])
def test_the_trainers_own_validation_points_win(setting, tmp_path):
    """A resumed run validates where its own Trainer says, whatever the one that was cut had."""
    cut = Cut("train_batch_end", 0, 3)
    run(Setup(scripted(4), trainer={"val_check_interval": 0.25}), tmp_path, [cut])
    resumed = resume(Setup(scripted(4), trainer=setting), tmp_path / f"{cut}.ckpt", tmp_path)
    at = [step for epoch, step, _ in resumed.module.validations if epoch == 1]
    whole = run(Setup(scripted(4), trainer=setting), tmp_path)
    assert at == [step for epoch, step, _ in whole.module.validations if epoch == 1]


class LogsSteps(Learner):
    """Follows a metric that training_step logs."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        configured["lr_scheduler"]["monitor"] = "train_loss"
        return configured


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("side", ["before", "behind"])
def test_plateau_on_a_metric_of_the_step(number, side, tmp_path):
    """A scheduler that follows what training_step logged finds it after a resume, whoever wrote the checkpoint."""
    cut = Cut("train_batch_end", 0, number, side)
    module = lambda: LogsSteps(lambda o, _: ReduceLROnPlateau(o, patience=0, factor=0.7), "step")  # noqa: E731
    setup = Setup(PLANS["radadamp"].ours, module=module)
    uncut = run(setup, tmp_path, [cut])
    assert_goes_on(uncut, resume(setup, tmp_path / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


def test_a_run_stopped_in_its_last_epoch_is_finished(tmp_path):
    """What max_steps ended in the middle of the only epoch goes on to that epoch's end."""
    setup = PLANS["radadamp"]
    whole = run(replace(setup, trainer={"epochs": 1}), tmp_path)
    cut = Cut("train_end", 0)
    stopped = run(replace(setup, trainer={"epochs": 1, "max_steps": 3}), tmp_path)
    stopped.trainer.save_checkpoint(tmp_path / f"{cut}.ckpt")
    resumed = resume(replace(setup, trainer={"epochs": 1}), tmp_path / f"{cut}.ckpt", tmp_path)
    assert_equal("steps", resumed.steps, whole.steps[3:])
    assert_same_end(whole, resumed)


def test_a_lower_limit_of_batches_ends_the_epoch(tmp_path):
    """More batches were trained than limit_train_batches allows now: the epoch is over, and the next one is short."""
    cut = Cut("train_batch_end", 0, 4)
    run(Setup(scripted(4)), tmp_path, [cut])
    resumed = resume(Setup(scripted(4), trainer={"limit_train_batches": 3}), tmp_path / f"{cut}.ckpt", tmp_path)
    assert [step.epoch for step in resumed.steps] == [1, 1, 1, 2, 2, 2]
    assert [epoch for epoch, _, _ in resumed.module.validations][-2:] == [1, 2]


@pytest.mark.filterwarnings("ignore:AdaptiveBatchSize. the order of the epoch")
def test_a_share_of_the_data_is_in_batches_of_the_runs_first_size(tmp_path):
    """A float limit_train_batches stays the same share if the DataLoader has another batch size now."""
    cut = Cut("train_epoch_end", 0)
    setup = Setup(scripted(4), trainer={"limit_train_batches": 0.5})
    uncut = run(setup, tmp_path, [cut])
    other = replace(setup, train=lambda: train_loader(7))
    resumed = resume(other, tmp_path / f"{cut}.ckpt", tmp_path)
    assert_equal("steps", resumed.steps, uncut.steps[-len(resumed.steps) :])


class SavesBeforeValidation(Learner):
    """Writes a checkpoint in the hook between a batch and its validation."""

    folder = None

    def on_validation_model_zero_grad(self):
        super().on_validation_model_zero_grad()
        if self.folder is not None and not self.trainer.sanity_checking:
            self.trainer.save_checkpoint(self.folder / f"zero_grad-{len(self.validations)}.ckpt")


@pytest.mark.parametrize("number", [0, 1])
def test_checkpoint_right_before_a_validation(number, tmp_path):
    """The hook before a validation is one in which a checkpoint can be written too."""
    uncut = run(replace(PLANS["radadamp"], module=SavesBeforeValidation), tmp_path)
    SavesBeforeValidation.folder = tmp_path
    run(replace(PLANS["radadamp"], module=SavesBeforeValidation), tmp_path)
    SavesBeforeValidation.folder = None
    resumed = resume(
        replace(PLANS["radadamp"], module=SavesBeforeValidation), tmp_path / f"zero_grad-{number}.ckpt", tmp_path
    )
    assert resumed.module.validations == uncut.module.validations[number:]
    assert_same_end(uncut, resumed)
