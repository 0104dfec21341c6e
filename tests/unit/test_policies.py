# SPDX-License-Identifier: Apache-2.0
"""Every policy keeps the contract of a policy, and gives what its formula says."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import FrozenInstanceError, asdict, is_dataclass, replace
from functools import reduce
from typing import Any

import pytest
import reference
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import evaluations, numbers, observations, positive_observations

from lightning_adabatch import (
    CABS,
    AdaDamp,
    Constant,
    Cooldown,
    DiveBatch,
    ExponentialDamp,
    GeoDamp,
    GradNormDamp,
    NoiseScale,
    NormTest,
    Observation,
    Policy,
    PolynomialDamp,
    Progress,
    RadaDamp,
    Schedule,
    policies,
)
from lightning_adabatch.policies import EVALUATED, OBSERVED, RadaDampState

POLICIES = [
    RadaDamp(),
    RadaDamp(rho=0.5, grad_norm_weight=0.0, optimal_loss=-1.5, warmup=3),
    GeoDamp(factor=2, delay=5),
    GeoDamp(factor=0.5, delay=0.25),
    Schedule({0: 8, 4: 16}),
    Schedule({2.5: 7, 1: 3}, unit="epochs"),
    Constant(),
    PolynomialDamp(rate=0.01),
    PolynomialDamp(rate=3, power=2.5),
    ExponentialDamp(rate=1.001),
    ExponentialDamp(rate=0.5),
    GradNormDamp(),
    GradNormDamp(rho=0.0),
    AdaDamp(),
    AdaDamp(optimal_loss=-1.5, fraction=0.25),
    NoiseScale(),
    NoiseScale(rho=0.0, scale=3, warmup=1),
    CABS(),
    CABS(rho=0.0, scale=0.5, optimal_loss=-1.5, warmup=1),
    NormTest(),
    NormTest(theta=1e-200, rho=0.0, warmup=1),
    DiveBatch(),
    DiveBatch(delta=0.1, every=5e-324, fraction=0.25),
    Cooldown(RadaDamp(), start=160, end=200),
    Cooldown(DiveBatch(fraction=0.25), start=0, end=5e-324, factor=1e308, unit="updates"),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)
runs = st.lists(observations, max_size=12)


def progress(updates: int = 0, samples: int = 0, epochs: float = 0.0, initial: int = 8, cap: float = 64) -> Progress:
    """Return a progress of which only what a test is about has to be said."""
    return Progress(updates, samples, epochs, initial, initial, cap, learning_rate=0.1)


def taken(policy: Policy[Any], state: Any, now: Progress, measured: dict[str, float]) -> Any:
    """Return the state after an evaluation, if the policy needs one."""
    needed = policy.needs(state, now)
    return policy.take(state, replace(now, measured={name: measured[name] for name in needed})) if needed else state


def observe(policy: Policy[Any], seen: list[Observation]) -> Any:
    """Return the state after these observations."""
    return reduce(policy.update, seen, policy.init())


def losses(*values: float) -> list[Observation]:
    """Return observations of losses alone."""
    return [Observation(value, None, batch_size=8) for value in values]


def stored(state: Any) -> Any:
    """Return the state after a way through JSON, as plain numbers take it."""
    if state is None:
        return None
    plain = asdict(state) if is_dataclass(state) else state._asdict()
    return type(state)(**json.loads(json.dumps(plain)))


# The contract ------------------------------------------------------------------------------------------------


def test_contract_covers_every_policy():
    """Each public policy is in the list that the contract is applied to."""
    public = {value for value in vars(policies).values() if isinstance(value, type) and issubclass(value, Policy)}
    assert public - {Policy} == {type(policy) for policy in POLICIES}


@every_policy
def test_init_is_equal_on_repeat(policy):
    """Two runs begin in equal states."""
    assert policy.init() == policy.init()


@every_policy
@given(seen=runs, last=observations)
def test_update_is_pure_and_deterministic(policy, seen, last):
    """An update leaves the state and the policy that it is given alone, and repeats itself."""
    state, before = observe(policy, seen), copy.deepcopy((observe(policy, seen), policy))
    assert policy.update(state, last) == policy.update(state, last)
    assert (state, policy) == before


@every_policy
@given(seen=runs, later=observations)
def test_state_survives_json(policy, seen, later):
    """A state rebuilt from plain numbers is equal and goes on equally."""
    state = observe(policy, seen)
    rebuilt = stored(state)
    assert rebuilt == state
    assert policy.update(rebuilt, later) == policy.update(state, later)


@every_policy
@given(
    seen=runs,
    updates=st.integers(0, 10**7),
    epochs=numbers(0.0, 1e4),
    cap=st.sampled_from([8, 64, math.inf]),
    evaluated=st.lists(evaluations, max_size=3),
)
def test_damping_is_above_zero(policy, seen, updates, epochs, cap, evaluated):
    """Whatever finite numbers were measured, the damping is a number above 0, and the same when asked again."""
    state, now = observe(policy, seen), progress(updates, samples=8 * updates, epochs=epochs, cap=cap)
    for measured in evaluated:
        state = taken(policy, state, now, measured)
    assert policy.damping(state, now) > 0
    assert policy.damping(state, now) == policy.damping(state, now)


@every_policy
@given(evaluated=st.lists(evaluations, max_size=4), last=evaluations)
def test_take_is_pure_and_survives_json(policy, evaluated, last):
    """An evaluation leaves state and policy alone; a state rebuilt from plain numbers goes on equally."""
    state, now = policy.init(), progress(epochs=99.0)
    for measured in evaluated:
        state = taken(policy, state, now, measured)
    before = copy.deepcopy((state, policy))
    assert taken(policy, state, now, last) == taken(policy, stored(state), now, last)
    assert (state, policy) == before


@every_policy
def test_repr_evaluates_to_an_equal_policy(policy):
    """What is printed in a message can be pasted."""
    names = {cls.__name__: cls for cls in map(type, POLICIES)}
    assert eval(repr(policy), names) == policy


@every_policy
def test_policies_are_frozen(policy):
    """A policy's hyperparameters cannot be changed after they were checked."""
    with pytest.raises(FrozenInstanceError, match="cannot assign to field"):
        policy.requires = frozenset()


