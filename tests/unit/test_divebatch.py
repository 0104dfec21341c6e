# SPDX-License-Identifier: Apache-2.0
"""DiveBatch: measured once in a while, and used until the next time."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from strategies import numbers

from lightning_adabatch import DiveBatch, Progress
from lightning_adabatch.policies import DiveBatchState, dump_state, load_state

ASKED = frozenset({"gradient_diversity"})


def where(epochs: float, **measured: float) -> Progress:
    """Return a progress after so many epochs."""
    return Progress(3, 24, epochs, 8, 8, 64, learning_rate=0.1, measured=measured)


def decide(policy: DiveBatch, state: DiveBatchState, epochs: float, diversity: float) -> tuple[DiveBatchState, bool]:
    """Return the state after a decision as a controller makes it, and whether something was measured."""
    now = where(epochs)
    needed = policy.needs(state, now)
    assert needed in {ASKED, frozenset()}
    return (
        (policy.take(state, replace(now, measured=dict.fromkeys(needed, diversity))), True)
        if needed
        else (
            state,
            False,
        )
    )


def run(
    policy: DiveBatch, decisions: list[tuple[float, float]], *, cut: int | None = None
) -> tuple[list[bool], list[float]]:
    """Return at each decision whether it measured and the batch size wanted; cut by JSON before one of them."""
    state, measured, sizes = policy.init(), [], []
    for count, (epochs, diversity) in enumerate(decisions):
        if count == cut:
            state = load_state(policy, json.loads(json.dumps(dump_state(policy, state))))
        state, was_measured = decide(policy, state, epochs, diversity)
        measured.append(was_measured)
        sizes.append(8 * policy.damping(state, where(epochs)))
    return measured, sizes


decisions = st.lists(st.tuples(st.integers(0, 80).map(lambda n: n / 8), numbers(1.0, 1e4)), max_size=15).map(sorted)


@given(seen=decisions, delta=numbers(0.01, 10.0), every=st.sampled_from([0.25, 0.375, 1, 2.5]))
def test_divebatch_is_its_formula(seen, delta, every):
    """Each multiple of ``every`` that is passed has one measurement, after which delta times it is the size."""
    epochs, diversities = [e for e, _ in seen], [d for _, d in seen]
    measured, sizes = reference.divebatch(epochs, diversities, delta=delta, every=every, initial=8)
    assert run(DiveBatch(delta, every), seen) == (measured, pytest.approx(sizes, rel=1e-9))


@given(seen=decisions, cut=st.integers(0, 15))
def test_divebatch_goes_on_from_json(seen, cut):
    """Cut between any two decisions it measures when it would have, and decides the same."""
    assert run(DiveBatch(0.5, 0.5), seen, cut=cut) == run(DiveBatch(0.5, 0.5), seen)


def test_divebatch_by_hand():
    """Every 2 epochs: B0 up to the second, then half of 32 whatever the diversity, then half of 100 from the fourth."""
    seen = [(0.0, 5.0), (1.9, 5.0), (2.0, 32.0), (2.1, 7.0), (3.9, 7.0), (4.5, 100.0), (5.9, 7.0), (6.0, 1.0)]
    measured, sizes = run(DiveBatch(delta=0.5, every=2), seen)
    assert measured == [False, False, True, False, False, True, False, True]
    assert sizes == [8, 8, 16, 16, 16, 50, 50, 1]


def test_divebatch_measures_once_after_intervals_without_a_decision():
    """Intervals that went by are not made up for."""
    assert run(DiveBatch(every=0.5), [(7.3, 9.0), (7.4, 3.0), (7.5, 4.0)]) == ([True, False, True], [9, 9, 4])


@pytest.mark.parametrize("every", [0.1, 0.3, 1 / 3, 0.7])
def test_divebatch_point_reached_up_to_float_dust_is_reached(every):
    """At epochs = step · every the step-th measurement is due, whatever the product's last bits."""
    policy = DiveBatch(every=every)
    for step in range(1, 200):
        assert policy.needs(DiveBatchState(step - 1, 5.0), where(step * every)) == ASKED
        assert policy.needs(DiveBatchState(step, 5.0), where(step * every)) == frozenset()


def test_divebatch_state_is_what_was_measured_and_when():
    """The interval and the diversity, which the logs show."""
    policy = DiveBatch(every=0.5)
    state = policy.take(policy.init(), where(1.7, gradient_diversity=12.0))
    assert state == DiveBatchState(interval=3, diversity=12.0)
    assert policy.estimates(state) == {"gradient_diversity": 12.0}
    assert policy.estimates(policy.init()) == {}


def test_divebatch_with_intervals_beyond_counting_still_answers():
    """An interval that no float can count is one; nothing overflows."""
    policy = DiveBatch(every=5e-324)
    state, measured = decide(policy, policy.init(), 1.0, 16.0)
    assert measured
    assert policy.damping(state, where(1.0)) == 16 / 8
    assert not decide(policy, state, 2.0, 5.0)[1]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "0.5", None, True])
def test_divebatch_refuses_what_is_not_above_zero(value):
    """Delta and the interval are finite and above 0."""
    with pytest.raises(ValueError, match=rf"delta={re.escape(repr(value))} must be a finite number > 0, such as 1\.0"):
        DiveBatch(delta=value)
    with pytest.raises(ValueError, match=rf"every={re.escape(repr(value))} must be a finite number > 0, such as 1.0"):
        DiveBatch(every=value)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, math.nan, "0.5", None, True])
def test_divebatch_refuses_a_fraction(fraction):
    """A share of the training set is above 0 and at most all of it."""
    with pytest.raises(ValueError, match=rf"fraction={re.escape(repr(fraction))} must be a number in \(0, 1\]"):
        DiveBatch(fraction=fraction)
