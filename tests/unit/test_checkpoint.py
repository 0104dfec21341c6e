# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of a run, and what each rank finds in it."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_adabatch.checkpoint import FRESH, VERSION, Snapshot


def snapshot(own=({"carried": []},), ranks=1, **changes):
    """Return a snapshot of a run."""
    known = {
        "rule": {"updates": 3, "policy": {"class": "a.B", "state": {"mean": 0.5}}},
        "rows": [[0.5, 4.0, 8], [0.25, None, 8]],
        "logged": {"size": 8, "last": [1.0, 8, 8, 1.0, 8]},
        "place": {"batches": 3, "next": "batch"},
        "metrics": {"loss": torch.tensor(0.5)},
        "whole": True,
        "inside_step": False,
        "fitted": 12,
        "device_limit": None,
    }
    return Snapshot(**{**known, "own": own, "ranks": ranks, **changes})


def through_a_file(state):
    """Return what another process reads of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_snapshot_is_read_as_it_was_written():
    """Every field comes back through a file that a safe loader reads."""
    written = snapshot(own=[{"carried": [1, 2]}, {"carried": []}], ranks=2, whole=False, inside_step=True)
    read = Snapshot.from_state_dict(through_a_file(written.state_dict()))
    assert read == written
    assert read.own[0]["carried"] == [1, 2]
    assert (read.whole, read.inside_step) == (False, True)


def test_a_state_has_its_version_and_every_field():
    """The state says that the run had begun and what it can be read with."""
    state = snapshot().state_dict()
    assert state.keys() == {"version", "begun"} | {field.name for field in fields(Snapshot)}
    assert (state["version"], state["begun"]) == (VERSION, True)


def test_what_later_versions_add_is_not_looked_at():
    """A state with one more entry is read, as long as its version is the same."""
    written = snapshot()
    assert Snapshot.from_state_dict({**written.state_dict(), "more": 1}) == written


def test_a_run_that_had_not_begun_has_no_snapshot():
    """The state of a run before its training starts is None, and stored like any other."""
    assert Snapshot.from_state_dict(through_a_file(FRESH)) is None


@pytest.mark.parametrize("version", [0, 1, "2", None])
@pytest.mark.parametrize("begun", [True, False])
def test_another_version_is_refused(version, begun):
    """The message has both versions."""
    state = {**snapshot().state_dict(), "version": version, "begun": begun}
    if version is None:
        del state["version"]
    with pytest.raises(ValueError, match=rf"version {version!r}, and {VERSION} is"):
        Snapshot.from_state_dict(state)


@pytest.mark.parametrize(("rank", "expected"), [(0, 0), (1, 1), (2, 2), (3, 0), (7, 0)])
def test_each_rank_has_its_own(rank, expected):
    """A rank finds what it wrote; one that was not there takes after the first one."""
    assert snapshot([{"n": 0}, {"n": 1}, {"n": 2}], ranks=3).of_rank(rank) == {"n": expected}


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_one_entry_is_for_all_ranks(rank):
    """Where all ranks were equal, or one wrote alone, every rank has that entry."""
    assert snapshot([{"n": 0}], ranks=3).of_rank(rank) == {"n": 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_as_many_ranks_begin_with_what_they_left(rank):
    """Each rank has its own samples back, in their order, in a list of its own."""
    own = [{"carried": [5, 3]}, {"carried": [4, 9]}]
    found = snapshot(own, ranks=2).carried(rank, 2)
    assert found == own[rank]["carried"]
    found.append(0)
    assert own[rank]["carried"] in ([5, 3], [4, 9])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nothing_carried_is_nothing(ranks):
    """Runs that carry nothing, or whose loader is none of ours, begin with nothing."""
    for own in ([{}], [{}, {}], [{"carried": []}, {"carried": []}]):
        before = snapshot(own, ranks=len(own))
        assert [before.carried(rank, ranks) for rank in range(ranks)] == [[]] * ranks


@given(before=st.integers(2, 6), now=st.integers(1, 12), each=st.integers(0, 5))
def test_other_ranks_begin_with_everything_once(before, now, each):
    """The ranks share what was left: equal numbers, every index once, and less padding than there are ranks."""
    own = [{"carried": list(range(rank * each, (rank + 1) * each))} for rank in range(before)]
    shares = [snapshot(own, ranks=before).carried(rank, now) for rank in range(now)]
    assert len({len(share) for share in shares}) == 1
    counts = Counter(index for share in shares for index in share)
    assert counts.keys() == set(range(before * each))
    assert sum(counts.values()) - before * each < now


@given(ranks=st.integers(1, 6), more=st.integers(0, 3))
def test_as_many_or_more_entries_than_ranks_never_fail(ranks, more):
    """Any rank of any number of ranks finds its share."""
    own = [{"carried": [rank]} for rank in range(ranks + more)]
    shares = [snapshot(own, ranks=ranks + more).carried(rank, ranks) for rank in range(ranks)]
    assert {index for share in shares for index in share} == set(range(ranks + more))


def test_what_one_process_carried_is_shared_out():
    """Two ranks that go on for one process have its carried samples between them, not each all of them."""
    one = snapshot(own=[{"carried": [1, 2, 3]}], ranks=1)
    assert [one.carried(rank, 2) for rank in range(2)] == [[1, 3], [2, 1]]
