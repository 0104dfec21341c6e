# SPDX-License-Identifier: Apache-2.0
"""The controller in a checkpoint: what another one needs to go on, and copies that leave the original alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import Sizes
from strategies import observations

from lightning_adabatch import Observation, Policy, Progress, RadaDamp
from lightning_adabatch.controller import Cadence, Controller
from lightning_adabatch.limits import Decision, Limits


class Seen(NamedTuple):
    """What :class:`Doubling` remembers."""

    observations: int = 0
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Doubling(Policy[Seen]):
    """Double at each observation."""

    requires = frozenset({"loss"})

    def init(self) -> Seen:
        return Seen()

    def update(self, state: Seen, observation: Observation) -> Seen:
        return state._replace(observations=state.observations + 1)

    def damping(self, state: Seen, progress: Progress) -> float:
        return 2.0**state.observations

    def notice(self, state: Seen) -> str | None:
        return "it grows" if state.observations > 1 else None


class Loop:
    """A loop around a controller, that takes given observations."""

    def __init__(self, policy: Policy[Any], limits: Limits, *, dwell: int = 1, samples: int = 100) -> None:
        self.pending: list[Observation] = []
        self.told: list[str] = []
        self.controller = Controller(
            policy,
            limits,
            Cadence(dwell, 0),
            training_samples=samples,
            observe=self.read,
            notify=self.told.append,
        )

    def read(self) -> list[Observation]:
        pending, self.pending = self.pending, []
        return pending

    def step(self, observation: Observation) -> Decision:
        self.pending.append(observation)
        return self.controller.end_batch(observation.batch_size, updated=True, learning_rate=lambda: 0.1)

    def go_on_from(self, other: Loop) -> None:
        self.controller.load_state_dict(json.loads(json.dumps(other.controller.state_dict())))
        self.pending = list(other.pending)


@given(seen=st.lists(observations, max_size=20), cut=st.integers(0, 20), dwell=st.integers(1, 4))
def test_a_cut_run_decides_as_the_uncut_one(seen, cut, dwell):
    """Stored as JSON after any update and loaded by another controller, the decisions are the same to the last bit."""
    limits = Limits(8, 64, lr_scaling="sqrt")
    whole, first, second = (Loop(RadaDamp(rho=0.5, warmup=2), limits, dwell=dwell) for _ in range(3))
    whole.controller.start(lambda: 0.1)
    first.controller.start(lambda: 0.1)
    expected = [whole.step(observation) for observation in seen]
    decided = [first.step(observation) for observation in seen[:cut]]
    second.go_on_from(first)
    assert second.controller.decision == first.controller.decision
    decided += [second.step(observation) for observation in seen[cut:]]
    assert decided == expected
    assert second.controller.state_dict() == whole.controller.state_dict()


def test_a_state_says_where_the_run_stands():
    """Counts, decision, last observation and the policy's state, and no hyperparameters."""
    loop = Loop(Doubling(), Limits(8, 10))
    loop.controller.start(lambda: 0.1)
    loop.step(Observation(0.5, None, 8))
    loop.step(Observation(math.nan, None, 10))
    loop.controller.end_batch(3, updated=False, learning_rate=lambda: 0.1)
    state = loop.controller.state_dict()
    assert state.pop("policy") == {
        "class": f"{__name__}.Doubling",
        "state": {"observations": 1, "losses": ()},
    }
    assert state == {
        "updates": 2,
        "samples": 21,
        "epochs": 0.21,
        "skipped": 2,
        "training_samples": 100,
        "before": [0, 0.0],
        "evaluated": 0,
        "initial_batch_size": 8,
        "batch_size": 10,
        "lr_factor": 10 / 16,
        "damping": 2.0,
        "latest": [0.5, None, 8, None],
    }


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=12), st.data())
def test_epochs_of_training_sets_of_several_lengths(sets, data):
    """Each sample counts as a share of the training set that it was drawn from, in a run that is cut too."""
    cut = data.draw(st.integers(0, len(sets)))
    loop, expected = Loop(Doubling(), Limits(8, 64), samples=sets[0][0]), 0.0
    for number, (length, batches) in enumerate(sets):
        if number == cut:
            following = Loop(Doubling(), Limits(8, 64), samples=length)
            following.go_on_from(loop)
            loop = following
        loop.controller.count_by(length)
        for _ in range(batches):
            loop.step(Observation(0.5, None, 3))
            expected += 3 / length
            assert loop.controller.epochs == pytest.approx(expected)


