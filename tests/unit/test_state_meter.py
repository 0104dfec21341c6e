# SPDX-License-Identifier: Apache-2.0
"""The meter in a checkpoint and among ranks: rows that are kept, put back, copied and averaged."""

from __future__ import annotations

import math

import pytest
import torch
from gradients import read
from hypothesis import given
from hypothesis import strategies as st

from lightning_adabatch.meter import Meter, grad_norm
from lightning_adabatch.policies import Observation

LOSS, NORM = frozenset({"loss"}), frozenset({"grad_norm_sq"})
BOTH = LOSS | NORM


def measure(meter, loss=0.5, gradient=(3.0, 4.0), batch_size=8):
    """Measure one update."""
    meter.open()
    meter.loss(torch.tensor(loss))
    meter.gradients([torch.tensor(gradient)])
    meter.close(batch_size)


class Others:
    """Stands for the collective: the mean with other processes' rows, which must be float64 and never this one's."""

    def __init__(self, *rows):
        self.rows = [torch.tensor(others, dtype=torch.float64) for others in rows]
        self.asked = []

    def __call__(self, rows):
        self.asked.append(rows.clone())
        return torch.stack([rows, *self.rows]).mean(0)


# Kept, put back, copied ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires", [frozenset(), LOSS, NORM, BOTH], ids=lambda r: "+".join(sorted(r)) or "nothing")
def test_peek_keeps_what_read_takes(requires):
    """The rows can be looked at any number of times; reading returns the same, once."""
    meter = Meter(requires)
    measure(meter)
    measure(meter, 0.25, (1.0,), 4)
    rows = meter.peek()
    assert len(rows) == 2
    assert meter.peek() == meter.peek(alone=True) == rows
    assert read(meter) == rows
    assert meter.peek() == read(meter) == []


def test_an_open_row_is_not_peeked_at():
    """A row is there once it is closed, and peeking leaves the open one open."""
    meter = Meter(BOTH)
    meter.open()
    meter.loss(torch.tensor(0.25))
    assert meter.peek() == []
    meter.gradients([torch.tensor([2.0])])
    meter.close(4)
    assert meter.peek() == [Observation(0.25, 4.0, 4)]


def test_rows_that_are_put_back_come_first():
    """The rows of the process before stand ahead of this one's, and go with the first read."""
    before = [Observation(1.0, 2.0, 3), Observation(math.inf, None, 5)]
    meter = Meter(BOTH)
    meter.put_back(before)
    assert meter.peek() == before
    measure(meter)
    assert meter.peek() == [*before, Observation(0.5, 25.0, 8)]
    assert read(meter) == [*before, Observation(0.5, 25.0, 8)]
    assert read(meter) == []
    assert len(before) == 2


def test_a_window_cut_anywhere_reads_as_one():
    """Rows that are peeked at, and put back in another meter, continue as if nothing had happened."""
    losses = [0.5, 0.25, 2.0, 8.0, 1.0]
    for cut in range(len(losses) + 1):
        first, second = Meter(BOTH), Meter(BOTH)
        for loss in losses[:cut]:
            measure(first, loss)
        second.put_back(first.peek())
        for loss in losses[cut:]:
            measure(second, loss)
        assert read(second) == [Observation(loss, 25.0, 8) for loss in losses]


@pytest.mark.parametrize("count", [1, 200, 300])
def test_a_copy_goes_its_own_way(count):
    """What the copy measures and reads is not the original's, and the other way round; both have what came before."""
    meter = Meter(BOTH)
    meter.put_back([Observation(1.0, 1.0, 1)])
    for _ in range(count):
        measure(meter)
    copied = meter.copy(alone=False)
    measure(copied, 0.25)
    assert len(copied.peek()) == count + 2
    assert len(meter.peek()) == count + 1
    assert len(read(copied)) == count + 2
    assert len(meter.peek()) == count + 1
    measure(meter, 4.0)
    assert copied.peek() == []
    assert [row.loss for row in read(meter)] == [1.0] + [0.5] * count + [4.0]


def test_a_copy_has_the_open_row():
    """A row that was open when the copy was made can be closed in the copy, and still be closed in the original."""
    meter = Meter(BOTH)
    meter.open()
    meter.loss(torch.tensor(0.25))
    meter.gradients([torch.tensor([2.0])])
    copied = meter.copy(alone=True)
    copied.close(4)
    assert (read(copied), read(meter)) == ([Observation(0.25, 4.0, 4)], [])
    meter.close(4)
    assert read(meter) == [Observation(0.25, 4.0, 4)]


