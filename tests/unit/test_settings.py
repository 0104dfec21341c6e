# SPDX-License-Identifier: Apache-2.0
"""The callback's arguments: which are refused, with what message, and what bounds they make."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_adabatch import AdaptiveBatchSize, Constant, Policy, RadaDamp
from lightning_adabatch.controller import Cadence
from lightning_adabatch.limits import Limits


@dataclass(frozen=True)
class Curious(Policy[None]):
    """Ask for what nobody measures."""

    requires = frozenset({"loss", "variance", "curvature"})

    def damping(self, state: Any, progress: Any) -> float:
        return 1.0


def bounds(initial: int = 8, samples: int = 100, epoch: int | None = None, ranks: int = 1, **arguments: Any) -> Limits:
    """Return the limits of a run with these arguments."""
    return AdaptiveBatchSize(Constant(), **arguments).settings.limits(initial, samples, epoch or samples, ranks)


def integer(name: str, value: Any, least: int) -> tuple[dict[str, Any], str]:
    """Return an argument that is no integer of its range, and how its message begins."""
    return {name: value}, f"{name}={value!r} must be an integer >= {least}"


def test_integers_of_numpy_are_integers():
    """What a sweep draws with NumPy is taken, and kept as Python's own, which checkpoints may hold."""
    made = AdaptiveBatchSize(
        max_batch_size=np.int64(64), min_batch_size=np.int32(2), dwell=np.int64(3), wait=np.uint8(0)
    ).settings
    assert [type(value) for value in (made.max_batch_size, made.min_batch_size, made.dwell, made.wait)] == [int] * 4
    assert made == AdaptiveBatchSize(max_batch_size=64, min_batch_size=2, dwell=3).settings
    with pytest.raises(ValueError, match=r"dwell=2\.5 must be an integer >= 1\. Set for example dwell=2\."):
        AdaptiveBatchSize(dwell=np.float64(2.5))


LEAST = {"min_batch_size": 1, "dwell": 1, "wait": 0, "multiple_of": 1, "max_device_batch_size": 1, "max_batch_size": 1}

REFUSED = [
    ({"multiple_of": 64, "max_batch_size": 32}, "max_batch_size=32 is below multiple_of=64. Raise the first or lower"),
    *(integer(name, value, least) for name, least in LEAST.items() for value in (least - 1, -3, 2.5, "4", True)),
    *(integer(name, None, least) for name, least in LEAST.items() if not name.startswith("max")),
    *(integer(name, math.inf, least) for name, least in LEAST.items() if name != "max_batch_size"),
    *(integer(name, 64.0, least) for name, least in LEAST.items() if name != "max_batch_size"),
    *(integer("max_batch_size", value, 1) for value in (math.nan, -math.inf)),
    ({"policy": "RadaDamp"}, "policy='RadaDamp' must be an instance of a Policy, such as RadaDamp()."),
    ({"policy": RadaDamp}, "must be an instance of a Policy, such as RadaDamp()."),
    (
        {"policy": Curious()},
        (
            "Curious.requires asks for curvature, variance; what can be measured is full_loss, grad_norm_sq, "
            "grad_variance, gradient_diversity, loss."
        ),
    ),
    ({"adapt": "lr_only"}, "adapt='lr_only' must be one of 'batch_size', 'lr'."),
    ({"adapt": None}, "adapt=None must be one of 'batch_size', 'lr'."),
    ({"lr_scaling": "cubic"}, "lr_scaling='cubic' must be one of 'none', 'linear', 'sqrt'."),
    ({"lr_scaling": None}, "lr_scaling=None must be one of 'none', 'linear', 'sqrt'."),
    ({"tail": "pad"}, "tail='pad' must be one of None, 'keep', 'carry', 'drop'."),
    (
        {"max_batch_size": 16, "min_batch_size": 17},
        "max_batch_size=16 is below min_batch_size=17. Raise the first or lower the second.",
    ),
    *(
        ({"adapt": "lr", name: value}, f"{name}={value!r} has no effect with adapt='lr'")
        for name, value in {
            "max_batch_size": 64,
            "min_batch_size": 2,
            "multiple_of": 8,
            "max_device_batch_size": 32,
            "lr_scaling": "linear",
            "tail": "keep",
        }.items()
    ),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_argument_is_refused(arguments, message):
    """A value outside of its range is refused when it is given: what was given, what is allowed, what to do."""
    with pytest.raises(ValueError, match=re.escape(message)):
        AdaptiveBatchSize(**arguments)


def test_message_says_what_to_set():
    """A message ends with something that works."""
    with pytest.raises(ValueError, match=r"wait=-1 must be an integer >= 0\. Set for example wait=1\.$"):
        AdaptiveBatchSize(wait=-1)
    with pytest.raises(ValueError, match=r"an integer >= 1, math\.inf \(\.inf in YAML\), or None\. Set for example"):
        AdaptiveBatchSize(max_batch_size=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"policy": RadaDamp(rho=0.5), "max_batch_size": 64, "min_batch_size": 64},
        {"max_batch_size": math.inf, "min_batch_size": 1000},
        {"dwell": 1, "wait": 0, "multiple_of": 8, "max_device_batch_size": 32, "lr_scaling": "sqrt", "tail": "carry"},
        {"adapt": "lr", "dwell": 10, "wait": 50},
    ],
)
def test_argument_is_kept(arguments):
    """What is within its range is taken as it is given."""
    settings = AdaptiveBatchSize(**arguments).settings
    assert {name: getattr(settings, name) for name in arguments} == arguments