def test_epochs_of_data_whose_length_nobody_knows_for_a_while():
    """They are not a number then, and go on afterwards."""
    controller = Loop(Doubling(), Limits(8, 64), samples=20).controller
    for length, expected in ((20, 0.5), (None, math.nan), (40, 1.0)):
        controller.count_by(length)
        controller.end_batch(10, updated=False, learning_rate=lambda: 0.1)
        assert controller.epochs == pytest.approx(expected, nan_ok=True)


def test_padding_is_no_other_training_set():
    """53 samples are 54 on two ranks: half an epoch on those and 26 samples on one rank are one epoch."""
    two, one = Loop(Doubling(), Limits(8, 64), samples=54), Loop(Doubling(), Limits(8, 64), samples=53)
    two.step(Observation(0.5, None, 27))
    one.controller.load_state_dict(two.controller.state_dict(), padding=2)
    one.step(Observation(0.5, None, 26))
    assert one.controller.epochs == 1.0


@pytest.mark.parametrize(("before", "after"), [(53, 54), (54, 53)])
def test_padding_moves_no_epoch_that_is_over(before, after):
    """A whole number of epochs stays one, also where one more sample belongs to each of them now."""
    first, second = (Loop(Doubling(), Limits(8, 64), samples=samples) for samples in (before, after))
    for _ in range(2):
        first.step(Observation(0.5, None, before))
    second.controller.load_state_dict(first.controller.state_dict(), padding=2)
    assert second.controller.epochs == 2.0
    second.step(Observation(0.5, None, after))
    assert second.controller.epochs == 3.0


def test_everything_that_is_read_comes_back():
    """Counts, last observation and policy state of the other controller are this one's."""
    first, second = (Loop(Doubling(), Limits(8, 64)) for _ in range(2))
    first.step(Observation(0.5, None, 8))
    first.step(Observation(math.inf, None, 16))
    second.go_on_from(first)
    controller = second.controller
    assert (controller.updates, controller.samples, controller.skipped, controller.epochs) == (2, 24, 1, 0.24)
    assert controller.latest == Observation(0.5, None, 8)
    assert controller.state == Seen(1, [])
    assert isinstance(controller.state, Seen)


def test_an_observation_of_an_older_version_is_read():
    """A checkpoint from before there were variances has three numbers for the last observation."""
    first, second = (Loop(Doubling(), Limits(8, 64)) for _ in range(2))
    first.step(Observation(0.5, 2.0, 8, -0.25))
    state = first.controller.state_dict()
    assert state["latest"] == [0.5, 2.0, 8, -0.25]
    second.controller.load_state_dict(state)
    assert second.controller.latest == Observation(0.5, 2.0, 8, -0.25)
    second.controller.load_state_dict({**state, "latest": [0.5, 2.0, 8]})
    assert second.controller.latest == Observation(0.5, 2.0, 8, None)