def test_who_asks_nobody():
    """A copy made alone, and a peek alone, have this process's rows; any other asks the others each time."""
    others = Others([[1.5, 0.0]])
    meter = Meter(BOTH, others)
    measure(meter)
    mine, mean = [Observation(0.5, 25.0, 8)], [Observation(1.0, pytest.approx(12.5), 8)]
    assert meter.copy(alone=True).peek() == read(meter.copy(alone=True)) == meter.peek(alone=True) == mine
    assert others.asked == []
    assert read(meter.copy(alone=False)) == mean
    assert meter.peek() == mean
    assert read(meter) == mean
    assert len(others.asked) == 3


# Among ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "others", "expected"),
    [
        (LOSS, [[1.5], [0.25]], [Observation(1.0, None, 8), Observation(0.25, None, 4)]),
        (NORM, [[1.0], [16.0]], [Observation(None, 13.0, 8), Observation(None, 10.0, 4)]),
        (BOTH, [[1.5, 1.0], [0.25, 16.0]], [Observation(1.0, 13.0, 8), Observation(0.25, 10.0, 4)]),
    ],
    ids=["loss", "grad_norm_sq", "both"],
)
def test_rows_are_the_means_over_the_processes(requires, others, expected):
    """Losses are averaged, and so are the squares of the norms; one collective for all rows, in double precision."""
    collective = Others(others)
    meter = Meter(requires, collective)
    measure(meter)
    measure(meter, 0.25, (2.0,), 4)
    rows = read(meter)
    assert [(row.loss, row.batch_size) for row in rows] == [(row.loss, row.batch_size) for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.grad_norm_sq == (wanted.grad_norm_sq and pytest.approx(wanted.grad_norm_sq, rel=1e-12))
    [asked] = collective.asked
    assert (asked.dtype, asked.shape) == (torch.float64, (2, len(requires)))


def test_nothing_is_asked_where_there_is_nothing():
    """No rows, or no measures: no collective, on any process."""
    others = Others()
    assert read(Meter(BOTH, others)) == []
    counting = Meter(frozenset(), others)
    counting.close(8)
    assert read(counting) == [Observation(None, None, 8)]
    assert others.asked == []


def test_rows_put_back_are_averaged_already():
    """What the process before had read with the others is not averaged again."""
    others = Others([[1.5, 1.0]])
    meter = Meter(BOTH, others)
    before = [Observation(7.0, 7.0, 7)]
    meter.put_back(before)
    assert meter.peek() == before
    assert others.asked == []
    measure(meter)
    assert read(meter)[0] == before[0]
    assert read(meter) == []


@pytest.mark.parametrize("other", [math.nan, math.inf])
def test_what_one_process_lacks_nobody_has(other):
    """A value that is not finite on one process is not finite in the mean: the observation is dropped everywhere."""
    meter = Meter(BOTH, Others([[other, other]]))
    measure(meter)
    [row] = read(meter)
    assert not math.isfinite(row.loss)
    assert not math.isfinite(row.grad_norm_sq)


VALUES = st.floats(-1e3, 1e3, width=32)


@given(st.lists(st.lists(st.lists(VALUES, max_size=4), max_size=3), min_size=1, max_size=5))
def test_the_mean_of_the_squares_of_all_parts_is_that_of_the_whole(parts):
    """Over any number of processes, each with its part: the mean of their squares is the global squared norm."""
    norms = [float(grad_norm([torch.tensor(values) for values in part], len(parts))) for part in parts]
    whole = math.fsum(value * value for part in parts for values in part for value in values)
    mean = math.fsum(norm * norm for norm in norms) / len(parts)
    assert math.isclose(mean, whole, rel_tol=1e-5, abs_tol=1e-30)


@pytest.mark.parametrize(
    "gradients",
    [
        [torch.tensor([3.0]), torch.tensor([4.0])],
        [torch.tensor([3.0], dtype=torch.float16), torch.tensor([4.0])],
        [torch.tensor([[0.0, 3.0], [4.0, 0.0]]).to_sparse()],
        [torch.tensor([3.0, 4.0], dtype=torch.float64)],
    ],
    ids=["float32", "mixed", "sparse", "float64"],
)
@pytest.mark.parametrize("shards", [1, 4])
def test_each_kind_of_gradient_is_weighed(gradients, shards):
    """One of four equal parts has half the norm of the whole, of whatever kind its tensors are."""
    norm = grad_norm(gradients, shards)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(5.0 * math.sqrt(shards))


def test_a_meter_weighs_by_its_shards():
    """A meter that is told of four shards weighs what it sees by them; their mean is then the whole."""
    meter = Meter(NORM, Others([[0.0]], [[0.0]], [[0.0]]))
    meter.shards = 4
    measure(meter)
    assert meter.peek(alone=True) == [Observation(None, 100.0, 8)]
    [row] = read(meter)
    assert row.grad_norm_sq == pytest.approx(25.0)
