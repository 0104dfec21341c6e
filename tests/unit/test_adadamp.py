# SPDX-License-Identifier: Apache-2.0
"""AdaDamp is Eq. 3, from the first decision on."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from strategies import numbers

from lightning_adabatch import AdaDamp, Progress
from lightning_adabatch.controller import Cadence, Controller
from lightning_adabatch.limits import Limits
from lightning_adabatch.policies import AdaDampState, dump_state, load_state


def where(loss: float, cap: float = 64) -> Progress:
    """Return a progress at which the loss over the training set was measured."""
    return Progress(3, 24, 0.3, 8, 8, cap, learning_rate=0.1, measured={"full_loss": loss})


def dampings(policy: AdaDamp, losses: list[float], state: AdaDampState | None = None) -> list[float]:
    """Return the damping after each evaluation."""
    state, found = policy.init() if state is None else state, []
    for loss in losses:
        state = policy.take(state, where(loss))
        found.append(policy.damping(state, where(loss)))
    return found


def taken(policy: AdaDamp, *losses: float) -> AdaDampState:
    """Return the state after evaluations."""
    state = policy.init()
    for loss in losses:
        state = policy.take(state, where(loss))
    return state


@given(losses=st.lists(numbers(0.01, 20.0), max_size=12), optimal=numbers(-5.0, 0.0))
def test_adadamp_is_its_formula(losses, optimal):
    """The damping at every decision is the first distance to F* over the last."""
    expected = reference.adadamp(losses, optimal_loss=optimal, largest=64 / 8)
    assert dampings(AdaDamp(optimal_loss=optimal), losses) == pytest.approx(expected, rel=1e-9)


@given(losses=st.lists(st.integers(-3, 5).map(float), max_size=8), optimal=st.integers(-2, 2).map(float))
def test_adadamp_at_and_below_the_optimal_loss_is_its_formula(losses, optimal):
    """Where a distance to F* is 0 or less, the damping is 1 or the largest without LR decay."""
    expected = reference.adadamp(losses, optimal_loss=optimal, largest=64 / 8)
    assert dampings(AdaDamp(optimal_loss=optimal), losses) == pytest.approx(expected, rel=1e-12)


@given(losses=st.lists(numbers(-5.0, 20.0), max_size=10), cut=st.integers(0, 10))
def test_adadamp_goes_on_from_json(losses, cut):
    """Cut anywhere, written as JSON and read by another policy of the class, it decides as the uncut one."""
    policy = AdaDamp(optimal_loss=0.5)
    written = json.dumps(dump_state(policy, taken(policy, *losses[:cut])))
    state = load_state(AdaDamp(optimal_loss=0.5), json.loads(written))
    found = dampings(policy, losses[:cut]) + dampings(policy, losses[cut:], state)
    assert found == dampings(policy, losses)


def test_adadamp_by_hand():
    """With F* = 1: 4 / 4, 4 / 2, 4 / 8; up and down, without a memory but for the first."""
    assert dampings(AdaDamp(optimal_loss=1.0), [5.0, 3.0, 9.0]) == [4 / 4, 4 / 2, 4 / 8]
    assert taken(AdaDamp(), 5.0, 3.0) == AdaDampState(evaluations=2, loss=3.0, baseline=5.0)


@pytest.mark.parametrize(("cap", "largest"), [(64, 64 / 8), (math.inf, math.inf)])
@pytest.mark.parametrize("loss", [1.0, 0.5])
def test_adadamp_past_the_optimal_loss_asks_for_the_largest_size(cap, largest, loss):
    """A loss at or below F* after a sound first one asks for the largest size that needs no LR decay."""
    policy = AdaDamp(optimal_loss=1.0)
    state = taken(policy, 2.0, loss)
    assert policy.damping(state, where(loss, cap)) == largest
    assert policy.notice(state) is None


@pytest.mark.parametrize("first", [1.0, -2.0])
def test_adadamp_with_a_meaningless_first_loss_changes_nothing(first):
    """A first loss at or below F* gives damping 1 for ever, and a notice that names both."""
    policy = AdaDamp(optimal_loss=1.0)
    assert dampings(policy, [first, 5.0, 0.5]) == [1.0] * 3
    notice = policy.notice(taken(policy, first, 5.0))
    assert f"is {first:g} and must be above optimal_loss=1" in notice


def test_adadamp_before_an_evaluation():
    """Nothing is known: damping 1, no estimate, nothing to tell."""
    policy = AdaDamp()
    assert policy.damping(policy.init(), where(1.0)) == 1.0
    assert policy.estimates(policy.init()) == {}
    assert policy.notice(policy.init()) is None


def test_adadamp_shows_the_last_loss():
    """The logs have the loss itself, whatever F* is."""
    policy = AdaDamp(optimal_loss=-3.0)
    assert policy.estimates(taken(policy, 5.0, 2.0)) == {"loss": 2.0}


def test_adadamp_asks_for_the_full_loss_at_every_decision():
    """It observes nothing, and needs the loss over the training set each time."""
    policy = AdaDamp()
    assert policy.requires == {"full_loss"}
    assert policy.needs(taken(policy, 1.0), where(1.0)) == {"full_loss"}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, "0.5", None, True])
def test_adadamp_refuses_an_optimal_loss(loss):
    """The smallest loss is a finite number."""
    with pytest.raises(ValueError, match=rf"optimal_loss={re.escape(repr(loss))} must be a finite number\. Set the"):
        AdaDamp(optimal_loss=loss)


@pytest.mark.parametrize("fraction", [0.0, 0, -0.5, 1.01, 2, math.nan, math.inf, "0.5", None, True])
def test_adadamp_refuses_a_fraction(fraction):
    """A share of the training set is above 0 and at most all of it."""
    with pytest.raises(ValueError, match=rf"fraction={re.escape(repr(fraction))} must be a number in \(0, 1\]"):
        AdaDamp(fraction=fraction)


# In the loop -------------------------------------------------------------------------------------------------


def run(losses: list[float], **cadence: int) -> tuple[list[int], list[Any], int]:
    """Return the size of each update, what was asked for, and what was skipped."""
    asked: list[Any] = []

    def evaluate(names: frozenset[str]) -> dict[str, float]:
        asked.append(set(names))
        return {"full_loss": losses[len(asked) - 1]}

    controller = Controller(
        AdaDamp(),
        Limits(8, 64),
        Cadence(**cadence),
        training_samples=100,
        observe=list,
        notify=pytest.fail,
        evaluate=evaluate,
    )
    controller.start(lambda: 0.1)
    sizes = []
    for _ in range(6):
        sizes.append(controller.decision.batch_size)
        controller.end_batch(controller.decision.batch_size, updated=True, learning_rate=lambda: 0.1)
    return sizes, asked, controller.skipped


def test_adadamp_is_evaluated_before_the_first_update():
    """F(w_0) is that of the untrained weights, at count 0, and every decision has its own."""
    sizes, asked, skipped = run([4.0, 2.0, 1.0, 4.0, 8.0, 0.25, 1.0])
    assert sizes == [8 * 4 // loss for loss in (4, 2, 1, 4, 8)] + [64]
    assert asked == [{"full_loss"}] * 7
    assert skipped == 0


def test_adadamp_is_evaluated_at_decisions_only():
    """With dwell 3 it is evaluated at counts 0, 3 and 6; with wait 2 the first decision's is the baseline."""
    assert run([4.0, 2.0, 1.0], dwell=3) == ([8, 8, 8, 16, 16, 16], [{"full_loss"}] * 3, 0)
    assert run([4.0, 2.0, 1.0, 0.5, 0.5], wait=2) == ([8, 8, 8, 16, 32, 64], [{"full_loss"}] * 5, 0)


def test_adadamp_takes_the_first_finite_loss_for_its_baseline():
    """A loss that is not finite is no decision, and the next one is the first."""
    sizes, _, skipped = run([math.nan, 4.0, math.inf, 1.0, 2.0, 2.0, 2.0])
    assert sizes == [8, 8, 8, 32, 16, 16]
    assert skipped == 2
