# SPDX-License-Identifier: Apache-2.0
"""The meter: one row per update, measured on the device, against sums written out."""

import math
import weakref

import pytest
import torch
import torch.distributed as dist
from gradients import read
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_adabatch.meter import Meter, grad_norm
from lightning_adabatch.policies import Observation

BOTH = frozenset({"loss", "grad_norm_sq"})
VALUES = st.floats(-1e3, 1e3, width=32)
UPDATES = st.lists(
    st.tuples(VALUES, st.lists(st.lists(VALUES, max_size=4), max_size=4), st.integers(1, 512)), max_size=40
)


def tensors(gradients):
    """Return gradients as tensors."""
    return [torch.tensor(gradient, dtype=torch.float32) for gradient in gradients]


def measure(meter, loss=0.5, gradients=((3.0,), (4.0,)), batch_size=8):
    """Measure one update."""
    meter.open()
    meter.loss(torch.tensor(loss))
    meter.gradients(tensors(gradients))
    meter.close(batch_size)


@settings(max_examples=100, deadline=None)
@given(UPDATES, st.integers(1, 20))
def test_rows_are_the_updates(updates, window):
    """Any number of updates, read in windows of any length, come back in order with their losses and squared norms."""
    meter, rows = Meter(BOTH), []
    for number, update in enumerate(updates, 1):
        measure(meter, *update)
        if number % window == 0:
            rows += read(meter)
    rows += read(meter)
    assert len(rows) == len(updates)
    for row, (loss, gradients, size) in zip(rows, updates, strict=True):
        squares = math.fsum(value * value for gradient in gradients for value in gradient)
        assert (row.loss, row.batch_size) == (loss, size)
        assert math.isclose(row.grad_norm_sq, squares, rel_tol=1e-5, abs_tol=1e-30)


@pytest.mark.parametrize("count", [16, 17, 127, 128, 129, 300, 600])
@pytest.mark.parametrize("requires", [frozenset({"loss"}), frozenset({"grad_norm_sq"}), BOTH], ids="+".join)
def test_many_updates_between_two_reads(requires, count):
    """However many updates there are between two reads, none is lost and none changes place."""
    meter = Meter(requires)
    for number in range(count):
        measure(meter, float(number), [[float(number)]], number + 1)
    loss, norm = "loss" in requires, "grad_norm_sq" in requires
    assert read(meter) == [
        Observation(float(n) if loss else None, float(n) ** 2 if norm else None, n + 1) for n in range(count)
    ]
    assert read(meter) == []
    measure(meter)
    assert read(meter) == [Observation(0.5 if loss else None, 9.0 + 16.0 if norm else None, 8)]


def with_variance(meter, small, samples, large, batch_size, **kwargs):
    """Measure an update by the gradients of its first part and of all of it."""
    meter.open()
    meter.loss(torch.tensor(0.5))
    if small is not None:
        meter.small_gradients(tensors(small), samples, lambda norm: norm)
        meter.small_gradients(tensors([[99.0]]), 7, lambda norm: norm)  # a later one does not count
    meter.gradients(tensors(large))
    meter.close(batch_size, **kwargs)


def test_variance_is_its_formula():
    """(|G_small|² - |G_big|²) / (1/b - 1/B), by hand: (25 - 4) / (1/2 - 1/8) = 56, and below 0 by noise."""
    meter = Meter(BOTH | {"grad_variance"})
    with_variance(meter, [[3.0], [4.0]], 2, [[2.0]], 8)
    with_variance(meter, [[1.0]], 4, [[2.0]], 8)
    with_variance(meter, [[3.0], [4.0]], 2, [[2.0]], 8, effective=4.0)
    assert read(meter) == [
        Observation(0.5, 4.0, 8, pytest.approx(21 / (1 / 2 - 1 / 8))),
        Observation(0.5, 4.0, 8, pytest.approx(-3 / (1 / 4 - 1 / 8))),
        Observation(0.5, 4.0, 8, pytest.approx(21 / (1 / 2 - 1 / 4))),
    ]


