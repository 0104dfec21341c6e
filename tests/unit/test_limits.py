# SPDX-License-Identifier: Apache-2.0
"""From a damping to a batch size and a learning-rate factor."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import reference
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import limits, numbers

from lightning_adabatch.limits import MAX_DAMPING, Decision, Limits, round_down, round_up

dampings = st.just(math.inf) | numbers(1e-6, 100.0) | numbers(1e-300, 1e300)
scalings = st.sampled_from(["none", "linear", "sqrt"])


# Batch size --------------------------------------------------------------------------------------------------


@given(bounds=limits(), damping=numbers(1e-6, 300.0))
def test_decide_is_its_formula(bounds, damping):
    """Wanted size and batch size are those found by trying one multiple after the other."""
    decision = bounds.decide(damping)
    assert decision.damping == damping
    assert decision.wanted == reference.wanted(bounds.initial_batch_size, damping)
    assert decision.batch_size == reference.batch_size(
        decision.wanted,
        floor=bounds.floor,
        cap=bounds.cap,
        multiple=bounds.multiple,
        epoch_samples=bounds.epoch_samples,
    )


@given(bounds=limits(), damping=dampings)
def test_batch_size_is_within_its_bounds(bounds, damping):
    """A size is an integer from 1 up, never above cap or epoch, and a multiple at or above the floor if one fits."""
    decision = bounds.decide(damping)
    assert type(decision.batch_size) is int
    assert type(decision.wanted) is int
    assert 1 <= decision.batch_size <= min(bounds.cap, bounds.epoch_samples)
    if bounds.epoch_samples >= bounds.floor:
        assert decision.batch_size % bounds.multiple == 0
        assert decision.batch_size >= bounds.floor


@given(bounds=limits(), one=dampings, other=dampings)
def test_batch_size_grows_with_the_damping(bounds, one, other):
    """A larger damping never gives a smaller batch."""
    less, more = sorted((one, other))
    assert bounds.decide(less).batch_size <= bounds.decide(more).batch_size
    assert bounds.decide(less).wanted <= bounds.decide(more).wanted


@pytest.mark.parametrize(
    ("damping", "wanted", "batch_size"),
    [
        (1.0, 8, 8),
        (1.01, 9, 12),  # 8.08 is rounded up to 9, then to a multiple of 4
        (1.5, 12, 12),
        (1.5000001, 13, 16),  # 12.0000008 is more than dust
        (0.5, 4, 8),  # the floor
        (1e-9, 1, 8),  # wanted is at least 1
        (3.0, 24, 24),
        (3.1, 25, 24),  # the cap
        (100.0, 800, 24),
    ],
)
def test_batch_size_by_hand(damping, wanted, batch_size):
    """B0 = 8 between 8 and 24 in multiples of 4."""
    decision = Limits(8, cap=24, floor=8, multiple=4).decide(damping)
    assert (decision.wanted, decision.batch_size) == (wanted, batch_size)


def test_float_dust_is_not_one_more_sample():
    """0.1 * 3 / 0.1 and 8 / 7 * 7 are 3 and 8."""
    assert 0.1 * 3 / 0.1 > 3.0
    assert Limits(1, cap=math.inf).decide(0.1 * 3 / 0.1).wanted == 3
    assert Limits(100, cap=math.inf).decide(1.1).wanted == 110
    assert 100 * 1.1 > 110


@given(initial=st.integers(1, 4096), size=st.integers(1, 4096))
def test_an_absolute_size_is_wanted_exactly(initial, size):
    """A size divided by B0 asks for that size again."""
    assert Limits(initial, cap=math.inf).decide(size / initial).wanted == size


@pytest.mark.parametrize(
    ("epoch_samples", "batch_size"),
    [
        (100, 32),
        (32, 32),
        (31, 28),  # the largest multiple of 4 that one epoch holds
        (4, 4),
        (3, 3),  # an epoch smaller than one multiple is one batch
        (math.inf, 32),
    ],
)
def test_batch_is_never_larger_than_an_epoch(epoch_samples, batch_size):
    """Whatever the cap, an epoch holds at least one batch."""
    bounds = Limits(8, cap=math.inf, multiple=4, epoch_samples=epoch_samples)
    assert bounds.decide(4.0).batch_size == batch_size


def test_epoch_limits_the_size_without_lr_decay():
    """Without a cap the data alone limits the size, and the learning rate stays."""
    bounds = Limits(8, cap=math.inf, epoch_samples=103)
    assert bounds.decide(1000.0) == Decision(1000.0, 8000, 103, 1.0)
    assert bounds.decide(math.inf) == Decision(1e12, 8 * 10**12, 103, 1.0)


# Learning-rate factor ----------------------------------------------------------------------------------------


def test_learning_rate_decays_past_the_cap_and_comes_back():
    """With a maximum of 64 and a base rate of 0.1, the rate falls only while more than 64 is wanted."""
    bounds = Limits(8, cap=64)
    decisions = [bounds.decide(wanted / 8) for wanted in (8, 64, 128, 256, 64, 8)]
    assert [decision.batch_size for decision in decisions] == [8, 64, 64, 64, 64, 8]
    rates = [0.1, 0.1, 0.05, 0.025, 0.1, 0.1]
    assert [0.1 * decision.lr_factor for decision in decisions] == pytest.approx(rates, rel=1e-12)


@given(bounds=limits(), damping=dampings)
def test_lr_factor_law(bounds, damping):
    """The factor is exactly 1 unless more than the cap is wanted, then cap / wanted; it never is 0."""
    decision = bounds.decide(damping)
    if decision.wanted <= bounds.cap:
        assert decision.lr_factor == 1.0
    else:
        assert decision.lr_factor == bounds.cap / decision.wanted
    assert 0.0 < decision.lr_factor <= 1.0


@given(bounds=limits(scalings), history=st.lists(dampings | st.sampled_from([math.nan, -1.0])), damping=dampings)
def test_decide_is_memoryless(bounds, history, damping):
    """What was asked for before does not matter."""
    expected = bounds.decide(damping)
    for earlier in history:
        bounds.decide(earlier)
    assert bounds.decide(damping) == expected


@given(bounds=limits(scalings), damping=dampings)
def test_lr_scaling_multiplies_by_the_growth(bounds, damping):
    """The factor without scaling is multiplied by 1, B / B0 or its square root."""
    decision, plain = bounds.decide(damping), replace(bounds, lr_scaling="none").decide(damping)
    growth = decision.batch_size / bounds.initial_batch_size
    power = {"none": 0, "linear": 1, "sqrt": 1 / 2}[bounds.lr_scaling]
    assert decision.lr_factor == pytest.approx(plain.lr_factor * growth**power, rel=1e-12)
    assert replace(decision, lr_factor=0) == replace(plain, lr_factor=0)


@pytest.mark.parametrize(
    ("lr_scaling", "below", "at", "past"),
    [
        ("none", 1.0, 1.0, 32 / 64),
        ("linear", 4 / 8, 32 / 8, 32 / 64 * 32 / 8),
        ("sqrt", (4 / 8) ** 0.5, (32 / 8) ** 0.5, 32 / 64 * 2),
    ],
)
def test_lr_scaling_by_hand(lr_scaling, below, at, past):
    """B0 = 8 and cap 32: the factor at a wanted size of 4, 32 and 64."""
    bounds = Limits(8, cap=32, lr_scaling=lr_scaling)
    found = [bounds.decide(size / 8).lr_factor for size in (4, 32, 64)]
    assert found == pytest.approx([below, at, past])


@given(initial=st.integers(1, 500), damping=dampings)
@example(initial=256, damping=1.219231**5)
def test_adapting_the_lr_keeps_the_batch_size(initial, damping):
    """With ``adapt="lr"`` the batch size stays B0, and the factor is B0 / wanted where more is wanted."""
    decision = Limits(initial, cap=initial, adapt="lr").decide(damping)
    assert decision.batch_size == initial
    assert decision.lr_factor == pytest.approx(min(1.0, float(Fraction(initial, decision.wanted))), rel=1e-12)


def test_adapting_the_lr_keeps_a_batch_size_larger_than_the_data():
    """The loader's own size stands even where an epoch holds less."""
    assert Limits(64, cap=64, adapt="lr").decide(2.0) == Decision(2.0, 128, 64, 0.5)


# Dampings without a meaning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, -0.0, -1.0, -math.inf, math.nan])
@pytest.mark.parametrize("adapt", ["batch_size", "lr"])
def test_damping_without_a_meaning_is_no_decision(damping, adapt):
    """A damping at or below 0, or NaN, asks for nothing."""
    assert Limits(8, cap=8, adapt=adapt).decide(damping) is None


@pytest.mark.parametrize("damping", [1e12, 1.1e12, 1e300, math.inf])
def test_huge_damping_counts_as_1e12(damping):
    """Above 1e12 nothing overflows, and the learning rate does not become 0."""
    assert MAX_DAMPING == 1e12
    assert Limits(8, cap=64).decide(damping) == Decision(1e12, 8 * 10**12, 64, 64 / (8 * 10**12))


# Rounding ----------------------------------------------------------------------------------------------------


@given(value=st.integers(0, 10**6), multiple=st.integers(1, 1000))
def test_rounding_finds_the_nearest_multiples(value, multiple):
    """Rounding goes to the closest multiple that is not below, or not above."""
    assert round_up(value, multiple) % multiple == round_down(value, multiple) % multiple == 0
    assert value <= round_up(value, multiple) < value + multiple
    assert value - multiple < round_down(value, multiple) <= value