def test_whole_number_from_a_command_line_is_a_size():
    """A ``max_batch_size`` that came as 64.0, as an ``int | float`` is read, is the integer 64."""
    kept = AdaptiveBatchSize(max_batch_size=64.0).settings.max_batch_size
    assert (kept, type(kept)) == (64, int)


def test_default_policy_is_radadamp():
    """Without a policy the rule is RadaDamp with its defaults."""
    assert AdaptiveBatchSize().settings.policy == RadaDamp()


def test_cadence_is_that_of_the_arguments():
    """``dwell`` and ``wait`` make the cadence."""
    assert AdaptiveBatchSize(dwell=3, wait=5).settings.cadence == Cadence(dwell=3, wait=5)


# Bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, Limits(8, cap=100, epoch_samples=100)),
        ({"max_batch_size": 64}, Limits(8, cap=64, epoch_samples=100)),
        ({"max_batch_size": 1000}, Limits(8, cap=1000, epoch_samples=100)),
        ({"max_batch_size": math.inf}, Limits(8, cap=math.inf, epoch_samples=100)),
        ({"min_batch_size": 5}, Limits(8, cap=100, floor=5, epoch_samples=100)),
        ({"samples": 5}, Limits(8, cap=8, epoch_samples=5)),  # the larger of B0 and the data
        ({"epoch": 40}, Limits(8, cap=100, epoch_samples=40)),
        (  # the cap is rounded down, the floor up
            {"multiple_of": 4, "max_batch_size": 63, "min_batch_size": 5},
            Limits(8, cap=60, floor=8, multiple=4, epoch_samples=100),
        ),
        ({"multiple_of": 8}, Limits(8, cap=96, floor=8, multiple=8, epoch_samples=100)),
        (
            {"multiple_of": 8, "max_batch_size": math.inf},
            Limits(8, cap=math.inf, floor=8, multiple=8, epoch_samples=100),
        ),
        ({"lr_scaling": "sqrt"}, Limits(8, cap=100, epoch_samples=100, lr_scaling="sqrt")),
        ({"adapt": "lr"}, Limits(8, cap=8, adapt="lr")),
        ({"adapt": "lr", "initial": 512}, Limits(512, cap=512, adapt="lr")),
    ],
)
def test_bounds_by_hand(arguments, expected):
    """B0 = 8 on 100 samples, unless said otherwise."""
    assert bounds(**arguments) == expected