@every_policy
def test_requires_is_what_can_be_measured(policy):
    """A policy asks for nothing that is not measured."""
    assert isinstance(policy.requires, frozenset)
    assert policy.requires <= OBSERVED | EVALUATED
    assert policy.needs(policy.init(), progress(epochs=99.0)) == policy.requires & EVALUATED


def test_policy_needs_a_damping():
    """A subclass without a rule cannot be made."""
    with pytest.raises(TypeError, match="damping"):
        Policy()


def test_policy_defaults_remember_nothing():
    """A policy that only says ``damping`` asks for the loss, has no state, no estimates and nothing to tell."""

    class Two(Policy[None]):
        def damping(self, state, progress):
            return 2.0

    policy = Two()
    assert policy.requires == {"loss"}
    assert policy.init() is None
    assert policy.update(None, Observation(1.0, None, 8)) is None
    assert policy.needs(None, progress()) == frozenset()
    assert policy.take(None, progress()) is None
    assert policy.estimates(None) == {}
    assert policy.notice(None) is None


# RadaDamp ----------------------------------------------------------------------------------------------------

radadamp_arguments = st.fixed_dictionaries(
    {
        "rho": st.sampled_from([0.0, 0.5, 0.9, 0.999]) | numbers(0.0, 0.9999),
        "grad_norm_weight": st.sampled_from([0.0, 1e-3, 0.05]) | numbers(0.0, 2.0),
        "optimal_loss": st.just(0.0) | numbers(-5.0, 0.0),
        "warmup": st.integers(1, 8),
    }
)


def dampings(policy: RadaDamp, seen: list[Observation], now: Progress) -> list[float]:
    """Return the damping after each observation."""
    state, found = policy.init(), []
    for observation in seen:
        state = policy.update(state, observation)
        found.append(policy.damping(state, now))
    return found


@given(arguments=radadamp_arguments, seen=st.lists(positive_observations, min_size=1, max_size=25))
def test_radadamp_is_its_formula(arguments, seen):
    """The damping after every observation is the ratio of the averages, each summed up from the start."""
    expected = reference.radadamp(seen, **arguments, largest=64 / 8)
    assert dampings(RadaDamp(**arguments), seen, progress()) == pytest.approx(expected, rel=1e-9)


