# SPDX-License-Identifier: Apache-2.0
"""The loop of a rule without torch and without Lightning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from lightning_adabatch import Constant, Observation, Policy, Progress, RadaDamp
from lightning_adabatch.controller import Cadence, Controller
from lightning_adabatch.limits import Decision, Limits


@dataclass(frozen=True)
class Scripted(Policy[None]):
    """Answer with given dampings, one per decision, and keep what was shown."""

    dampings: list[float]
    measures: frozenset[str] = frozenset()
    seen: list[Progress] = field(default_factory=list, repr=False)

    @property
    def requires(self) -> frozenset[str]:
        return self.measures

    def damping(self, state: Any, progress: Progress) -> float:
        self.seen.append(progress)
        return self.dampings[min(len(self.seen), len(self.dampings)) - 1]


class Loop:
    """A training loop of numbers: every batch has the size in force."""

    def __init__(
        self,
        policy: Policy[Any],
        *,
        dwell: int = 1,
        wait: int = 0,
        cap: float = 64,
        samples: int = 100,
        initial: int = 8,
    ) -> None:
        self.pending: list[Observation] = []
        self.notices: list[str] = []
        self.sizes: list[int] = []
        self.factors: list[float] = []
        self.reads = 0
        self.rates = 0
        self.controller = Controller(
            policy,
            Limits(initial, cap),
            Cadence(dwell, wait),
            training_samples=samples,
            observe=self.read,
            notify=self.notices.append,
        )
        self.controller.start(self.rate)

    def read(self) -> list[Observation]:
        self.reads += 1
        pending, self.pending = self.pending, []
        return pending

    def rate(self) -> float:
        self.rates += 1
        return 0.1

    def step(self, loss: float | None = None, norm: float | None = None, *, updated: bool = True) -> Decision:
        used = self.controller.decision
        self.sizes.append(used.batch_size)
        self.factors.append(used.lr_factor)
        if updated:
            self.pending.append(Observation(loss, norm, used.batch_size))
        return self.controller.end_batch(used.batch_size, updated=updated, learning_rate=self.rate)


def decided_at(*, dwell: int, wait: int, updates: int = 12) -> list[int]:
    """Return the update counts at which a policy was asked."""
    policy = Scripted([1.0])
    loop = Loop(policy, dwell=dwell, wait=wait)
    for _ in range(updates):
        loop.step()
    return [progress.updates for progress in policy.seen]


# When ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dwell", "wait", "expected"),
    [
        (1, 0, list(range(13))),
        (5, 0, [0, 5, 10]),
        (1, 10, [10, 11, 12]),
        (4, 6, [8, 12]),
        (4, 8, [8, 12]),
        (1, 1, list(range(1, 13))),
        (20, 0, [0]),
        (1, 99, []),
    ],
)
def test_decisions_fall_on_multiples_of_dwell_from_wait_on(dwell, wait, expected):
    """A decision is made before the first update and after every ``dwell``, both only from ``wait`` on."""
    assert decided_at(dwell=dwell, wait=wait) == expected


@given(dwell=st.integers(1, 9), wait=st.integers(0, 15), updates=st.integers(0, 15))
def test_cadence_law(dwell, wait, updates):
    """The counts at which decisions are made are exactly the multiples of ``dwell`` not below ``wait``."""
    expected = [k for k in range(updates + 1) if k >= wait and k in range(0, updates + 1, dwell)]
    assert decided_at(dwell=dwell, wait=wait, updates=updates) == expected


def test_decision_before_the_first_update_counts_for_it():
    """What a policy that measures nothing asks for at count 0 is the size of the first update."""
    loop = Loop(Scripted([2.0, 3.0]))
    assert loop.controller.decision == Decision(2.0, 16, 16, 1.0)
    loop.step()
    loop.step()
    assert loop.sizes == [16, 24]


def test_size_stands_between_decisions():
    """With dwell 3 three updates use one size."""
    loop = Loop(Scripted([1.0, 2.0, 100.0]), dwell=3)
    for _ in range(8):
        loop.step()
    assert loop.sizes == [8] * 3 + [16] * 3 + [64] * 2
    assert loop.factors == [1.0] * 6 + [64 / 800] * 2


def test_observations_are_read_once_per_decision():
    """Reading may copy from a device: it happens at decisions only, as does asking for the learning rate."""
    loop = Loop(Scripted([1.0]), dwell=4)
    for _ in range(8):
        loop.step()
    assert loop.reads == 2
    assert loop.rates == 1 + 2


def test_measuring_policy_is_not_asked_before_it_has_an_observation():
    """With nothing observed the damping is 1, also where the batches so far gave nothing finite."""
    policy = Scripted([2.0], measures=frozenset({"loss"}))
    loop = Loop(policy)
    loop.step(math.nan)
    assert policy.seen == []
    assert loop.controller.decision == Decision(1.0, 8, 8, 1.0)
    loop.step(1.0)
    assert [progress.updates for progress in policy.seen] == [2]
    assert loop.controller.decision.batch_size == 16


def test_observations_before_wait_are_not_lost():
    """Observations are taken from the first update on: the baseline is the first loss, not that after ``wait``."""
    loop = Loop(RadaDamp(rho=0.0, grad_norm_weight=0.0), wait=3)
    for loss in (4.0, 3.0, 2.0):
        loop.step(loss)
    assert loop.sizes == [8, 8, 8]
    assert loop.controller.decision.batch_size == 8 * 4 / 2
    assert loop.controller.state.observations == 3


@given(losses=st.lists(st.integers(1, 8).map(float), min_size=1, max_size=12), dwell=st.integers(1, 5))
def test_dwell_does_not_change_the_averages(losses, dwell):
    """At a decision the policy's state is the one after every update so far, whatever the dwell."""
    every, rare = Loop(RadaDamp(rho=0.5)), Loop(RadaDamp(rho=0.5), dwell=dwell)
    for count, loss in enumerate(losses, 1):
        every.step(loss, 1.0)
        rare.step(loss, 1.0)
        if count % dwell == 0:
            assert rare.controller.state == every.controller.state
            assert rare.controller.decision == every.controller.decision