@given(
    initial=st.integers(1, 64),
    multiple=st.integers(1, 16),
    least=st.integers(1, 64),
    most=st.none() | st.just(math.inf) | st.integers(1, 128),
    samples=st.integers(1, 200),
)
def test_bounds_hold_b0_or_are_refused(initial, multiple, least, most, samples):
    """Bounds are multiples with B0 between them; where none are possible, the set-up is refused."""
    if most is not None and most < max(least, multiple):
        most = max(least, multiple)
    highest = max(initial, samples) if most is None else most
    cap = max((n for n in range(0, 257, multiple) if n <= highest), default=0) if highest != math.inf else math.inf
    floor = min(n for n in range(0, 257, multiple) if n >= least)
    arguments = {"multiple_of": multiple, "min_batch_size": least, "max_batch_size": most}
    if initial % multiple == 0 and floor <= initial <= cap:
        assert bounds(initial, samples, **arguments) == Limits(initial, cap, floor, multiple, samples)
    else:
        with pytest.raises(MisconfigurationException, match=f"initial batch size {initial} is not|no batch size is"):
            bounds(initial, samples, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"multiple_of": 16},
            "the initial batch size 8 is not a multiple of multiple_of=16. Set batch_size=16 in the DataLoader",
        ),
        ({"multiple_of": 3}, "the initial batch size 8 is not a multiple of multiple_of=3. Set batch_size=9"),
        ({"max_batch_size": 7}, "the initial batch size 8 is not within 1 and 7"),
        (
            {"max_batch_size": 1, "ranks": 2},
            "max_batch_size=1 is below 2, the smallest multiple of multiple_of=1 * 2 ranks. Set max_batch_size=8",
        ),
        ({"min_batch_size": 9}, "the initial batch size 8 is not within 9 and 100"),
        (
            {"min_batch_size": 9, "multiple_of": 4},
            "12 and 100, which are min_batch_size=9 and max_batch_size=None (here 100) as multiples of multiple_of=4",
        ),
        (
            {"min_batch_size": 200},
            "no batch size is within 200 and 100, which are min_batch_size=200 and max_",
        ),
        ({"multiple_of": 8, "max_batch_size": 15, "initial": 16}, "the initial batch size 16 is not within 8 and 8"),
    ],
)
def test_bounds_without_b0_are_refused(arguments, message):
    """B0 outside of the bounds, or no multiple, is refused with both bounds and the arguments behind them."""
    with pytest.raises(MisconfigurationException, match=re.escape(message)):
        bounds(**arguments)


@pytest.mark.parametrize("size", [10**400, 2**62 + 1])
def test_a_cap_beyond_all_data_is_refused(size):
    """A number that no ratio of floats can hold is refused when it is given, not in the middle of a run."""
    with pytest.raises(ValueError, match=r"must be an integer >= 1 and <= 4611686018427387904, math\.inf"):
        AdaptiveBatchSize(max_batch_size=size)


@pytest.mark.parametrize("requires", [None, 5, {1}, {1, "a"}, [["loss"]], "loss"])
def test_requires_that_are_no_names_are_refused(requires):
    """What a policy asks for is a set of names."""
    policy = Constant()
    object.__setattr__(policy, "requires", requires)
    with pytest.raises(ValueError, match=r"Constant\.requires=.* must be a frozenset of names"):
        AdaptiveBatchSize(policy)


def test_a_tensor_is_no_size():
    """What only looks like a number is refused by name."""
    with pytest.raises(ValueError, match="max_batch_size=tensor"):
        AdaptiveBatchSize(max_batch_size=torch.tensor([1, 2]))


def test_a_cap_below_the_multiple_is_refused():
    """It is seen without a loader, and the remedy does not lead to another refusal."""
    with pytest.raises(ValueError, match=r"max_batch_size=32 is below multiple_of=64\. Raise the first or lower"):
        AdaptiveBatchSize(max_batch_size=32, multiple_of=64)


def test_numbers_of_numpy_in_policies():
    """What is a number is one for rules too, and what only looks like one is told so."""
    assert RadaDamp(rho=np.float32(0.5), warmup=np.int64(50)) == RadaDamp(rho=0.5, warmup=50)
    for rho in ("0.9", True, None):
        with pytest.raises(ValueError, match=r"must be a number in \[0, 1\)"):
            RadaDamp(rho=rho)
