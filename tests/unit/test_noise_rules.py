# SPDX-License-Identifier: Apache-2.0
"""NoiseScale, CABS and NormTest: the rules that know how much the gradients of single samples vary."""

from __future__ import annotations

import json
import math
import random
import re
from functools import reduce
from typing import Any

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from strategies import numbers, observations

from lightning_adabatch import CABS, NoiseScale, NormTest, Observation, Policy, Progress
from lightning_adabatch.policies import CABSState, NoiseScaleState, NormTestState, dump_state, load_state
from lightning_adabatch.policies.checks import average

INITIAL, CAP = 8, 64


def where(rate: float = 0.1, cap: float = CAP) -> Progress:
    """Return a progress of which only learning rate and cap matter."""
    return Progress(3, 24, 0.3, INITIAL, INITIAL, cap, learning_rate=rate)


def observed(loss: float = 1.0, norm: float = 0.0, variance: float = 0.0, size: int = 8) -> Observation:
    """Return an observation of which only what a test is about has to be said."""
    return Observation(loss, norm, size, variance)


def after(policy: Policy[Any], *seen: Observation) -> Any:
    """Return the state after these observations."""
    return reduce(policy.update, seen, policy.init())


def sizes(policy: Policy[Any], seen: list[Observation], rates: list[float] | None = None) -> list[float]:
    """Return the batch size wanted after each observation."""
    state, found = policy.init(), []
    for observation, rate in zip(seen, rates or [0.1] * len(seen), strict=True):
        state = policy.update(state, observation)
        found.append(INITIAL * policy.damping(state, where(rate)))
    return found


@st.composite
def healthy(draw: st.DrawFn) -> Observation:
    """Draw an observation whose gradient is more than its noise."""
    variance, size = draw(numbers(0.01, 1000.0)), draw(st.integers(1, 512))
    return Observation(draw(numbers(0.01, 20.0)), variance / size + draw(numbers(0.01, 50.0)), size, variance)


#: Exact in binary, as are their averages with the memories below: no float dust decides about a sign.
whole = st.builds(
    Observation,
    st.integers(-4, 8).map(float),
    st.integers(0, 4).map(float),
    st.sampled_from([1, 2, 8]),
    st.integers(-8, 32).map(float),
)
rhos = st.sampled_from([0.0, 0.5, 0.9]) | numbers(0.0, 0.99)
exact_rhos = st.sampled_from([0.0, 0.5])
warmups = st.integers(1, 6)
runs = st.lists(healthy(), min_size=1, max_size=25)
whole_runs = st.lists(whole, min_size=1, max_size=10)

ALL = [NoiseScale(rho=0.75, warmup=2), CABS(rho=0.75, warmup=2), NormTest(rho=0.75, warmup=2)]
every_rule = pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)


# The average ---------------------------------------------------------------------------------------------------


@given(values=st.lists(numbers(-5.0, 5.0), min_size=1, max_size=30), rho=rhos)
def test_average_is_its_formula(values, rho):
    """A mean of the first 1 / (1 - rho) values, an exponential average from then on, summed up anew each time."""
    found, last = [], 0.0
    for count, value in enumerate(values, 1):
        last = average(last, value, count, rho)
        found.append(last)
    assert found == pytest.approx([float(x) for x in reference.averages(values, rho=rho)], rel=1e-9, abs=1e-9)


def test_average_by_hand():
    """With a memory of 3/4: means of 1, 2, 3 and 4 values, then a quarter of the new one."""
    found = [4.0]
    for count, value in enumerate([2.0, 0.0, 6.0, 7.0, 0.0], 2):
        found.append(average(found[-1], value, count, 0.75))
    assert found == pytest.approx([4, 6 / 2, 6 / 3, 12 / 4, 0.75 * 3 + 7 / 4, 0.75 * 4])


@every_rule
@given(seen=st.lists(observations, max_size=12), cut=st.integers(0, 12))
def test_goes_on_from_json(policy, seen, cut):
    """Cut anywhere and written as JSON, the state goes on as the uncut one, to the last bit."""
    state = load_state(policy, json.loads(json.dumps(dump_state(policy, after(policy, *seen[:cut])))))
    found = reduce(policy.update, seen[cut:], state)
    assert found == after(policy, *seen)
    assert type(found) is type(policy.init())
    assert policy.damping(found, where()) == policy.damping(after(policy, *seen), where())