# What a policy sees --------------------------------------------------------------------------------------------


def test_progress_counts_what_happened():
    """A policy sees updates, samples, epochs, B0, the size in force, the cap and the base learning rate."""
    policy = Scripted([1.0, 2.0, 3.0])
    loop = Loop(policy, samples=40)
    loop.step()
    loop.step()
    assert policy.seen == [
        Progress(0, 0, 0.0, initial_batch_size=8, batch_size=8, cap=64, learning_rate=0.1),
        Progress(1, 8, 8 / 40, initial_batch_size=8, batch_size=8, cap=64, learning_rate=0.1),
        Progress(2, 8 + 16, 24 / 40, initial_batch_size=8, batch_size=16, cap=64, learning_rate=0.1),
    ]


def test_counts_take_the_samples_really_trained():
    """An epoch's tail counts with its own samples, whatever the size in force."""
    loop = Loop(Constant(), samples=10)
    loop.controller.end_batch(8, updated=True, learning_rate=loop.rate)
    loop.controller.end_batch(2, updated=True, learning_rate=loop.rate)
    assert (loop.controller.updates, loop.controller.samples, loop.controller.epochs) == (2, 10, 10 / 10)


def test_initial_size_is_not_more_than_an_epoch():
    """Where the loader's size is more than the data, the first batch is the data, decision or not."""
    bounds = Limits(64, cap=64, epoch_samples=10)
    controller = Controller(Constant(), bounds, Cadence(wait=5), training_samples=10, observe=list, notify=pytest.fail)
    assert controller.start(lambda: 0.1).batch_size == 10


# What is no information ----------------------------------------------------------------------------------------