@given(
    arguments=st.fixed_dictionaries(  # exact in binary: no float dust decides about a sign
        {
            "rho": st.sampled_from([0.0, 0.5, 0.875]),
            "grad_norm_weight": st.sampled_from([0.0, 0.125, 1.0]),
            "optimal_loss": st.integers(-4, 4).map(float),
            "warmup": st.integers(1, 2),
        }
    ),
    seen=st.lists(
        st.builds(Observation, st.integers(-4, 8).map(float), st.integers(0, 9).map(float), st.just(8)),
        min_size=1,
        max_size=12,
    ),
)
@example(arguments={"rho": 0.5, "grad_norm_weight": 0.0, "optimal_loss": 0.0, "warmup": 1}, seen=losses(2.0, -2.0))
@example(arguments={"rho": 0.5, "grad_norm_weight": 0.0, "optimal_loss": 0.0, "warmup": 2}, seen=losses(1, -1, 1))
def test_radadamp_with_losses_below_zero_is_its_formula(arguments, seen):
    """Where the baseline or the average falls to 0 or below, the damping is 1 or the largest without LR decay."""
    expected = reference.radadamp(seen, **arguments, largest=64 / 8)
    assert dampings(RadaDamp(**arguments), seen, progress()) == pytest.approx(expected, rel=1e-9)


def test_radadamp_by_hand():
    """With rho 1/2, lambda 1/10, F* 1: t = 3, 1, 3/2 and d = 3, 2, 7/4."""
    seen = [Observation(3.0, 10.0, 8), Observation(1.5, 5.0, 8), Observation(2.0, 5.0, 8)]
    policy = RadaDamp(rho=0.5, grad_norm_weight=0.1, optimal_loss=1.0)
    assert [(o.loss - 1.0) + 0.1 * o.grad_norm_sq for o in seen] == [3.0, 1.0, 1.5]
    assert dampings(policy, seen, progress()) == pytest.approx([3 / 3, 3 / (3 / 2 + 1 / 2), 3 / (2 / 2 + 1.5 / 2)])


def test_radadamp_warmup_by_hand():
    """The baseline is the mean of the first three, nothing changes before, and the average starts from it."""
    policy = RadaDamp(rho=0.5, grad_norm_weight=0.0, warmup=3)
    found = dampings(policy, losses(1.0, 2.0, 6.0, 1.0, 1.0), progress())
    assert found == pytest.approx([1.0, 1.0, 1.0, 3 / (3 / 2 + 1 / 2), 3 / (2 / 2 + 1 / 2)])


def test_radadamp_update_is_one_step():
    """One update of a state that was built by hand gives the whole next state."""
    policy = RadaDamp(rho=0.75, grad_norm_weight=0.5)
    before = RadaDampState(observations=4, loss=2.0, grad_norm_sq=8.0, baseline=9.0)
    after = policy.update(before, Observation(4.0, 16.0, 8))
    assert after == RadaDampState(5, 0.75 * 2.0 + 0.25 * 4.0, 0.75 * 8.0 + 0.25 * 16.0, baseline=9.0)


@given(seen=st.lists(positive_observations, min_size=1, max_size=10), size=st.integers(1, 999))
def test_radadamp_weighs_all_observations_alike(seen, size):
    """An epoch's tail counts as one observation: batch sizes do not enter."""
    other = [Observation(o.loss, o.grad_norm_sq, size) for o in seen]
    assert observe(RadaDamp(), seen) == observe(RadaDamp(), other)


def test_radadamp_measures_the_norm_only_if_it_counts():
    """With lambda = 0 the gradient norm is not asked for, and may be None."""
    assert RadaDamp().requires == {"loss", "grad_norm_sq"}
    assert RadaDamp(grad_norm_weight=0.0).requires == {"loss"}


def test_radadamp_without_an_observation_changes_nothing():
    """Before the first observation the damping is 1 and there is nothing to tell."""
    policy = RadaDamp(warmup=2)
    assert policy.damping(policy.init(), progress()) == 1.0
    assert policy.estimates(policy.init()) == {}
    assert policy.notice(policy.init()) is None