@every_rule
def test_nothing_changes_before_the_warmup_is_over(policy):
    """With one observation of two the damping is 1, with none there is no estimate and nothing to tell."""
    extreme = observed(1e-3, 2e-3, 1e3, 10**6)
    assert policy.damping(policy.init(), where()) == 1.0
    assert policy.damping(after(policy, extreme), where()) == 1.0
    assert policy.damping(after(policy, extreme, extreme), where()) > 100
    assert policy.estimates(policy.init()) == {}
    assert policy.notice(policy.init()) is None


# NoiseScale ----------------------------------------------------------------------------------------------------


@given(seen=runs, rho=rhos, scale=numbers(0.1, 10.0), warmup=warmups)
def test_noise_scale_is_its_formula(seen, rho, scale, warmup):
    """Wanted is the ratio of the averages, each summed up from the start, and at least two samples."""
    expected = reference.noise_scale(seen, rho=rho, scale=scale, warmup=warmup, initial=INITIAL, cap=CAP)
    assert sizes(NoiseScale(rho, scale, warmup), seen) == pytest.approx(expected, rel=1e-6)


@given(seen=whole_runs, rho=exact_rhos, warmup=warmups)
def test_noise_scale_of_estimates_below_zero_is_its_formula(seen, rho, warmup):
    """No noise asks for two samples, noise that hides the gradient for the largest size without LR decay."""
    expected = reference.noise_scale(seen, rho=rho, scale=1.0, warmup=warmup, initial=INITIAL, cap=CAP)
    assert sizes(NoiseScale(rho, warmup=warmup), seen) == pytest.approx(expected, rel=1e-9)


def test_noise_scale_by_hand():
    """Two sizes of batch: 6 - 32/8 = 2 and 5 - 16/4 = 1, so the noise scale is 24 / 1.5 of the means."""
    policy = NoiseScale(rho=0.5, scale=0.5, warmup=1)
    state = after(policy, observed(norm=6.0, variance=32.0), observed(norm=5.0, variance=16.0, size=4))
    assert state == NoiseScaleState(2, (32 + 16) / 2, (2 + 1) / 2)
    assert INITIAL * policy.damping(state, where()) == 0.5 * 24 / 1.5
    assert policy.estimates(state) == {"grad_norm_sq": 1.5, "grad_variance": 24.0}


@pytest.mark.parametrize(("cap", "largest"), [(64, 64 / 8), (math.inf, math.inf)])
def test_noise_scale_of_pure_noise_asks_for_the_largest_size(cap, largest):
    """Where a batch's norm is that of its noise, the gradient cannot be seen."""
    policy = NoiseScale(warmup=1)
    assert policy.damping(after(policy, observed(norm=4.0, variance=32.0)), where(cap=cap)) == largest


def test_noise_scale_without_noise_asks_for_two_samples():
    """All samples agree; with one sample it could never be seen that they no longer do. So too at a minimum."""
    policy = NoiseScale(warmup=1)
    assert INITIAL * policy.damping(after(policy, observed(norm=4.0)), where()) == 2
    assert INITIAL * policy.damping(after(policy, observed()), where()) == 2
    assert INITIAL * policy.damping(after(policy, observed(norm=400.0, variance=8.0)), where()) == 2


def test_noise_scale_finds_a_known_one():
    """Gradients 1 + noise of variance 20, batches of 4 to 64: within 15 % of 20 / 1 after 4,000 updates."""
    draw, policy, seen = random.Random(0), NoiseScale(rho=0.9995), []
    for _ in range(4000):
        batch = [1.0 + draw.gauss(0.0, math.sqrt(20.0)) for _ in range(draw.choice([4, 16, 64]))]
        mean = sum(batch) / len(batch)
        variance = sum((g - mean) ** 2 for g in batch) / (len(batch) - 1)
        seen.append(Observation(None, mean**2, len(batch), variance))
    assert INITIAL * policy.damping(after(policy, *seen), where()) == pytest.approx(20 / 1, rel=0.15)


# CABS ----------------------------------------------------------------------------------------------------------

cabs_arguments = st.fixed_dictionaries(
    {"rho": rhos, "scale": numbers(0.1, 100.0), "optimal_loss": numbers(-5.0, 0.0), "warmup": warmups}
)
exact_cabs_arguments = st.fixed_dictionaries(
    {"rho": exact_rhos, "scale": st.just(4.0), "optimal_loss": st.integers(-3, 3).map(float), "warmup": warmups}
)