def test_batch_without_an_update_counts_samples_and_skipped():
    """A batch without an update changes no decision, gives no observation and asks for nothing."""
    policy = Scripted([1.0, 2.0])
    loop = Loop(policy)
    decision = loop.step(updated=False)
    assert (loop.controller.updates, loop.controller.samples, loop.controller.skipped) == (0, 8, 1)
    assert decision.batch_size == 8
    assert (loop.reads, len(policy.seen)) == (0, 1)


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, None), (None, math.inf), (-math.inf, 1.0)]
)
def test_observation_that_is_not_finite_is_dropped_and_counted(loss, norm):
    """One part that is not finite makes the whole observation no information."""
    loop = Loop(RadaDamp())
    loop.step(2.0, 1.0)
    state, latest = loop.controller.state, loop.controller.latest
    loop.step(loss, norm)
    assert (loop.controller.state, loop.controller.latest) == (state, latest)
    assert (loop.controller.updates, loop.controller.skipped) == (2, 1)


def test_what_is_not_finite_leaves_no_trace_in_the_averages():
    """An infinite norm at the 3rd batch, which took no step, and a NaN loss at the 7th: the run without the two."""
    losses = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.25]
    disturbed, clean = Loop(RadaDamp(rho=0.5)), Loop(RadaDamp(rho=0.5))
    for batch, loss in enumerate(losses, 1):
        before = disturbed.controller.decision
        if batch == 3:
            disturbed.step(loss, math.inf, updated=False)  # the scaler saw it and skipped the step
        elif batch == 7:
            disturbed.step(math.nan, 1.0)
        else:
            disturbed.step(loss, 1.0)
            clean.step(loss, 1.0)
        if batch in {3, 7}:
            assert disturbed.controller.decision == before
    assert disturbed.controller.state == clean.controller.state
    assert disturbed.controller.decision == clean.controller.decision
    assert disturbed.controller.skipped == 2
    assert disturbed.controller.updates == 9 - 1
    assert clean.controller.decision.batch_size > 8, "the size must move, or the test says nothing"


@pytest.mark.parametrize("variance", [math.nan, math.inf, -math.inf])
def test_variance_that_is_not_finite_is_dropped_and_counted(variance):
    """The variance is a part of the observation as loss and norm are; one below 0 is information."""
    loop = Loop(RadaDamp())
    loop.pending.append(Observation(1.0, 1.0, 8, variance))
    loop.controller.end_batch(8, updated=True, learning_rate=loop.rate)
    assert (loop.controller.latest, loop.controller.skipped) == (None, 1)
    loop.pending.append(Observation(1.0, 1.0, 8, -3.0))
    loop.controller.end_batch(8, updated=True, learning_rate=loop.rate)
    assert (loop.controller.latest, loop.controller.skipped) == (Observation(1.0, 1.0, 8, -3.0), 1)


@pytest.mark.parametrize("damping", [0.0, -1.0, math.nan])
def test_damping_without_a_meaning_keeps_the_decision_and_warns_once(damping):
    """The last decision stands as long as it takes, and the user is told once, with the policy's name."""
    loop = Loop(Scripted([2.0, damping, damping, 3.0]))
    for _ in range(3):
        loop.step()
    assert loop.sizes == [16, 16, 16]
    assert loop.controller.decision.batch_size == 24
    (notice,) = loop.notices
    assert notice.startswith("Scripted(")
    assert f"returned the damping {damping!r}; the batch size stays as it was. A damping must be > 0" in notice
    assert "uses_epochs" not in notice


@pytest.mark.parametrize("damping", [None, "2", 1j, [2.0]])
def test_damping_that_is_no_number_is_an_error_that_names_the_policy(damping):
    """A rule that forgets its return is told so, and nothing has been counted."""
    loop = Loop(Scripted([2.0, damping]))
    with pytest.raises(TypeError, match=r"Scripted.damping returned .*Let it return a number > 0"):
        loop.step()
    assert (loop.controller.updates, loop.controller.decision.batch_size) == (0, 16)


@pytest.mark.parametrize("damping", [10**400, np.float32(3.0), np.int64(3), 3])
def test_damping_of_any_type_of_number_counts(damping):
    """Integers, however large, and NumPy's numbers are dampings, and are kept as Python's floats."""
    loop = Loop(Scripted([2.0, damping]))
    loop.step()
    assert type(loop.controller.decision.damping) is float
    assert loop.controller.decision.damping == min(damping, 1e12)