@pytest.mark.parametrize("baseline", [0.0, -5.0])
def test_radadamp_with_a_meaningless_baseline_changes_nothing(baseline):
    """A baseline at or below 0 gives damping 1 for ever, and a notice that names ``optimal_loss``."""
    policy = RadaDamp(rho=0.0, grad_norm_weight=0.0)
    assert dampings(policy, losses(baseline, 1.0, -9.0, 100.0), progress()) == [1.0] * 4
    notice = policy.notice(observe(policy, losses(baseline, 1.0)))
    assert "optimal_loss" in notice
    assert f"{baseline:g} and must be > 0" in notice


def test_radadamp_baseline_is_judged_after_the_warmup():
    """A mean below 0 that recovers within the warm-up is no reason for a notice."""
    policy = RadaDamp(grad_norm_weight=0.0, warmup=2)
    assert policy.notice(observe(policy, losses(-1.0))) is None
    assert policy.notice(observe(policy, losses(-1.0, 3.0))) is None
    assert policy.notice(observe(policy, losses(-1.0, -3.0))) is not None


@pytest.mark.parametrize(("cap", "largest"), [(64, 64 / 8), (math.inf, math.inf)])
@pytest.mark.parametrize("loss", [0.0, -1.0])
def test_radadamp_with_a_vanished_average_asks_for_the_largest_size(loss, cap, largest):
    """An average at or below 0 over a sound baseline asks for the largest size that needs no LR decay."""
    policy = RadaDamp(rho=0.0, grad_norm_weight=0.0)
    assert dampings(policy, losses(1.0, loss), progress(cap=cap)) == [1.0, largest]
    assert policy.notice(observe(policy, losses(1.0, loss))) is None


def test_radadamp_shows_its_estimates():
    """The estimates are the rolling averages: of the loss itself, and of the norm where it is measured."""
    seen = [Observation(2.0, 4.0, 8), Observation(4.0, 8.0, 8)]
    with_norm = RadaDamp(rho=0.5, grad_norm_weight=1.0, optimal_loss=-7.0)
    without = RadaDamp(rho=0.5, grad_norm_weight=0.0)
    assert with_norm.estimates(observe(with_norm, seen)) == {"loss": (2 + 4) / 2, "grad_norm_sq": (4 + 8) / 2}
    assert without.estimates(observe(without, seen)) == {"loss": (2 + 4) / 2}


# Open loop ---------------------------------------------------------------------------------------------------


@given(
    epochs=st.lists(st.integers(0, 400).map(lambda n: n / 8), max_size=8),
    factor=st.sampled_from([0.5, 1.0, 1.219231, 2.0]),
    delay=st.sampled_from([0.25, 1, 2.5, 10, 500]),
)
def test_geodamp_is_its_formula(epochs, factor, delay):
    """The damping is multiplied once for each delay that fits into the epochs."""
    policy = GeoDamp(factor, delay)
    expected = reference.geodamp(epochs, factor=factor, delay=delay)
    assert [policy.damping(None, progress(epochs=e)) for e in epochs] == pytest.approx(expected)


def test_geodamp_by_hand():
    """Factor 3 every 2 epochs: 1 up to epoch 2, then 3, then 9 from epoch 4."""
    table = {0.0: 1.0, 1.999: 1.0, 2.0: 3.0, 3.5: 3.0, 4.0: 3.0 * 3.0}
    assert {e: GeoDamp(3, 2).damping(None, progress(epochs=e)) for e in table} == table


@given(step=st.integers(1, 500), delay=st.sampled_from([0.1, 0.3, 1 / 3, 0.7]))
def test_geodamp_point_reached_up_to_float_dust_is_reached(step, delay):
    """At epochs = step * delay there were ``step`` multiplications, whatever the product's last bits."""
    assert GeoDamp(1.01, delay).damping(None, progress(epochs=step * delay)) == 1.01**step


def test_quotient_that_underflows_is_above_zero():
    """A first loss, norm or distance beyond all floats below the later one asks for the smallest size, not for none."""
    tiny, huge = 5e-300, 1e200
    assert tiny / huge == 0.0
    rada = RadaDamp(rho=0.0, grad_norm_weight=0.0)
    assert 0.0 < rada.damping(observe(rada, losses(tiny, huge)), progress()) < 1e-200
    norm = GradNormDamp(rho=0.0)
    seen = [Observation(None, value, batch_size=8) for value in (tiny, huge)]
    assert 0.0 < norm.damping(observe(norm, seen), progress()) < 1e-200
    ada = AdaDamp()
    state = taken(ada, ada.init(), progress(), {"full_loss": tiny})
    assert 0.0 < ada.damping(taken(ada, state, progress(), {"full_loss": huge}), progress()) < 1e-200


