# SPDX-License-Identifier: Apache-2.0
"""Where validation falls inside an epoch whose batches change their size."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import numbers, sizes
from torch.utils.data import DataLoader

from lightning_adabatch.loader import ElasticLoader
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.validation import ValidationPoints

fractions = st.sampled_from([0.1, 0.25, 0.3, 1 / 3, 0.5, 0.9]) | numbers(0.01, 0.99)


def validated(batches: list[int], fraction: float, *, planned: int, size: int) -> list[int]:
    """Return the numbers of the batches, from 1, that validation follows."""
    points = ValidationPoints(fraction, range(size, planned * size + 1, size))
    ends = list(accumulate(batches))
    return [n for n, end in enumerate(ends, 1) if points.reached(end, last=n == len(batches))]


def epoch(samples: int, wanted: list[int], tail: str = "keep", own: int | None = None) -> list[int]:
    """Return the sizes of an epoch's batches; the last size wanted stays."""
    plan, batches = EpochPlan(samples, own or wanted[0], tail), []
    while batch := plan.hand_out(wanted[min(len(batches), len(wanted) - 1)]):
        batches.append(batch)
    return batches


@given(
    samples=st.integers(1, 400),
    size=st.integers(1, 40),
    own=st.none() | st.integers(1, 40),
    fraction=fractions,
    tail=st.sampled_from(["keep", "drop"]),
)
@example(samples=103, size=10, own=None, fraction=0.5, tail="keep")  # 11 batches: after the 5th and the 10th
@example(samples=101, size=10, own=4, fraction=0.1, tail="keep")  # the last one takes the leftover sample in
@example(samples=103, size=10, own=None, fraction=0.25, tail="drop")
def test_constant_size_is_lightnings_rule(samples, size, own, fraction, tail):
    """At a constant size validation follows each batch whose number is a multiple of max(1, int(batches * f))."""
    batches = epoch(samples, [size], tail, own)
    expected = [
        batch_idx + 1
        for batch_idx in range(len(batches))
        if (batch_idx + 1) % max(1, int(len(batches) * fraction)) == 0
    ]
    assert validated(batches, fraction, planned=len(batches), size=size) == expected


@given(samples=st.integers(1, 400), size=st.integers(1, 40), limit=st.integers(1, 20), fraction=fractions)
@example(samples=30, size=3, limit=2, fraction=0.1)  # of parts of 2 and 1
@example(samples=37, size=10, limit=3, fraction=0.2)  # parts of 3, 3, 2, 2, and in the last batch of 3, 2, 2
def test_constant_size_in_parts_is_lightnings_rule(samples, size, limit, fraction):
    """The same where batches are handed out in parts, which are Lightning's batches."""
    data_loader = DataLoader(range(samples), batch_size=size)
    loader = ElasticLoader(data_loader, device_limit=limit)
    parts = [len(part) for part in loader]
    points = ValidationPoints(fraction, ElasticLoader(data_loader, device_limit=limit).ends(len(parts)))
    every = max(1, int(len(parts) * fraction))
    found = [n for n, end in enumerate(accumulate(parts), 1) if points.reached(end, last=n == len(parts))]
    assert found == list(range(every, len(parts) + 1, every))


@given(samples=st.integers(1, 400), wanted=sizes, fraction=fractions)
def test_every_multiple_is_validated_once(samples, wanted, fraction):
    """However the size moves, validation follows exactly the batches that cross a multiple, never twice."""
    planned = len(epoch(samples, wanted[:1]))
    stride = max(1, int(planned * fraction)) * wanted[0]
    batches = epoch(samples, wanted)
    ends = [0, *accumulate(batches)]
    found = validated(batches, fraction, planned=planned, size=wanted[0])
    inner = [n for n in range(1, len(batches)) if ends[n] // stride > ends[n - 1] // stride]
    assert [n for n in found if n < len(batches)] == inner


def test_half_of_the_data_after_growth():
    """64 samples, interval 0.5, 4 grows to 16 after 4 batches: validation at 32 samples, and at the end."""
    batches = epoch(64, [4, 4, 4, 4, 16])
    assert batches == [4, 4, 4, 4, 16, 16, 16]
    assert validated(batches, 0.5, planned=16, size=4) == [5, 7]
    assert sum(batches[:5]) == 32


def test_half_of_the_data_after_shrinkage():
    """64 samples, interval 0.5, 16 shrinks to 4 after 2 batches: at 32 samples, and at the end."""
    batches = epoch(64, [16, 16, 4])
    assert validated(batches, 0.5, planned=4, size=16) == [2, 10]


def test_one_batch_that_crosses_several_points_is_validated_once():
    """With a quarter of 64 samples for an interval, a batch of 48 crosses three points: one validation."""
    assert validated([4, 48, 12], 0.25, planned=16, size=4) == [2, 3]


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([10, 10, 10, 4], [2, 4]),  # the second point, at 40 samples, is the epoch's end at 34
        ([20, 14], [1, 2]),
        ([34], [1]),
    ],
)
def test_planned_validation_at_the_end_is_kept_by_a_smaller_last_batch(batches, found):
    """34 samples in 4 batches of 10, interval 0.5: the last one validates, although it is short."""
    assert validated(batches, 0.5, planned=4, size=10) == found


def test_no_validation_at_the_end_where_none_was_planned():
    """5 batches at 0.5 validate after the 2nd and the 4th, as in Lightning; the 5th has none."""
    assert validated([10] * 5, 0.5, planned=5, size=10) == [2, 4]
