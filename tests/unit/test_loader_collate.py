# SPDX-License-Identifier: Apache-2.0
"""Batches of any kind: collate functions of the user's, and all that ``default_collate`` makes."""

import os
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_adabatch.loader import ElasticLoader

WORKERS = pytest.mark.parametrize("workers", [0, 2])
SIZES = [4, 4, 9, 2, 3, 7]
LENGTH = sum(SIZES)


class Mapped(Dataset):
    """``LENGTH`` samples, each a function of its index."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.sample(index)


def batches_of(dataset, workers, collate_fn=None, **more):
    """Return the batches of one pass with the sizes ``SIZES``."""
    loader = ElasticLoader(DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate_fn, **more))
    batches, result = iter(loader), []
    for size in SIZES:
        loader.resize(size)
        result.append(next(batches))
    assert next(batches, None) is None
    return result


def samples_of(sample):
    """Return the samples of each batch of ``batches_of``."""
    numbers = iter(range(LENGTH))
    return [[sample(next(numbers)) for _ in range(size)] for size in SIZES]


def same(left, right):
    """Whether two batches are equal: types, structure, dtypes, values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


# Collate functions of the user's ----------------------------------------------------------------------


def ragged(index):
    """A sequence whose length depends on its index, and a label."""
    return torch.full((index % 5 + 1,), float(index)), f"label {index}"


def to_dict(samples):
    """Return a mapping of padded sequences, lengths and labels."""
    sequences, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return {"padded": pad_sequence(list(sequences), batch_first=True), "lengths": lengths, "labels": labels}


@dataclass
class Bundle:
    total: float
    labels: list[str]


def to_object(samples):
    """Return what nobody could cut: an object that holds a sum."""
    return Bundle(sum(sequence.sum().item() for sequence, _ in samples), [label for _, label in samples])


def to_count(samples):
    """Return a plain number."""
    return len(samples)


@pytest.mark.parametrize("collate_fn", [to_dict, to_object, to_count, lambda samples: samples[-1][1]])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_own_collate_gets_exactly_the_samples_of_a_batch(workers, collate_fn):
    """Whatever a collate function makes, it makes it of exactly the samples of the batch, after any resize."""
    expected = [collate_fn(samples) for samples in samples_of(ragged)]
    assert all(map(same, batches_of(Mapped(ragged), workers, collate_fn), expected))


def add_noise(samples):
    """Return the samples with noise from all three generators, and the process that drew it."""
    noise = [torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random()]]  # noqa: NPY002
    return samples, noise, os.getpid()