@pytest.mark.parametrize("factor", [10.0, 10])
@pytest.mark.parametrize("delay", [1, 5e-324])
def test_geodamp_overflow_is_infinite(factor, delay):
    """A power that no float holds is infinite, not an exception."""
    assert GeoDamp(factor, delay).damping(None, progress(epochs=400.0)) == math.inf


@pytest.mark.parametrize("delay", [1, 5e-324])
def test_geodamp_underflow_is_above_zero(delay):
    """A power that is too small for a float is above 0 all the same, so that it asks for the smallest size."""
    assert 0.5**2000 == 0.0
    assert 0.0 < GeoDamp(0.5, delay).damping(None, progress(epochs=2000.0)) < 1e-200


@pytest.mark.parametrize("delay", [1, 5e-324])
def test_geodamp_with_a_factor_of_one_changes_nothing(delay):
    """1 to any power is 1, however often it was multiplied."""
    assert GeoDamp(1, delay).damping(None, progress(epochs=2000.0)) == 1.0


@given(
    counts=st.lists(st.integers(0, 100), max_size=10),
    sizes=st.dictionaries(st.integers(0, 90), st.integers(1, 999), min_size=1, max_size=6),
    unit=st.sampled_from(["updates", "samples", "epochs"]),
    initial=st.integers(1, 64),
)
def test_schedule_is_its_formula(counts, sizes, unit, initial):
    """The size is the one of the last point reached in the unit given; the other two counts do not matter."""
    policy = Schedule(sizes, unit)
    elsewhere = {"updates": 10**6, "samples": 10**6, "epochs": 1e6}
    found = [policy.damping(None, progress(**{**elsewhere, unit: n}, initial=initial)) for n in counts]
    assert found == reference.schedule(counts, sizes=sizes, initial=initial)


def test_schedule_by_hand():
    """``{0: 8, 4: 16}``: updates 1 to 4 (counts 0 to 3 before them) use 8 samples, the fifth uses 16."""
    policy = Schedule({0: 8, 4: 16})
    assert [8 * policy.damping(None, progress(updates=n)) for n in range(6)] == [8, 8, 8, 8, 16, 16]


def test_schedules_have_a_hash_as_all_rules_do():
    """Frozen rules are members of sets; equal ones have one hash."""
    assert len({Schedule({0: 8, 4: 16}), Schedule({0: 8, 4: 16}), Schedule({0: 8}), RadaDamp(), RadaDamp()}) == 3


def test_schedule_before_its_first_point_changes_nothing():
    """Up to the first point the size is the initial one."""
    assert [8 * Schedule({2: 24}).damping(None, progress(updates=n)) for n in range(4)] == [8, 8, 24, 24]


def test_schedule_fraction_of_an_epoch_is_reached_up_to_float_dust():
    """0.1 + 0.2 epochs were reached when 3/10 of the samples were seen."""
    assert 0.1 + 0.2 > 3 / 10
    assert Schedule({0.1 + 0.2: 16}, unit="epochs").damping(None, progress(epochs=3 / 10)) == 16 / 8


def test_schedule_keeps_a_mapping_of_its_own():
    """Points may come in any order, and changing the mapping later changes no schedule."""
    given_sizes = {4: 16, 0: 8}
    policy = Schedule(given_sizes)
    given_sizes[0] = 999
    assert list(policy.sizes.items()) == [(0, 8), (4, 16)]


@given(
    counts=st.lists(st.integers(0, 100), max_size=10),
    start=st.integers(0, 50),
    length=st.integers(1, 50),
    factor=st.sampled_from([1, 1.5, 20, 1e6]),
    unit=st.sampled_from(["updates", "samples", "epochs"]),
)
def test_cooldown_is_its_formula(counts, start, length, factor, unit):
    """The learning rate at the cap falls along a line; the other two counts do not matter."""
    policy = Cooldown(ExponentialDamp(2), start, start + length, factor, unit)
    elsewhere = {"updates": 6, "samples": 10**6, "epochs": 1e6}
    points = [progress(**{**elsewhere, unit: n}) for n in counts]
    found = [policy.damping(None, point) for point in points]
    rule = [2.0**point.updates for point in points]
    assert found == pytest.approx(reference.cooldown(counts, rule, start=start, length=length, factor=factor))


