# SPDX-License-Identifier: Apache-2.0
"""At a constant size the elastic loader is the user's ``DataLoader``, bit for bit, random state included."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from lightning_adabatch.loader import ElasticLoader

WORKERS = pytest.mark.parametrize("workers", [0, 2])
DROP_LAST = pytest.mark.parametrize("drop_last", [False, True])


class Augmented(Dataset):
    """Samples with noise from each of the three generators that a data set may draw from."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
        return {"index": index, "noise": torch.tensor(noise, dtype=torch.float64)}


def seed():
    """Seed the three global generators."""
    torch.manual_seed(11)
    np.random.seed(12)  # noqa: NPY002
    random.seed(13)


def states(generator):
    """Return the state of the global generators and of the loader's own."""
    own = None if generator is None else generator.get_state().tolist()
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(), own  # noqa: NPY002


def record(loader, generator, epochs=3):
    """Return every batch of some epochs, with the random state between batches and a draw as a training step makes."""
    rows = []
    for _ in range(epochs):
        rows.extend(
            (batch["index"].tolist(), batch["noise"].tolist(), torch.rand(()).item(), states(generator))
            for batch in loader
        )
        rows.append(states(generator))
    return rows


def both(make, generator=None):
    """Return the records of the plain loader and of the elastic one, each from the same random state."""
    records = []
    for wrap in (lambda loader: loader, ElasticLoader):
        seed()
        if generator is not None:
            generator.manual_seed(14)
        records.append(record(wrap(make()), generator))
    return records


@pytest.mark.parametrize("length", [20, 23, 3])
@DROP_LAST
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_constant_size_is_the_plain_loader(workers, persistent, drop_last, length):
    """Three epochs of shuffled, augmented batches and all random states equal the plain loader's."""

    def make():
        return DataLoader(
            Augmented(length),
            batch_size=4 if length > 4 else 2,
            shuffle=True,
            drop_last=drop_last,
            num_workers=workers,
            persistent_workers=persistent,
        )

    plain, elastic = both(make)
    assert elastic == plain


@DROP_LAST
@WORKERS
def test_generator_of_the_loader_is_used_alike(workers, drop_last):
    """A generator on the loader gives the same batches and ends in the same state; the global one is untouched."""
    generator = torch.Generator()

    def make():
        return DataLoader(
            Augmented(23), batch_size=5, shuffle=True, drop_last=drop_last, num_workers=workers, generator=generator
        )

    plain, elastic = both(make, generator)
    assert elastic == plain


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(17)),
        RandomSampler(range(17), replacement=True, num_samples=30),
        WeightedRandomSampler([1.0] * 17, 21),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
@WORKERS
def test_samplers_draw_alike(workers, sampler):
    """Samplers draw from the global state at the moment at which they do for a plain loader."""
    plain, elastic = both(lambda: DataLoader(Augmented(17), batch_size=4, sampler=sampler, num_workers=workers))
    assert elastic == plain


class Rotating(Sampler):
    """Starts one index later in each epoch; counts its epochs after the last index, as samplers of users do."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 17

    def __iter__(self):
        yield from ((index + self.epoch) % 17 for index in range(17))
        self.epoch += 1


@pytest.mark.parametrize("batch_size", [4, 17])
@DROP_LAST
@WORKERS
def test_samplers_reach_their_end(workers, drop_last, batch_size):
    """What a sampler does after its last index is done in each epoch, as with the plain loader."""

    def make():
        return DataLoader(
            Augmented(17), batch_size=batch_size, sampler=Rotating(), num_workers=workers, drop_last=drop_last
        )

    plain, elastic = both(make)
    assert elastic == plain


@WORKERS
def test_passes_that_are_left_early_are_alike(workers):
    """Two batches, a break, and two more epochs equal the same done with the plain loader."""
    records = []
    for wrap in (lambda loader: loader, ElasticLoader):
        seed()
        loader = wrap(DataLoader(Augmented(20), batch_size=4, shuffle=True, num_workers=workers))
        batches = iter(loader)
        first = [next(batches)["noise"].tolist() for _ in range(2)]
        del batches
        records.append((first, record(loader, None, epochs=2)))
    assert records[1] == records[0]


def init_worker(number):
    """Seed a worker by its number."""
    torch.manual_seed(100 + number)


def test_worker_init_fn_runs_in_the_workers():
    """The user's ``worker_init_fn`` seeds the workers as it does for the plain loader."""

    def make():
        return DataLoader(Augmented(20), batch_size=4, num_workers=2, worker_init_fn=init_worker)

    plain, elastic = both(make)
    assert elastic == plain


def test_worker_init_fn_can_be_set_later():
    """A ``worker_init_fn`` set on the elastic loader, as Lightning does when it seeds workers, is the one that runs."""
    seed()
    plain = record(DataLoader(Augmented(20), batch_size=4, num_workers=2, worker_init_fn=init_worker), None)
    seed()
    loader = ElasticLoader(DataLoader(Augmented(20), batch_size=4, num_workers=2))
    loader.worker_init_fn = init_worker
    assert record(loader, None) == plain
