# SPDX-License-Identifier: Apache-2.0
"""``torch.compile``: how often a module is compiled while the batch size grows, and that nothing else changes."""

from __future__ import annotations

import math
from shutil import which

import pytest
import torch
from models import Recorder, fit, loader
from torch._dynamo.utils import counters

from lightning_adabatch import AdaptiveBatchSize, PolynomialDamp


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Begin and end without compiled code and counts."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


class Compiled(Recorder):
    """Has its network compiled, by a backend that only notes for how many samples: None for any number."""

    def __init__(self, dynamic=None, backend=None) -> None:
        super().__init__()
        self.shapes: list[int | None] = []
        self.fast = torch.compile(self.net, backend=backend or self.note, dynamic=dynamic)

    def note(self, graph, inputs):
        symbolic = any(isinstance(one, torch.SymInt) for one in inputs)
        self.shapes.append(None if symbolic else inputs[-1].shape[0])
        return graph.forward

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.fast(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


def grow(module, tmp_path, **kwargs):
    """Train 200 updates that want 8, 9, 10 ... samples, up to 32, in epochs of 1,000."""
    ours = AdaptiveBatchSize(PolynomialDamp(rate=0.02), max_batch_size=32, **kwargs)
    fit(module, loader(1000, 8), callbacks=[ours], epochs=-1, max_steps=200, root=tmp_path)
    return module


def sizes_and_tails(module):
    """Return the sizes that were decided, and those that an epoch's end left over."""
    sizes = {batch.size for batch in module.batches if not batch.last}
    return sizes, {batch.size for batch in module.batches if batch.last} - sizes


def gave_up():
    """Whether the compiler reached its limit and went on without compiling."""
    return any("recompile limit" in reason for reason in counters["unimplemented"])


def test_few_shapes_with_multiples(tmp_path):
    """C62: static shapes, multiple_of=8: (32 - 8) / 8 + 1 sizes and tails, each compiled once; no limit is reached."""
    module = grow(Compiled(dynamic=False), tmp_path, multiple_of=8)
    sizes, tails = sizes_and_tails(module)
    assert sizes == {8, 16, 24, 32}
    assert len(tails) <= math.ceil(sum(module.sizes) / 1000)
    assert sorted(module.shapes) == sorted(sizes | tails)
    assert not gave_up()


def test_no_tail_is_another_shape_where_it_is_dropped(tmp_path):
    """C62: with tail="drop" the sizes are all that is compiled."""
    module = grow(Compiled(dynamic=False), tmp_path, multiple_of=8, tail="drop")
    assert sizes_and_tails(module) == ({8, 16, 24, 32}, set())
    assert module.shapes == [8, 16, 24, 32]


def test_every_size_is_a_shape_without_multiples(tmp_path):
    """C62: static shapes and multiple_of=1 reach the compiler's limit of 8: what the documented settings avoid."""
    module = grow(Compiled(dynamic=False), tmp_path)
    assert len(sizes_and_tails(module)[0]) == 25
    assert module.shapes == [8, 9, 10, 11, 12, 13, 14, 15]
    assert gave_up()


@pytest.mark.parametrize("multiple", [1, 8])
def test_second_size_makes_shapes_dynamic(multiple, tmp_path):
    """C62: with torch.compile's own default the second size is compiled for all sizes to come: two graphs in all."""
    module = grow(Compiled(), tmp_path, multiple_of=multiple)
    assert module.shapes == [8, None]
    assert not gave_up()


INDUCTOR = pytest.param(
    "inductor", marks=[pytest.mark.slow, pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")]
)


@pytest.mark.parametrize("backend", [None, "aot_eager", INDUCTOR])
def test_compiled_module_is_the_plain_one(backend, tmp_path):
    """C62: a compiled module trains on the same batches to the same weights as the plain one, in two graphs."""
    plain, compiled = grow(Recorder(), tmp_path), grow(Compiled(backend=backend), tmp_path)
    assert counters["stats"]["unique_graphs"] == 2
    assert [batch.indices for batch in plain.batches] == [batch.indices for batch in compiled.batches]
    assert torch.allclose(plain.net.weight, compiled.net.weight, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_module_compiled(backend, tmp_path):
    """A LightningModule that was compiled as a whole is measured and resized as any other."""
    module = Recorder()
    torch.manual_seed(0)
    ours = AdaptiveBatchSize(PolynomialDamp(rate=1.0), max_batch_size=32)
    fit(torch.compile(module, backend=backend), loader(72, 8), callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [8, 16, 24, 24]
    assert ours.updates == 4