def states():
    """Return the state of the global generators."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


def noisy(workers):
    """Return what ``add_noise`` makes with some workers, after asserting that it left the random state alone."""
    torch.manual_seed(5)  # which gives the base seed
    np.random.seed(workers)  # noqa: NPY002
    random.seed(workers)
    loader = ElasticLoader(DataLoader(range(20), batch_size=4, num_workers=workers, collate_fn=add_noise))
    batches = iter(loader)  # draws the base seed, as a DataLoader does
    before = states()
    result = list(batches)
    assert states() == before
    return result


def test_random_draws_of_a_collate_function_are_apart():
    """With workers, draws of a collate function leave the global generators alone and do not depend on their number."""
    one, two = noisy(1), noisy(2)
    assert two == one
    for draws in zip(*(noise for _, noise, _ in one), strict=True):  # of each generator, over all batches
        assert all(draws.count(draw) == 1 for draw in draws)
    assert all(process == os.getpid() for _, _, process in one)


def test_random_draws_of_a_collate_function_differ_between_epochs():
    """Two epochs of a loader do not draw the same noise."""
    loader = ElasticLoader(DataLoader(range(20), batch_size=4, num_workers=1, collate_fn=add_noise))
    first, second = ([noise for _, noise, _ in loader] for _ in range(2))
    assert not any(noise in second for noise in first)


def fail(samples):
    """Draw, and raise."""
    raise LookupError(f"no room for {len(samples)} after {torch.rand(())}")


def test_collate_function_that_raises_leaves_the_random_state_alone():
    """The error of a collate function reaches the caller, and the random state is as before."""
    loader = ElasticLoader(DataLoader(range(20), batch_size=4, num_workers=1, collate_fn=fail))
    batches = iter(loader)
    before = states()
    with pytest.raises(LookupError, match="no room for 4"):
        next(batches)
    assert states() == before


def test_samples_that_cannot_be_sent_are_named():
    """A sample that does not pickle is named by its type, with what can be done."""
    loader = ElasticLoader(DataLoader(Mapped(lambda index: lambda: index), batch_size=4, num_workers=1, collate_fn=len))
    with pytest.raises(TypeError, match=r"(?s)A sample of type function cannot be sent.*set num_workers=0"):
        next(iter(loader))


# What default_collate makes ---------------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024  # what a data set of a user returns


def nested(index):
    """All that ``default_collate`` knows, nested."""
    return {
        "tensor": torch.full((2, 3), index, dtype=torch.int16),
        "array": np.full(2, index, dtype=np.float32),
        "scalar": np.float64(index),
        "numbers": (index, float(index), index % 2 == 0),
        "text": f"sample {index}",
        "bytes": b"%d" % index,
        "point": Point(torch.tensor(index), f"y{index}"),
        "list": [torch.tensor([index]), {"deep": (f"d{index}", index)}],
    }


@WORKERS
def test_default_collate_is_cut_by_its_own_rules(workers):
    """Every structure that ``default_collate`` makes is, at any size, what it makes of the samples of the batch."""
    expected = [default_collate(samples) for samples in samples_of(nested)]
    found = batches_of(Mapped(nested), workers)
    assert all(map(same, found, expected))
    assert type(found[2]["point"]) is Point


@WORKERS
def test_bare_samples_are_cut(workers):
    """Samples that are a number, a text or a tuple without names are cut as well."""
    for sample in (float, str, lambda index: (index, str(index))):
        expected = [default_collate(samples) for samples in samples_of(sample)]
        assert all(map(same, batches_of(Mapped(sample), workers), expected))


class Length(float):
    """A type that the program taught ``default_collate``."""


def largest(batch, *, collate_fn_map=None):
    """Return one number for the batch: nothing that could be cut."""
    return torch.tensor(max(batch))


@pytest.fixture
def registered():
    """Register ``Length`` with ``default_collate``, before the type that it derives from."""
    before = dict(default_collate_fn_map)
    default_collate_fn_map.clear()
    default_collate_fn_map.update({Length: largest, **before})
    yield
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


@pytest.mark.usefixtures("registered")
@WORKERS
def test_registered_types_are_collated_after_the_cut(workers):
    """A type registered with ``default_collate`` is collated per batch, since nobody knows how to cut the result."""
    found = batches_of(Mapped(Length), workers)
    ends = [4, 4 + 4, 8 + 9, 17 + 2, 19 + 3, 22 + 7]
    assert [batch.item() for batch in found] == [end - 1 for end in ends]


class Bulk(Dataset):
    """Fetches a whole list of indices at once."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        raise AssertionError("this data set has a faster way")

    def __getitems__(self, indices):
        return [torch.tensor([float(index)]) for index in indices]


@pytest.mark.parametrize("collate_fn", [None, torch.stack], ids=["default", "own"])
@WORKERS
def test_data_sets_that_fetch_in_bulk(workers, collate_fn):
    """A data set with ``__getitems__`` is asked for whole blocks, with the default and with an own collate function."""
    found = batches_of(Bulk(), workers, collate_fn)
    assert [len(batch) for batch in found] == SIZES
    assert torch.cat(found).flatten().tolist() == list(range(LENGTH))


class Together(Dataset):
    """Fetches many samples at once: as a list or tuple of them, or as a batch."""

    def __init__(self, kind=None):
        self.kind = kind

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(-index)

    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        return self.kind(self[index] for index in indices) if self.kind else (rows, -rows)


def as_it_is(batch):
    return batch


def pairs(samples):
    return default_collate(samples)


@WORKERS
@pytest.mark.parametrize("kind", [list, tuple])
def test_samples_that_are_fetched_together(kind, workers):
    """A list or a tuple with one entry per index is cut like any other."""
    expected = samples_of(lambda index: (index, -index))
    for batch, samples in zip(batches_of(Together(kind), workers, pairs), expected, strict=True):
        assert list(zip(*(part.tolist() for part in batch), strict=True)) == samples


def test_batches_that_are_fetched_as_such():
    """With workers a block of a batch's form cannot be cut, and is refused by name; without them nothing is cut."""
    for batch, samples in zip(batches_of(Together(), 0, as_it_is), SIZES, strict=True):
        assert [len(part) for part in batch] == [samples, samples]
    with pytest.raises(TypeError, match=r"__getitems__ returned a tuple for 4 indices.*set num_workers=0"):
        batches_of(Together(), 2, as_it_is)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but not supported on MPS")
def test_nothing_is_pinned_for_mps(monkeypatch):
    """As in a DataLoader: for Apple's devices there is no page-locked memory."""

    def pin_memory(self, *args):
        raise AssertionError("pinned")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    for collate in (None, pad_sequence):
        loader = DataLoader(torch.arange(10.0)[:, None], 4, pin_memory=True, collate_fn=collate)
        assert [batch.numel() for batch in ElasticLoader(loader)] == [4, 4, 2]