def test_a_run_without_an_observation_goes_on_without_one():
    """Nothing was observed: nothing is, and the measuring policy's damping stays 1."""
    first, second = (Loop(Doubling(), Limits(8, 64)) for _ in range(2))
    second.step(Observation(0.5, None, 8))
    second.go_on_from(first)
    assert second.controller.latest is None
    assert second.controller.decision == Decision(1.0, 8, 8, 1.0)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(8, 64), Decision(4.0, 32, 32, 1.0)),
        (Limits(8, 16), Decision(4.0, 32, 16, 0.5)),
        (Limits(8, 64, epoch_samples=20), Decision(4.0, 32, 20, 1.0)),
        (Limits(8, 128, multiple=40), Decision(4.0, 32, 40, 1.0)),
        (Limits(8, 64, lr_scaling="linear"), Decision(4.0, 32, 32, 4.0)),
    ],
    ids=["the same", "a smaller cap", "less data", "another multiple", "another scaling"],
)
def test_a_decision_is_bounded_by_the_new_limits(limits, expected):
    """The damping is what was decided; size and factor follow from it and the limits of the run that goes on."""
    first, second = Loop(Doubling(), Limits(8, 64)), Loop(Doubling(), limits)
    for _ in range(2):
        first.step(Observation(0.5, None, 8))
    second.go_on_from(first)
    assert second.controller.decision == expected


def test_a_larger_cap_moves_size_and_learning_rate_together():
    """Size and factor stay in step: the learning rate that the old cap took away comes back with the samples."""
    first, second = Loop(Doubling(), Limits(8, 16)), Loop(Doubling(), Limits(8, 64, lr_scaling="sqrt"))
    for _ in range(2):
        first.step(Observation(0.5, None, 8))
    assert first.controller.decision == Decision(4.0, 32, 16, 0.5)
    second.go_on_from(first)
    assert second.controller.decision == Decision(4.0, 32, 32, 2.0)


def test_the_state_of_another_policy_is_refused():
    """The message has both names, and the controller stays where it was."""
    first, second = Loop(Doubling(), Limits(8, 64)), Loop(RadaDamp(), Limits(8, 64))
    first.step(Observation(0.5, None, 8))
    with pytest.raises(ValueError, match=r"Doubling, and the policy is .*RadaDamp"):
        second.go_on_from(first)
    assert second.controller.updates == 0


def test_a_copy_goes_its_own_way_and_tells_nobody():
    """What a copy would decide is known without a change to the original, whose user hears of nothing twice or less."""
    loop = Loop(Doubling(), Limits(8, 64))
    loop.step(Observation(0.5, None, 8))
    before = loop.controller.state_dict()
    copied = loop.controller.copy(lambda: [Observation(0.25, None, 16)])
    ahead = copied.end_batch(16, updated=True, learning_rate=lambda: 0.1)
    assert ahead == Decision(4.0, 32, 32, 1.0)
    assert (copied.updates, copied.samples, copied.latest) == (2, 24, Observation(0.25, None, 16))
    assert loop.controller.state_dict() == before
    assert loop.told == []
    assert loop.step(Observation(0.25, None, 16)) == ahead
    assert loop.told == ["it grows"]
    assert loop.controller.state_dict() == copied.state_dict()


def test_a_copy_does_not_read_for_the_original():
    """The copy has observations of its own: the original's are still there."""
    loop = Loop(Doubling(), Limits(8, 64), dwell=2)
    loop.step(Observation(0.5, None, 8))
    copied = loop.controller.copy(list)
    copied.end_batch(8, updated=True, learning_rate=lambda: 0.1)
    assert loop.pending == [Observation(0.5, None, 8)]
    assert loop.controller.updates == 1


def test_the_size_stays_where_it_is_rounded_in_another_way():
    """C70: the size decided on two ranks stays when one rank goes on, as far as the bounds of the run allow."""
    two, one = Limits(8, cap=64, floor=2, multiple=2), Limits(8, cap=64, floor=1, multiple=1)
    first = Loop(Sizes([11]), two).controller
    first.start(lambda: 0.1)
    assert first.decision.batch_size == 12
    state = first.state_dict()
    for limits, size in ((one, 12), (two, 12), (Limits(8, cap=10), 10)):
        second = Loop(Sizes([11]), limits).controller
        second.load_state_dict(state)
        assert second.decision.batch_size == size