def test_cooldown_by_hand():
    """From 1 to 1/5 in four epochs: 1, 0.8, 0.6, 0.4, 0.2, and 0.2 from then on."""
    policy = Cooldown(Constant(), start=2, end=6, factor=5)
    dampings = [policy.damping(None, progress(epochs=e)) for e in (0, 2, 3, 4, 5, 6, 99)]
    assert dampings == pytest.approx([1, 1, 1 / 0.8, 1 / 0.6, 1 / 0.4, 5, 5])


@given(seen=runs, factor=st.sampled_from([1.0, 20.0]))
def test_cooldown_before_its_start_is_its_rule(seen, factor):
    """Bit for bit, and the state is the rule's own, so that checkpoints of either can be gone on with by the other."""
    rule = RadaDamp(rho=0.5)
    policy = Cooldown(rule, start=3, end=4, factor=factor)
    state = observe(policy, seen)
    assert state == observe(rule, seen)
    assert policy.damping(state, progress(epochs=3.0)) == rule.damping(state, progress(epochs=3.0))
    assert policies.load_state(rule, policies.dump_state(policy, state)) == state
    assert policies.load_state(policy, policies.dump_state(rule, state)) == state
    assert policy.estimates(state) == rule.estimates(state)
    assert policy.notice(state) == rule.notice(state)


def test_cooldown_does_not_take_the_state_of_another_rule():
    """That of RadaDamp is no state for a cooldown of GradNormDamp."""
    dumped = policies.dump_state(RadaDamp(), RadaDamp().init())
    with pytest.raises(ValueError, match=r"the state is that of .*RadaDamp, and the policy is .*GradNormDamp"):
        policies.load_state(Cooldown(GradNormDamp(), 1, 2), dumped)


def test_cooldown_asks_for_what_its_rule_asks_for():
    """What is measured, on how much of the data, and whether epochs matter."""
    policy = Cooldown(AdaDamp(fraction=0.25), 1, 2, unit="updates")
    assert policy.requires == AdaDamp.requires
    assert policy.fraction == 0.25
    assert not policy.uses_epochs
    assert Cooldown(AdaDamp(), 1, 2).uses_epochs
    assert Cooldown(GeoDamp(2, 1), 1, 2, unit="updates").uses_epochs
    assert not hasattr(Cooldown(RadaDamp(), 1, 2), "fraction")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": -1}, r"start=-1 must be a finite number of epochs >= 0"),
        ({"start": math.nan}, r"start=nan must be"),
        ({"start": True}, r"start=True must be"),
        ({"end": 2}, r"end=2 must be a finite number of epochs > start=2"),
        ({"end": math.inf, "unit": "samples"}, r"end=inf must be a finite number of samples > start=2"),
        ({"factor": 0.5}, r"factor=0.5 must be a finite number >= 1"),
        ({"factor": math.inf}, r"factor=inf must be"),
        ({"unit": "steps"}, r"unit='steps' must be one of 'updates', 'samples', 'epochs'"),
    ],
)
def test_cooldown_refuses(arguments, message):
    """A value outside of its range is named with the range."""
    with pytest.raises(ValueError, match=message):
        Cooldown(**{"policy": RadaDamp(), "start": 2, "end": 3, **arguments})


def test_cooldown_refuses_what_is_no_rule():
    """A class, forgotten parentheses."""
    with pytest.raises(ValueError, match=r"policy=<class .*RadaDamp'> must be a rule, such as RadaDamp\(\)"):
        Cooldown(RadaDamp, 1, 2)


def test_constant_by_hand():
    """The damping is 1 at any time."""
    assert Constant().damping(None, progress(updates=10**6, epochs=99.0)) == 1.0


@pytest.mark.parametrize(
    "policy", [GeoDamp(2, 5), Schedule({0: 8}), Constant(), PolynomialDamp(1), ExponentialDamp(2)], ids=repr
)
def test_open_loop_policies_measure_nothing(policy):
    """What depends on the run's progress alone asks for no measurement, and so decides for the first update too."""
    assert policy.requires == frozenset()