@pytest.mark.parametrize(("small", "samples"), [(None, 0), ([[3.0]], 8), ([[3.0]], 9)])
def test_variance_that_cannot_be_seen(small, samples):
    """Without a part that is smaller than the update the variance is not a number, in this row alone."""
    meter = Meter(frozenset({"grad_variance"}))
    with_variance(meter, small, samples, [[2.0]], 8)
    with_variance(meter, [[3.0]], 2, [[2.0]], 8)
    first, second = read(meter)
    assert math.isnan(first.grad_variance)
    assert second == Observation(None, None, 8, pytest.approx(5 / (1 / 2 - 1 / 8)))


def test_variance_over_processes_is_that_of_the_mean_square():
    """Each process has a first part of its own: of their squared norms the mean counts, and not of their norms."""
    others = torch.tensor([[5.0**2, 2.0**2]], dtype=torch.float64)
    meter = Meter(frozenset({"grad_variance"}), lambda rows: (rows + others) / 2)
    with_variance(meter, [[3.0]], 2, [[2.0]], 8)
    assert read(meter)[0].grad_variance == pytest.approx((17 - 4) / (1 / 2 - 1 / 8))


def test_variances_survive_copy_and_many_rows():
    """Rows keep their own samples, however many there are, and in a copy."""
    meter = Meter(frozenset({"grad_variance"}))
    for number in range(400):
        with_variance(meter, [[3.0]], 1 + number % 3, [[2.0]], 8 + number)
    copied = meter.copy(alone=True)
    meter.clear()
    expected = [5 / (1 / (1 + n % 3) - 1 / (8 + n)) for n in range(400)]
    assert [row.grad_variance for row in read(copied)] == pytest.approx(expected)
    with_variance(meter, [[3.0]], 2, [[2.0]], 8)
    assert [row.grad_variance for row in read(meter)] == pytest.approx([5 / (1 / 2 - 1 / 8)])


def test_the_first_evaluation_counts():
    """Where an optimizer evaluates several times in one update, the first loss and norm are the row's."""
    meter = Meter(BOTH)
    meter.open()
    for loss, gradient in [(1.0, 2.0), (3.0, 4.0)]:
        meter.loss(torch.tensor(loss))
        meter.gradients(tensors([[gradient]]))
    meter.close(8)
    assert read(meter) == [Observation(1.0, 2.0**2, 8)]


def test_an_update_that_never_came_is_forgotten():
    """What was measured for a batch that was no update does not stand in the next row."""
    meter = Meter(BOTH)
    meter.open()
    meter.loss(torch.tensor(9.0))
    meter.gradients(tensors([[9.0]]))
    measure(meter)
    assert read(meter) == [Observation(0.5, 9.0 + 16.0, 8)]


def test_an_open_row_is_not_read():
    """What is measured when the rows are read, and not closed yet, belongs to the next read."""
    meter = Meter(BOTH)
    measure(meter)
    meter.open()
    assert read(meter) == [Observation(0.5, 25.0, 8)]
    meter.loss(torch.tensor(0.25))
    meter.gradients(tensors([[1.0]]))
    meter.close(4)
    assert read(meter) == [Observation(0.25, 1.0, 4)]


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        (frozenset(), Observation(None, None, 8)),
        (frozenset({"loss"}), Observation(0.5, None, 8)),
        (frozenset({"grad_norm_sq"}), Observation(None, 25.0, 8)),
        (BOTH, Observation(0.5, 25.0, 8)),
    ],
    ids=lambda value: "+".join(sorted(value)) or "nothing" if isinstance(value, frozenset) else "",
)
def test_what_is_not_required_is_not_measured(requires, expected):
    """A measure that the policy does not ask for is None."""
    meter = Meter(requires)
    measure(meter)
    assert read(meter) == [expected]


class Untouchable:
    """Stands for gradients that nobody may look at."""

    def __iter__(self):
        pytest.fail("a gradient was taken")

    __getitem__ = __len__ = __bool__ = __iter__


def test_gradients_are_not_looked_at_unless_required():
    """Without a need for the norm, the gradients are not even gone through."""
    Meter(frozenset({"loss"})).gradients(Untouchable())