@dataclass(frozen=True)
class Talkative(Scripted):
    """Tell something new at every decision."""

    def notice(self, state: Any) -> str | None:
        return f"decision {len(self.seen)}"


def test_notice_of_a_policy_is_said_once_whatever_it_says():
    """The first notice in a run is said, not every one of a policy that writes its numbers into it."""
    loop = Loop(Talkative([1.0, 1.0, -1.0, -1.0]))
    for _ in range(5):
        loop.step()
    policys_own, of_the_damping = loop.notices
    assert policys_own == "decision 1"
    assert "A damping must be > 0" in of_the_damping


# RadaDamp in the loop --------------------------------------------------------------------------------------------


def test_warmup_holds_the_size_and_averages_the_baseline():
    """Warm-up 50 with 5 norms 100 times the rest: B0 for updates 1 to 50, then the formula of the averages."""
    policy = RadaDamp(rho=0.9, grad_norm_weight=0.05, warmup=50)
    seen = [Observation(2.0 - 0.01 * k, 100.0 if k < 5 else 1.0, 8) for k in range(120)]
    loop = Loop(policy)
    for observation in seen:
        loop.step(observation.loss, observation.grad_norm_sq)
    dampings = reference.radadamp(seen, rho=0.9, grad_norm_weight=0.05, optimal_loss=0.0, warmup=50, largest=64 / 8)
    expected = [8] + [min(64, math.ceil(round(8 * damping, 6))) for damping in dampings[:-1]]
    assert loop.sizes == expected
    assert loop.sizes[:50] == [8] * 50
    assert loop.controller.state.baseline == pytest.approx(
        sum(2.0 - 0.01 * k for k in range(50)) / 50 + 0.05 * (5 * 100 + 45 * 1) / 50, rel=1e-6
    )
    assert len(set(loop.sizes)) > 5, "the size must move, or the test says nothing"


@pytest.mark.parametrize(("cap", "largest"), [(64, 64), (math.inf, 103)])
def test_loss_and_norm_of_zero_ask_for_the_largest_size(cap, largest):
    """Exactly 0 after 60 updates: the cap or the data set, a finite LR above 0, no exception and no notice."""
    limits = Limits(8, cap, epoch_samples=103)
    observed: list[Observation] = []
    notices: list[str] = []
    controller = Controller(
        RadaDamp(rho=0.0),
        limits,
        Cadence(),
        training_samples=103,
        observe=lambda: [observed[-1]],
        notify=notices.append,
    )
    controller.start(lambda: 0.1)
    for update in range(80):
        value = 1.0 if update < 60 else 0.0
        observed.append(Observation(value, value, controller.decision.batch_size))
        controller.end_batch(controller.decision.batch_size, updated=True, learning_rate=lambda: 0.1)
        assert controller.decision.batch_size == (8 if update < 60 else largest)
    assert controller.decision.lr_factor == 1.0
    assert math.isfinite(controller.decision.damping)
    assert notices == []


def test_averages_that_vanish_slowly_keep_the_learning_rate_above_zero():
    """With a memory the average falls towards 0 for ever: the factor falls with it but stays above 1e-13."""
    loop = Loop(RadaDamp(rho=0.5))
    loop.step(1.0, 1.0)
    for _ in range(2000):
        loop.step(0.0, 0.0)
    assert loop.sizes[-1] == 64
    assert 0.0 < 64 / (8 * 1e12) <= loop.factors[-1] <= 1.0
    assert all(math.isfinite(factor) for factor in loop.factors)


def test_baseline_below_zero_changes_nothing_and_warns_once():
    """Loss -5 with squared norm 1: the size stays, and one notice names ``optimal_loss``."""
    loop = Loop(RadaDamp())
    for _ in range(20):
        loop.step(-5.0, 1.0)
    assert loop.sizes == [8] * 20
    (notice,) = loop.notices
    assert "Set optimal_loss" in notice


