# SPDX-License-Identifier: Apache-2.0
"""Cutting and joining batches: the same as collating their samples anew."""

from collections import OrderedDict, UserDict, UserList, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_adabatch.loader.cut import can_cut, cut, join

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  # what a data set of a user returns

# A kind of sample is a function from an index to a sample.
LEAVES = st.sampled_from(
    [
        torch.tensor,
        lambda index: torch.full((2, 0, 3), index),
        lambda index: torch.full((2, 3), index, dtype=torch.bfloat16),
        lambda index: np.full((3,), index, dtype=np.int16),
        np.float32,
        int,
        float,
        lambda index: index % 3 == 0,
        str,
        lambda index: b"%d" % index,
    ]
)


def branches(kinds):
    """Return strategies for the structures that hold other kinds of samples."""
    many = st.lists(kinds, max_size=3)
    return st.one_of(
        many.map(lambda parts: lambda index: [part(index) for part in parts]),
        many.map(lambda parts: lambda index: tuple(part(index) for part in parts)),
        many.map(lambda parts: lambda index: {f"k{n}": part(index) for n, part in enumerate(parts)}),
        many.map(lambda parts: lambda index: OrderedDict((n, part(index)) for n, part in enumerate(parts))),
        st.tuples(kinds, kinds).map(lambda parts: lambda index: Pair(parts[0](index), parts[1](index))),
    )


KINDS = st.recursive(LEAVES, branches, max_leaves=6)


def same(left, right):
    """Whether two batches are equal: types, structure, dtypes, shapes, values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(max_examples=200, deadline=None)
@given(KINDS, st.integers(1, 8), st.data())
def test_a_cut_is_the_batch_of_its_samples(kind, length, data):
    """Samples ``start`` to ``stop`` cut out of a batch are what ``default_collate`` makes of just them."""
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    samples = [kind(index) for index in range(length)]
    assert same(cut(default_collate(samples), start, stop), default_collate(samples[start:stop]))


@settings(max_examples=200, deadline=None)
@given(KINDS, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_joined_batches_are_the_batch_of_all_samples(kind, lengths):
    """Batches joined are what ``default_collate`` makes of all their samples together."""
    samples = [kind(index) for index in range(sum(lengths))]
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    parts = [default_collate(samples[end - length : end]) for length, end in zip(lengths, ends, strict=True)]
    assert same(join(parts), default_collate(samples))


def test_tensors_of_a_cut_are_views():
    """Cutting copies nothing."""
    batch = torch.arange(12).reshape(6, 2)
    piece = cut(batch, 2, 5)
    assert piece.data_ptr() == batch[2].data_ptr()
    assert piece.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


def test_joining_leaves_the_parts_alone():
    """Joining makes new containers and tensors; those joined stay as they were."""
    first, second = {"x": torch.tensor([1, 2]), "t": ["a", "b"]}, {"x": torch.tensor([3]), "t": ["c"]}
    joined = join([first, second])
    joined["x"].zero_()
    joined["t"].append("d")
    assert (first["x"].tolist(), first["t"], second["x"].tolist(), second["t"]) == ([1, 2], ["a", "b"], [3], ["c"])


def test_containers_keep_their_class():
    """Mappings and sequences of classes of the user's come back as those, with what else they carry."""
    mapping = UserDict(x=torch.arange(4))
    mapping.note = "kept"
    piece = cut(mapping, 1, 3)
    assert type(piece) is UserDict
    assert (piece["x"].tolist(), piece.note) == ([1, 2], "kept")
    assert mapping["x"].tolist() == [0, 1, 2, 3]
    whole = UserList([torch.arange(4), torch.arange(4, 8)])
    sequence = cut(whole, 1, 3)
    assert type(sequence) is UserList
    assert [leaf.tolist() for leaf in sequence] == [[1, 2], [5, 6]]
    assert [leaf.tolist() for leaf in whole] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    proxy = cut(MappingProxyType({"x": torch.arange(4)}), 1, 3)
    assert type(proxy) is MappingProxyType
    assert proxy["x"].tolist() == [1, 2]


class Named(tuple):
    """A sequence that cannot be made of its items alone."""

    __slots__ = ()

    def __new__(cls, name, items):
        return super().__new__(cls, items)


def test_containers_that_cannot_be_made_anew_become_plain():
    """A sequence whose class needs more than its items comes back as a list, as from ``default_collate``."""
    samples = [Named("a", [torch.tensor(index), index]) for index in range(4)]
    batch = default_collate(samples)
    assert same(cut(Named("a", batch), 1, 3), default_collate(samples[1:3]))


def test_what_is_neither_structure_nor_samples_is_refused():
    """A batch that holds anything else is refused by the name of its type, with the remedy."""
    with pytest.raises(TypeError, match=r"Cannot cut a batch that holds a set\..*collate_fn of your own"):
        cut({"x": torch.arange(4), "y": {1, 2}}, 0, 2)


def test_batches_of_unlike_structure_are_not_joined():
    """Batches whose sequences differ in length are an error; nothing is left out."""
    with pytest.raises(ValueError, match="shorter"):
        join([[torch.arange(2), torch.arange(2)], [torch.arange(2)]])


def test_only_what_default_collate_knows_by_itself_is_cut():
    """As soon as a program has registered a type with ``default_collate``, nothing is cut any more."""
    assert can_cut()
    for entry in (complex, (int, complex)):
        default_collate_fn_map[entry] = lambda batch, *, collate_fn_map=None: batch
        try:
            assert not can_cut()
        finally:
            del default_collate_fn_map[entry]
    assert can_cut()


def test_a_type_with_a_known_name_is_still_a_new_type():
    """A type of the program's that is called like one of torch's counts as registered."""
    impostor = type("Tensor", (), {})
    default_collate_fn_map[impostor] = lambda batch, *, collate_fn_map=None: batch
    try:
        assert not can_cut()
    finally:
        del default_collate_fn_map[impostor]