@given(seen=st.lists(st.tuples(healthy(), numbers(1e-4, 1.0)), min_size=1, max_size=25), arguments=cabs_arguments)
def test_cabs_is_its_formula(seen, arguments):
    """Wanted is rate times variance over the distance of the loss to F*, with the averages summed up anew."""
    shown, rates = [o for o, _ in seen], [rate for _, rate in seen]
    expected = reference.cabs(shown, rates, **arguments, initial=INITIAL, cap=CAP)
    assert sizes(CABS(**arguments), shown, rates) == pytest.approx(expected, rel=1e-9)


@given(
    seen=st.lists(st.tuples(whole, st.sampled_from([0.0, 0.5])), min_size=1, max_size=10),
    arguments=exact_cabs_arguments,
)
def test_cabs_of_values_below_zero_is_its_formula(seen, arguments):
    """No variance or no rate asks for two samples, a loss past F* for the largest, one that began there for B0."""
    shown, rates = [o for o, _ in seen], [rate for _, rate in seen]
    expected = reference.cabs(shown, rates, **arguments, initial=INITIAL, cap=CAP)
    assert sizes(CABS(**arguments), shown, rates) == pytest.approx(expected, rel=1e-9)


def test_cabs_by_hand():
    """Losses 4, 2 and variances 320, 160 with F* = 1: 0.2 · 240 / (3 - 1)."""
    policy = CABS(rho=0.5, optimal_loss=1.0, warmup=1)
    state = after(policy, observed(4.0, variance=320.0), observed(2.0, variance=160.0))
    assert state == CABSState(2, 3.0, 240.0, baseline=4.0)
    assert INITIAL * policy.damping(state, where(rate=0.2)) == pytest.approx(0.2 * 240 / 2)
    assert policy.estimates(state) == {"loss": 3.0, "grad_variance": 240.0}
    assert policy.notice(state) is None


def test_cabs_follows_the_learning_rate():
    """A tenth of the rate is a tenth of the batch; at the start of a warm-up of the rate it is two samples."""
    policy = CABS(warmup=1)
    state = after(policy, observed(1.0, variance=1000.0))
    assert INITIAL * policy.damping(state, where(rate=0.1)) == pytest.approx(100)
    assert INITIAL * policy.damping(state, where(rate=0.01)) == pytest.approx(10)
    assert INITIAL * policy.damping(state, where(rate=0.0)) == 2


def test_cabs_with_a_meaningless_first_loss_says_so():
    """Judged when the warm-up is over: the mean of the first losses must be above F*."""
    policy = CABS(warmup=2)
    assert policy.notice(after(policy, observed(-3.0, variance=9.0))) is None
    assert policy.notice(after(policy, observed(-3.0), observed(5.0))) is None
    state = after(policy, observed(-3.0, variance=9.0), observed(1.0, variance=9.0), observed(9.0, variance=9.0))
    assert policy.damping(state, where()) == 1.0
    assert "is -1 and must be above optimal_loss=0" in policy.notice(state)


@pytest.mark.parametrize(("cap", "largest"), [(64, 64 / 8), (math.inf, math.inf)])
def test_cabs_past_the_optimal_loss_asks_for_the_largest_size(cap, largest):
    """An average of the loss at F* after a sound first one has no ratio."""
    policy = CABS(rho=0.0, warmup=1)
    state = after(policy, observed(1.0, variance=9.0), observed(0.0, variance=9.0))
    assert policy.damping(state, where(cap=cap)) == largest
    assert policy.notice(state) is None


# NormTest ------------------------------------------------------------------------------------------------------


@given(seen=runs, theta=numbers(0.05, 0.95), rho=rhos, warmup=warmups)
def test_norm_test_is_its_formula(seen, theta, rho, warmup):
    """The size is B0 until the test fails, then what would have passed it, and so on."""
    expected = reference.norm_test(seen, theta=theta, rho=rho, warmup=warmup, initial=INITIAL, cap=CAP)
    assert sizes(NormTest(theta, rho, warmup), seen) == pytest.approx(expected, rel=1e-9)


@given(seen=whole_runs, rho=exact_rhos, warmup=warmups)
def test_norm_test_of_values_that_vanish_is_its_formula(seen, rho, warmup):
    """Without a gradient it is the largest size without LR decay, without a variance the test is passed."""
    expected = reference.norm_test(seen, theta=0.5, rho=rho, warmup=warmup, initial=INITIAL, cap=CAP)
    assert sizes(NormTest(0.5, rho, warmup), seen) == pytest.approx(expected, rel=1e-9)


@given(seen=st.lists(observations, max_size=12))
def test_norm_test_remembers_the_largest_size(seen):
    """What the state holds of the size never falls, whatever is observed."""
    policy, held = NormTest(rho=0.0, warmup=1), [0.0]
    state = policy.init()
    for observation in seen:
        state = policy.update(state, observation)
        held.append(state.size)
    assert held == sorted(held)


