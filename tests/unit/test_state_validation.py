# SPDX-License-Identifier: Apache-2.0
"""Validation points and the log's gate in a checkpoint: they go on as if nobody had cut the epoch."""

from __future__ import annotations

import copy
import json
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import numbers

from lightning_adabatch.report import Gate
from lightning_adabatch.validation import ValidationPoints

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(
    batches=SIZES,
    planned=st.integers(1, 60),
    fraction=numbers(0.01, 0.99),
    size=st.integers(1, 40),
    cut=st.integers(0, 40),
)
def test_points_cut_anywhere_go_on_alike(batches, planned, fraction, size, cut):
    """After any batch, points made again from their state validate where the ones that were not cut do."""
    whole, points = (ValidationPoints(fraction, range(size, planned * size + 1, size)) for _ in range(2))
    for number, end in enumerate(accumulate(batches), 1):
        if number == cut:
            points = ValidationPoints.from_state(json.loads(json.dumps(points.state())))
        last = number == len(batches)
        assert points.reached(end, last=last) == whole.reached(end, last=last)
    assert points.state() == whole.state()


def test_a_point_that_was_passed_is_not_passed_again():
    """10 batches of 8 validate every 5: after the state of 40 samples the next one is at 80, and the last is there."""
    points = ValidationPoints(0.5, range(8, 81, 8))
    assert [points.reached(end, last=False) for end in range(8, 41, 8)] == [False] * 4 + [True]
    again = ValidationPoints.from_state(points.state())
    assert not again.reached(40, last=False)
    assert [again.reached(end, last=end == 80) for end in range(48, 81, 8)] == [False] * 4 + [True]


def test_a_planned_validation_survives_the_cut():
    """Where the last batch is smaller than planned, the validation at the epoch's end is still made."""
    points = ValidationPoints(0.5, range(8, 33, 8))
    assert points.reached(16, last=False)
    assert ValidationPoints.from_state(points.state()).reached(25, last=True)
    assert not ValidationPoints.from_state(points.state()).reached(25, last=False)


@given(sizes=SIZES, every=st.integers(1, 9), cut=st.integers(0, 40))
def test_a_gate_goes_on_with_the_size_it_logged_last(sizes, every, cut):
    """The size logged last is all that a gate remembers: another one with it admits the same updates."""
    whole, gate = Gate(every), Gate(every)
    for updates, size in enumerate(sizes, 1):
        if updates == cut:
            logged = json.loads(json.dumps(gate.logged_size))
            gate = Gate(every)
            gate.logged_size = logged
        assert gate.admits(updates, size) == whole.admits(updates, size)
        assert gate.logged_size == whole.logged_size


def test_a_gate_says_what_it_logged_last():
    """That of the first update, with which others compare; then of the last that was admitted or noted."""
    gate = Gate(2)
    assert gate.logged_size is None
    assert not gate.admits(1, 104)
    assert gate.logged_size == 104
    assert gate.admits(2, 100)
    assert not gate.admits(3, 105)
    assert gate.logged_size == 100
    gate.note(80)
    assert gate.logged_size == 80


@pytest.mark.parametrize("size", [100, 200])
def test_a_copied_gate_leaves_the_original_alone(size):
    """What a copy admits is not taken for logged by the original."""
    gate = Gate(2)
    gate.note(50)
    assert copy.copy(gate).admits(2, size)
    assert gate.logged_size == 50