# GradNormDamp ------------------------------------------------------------------------------------------------


@given(
    rho=numbers(0.0, 0.99),
    norms=st.lists(numbers(0.01, 100.0), min_size=1, max_size=25),
)
def test_grad_norm_damp_is_its_formula(rho, norms):
    """The first squared norm over the rolling average of all, summed up again from the first observation."""
    policy, state = GradNormDamp(rho), GradNormDamp(rho).init()
    expected = reference.grad_norm_damp(norms, rho=rho)
    for norm, damping in zip(norms, expected, strict=True):
        state = policy.update(state, Observation(None, norm, batch_size=8))
        assert policy.damping(state, progress()) == pytest.approx(damping, rel=1e-9)


def test_grad_norm_damp_by_hand():
    """4, then 1 with half of the memory: 4 / 2.5; the average is what the logs show."""
    state = observe(GradNormDamp(0.5), [Observation(None, 4.0, 8), Observation(None, 1.0, 8)])
    assert GradNormDamp(0.5).damping(state, progress()) == 1.6
    assert GradNormDamp(0.5).estimates(state) == {"grad_norm_sq": 2.5}
    assert GradNormDamp().estimates(GradNormDamp().init()) == {}


def test_grad_norm_damp_without_a_gradient():
    """A first norm of 0 changes nothing and is said; one that vanishes later asks for the largest size."""
    policy = GradNormDamp(0.0)
    state = observe(policy, [Observation(None, 0.0, 8), Observation(None, 3.0, 8)])
    assert policy.damping(state, progress()) == 1.0
    assert "the first squared gradient norm is 0" in policy.notice(state)
    state = observe(policy, [Observation(None, 3.0, 8), Observation(None, 0.0, 8)])
    assert policy.damping(state, progress(initial=8, cap=64)) == 8.0
    assert policy.notice(state) is None
    assert policy.notice(policy.init()) is None


# PolynomialDamp and ExponentialDamp --------------------------------------------------------------------------


@given(updates=st.integers(0, 10**6), rate=numbers(1e-6, 1e3), power=numbers(0.1, 4.0))
def test_polynomial_damp_is_its_formula(updates, rate, power):
    """1 + rate · k^power, by logarithms."""
    expected = 1.0 + (math.exp(math.log(rate) + power * math.log(updates)) if updates else 0.0)
    assert PolynomialDamp(rate, power).damping(None, progress(updates=updates)) == pytest.approx(expected, rel=1e-9)


@given(updates=st.integers(0, 200), rate=numbers(0.5, 2.0))
def test_exponential_damp_is_its_formula(updates, rate):
    """One multiplication for each update."""
    expected = reduce(lambda damping, _: damping * rate, range(updates), 1.0)
    assert ExponentialDamp(rate).damping(None, progress(updates=updates)) == pytest.approx(expected, rel=1e-9)


def test_growth_by_hand():
    """Linear: PadaDamp's rate is rate · B0. Quadratic. Doubling."""
    assert [PolynomialDamp(0.125).damping(None, progress(updates=k, initial=8)) * 8 for k in range(4)] == [8, 9, 10, 11]
    assert [PolynomialDamp(1, 2).damping(None, progress(updates=k)) for k in range(4)] == [1, 2, 5, 10]
    assert [ExponentialDamp(2).damping(None, progress(updates=k)) for k in range(4)] == [1, 2, 4, 8]


def test_growth_without_an_end():
    """What no float can hold is infinite, and what would be 0 stays above it."""
    assert PolynomialDamp(1e300, 300).damping(None, progress(updates=10**6)) == math.inf
    assert ExponentialDamp(2).damping(None, progress(updates=10**6)) == math.inf
    assert 0 < ExponentialDamp(0.5).damping(None, progress(updates=10**6)) < 1e-200


# Refusals ----------------------------------------------------------------------------------------------------


#: What a command line or a configuration may give where a number belongs; the last one is beyond all floats.
NO_NUMBERS = ["0.5", None, True, [0.5], 1j, pytest.param(10**400, id="10**400")]


@pytest.mark.parametrize("rho", [1, 1.0, -0.1, 1.5, math.nan, math.inf, *NO_NUMBERS])
def test_radadamp_refuses_a_rho(rho):
    """A memory outside of [0, 1) has no meaning."""
    with pytest.raises(ValueError, match=rf"rho={re.escape(repr(rho))} must be a number in \[0, 1\)"):
        RadaDamp(rho=rho)


