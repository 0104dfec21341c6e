# SPDX-License-Identifier: Apache-2.0
"""What workers send: as torch sends it, but for small tensors, which are in the message."""

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_adabatch.loader import ElasticLoader
from lightning_adabatch.loader.message import SMALL, Message, Sent

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]


def arrived(content):
    """Return what is at the other end of a queue between two processes."""
    return pickle.loads(bytes(ForkingPickler.dumps(Message(content))))


def same(left, right):
    """Whether two trees are of the same types, with the same tensors, bit for bit."""
    if isinstance(left, torch.Tensor):
        pair = left.contiguous().reshape(-1), right.contiguous().reshape(-1)
        looks = [(type(t), t.dtype, t.shape, t.requires_grad) for t in (left, right)]
        return looks[0] == looks[1] and torch.equal(*(t.view(torch.uint8) for t in pair))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return (type(left), left) == (type(right), right)


def tensors(dtype, shape):
    """Return a tensor of random bits."""
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


LEAVES = st.builds(tensors, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)) | st.text()
TREES = st.recursive(LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(), one, max_size=3))


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_any_tree_arrives_as_it_was(tree):
    """Whatever a batch is made of."""
    assert same(arrived(tree), tree)


def views():
    """Return small tensors that show a part of a large one, in ways of their own."""
    base = torch.arange(40_000.0).view(200, 200)
    return [base[3], base[:, 3], base[::40, ::40], base.t()[:5], base[7, 9], base[:1].expand(9, 200)]


@pytest.mark.parametrize("view", views(), ids=lambda view: str(tuple(view.shape)))
def test_only_what_a_small_tensor_shows_travels(view):
    """Not the large one behind it; and what arrives can be written to."""
    stream = ForkingPickler.dumps(Message(view))
    found = pickle.loads(bytes(stream))
    assert len(stream) < 1000 + view.nbytes
    assert same(found, view)
    found.zero_()


class Rows(Dataset):
    """Samples of a small field and one that, in batches of four, is as large as asked for."""

    def __init__(self, wide):
        self.wide = wide

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": torch.full((self.wide,), index, dtype=torch.uint8), "y": index}


@pytest.mark.parametrize(("wide", "shared"), [(SMALL // 4, False), (SMALL // 4 + 1, True)])
def test_large_tensors_stay_in_shared_memory(wide, shared):
    """They are not copied into a pipe; small ones are, labels for one."""
    loader = ElasticLoader(DataLoader(Rows(wide), 4, num_workers=1))
    batches = list(loader)
    loader.close()
    assert [batch["x"].is_shared() for batch in batches] == [shared] * 3
    assert [batch["y"].is_shared() for batch in batches] == [False] * 3
    assert [batch["y"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(torch.equal(batch["x"][:, -1], batch["y"].byte()) for batch in batches)


@pytest.mark.parametrize("make", [lambda: torch.ones(3).requires_grad_(), lambda: torch.nn.Parameter(torch.ones(3))])
def test_tensors_that_are_more_than_their_bytes(make):
    """Torch sends them as it always does."""
    sent = make()
    assert same(arrived([sent])[0].detach(), sent.detach())
    assert arrived([sent])[0].requires_grad


class Odd(Dataset):
    """Samples of a type that no other process can know."""

    def __init__(self):
        class Local(dict):
            pass

        self.kind = Local

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.kind(x=index)


def test_what_cannot_be_sent_is_an_error():
    """In a plain DataLoader the thread that feeds the queue drops it, and the main process waits for ever."""
    loader = ElasticLoader(DataLoader(Odd(), 4, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(Exception, match="Local"):
        next(iter(loader))
    loader.close()


def test_the_collate_function_is_called_as_it_was_given():
    """A batch of a message is the batch."""
    samples = [(torch.ones(2), 3), (torch.zeros(2), 4)]
    assert same(pickle.loads(pickle.dumps(Sent(default_collate)(samples))), default_collate(samples))