def test_norm_test_by_hand():
    """With theta 1/2: 32 / (8 / 4) = 16 samples, kept when 10 samples would do."""
    policy = NormTest(theta=0.5, rho=0.0, warmup=1)
    first = after(policy, observed(norm=8.0, variance=32.0))
    assert first == NormTestState(1, 32.0, 8.0, size=16.0)
    second = policy.update(first, observed(norm=4.0, variance=10.0, size=16))
    assert second == NormTestState(2, 10.0, 4.0, size=16.0)
    assert [INITIAL * policy.damping(state, where()) for state in (first, second)] == [16, 16]
    assert policy.estimates(second) == {"grad_norm_sq": 4.0, "grad_variance": 10.0}


def test_norm_test_that_passes_keeps_the_initial_size():
    """A test that five samples would pass leaves eight of them."""
    policy = NormTest(theta=0.5, warmup=1)
    assert policy.damping(after(policy, observed(norm=8.0, variance=10.0)), where()) == 1.0


@pytest.mark.parametrize(("cap", "largest"), [(64, 64 / 8), (math.inf, math.inf)])
def test_norm_test_without_a_gradient_asks_for_the_largest_size_and_forgets_it(cap, largest):
    """Noise alone, once, is no reason to stay at the largest size for ever."""
    policy = NormTest(rho=0.0, warmup=1)
    state = after(policy, observed(norm=0.0, variance=1.0))
    assert policy.damping(state, where(cap=cap)) == largest
    assert policy.damping(policy.update(state, observed(norm=9.0, variance=1.0)), where(cap=cap)) == 1.0


@pytest.mark.parametrize("theta", [0.25, 0.5, 0.9])
def test_norm_test_settles_where_its_docstring_says(theta):
    """With a batch's own norm, |G|² + tr Σ / B, the size is (1 / theta² - 1) noise scales."""
    policy, size, state = NormTest(theta, rho=0.0, warmup=1), 2.0, NormTest().init()
    for _ in range(2000):
        state = policy.update(state, Observation(None, 1.0 + 30.0 / size, 8, 30.0))
        size = max(size, state.size)
    assert size == pytest.approx(max(2.0, 30.0 * (1 / theta**2 - 1)), rel=1e-6)


# Refusals ------------------------------------------------------------------------------------------------------

NO_NUMBERS = ["0.5", None, True, [0.5], pytest.param(10**400, id="10**400")]


@pytest.mark.parametrize("rule", [NoiseScale, CABS, NormTest])
@pytest.mark.parametrize("rho", [1, -0.1, math.nan, math.inf, *NO_NUMBERS])
def test_a_rho_is_refused(rule, rho):
    """A memory outside of [0, 1) has no meaning."""
    with pytest.raises(ValueError, match=rf"rho={re.escape(repr(rho))} must be a number in \[0, 1\). Set for ex"):
        rule(rho=rho)


@pytest.mark.parametrize("rule", [NoiseScale, CABS, NormTest])
@pytest.mark.parametrize("warmup", [0, -1, 1.5, 2.0, True, "3", None])
def test_a_warmup_is_refused(rule, warmup):
    """The warm-up is a number of updates."""
    with pytest.raises(ValueError, match=rf"warmup={warmup!r} must be an integer >= 1, a number of updates"):
        rule(warmup=warmup)


@pytest.mark.parametrize("rule", [NoiseScale, CABS])
@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, *NO_NUMBERS])
def test_a_scale_is_refused(rule, scale):
    """A scale is finite and above 0."""
    with pytest.raises(ValueError, match=rf"scale={re.escape(repr(scale))} must be a finite number > 0, such as 1"):
        rule(scale=scale)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, *NO_NUMBERS])
def test_cabs_refuses_an_optimal_loss(loss):
    """The smallest loss is a finite number."""
    with pytest.raises(ValueError, match=rf"optimal_loss={re.escape(repr(loss))} must be a finite number"):
        CABS(optimal_loss=loss)


@pytest.mark.parametrize("theta", [0, 1, -0.5, 1.5, math.nan, math.inf, *NO_NUMBERS])
def test_norm_test_refuses_a_theta(theta):
    """A share of the gradient is between 0 and 1."""
    with pytest.raises(ValueError, match=rf"theta={re.escape(repr(theta))} must be a number in \(0, 1\)\. Set"):
        NormTest(theta=theta)
