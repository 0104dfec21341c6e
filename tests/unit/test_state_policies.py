# SPDX-License-Identifier: Apache-2.0
"""A policy's state in a checkpoint: plain data, read back as what the policy made."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import observations

from lightning_adabatch import Constant, Policy, RadaDamp
from lightning_adabatch.policies import dump_state, load_state


class Pair(NamedTuple):
    count: int
    means: list[float]


class Triple(NamedTuple):
    count: int
    means: list[float]
    more: int


@dataclass(frozen=True)
class Frozen:
    count: int
    means: list[float]


@dataclass(frozen=True)
class Holds(Policy[Any]):
    """Begin with a given state."""

    state: Any = None

    def init(self) -> Any:
        return self.state

    def damping(self, state, progress) -> float:
        return 1.0


class HoldsToo(Holds):
    """Another class with the same state."""


def through_json(dumped):
    """Return what is read of a file of plain data."""
    return json.loads(json.dumps(dumped))


@pytest.mark.parametrize(
    ("state", "plain"),
    [
        (Pair(3, [0.5, 0.25]), {"count": 3, "means": [0.5, 0.25]}),
        (Frozen(3, [0.5, 0.25]), {"count": 3, "means": [0.5, 0.25]}),
        (None, None),
        (7, 7),
        ([0.5, 0.25], [0.5, 0.25]),
        ({"a": 0.5}, {"a": 0.5}),
    ],
    ids=["NamedTuple", "dataclass", "None", "number", "list", "dict"],
)
def test_a_state_is_plain_data_and_comes_back(state, plain):
    """It is written as a dict of numbers where it has fields, as it is elsewhere, and read as the policy's own type."""
    policy = Holds(state)
    dumped = dump_state(policy, state)
    assert dumped == {"class": f"{__name__}.Holds", "state": plain}
    assert type(dumped["state"]) is type(plain)
    read = load_state(policy, through_json(dumped))
    assert read == state
    assert type(read) is type(state)


@given(st.lists(observations, max_size=5))
def test_the_state_of_a_policy_comes_back_to_the_last_bit(seen):
    """RadaDamp's averages are the same numbers after JSON, whatever was observed."""
    policy = RadaDamp(rho=0.9)
    state = policy.init()
    for observation in seen:
        state = policy.update(state, observation)
    assert load_state(policy, through_json(dump_state(policy, state))) == state


def test_hyperparameters_are_not_in_the_state():
    """A policy with other values goes on from the state: they are the user's to change."""
    state = RadaDamp(rho=0.5).init()._replace(observations=3)
    assert load_state(RadaDamp(rho=0.9), dump_state(RadaDamp(rho=0.5), state)) == state


def test_what_was_written_does_not_hold_the_state():
    """The fields of a state are in a dict of its own, which may be changed."""
    state = Frozen(3, [])
    dumped = dump_state(Holds(state), state)["state"]
    dumped["count"] = 4
    dumped["means"].append(1.0)
    assert state == Frozen(3, [])


@pytest.mark.parametrize("number", [np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(1)])
def test_numbers_of_other_libraries_are_written_as_plain_ones(number):
    """NumPy's floats are Python's too, and yet a checkpoint that holds them is not read back safely."""
    written = dump_state(Holds(Pair(0, [])), Frozen(number, [number, {"a": (number,)}]))["state"]
    plain = number.item()
    assert written == {"count": plain, "means": [plain, {"a": (plain,)}]}
    kinds = {type(written["count"]), type(written["means"][0]), type(written["means"][1]["a"][0])}
    assert kinds == {type(plain)} <= {float, int, bool}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(Holds(Pair(0, [])), HoldsToo(Pair(0, []))), (Constant(), RadaDamp()), (RadaDamp(), Constant())],
    ids=["a subclass", "none and some", "some and none"],
)
def test_the_state_of_another_class_is_refused(writer, reader):
    """The message names both classes, also where the state would fit."""
    dumped = dump_state(writer, writer.init())
    names = [rf"{type(policy).__module__}\.{type(policy).__name__}" for policy in (writer, reader)]
    with pytest.raises(ValueError, match=f"^the state is that of {names[0]}, and the policy is {names[1]}$"):
        load_state(reader, dumped)


@pytest.mark.parametrize(
    "stored",
    [{"count": 3}, {"count": 3, "means": [], "more": 1}, {"count": 3, "mean": []}, {}, None, 3, [3, []]],
    ids=["fewer", "more", "another name", "none", "None", "number", "list"],
)
@pytest.mark.parametrize("fresh", [Pair(0, []), Frozen(0, [])], ids=["NamedTuple", "dataclass"])
def test_a_state_with_other_fields_is_refused(fresh, stored):
    """The state of another version of the policy is none, and the message says what the fields are."""
    policy = Holds(fresh)
    with pytest.raises(ValueError, match=r"Holds has the fields count, means$"):
        load_state(policy, {**dump_state(policy, fresh), "state": stored})


def test_the_order_of_the_fields_does_not_matter():
    """Fields are found by their names."""
    policy = Holds(Triple(0, [], 0))
    dumped = {**dump_state(policy, policy.init()), "state": {"more": 3, "means": [2.0], "count": 1}}
    assert load_state(policy, dumped) == Triple(1, [2.0], 3)


def test_fields_are_not_looked_into():
    """A dataclass whose field holds another is not taken apart: a state is numbers and lists of numbers."""
    state = Frozen(1, [0.5])
    dumped = dump_state(Holds(state), state)
    assert dumped["state"]["means"] == state.means
    assert {field.name for field in dataclasses.fields(state)} == dumped["state"].keys()
