# SPDX-License-Identifier: Apache-2.0
"""Samples packed into one tensor of bytes and back."""

import pickle
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adabatch.loader.parcel import Parcel, collate_apart, pack, unpack

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def there_and_back(samples):
    """Return the samples after a trip, pickled once more as between two processes."""
    content, lengths = pack(samples)
    assert (content.dtype, content.dim()) == (torch.uint8, 1)
    return unpack(Parcel(content.clone(), pickle.loads(pickle.dumps(lengths))))


def bits(tensor):
    """Return the bytes of a tensor, so that NaN equals itself and any dtype compares."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


def same_tensor(left, right):
    """Whether two tensors have the same type, dtype, shape, bits and need for a gradient."""
    return (
        (type(left), left.dtype, left.shape) == (type(right), right.dtype, right.shape)
        and left.requires_grad == right.requires_grad
        and bits(left) == bits(right)
    )


def filled(dtype, shape, seed=0):
    """Return a tensor of random bits, or of random truth for bool."""
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=seeded(seed))
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def seeded(seed):
    """Return a generator with a seed."""
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_and_shape(dtype, shape):
    """A tensor of any dtype and shape comes back bit for bit, also between others of other alignments."""
    sent = [filled(dtype, shape), filled(torch.uint8, (3,)), filled(dtype, shape, seed=1)]
    assert all(map(same_tensor, there_and_back(sent), sent))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=8))
def test_tensors_side_by_side_do_not_touch(kinds):
    """Any number of tensors of mixed dtypes and shapes come back, each with its own bits."""
    sent = [filled(dtype, shape, seed) for seed, (dtype, shape) in enumerate(kinds)]
    found = there_and_back(sent)
    assert len(found) == len(sent)
    assert all(map(same_tensor, found, sent))


VIEWS = {
    "transposed": lambda base: base.t(),
    "strided": lambda base: base[:, ::2],
    "reversed": lambda base: base.flip(0)[1:],
    "expanded": lambda base: base[:1].expand(7, 8),
    "column": lambda base: base[:, 3],
    "scalar": lambda base: base[2, 3],
    "row": lambda base: base[2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(view, dtype):
    """A tensor that shows a part of a larger one comes back, and only that part travels."""
    large = filled(dtype, (8, 8)).repeat(100, 1)
    sent = view(large)
    assert same_tensor(there_and_back([sent])[0], sent)
    assert pack([sent]).lengths[1:] == [sent.numel() * sent.element_size()]


SPECIAL = {
    "requires_grad": lambda: torch.arange(4.0).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL.keys())
def test_special_tensors(make):
    """Tensors that are more than their bytes come back as what they were."""
    sent = make()
    [found] = there_and_back([sent])
    assert same_tensor(found, sent)
    assert found.tolist() == sent.tolist()


def test_sparse_tensors():
    """A sparse tensor comes back sparse."""
    sent = torch.tensor([1.0, 0.0, 2.0, 0.0]).to_sparse()
    [found] = there_and_back([sent])
    assert found.layout == torch.sparse_coo
    assert found.to_dense().tolist() == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6, dtype=np.float16)[::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5),
        np.empty((0, 3)),
        np.array(["a", "bcd"]),
        np.array([{"any": "object"}, None], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2024-02-29"], dtype="datetime64[D]"),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays(array):
    """A NumPy array of any dtype, order and shape comes back equal."""
    [found] = there_and_back([array])
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tolist() == array.tolist()


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  # what a data set of a user returns


@dataclass
class Sample:
    image: torch.Tensor
    words: list[str]


def test_nested_samples():
    """Samples of any structure come back: texts, numbers, containers, named tuples, objects."""
    image = torch.arange(6.0).reshape(2, 3)
    sent = [{"pair": Pair(1, "zwölf"), "more": ([b"\x00\xff", None], 2.5)}, Sample(image, ["a", "b"]), "text", 7]
    found = there_and_back(sent)
    assert (found[0], found[2:]) == (sent[0], sent[2:])
    assert type(found[0]["pair"]) is Pair
    assert (found[1].image.tolist(), found[1].words) == (image.tolist(), ["a", "b"])


def test_a_tensor_that_stands_twice_stays_one():
    """Two places of a block that hold one tensor hold one tensor afterwards."""
    tensor = torch.arange(3)
    first, second = there_and_back([(tensor, 0), (tensor, 1)])
    assert first[0] is second[0]


def test_rebuilt_tensors_can_be_written():
    """Collate functions may write into the samples: they are views of the parcel, not of read-only memory."""
    sent = [torch.zeros(3), np.zeros(3)]
    tensor, array = there_and_back(sent)
    tensor += 1
    array += 2
    assert (tensor.tolist(), array.tolist()) == ([1.0] * 3, [2.0] * 3)
    assert (sent[0].tolist(), sent[1].tolist()) == ([0.0] * 3, [0.0] * 3)


def test_a_block_of_many_tensors_is_one_tensor_in_shared_memory():
    """A thousand tensors travel as one, which takes one file descriptor, and 64 bytes or less each to align."""
    parcel = pack([torch.tensor([float(n)]) for n in range(1000)])
    assert parcel.content.is_shared()
    assert len(parcel.lengths) == 1 + 1000
    assert parcel.lengths[1:] == [4] * 1000
    assert parcel.content.nbytes == -(-parcel.lengths[0] // 64) * 64 + 1000 * 64


def test_empty_block():
    """A block without samples comes back empty."""
    assert there_and_back([]) == []


class Closed:
    """Refuses to be pickled, as open files and locks do."""

    def __reduce__(self):
        raise TypeError("it stays here")


@pytest.mark.parametrize(("sample", "why"), [(lambda: 0, "pickle"), (Closed(), "it stays here"), ((0, Closed()), "")])
def test_samples_that_do_not_pickle_are_refused(sample, why):
    """A block that does not pickle is refused by the type of its samples, the reason, and three remedies."""
    message = (
        rf"(?s)A sample of type {type(sample).__name__} cannot be sent from a worker process: .*{why}.*"
        r"Make the samples picklable, use the default collate function, or set num_workers=0\."
    )
    with pytest.raises(TypeError, match=message):
        pack([sample])


def draw(samples):
    """Return the samples and a draw from each of the global generators."""
    return samples, torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**63 - 1 + 9])
def test_collating_apart_depends_on_its_seed_alone(seed):
    """The draws of a collate function depend on the seed, however large, and leave no trace."""
    torch.manual_seed(1)
    first = collate_apart(draw, (1, 2), seed)
    after = torch.rand(()).item()
    torch.manual_seed(1)
    torch.rand(())
    assert collate_apart(draw, (1, 2), seed) == first
    assert collate_apart(draw, (1, 2), seed + 1) != first
    torch.manual_seed(1)
    assert torch.rand(()).item() == after
    assert first[0] == [1, 2]
