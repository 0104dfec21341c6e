# SPDX-License-Identifier: Apache-2.0
"""What is worth writing down, and under which tags."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adabatch.report import Gate, Record


def admitted(sizes: list[int], *, every: int) -> list[int]:
    """Return the update counts that are logged at once."""
    gate = Gate(every)
    return [k for k, size in enumerate(sizes, 1) if gate.admits(k, size)]


def test_metrics_are_the_values_by_their_tags():
    """Every value that says something has its tag, and is a float."""
    record = Record(16, 7, 100, 1.5, 0.5, 3.0, loss=2.0, grad_norm_sq=4.0, evaluated=50, skipped=1)
    record = replace(record, grad_variance=-0.5, gradient_diversity=6.0)
    assert record.metrics() == {
        "adabatch/batch_size": 16.0,
        "adabatch/updates": 7.0,
        "adabatch/samples": 100.0,
        "adabatch/epochs": 1.5,
        "adabatch/lr_factor": 0.5,
        "adabatch/damping": 3.0,
        "adabatch/loss": 2.0,
        "adabatch/grad_norm_sq": 4.0,
        "adabatch/grad_variance": -0.5,
        "adabatch/gradient_diversity": 6.0,
        "adabatch/evaluated": 50.0,
        "adabatch/skipped": 1.0,
    }
    assert {type(value) for value in record.metrics().values()} == {float}


@pytest.mark.parametrize(
    "name", ["loss", "grad_norm_sq", "grad_variance", "gradient_diversity", "evaluated", "skipped"]
)
def test_metrics_leave_out_what_says_nothing(name):
    """A value that was not measured has no tag; a value of 0 has one."""
    unsaid = Record(16, 7, 100, 1.5, 1.0, 1.0)
    assert f"adabatch/{name}" not in unsaid.metrics()
    assert Record(16, 7, 100, 1.5, 1.0, 1.0, **{name: 0}).metrics()[f"adabatch/{name}"] == 0.0


def test_gate_admits_multiples_of_the_interval():
    """At a constant size every 5th update is logged."""
    assert admitted([8] * 17, every=5) == [5, 10, 15]


def test_gate_takes_note_of_a_size_logged_otherwise():
    """The size of an epoch's last update, logged when the epoch ends, is what the next ones compare with."""
    gate = Gate(50)
    assert not gate.admits(1, 100)
    gate.note(80)
    assert gate.admits(2, 100)


@pytest.mark.parametrize(("size", "expected"), [(109, [2]), (110, [2, 3]), (91, [2]), (90, [2, 3])])
def test_gate_admits_a_change_of_a_tenth(size, expected):
    """A size that is 10 % or more away from the last one logged is logged at once, larger or smaller."""
    assert admitted([100, 100, size], every=2) == expected
    # Before anything is logged, the first one is what the others compare with.
    assert admitted([100, 100, size], every=50) == expected[1:]


def test_gate_compares_with_the_last_size_logged():
    """A size that grows by 1 from 100 is logged at 110 and 121, not at every update."""
    gate = Gate(1000)
    gate.note(100)
    assert [size for k, size in enumerate(range(100, 123), 1) if gate.admits(k, size)] == [110, 121]


@given(sizes=st.lists(st.integers(1, 100), max_size=30))
def test_gate_without_an_interval_admits_nothing(sizes):
    """``log_every_n_steps=0`` means no log."""
    assert admitted(sizes, every=0) == []
    assert not Gate(0).open


@given(sizes=st.lists(st.integers(1, 100), max_size=40), every=st.integers(1, 10))
def test_gate_never_hides_a_notable_size(sizes, every):
    """The last size logged, or the first of all, is always within 10 % of the size in force."""
    logged = sizes[0] if sizes else 0
    gate = Gate(every)
    for k, size in enumerate(sizes, 1):
        if gate.admits(k, size):
            logged = size
        assert abs(size - logged) < 0.1 * logged