@pytest.mark.parametrize("missing", ["loss", "gradients", "both"])
@pytest.mark.parametrize("first", [False, True])
def test_what_an_update_did_not_show_is_not_a_number(missing, first):
    """An update without a loss or gradients has NaN there, never what another update measured."""
    meter = Meter(BOTH)
    if not first:
        measure(meter)
        read(meter)
        measure(meter)
    meter.open()
    if missing == "gradients":
        meter.loss(torch.tensor(0.25))
    if missing == "loss":
        meter.gradients(tensors([[1.0]]))
    meter.close(4)
    measure(meter)
    rows = read(meter)
    found = rows.pop(0 if first else 1)
    assert math.isnan(found.loss) == (missing != "gradients")
    assert math.isnan(found.grad_norm_sq) == (missing != "loss")
    assert rows == [Observation(0.5, 25.0, 8)] * (1 if first else 2)


def test_a_loss_keeps_its_value():
    """What is written later into the memory of a loss, as a captured graph does, does not change the row."""
    meter, loss = Meter(BOTH), torch.tensor(1.0)
    meter.open()
    meter.loss(loss)
    loss.fill_(9.0)
    meter.gradients(tensors([[1.0]]))
    meter.close(1)
    assert read(meter) == [Observation(1.0, 1.0, 1)]


class Graph(torch.autograd.Function):
    """Multiplies by one third, and keeps a token as long as the graph lives."""

    token = None

    @staticmethod
    def forward(ctx, value):
        ctx.token = Graph.token
        return value / 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_rows_keep_no_graph(dtype):
    """Neither a loss nor gradients that have a graph keep it alive until the rows are read."""
    Graph.token = Untouchable()
    alive = weakref.ref(Graph.token)
    weight = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    meter = Meter(BOTH)
    meter.open()
    meter.loss(Graph.apply(weight))
    meter.gradients([Graph.apply(weight)])
    meter.close(1)
    Graph.token = None
    assert alive() is None
    assert read(meter) == [Observation(1.0, 1.0, 1)]


def test_losses_keep_their_precision():
    """A loss in double precision comes back unrounded."""
    meter = Meter(frozenset({"loss"}))
    meter.open()
    meter.loss(torch.tensor(1 / 3, dtype=torch.float64))
    meter.close(1)
    assert read(meter) == [Observation(1 / 3, None, 1)]