def test_optimal_loss_shifts_a_loss_below_zero():
    """Loss from -5 to -8 with F* = -9: 4 falls to 1, so the size is 4 times B0."""
    loop = Loop(RadaDamp(rho=0.0, grad_norm_weight=0.0, optimal_loss=-9.0))
    loop.step(-5.0)
    loop.step(-8.0)
    assert loop.controller.decision.batch_size == 8 * 4 / 1
    assert loop.notices == []


def test_loss_that_crosses_zero_asks_for_the_largest_size_and_comes_back():
    """At or below 0 the size is the cap without LR decay; back above 0 the ratio counts again."""
    loop = Loop(RadaDamp(rho=0.0, grad_norm_weight=0.0))
    for loss in (2.0, 1.0, 0.0, -1.0, 2.0, 4.0):
        loop.step(loss)
    loop.step(1.0)
    assert loop.sizes == [8, 8, 8 * 2, 64, 64, 8, 8 // 2]
    assert loop.factors == [1.0] * 7
    assert loop.notices == []


# What is evaluated before a decision -----------------------------------------------------------------------------


class Counted(NamedTuple):
    """What :class:`Evaluating` remembers."""

    observed: int = 0
    taken: tuple[float, ...] = ()


@dataclass(frozen=True)
class Evaluating(Policy[Counted]):
    """Need the full loss at even counts of updates; the damping is one more than the sum of what was taken."""

    asks: frozenset[str] = frozenset({"full_loss"})

    @property
    def requires(self) -> frozenset[str]:
        return self.asks

    def init(self) -> Counted:
        return Counted()

    def update(self, state: Counted, observation: Observation) -> Counted:
        return state._replace(observed=state.observed + 1)

    def needs(self, state: Counted, progress: Progress) -> frozenset[str]:
        assert progress.measured == {}
        return frozenset() if progress.updates % 2 else super().needs(state, progress)

    def take(self, state: Counted, progress: Progress) -> Counted:
        assert progress.updates % 2 == 0
        return state._replace(taken=(*state.taken, progress.measured["full_loss"]))

    def damping(self, state: Counted, progress: Progress) -> float:
        assert progress.measured == ({} if progress.updates % 2 else {"full_loss": state.taken[-1]})
        return 1.0 + sum(state.taken)


class Evaluator:
    """Give one value after the other, or raise it."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)
        self.asked: list[frozenset[str]] = []

    def __call__(self, names: frozenset[str]) -> dict[str, float]:
        self.asked.append(names)
        value = self.values.pop(0)
        if isinstance(value, BaseException):
            raise value
        return dict.fromkeys(names, value)


def evaluating(evaluate: Any, policy: Policy[Any] | None = None, *, wait: int = 0) -> Controller:
    """Return a controller with B0 8 that observes a loss of 1 at every update."""
    return Controller(
        policy or Evaluating(),
        Limits(8, 1000),
        Cadence(wait=wait),
        training_samples=100,
        observe=lambda: [Observation(1.0, None, 8)],
        notify=pytest.fail,
        evaluate=evaluate,
    )


def step(controller: Controller) -> Decision:
    """Make an update."""
    return controller.end_batch(controller.decision.batch_size, updated=True, learning_rate=lambda: 0.1)


def test_what_is_needed_is_evaluated_and_taken_before_the_damping():
    """At counts 0, 2 and 4 something is measured and taken in; between them the policy decides without."""
    evaluate = Evaluator(1.0, 2.0, 4.0)
    controller = evaluating(evaluate)
    sizes = [controller.start(lambda: 0.1).batch_size, *(step(controller).batch_size for _ in range(4))]
    assert sizes == [8 * 2, 8 * 2, 8 * 4, 8 * 4, 8 * 8]
    assert evaluate.asked == [{"full_loss"}] * 3
    assert controller.state == Counted(observed=4, taken=(1.0, 2.0, 4.0))


def test_what_is_evaluated_alone_is_evaluated_without_an_observation():
    """A policy that asks for evaluations only decides for the first update; one that observes too does not."""
    evaluate = Evaluator(1.0, 1.0)
    assert evaluating(evaluate).start(lambda: 0.1).damping == 2.0
    assert evaluating(evaluate, wait=1).start(lambda: 0.1).damping == 1.0
    both = evaluating(evaluate, Evaluating(frozenset({"full_loss", "loss"})))
    assert both.start(lambda: 0.1).damping == 1.0
    assert len(evaluate.asked) == 1
    step(both)
    assert step(both).damping == 2.0
    assert evaluate.asked == [{"full_loss"}] * 2


def test_policy_that_needs_nothing_is_never_evaluated_for():
    """Nor does it have to be said how."""
    evaluating(pytest.fail, Constant()).start(lambda: 0.1)
    evaluating(None, Constant()).start(lambda: 0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_evaluation_that_is_not_finite_is_no_decision(value):
    """It is counted, the decision stands, nothing is taken in; the observations before it are."""
    controller = evaluating(Evaluator(value, value, 4.0))
    assert controller.start(lambda: 0.1) == Decision(1.0, 8, 8, 1.0)
    step(controller)
    assert step(controller) == Decision(1.0, 8, 8, 1.0)
    assert (controller.skipped, controller.state) == (2, Counted(observed=2, taken=()))
    step(controller)
    assert step(controller).damping == 5.0
    assert (controller.skipped, controller.state) == (2, Counted(observed=4, taken=(4.0,)))


def test_only_what_was_asked_for_has_to_be_finite():
    """An evaluator may say more than it was asked for."""

    @dataclass(frozen=True)
    class Twice(Policy[None]):
        requires = frozenset({"full_loss"})

        def damping(self, state: None, progress: Progress) -> float:
            return 2.0 * progress.measured["full_loss"]

    controller = evaluating(lambda names: {**dict.fromkeys(names, 1.0), "other": math.nan}, Twice())
    assert controller.start(lambda: 0.1).damping == 2.0
    assert controller.skipped == 0


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt("Ctrl-C")], ids=repr)
def test_evaluation_that_raises_leaves_everything_as_it_was(error):
    """All of the update or nothing, at the start too: it can be tried again."""
    controller = evaluating(Evaluator(error, 1.0, error, 2.0))
    before = controller.state_dict()
    with pytest.raises(type(error), match=str(error)):
        controller.start(lambda: 0.1)
    assert controller.state_dict() == before
    controller.start(lambda: 0.1)
    step(controller)
    before = controller.state_dict()
    with pytest.raises(type(error), match=str(error)):
        step(controller)
    assert controller.state_dict() == before
    step(controller)
    assert (controller.updates, controller.samples, controller.skipped) == (2, 16 + 16, 0)
    assert controller.state == Counted(observed=2, taken=(1.0, 2.0))


@dataclass(frozen=True)
class Fragile(Evaluating):
    """Take in, and then have no damping."""

    def damping(self, state: Counted, progress: Progress) -> float:
        raise RuntimeError("no damping")


def test_damping_that_raises_undoes_what_was_taken():
    """The state after an evaluation is a part of the decision that did not come to be."""
    controller = evaluating(Evaluator(1.0), Fragile())
    with pytest.raises(RuntimeError, match="no damping"):
        controller.start(lambda: 0.1)
    assert controller.state == Counted()


def test_controller_that_cannot_evaluate_says_so():
    """The message names what was needed, and what to give."""
    with pytest.raises(ValueError, match=r"^the policy needs full_loss for a decision, .*measures them as evaluate\.$"):
        evaluating(None).start(lambda: 0.1)


def test_copy_evaluates_as_the_original_does():
    """A copy that goes one update ahead measures by the same function, and leaves the original's state alone."""
    evaluate = Evaluator(1.0, 2.0)
    controller = evaluating(evaluate)
    controller.start(lambda: 0.1)
    step(controller)
    ahead = controller.copy(lambda: [Observation(1.0, None, 8)])
    assert step(ahead).damping == 1.0 + 1.0 + 2.0
    assert len(evaluate.asked) == 2
    assert controller.state == Counted(observed=1, taken=(1.0,))