@pytest.mark.parametrize("weight", [-1e-3, math.nan, math.inf, *NO_NUMBERS])
def test_radadamp_refuses_a_weight(weight):
    """A weight below 0 or without an end has no meaning."""
    with pytest.raises(ValueError, match=rf"grad_norm_weight={re.escape(repr(weight))} must be a finite number >= 0"):
        RadaDamp(grad_norm_weight=weight)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, *NO_NUMBERS])
def test_radadamp_refuses_an_optimal_loss(loss):
    """The smallest loss is a finite number."""
    with pytest.raises(ValueError, match=rf"optimal_loss={re.escape(repr(loss))} must be a finite number"):
        RadaDamp(optimal_loss=loss)


@pytest.mark.parametrize("warmup", [0, -1, 1.5, 2.0, True, "3", None])
def test_radadamp_refuses_a_warmup(warmup):
    """The warm-up is a number of updates."""
    with pytest.raises(ValueError, match=rf"warmup={warmup!r} must be an integer >= 1"):
        RadaDamp(warmup=warmup)


@pytest.mark.parametrize("factor", [0, -2, math.nan, math.inf, *NO_NUMBERS])
def test_geodamp_refuses_a_factor(factor):
    """A factor is finite and above 0."""
    with pytest.raises(ValueError, match=rf"factor={re.escape(repr(factor))} must be a finite number > 0"):
        GeoDamp(factor=factor, delay=1)


@pytest.mark.parametrize("delay", [0, -1, math.nan, math.inf, *NO_NUMBERS])
def test_geodamp_refuses_a_delay(delay):
    """A delay is finite and above 0."""
    with pytest.raises(ValueError, match=rf"delay={re.escape(repr(delay))} must be a finite number of epochs > 0"):
        GeoDamp(factor=2, delay=delay)


@pytest.mark.parametrize("sizes", [{}, [], None, [(0, 8)]])
def test_schedule_refuses_sizes_that_are_no_mapping(sizes):
    """A schedule is a mapping with at least one point."""
    with pytest.raises(ValueError, match="must map points to batch sizes"):
        Schedule(sizes)


@pytest.mark.parametrize("point", [-1, -0.5, math.inf, math.nan, "0", True, None])
def test_schedule_refuses_a_point(point):
    """A point is a finite number at or above 0."""
    with pytest.raises(ValueError, match=rf"the point {point!r}; a point must be a finite number of epochs >= 0"):
        Schedule({0: 8, point: 16}, unit="epochs")


@pytest.mark.parametrize("size", [0, -8, 8.0, math.inf, True, "8", None])
def test_schedule_refuses_a_size(size):
    """A batch size is an integer above 0."""
    with pytest.raises(ValueError, match=rf"the batch size {size!r} at 3; a batch size must be an integer >= 1"):
        Schedule({0: 8, 3: size})


def test_schedule_refuses_a_unit():
    """The unit is one of the three counts."""
    with pytest.raises(ValueError, match="unit='steps' must be one of 'updates', 'samples', 'epochs'"):
        Schedule({0: 8}, unit="steps")


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, *NO_NUMBERS])
def test_growth_refuses_what_is_no_growth(value):
    """Rates and powers are finite and above 0."""
    with pytest.raises(ValueError, match=rf"rate={re.escape(repr(value))} must be a finite number > 0"):
        PolynomialDamp(rate=value)
    with pytest.raises(ValueError, match=rf"power={re.escape(repr(value))} must be a finite number > 0"):
        PolynomialDamp(rate=1, power=value)
    with pytest.raises(ValueError, match=rf"rate={re.escape(repr(value))} must be a finite number > 0"):
        ExponentialDamp(rate=value)


@pytest.mark.parametrize("rho", [1, -0.1, math.nan, math.inf, *NO_NUMBERS])
def test_grad_norm_damp_refuses_a_rho(rho):
    """A memory outside of [0, 1) has no meaning."""
    with pytest.raises(ValueError, match=rf"rho={re.escape(repr(rho))} must be a number in \[0, 1\)"):
        GradNormDamp(rho=rho)