def test_values_that_are_not_finite_come_through():
    """Infinite and undefined measurements are reported as they are: who reads them decides."""
    meter = Meter(BOTH)
    measure(meter, math.inf, [[math.nan]])
    [row] = read(meter)
    assert row.loss == math.inf
    assert math.isnan(row.grad_norm_sq)
    measure(meter)
    assert read(meter) == [Observation(0.5, 25.0, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_no_value_is_looked_at_between_two_reads(dtype):
    """Measuring hundreds of updates never asks a device for a value: tensors that have none will do."""
    meter = Meter(BOTH)
    nothing = torch.zeros((), dtype=dtype, device="meta")
    for _ in range(300):
        meter.open()
        meter.loss(nothing)
        meter.gradients([nothing.reshape(1), nothing.expand(2, 3)])
        meter.close(8)
    with pytest.raises(NotImplementedError, match="no data"):
        read(meter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nothing_waits_for_cuda_between_two_reads(dtype):
    """Measuring hundreds of updates on CUDA makes the host wait for nothing; reading them is one copy."""
    meter = Meter(BOTH)
    loss = torch.tensor(0.5, device="cuda")
    gradients = [torch.tensor([value], dtype=dtype, device="cuda") for value in (3.0, 4.0)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(300):
            meter.open()
            meter.loss(loss)
            meter.gradients(gradients)
            meter.close(8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read(meter) == [Observation(0.5, 3.0**2 + 4.0**2, 8)] * 300


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_do_not_overflow(dtype):
    """Gradients whose squares, and whose norm, do not fit half precision are summed in single precision."""
    gradients = [torch.full((4,), 40960.0, dtype=dtype), torch.full((12,), 40960.0, dtype=dtype)]
    norm = grad_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm.item() == math.sqrt((4 + 12) * 40960.0**2)
    assert grad_norm([torch.ones(3, dtype=dtype)]).item() == pytest.approx(math.sqrt(3), rel=1e-6)


def test_gradients_of_mixed_precision():
    """Gradients of several precisions count together."""
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert grad_norm([torch.tensor([2.0], dtype=kind) for kind in kinds]).item() == math.sqrt(4 * 2.0**2)


def test_squared_norms_beyond_single_precision():
    """A norm whose square does not fit single precision has a finite square all the same."""
    meter = Meter(BOTH)
    measure(meter, gradients=[[2.0**70]])
    assert read(meter)[0].grad_norm_sq == 2.0**140


def test_sparse_gradients():
    """A sparse gradient counts each place once, with the sum of what was added to it."""
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    # Row 1 is looked up twice, so its gradient is 2 everywhere; row 3 once.
    embedding(torch.tensor([1, 3, 1])).sum().backward()
    assert embedding.weight.grad.is_sparse
    assert grad_norm([embedding.weight.grad, torch.tensor([1.0])]).item() == pytest.approx(
        math.sqrt(2 * 2.0**2 + 2 * 1.0**2 + 1.0**2)
    )


@pytest.mark.parametrize("gradients", [[], [torch.zeros(3)], [torch.zeros(0)], [torch.zeros(0), torch.zeros(2, 2)]])
def test_without_gradients_the_norm_is_zero(gradients):
    """No gradient at all, and gradients that are zero or empty, have a norm of 0."""
    meter = Meter(BOTH)
    meter.open()
    meter.gradients(gradients)
    meter.close(8)
    assert read(meter)[0].grad_norm_sq == 0.0


def test_complex_gradients():
    """Complex gradients count with their absolute value."""
    assert grad_norm([torch.tensor([3 + 4j, 0j])]).item() == pytest.approx(5.0)


def test_optimizer_without_gradients_beside_one_on_a_gpu():
    """The norm of no gradients is on the CPU, and joins that of the others where they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415  # knows of devices that are not there

    with FakeTensorMode(allow_non_fake_inputs=True):
        meter = Meter(frozenset({"grad_norm_sq"}))
        meter.open()
        meter.gradients([torch.ones(3, device="cuda")], 1)
        meter.gradients([], 2)
        meter.close(4, [1, 2])
        assert [scalar.device.type for scalar in meter._scalars] == ["cuda"]


@pytest.fixture
def mesh():
    """Return a mesh of two by two processes, of which this one is the first and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    finally:
        dist.destroy_process_group()


def strided(dim):
    """Return how FSDP2 divides what tensor parallelism has divided along the same dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415  # not public

    return _StridedShard(dim, split_factor=2)


@pytest.mark.parametrize(
    ("placements", "parts"),
    [
        ([Shard(0), Shard(1)], 4),
        ([strided(0), Shard(0)], 4),
        ([Replicate(), Shard(0)], 2),
        ([Shard(0), Replicate()], 2),
        ([Replicate(), Replicate()], 1),
    ],
    ids=["both", "both along one dimension", "tensors", "data", "neither"],
)
def test_shards_weigh_as_many_as_there_are(placements, parts, mesh):
    """The mean of the squares over all processes is the square of the global norm."""
    gradient = DTensor.from_local(torch.ones(4, 3), mesh, placements)
    assert grad_norm([gradient]).item() == pytest.approx(math.sqrt(12 * parts))
    assert grad_norm([gradient, torch.ones(5)]).item() == pytest.approx(math.sqrt(12 * parts + 5))


@pytest.mark.parametrize("placements", [[Replicate(), Replicate()], [Partial(), Partial()]], ids=["whole", "summands"])
def test_loss_that_is_distributed(placements, mesh):
    """A loss of torch's loss_parallel is a plain number in its row; the other processes' summands are not there."""
    meter = Meter(frozenset({"loss"}))
    meter.open()
    meter.loss(DTensor.from_local(torch.tensor(2.5), mesh, placements))
    meter.close(8)
    assert read(meter)[0].loss == 2.5
