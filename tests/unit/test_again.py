# SPDX-License-Identifier: Apache-2.0
"""A batch that is handed out once more, in smaller parts, leaves the pass as if it had come in those parts at first."""

from __future__ import annotations

import gc
import weakref
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_adabatch.loader import ElasticLoader, EpochPlan

tails = st.sampled_from(["keep", "carry", "drop"])


@given(
    total=st.integers(1, 120),
    own=st.integers(1, 20),
    tail=tails,
    most=st.none() | st.integers(1, 12),
    steps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_plan(total, own, tail, most, steps):
    """After any part the plan begins the batch again by another limit, and stands where that limit would have led."""
    plan = EpochPlan(total, own, tail, most, device_limit=40)
    for size, limit, parts in steps:
        before = EpochPlan(*astuple(plan))
        before.over = plan.over
        handed = plan.hand_out(size)
        for _ in range(min(parts, plan.parts_left)):
            plan.hand_out(size)
        if handed == 0:
            break
        lower = min(limit, plan.device_limit or limit)
        plan.begin_again(lower)
        before.device_limit = lower
        while True:
            assert plan.hand_out(size) == before.hand_out(size)
            assert astuple(plan) == astuple(before)
            if plan.rest == 0:
                break


def samples(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def run(loader, script, epochs=2):
    """Return the samples of each batch; a batch may fail after so many parts, and again by a lower limit."""
    seen, number = [], 0
    for _ in range(epochs):
        begun = iter(loader)
        while True:
            size, failures = script[number % len(script)]
            number += 1
            loader.resize(size)
            part = next(begun, None)
            if part is None:
                break
            batch = samples(part)
            for parts, limit in failures:
                for _ in range(min(parts, begun.plan.parts_left)):
                    next(begun)
                lower = min(limit, begun.plan.part_size)
                assert begun.again.possible
                loader.lower(lower)
                begun.again.hand_out(lower)
                batch = samples(next(begun))
                assert len(batch) <= lower
            while begun.plan.rest:
                batch += samples(next(begun))
            seen.append(batch)
    return seen


def make(length, workers, tail, collate=None, limit=None):
    loader = DataLoader(range(length), 4, shuffle=True, num_workers=workers, collate_fn=collate)
    elastic = ElasticLoader(loader, tail=tail, device_limit=limit)
    elastic.keep = lambda plan: True
    return elastic


failures = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), max_size=3)
scripts = st.lists(st.tuples(st.integers(1, 20), failures), min_size=1, max_size=8)


@given(length=st.integers(1, 60), tail=tails, script=scripts, collate=st.sampled_from([None, list]))
def test_samples_without_workers(length, tail, script, collate):
    """Whatever fails, batches have the samples that they would have had, in the same order, carried ones too."""
    results = []
    for failing in (True, False):
        torch.manual_seed(0)
        results.append(
            run(make(length, 0, tail, collate), [(size, fails if failing else []) for size, fails in script])
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("collate", [None, list])
@settings(max_examples=5)
@given(tail=tails, script=scripts)
def test_samples_with_workers(collate, tail, script):
    """The same where workers fetch."""
    torch.manual_seed(0)
    plain = run(make(37, 0, tail), [(size, []) for size, _ in script])
    torch.manual_seed(0)
    assert run(make(37, 2, tail, collate), script) == plain


def test_what_is_kept():
    """Of a batch of several parts the samples are kept only if somebody asks for it, and until the next one."""
    loader = make(40, 2, "keep", limit=4)
    loader.keep = None
    loader.resize(8)
    begun = iter(loader)
    next(begun)
    assert not begun.again.possible
    next(begun)
    loader.keep = lambda plan: plan.consumed == 12
    next(begun)
    assert begun.again.possible
    next(begun)
    assert begun.again.possible
    next(begun)
    assert not begun.again.possible
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_goes_with_its_last_reference(workers):
    """What is kept holds no pass: its workers end when nobody needs it."""
    loader = make(40, workers, "keep")
    begun = iter(loader)
    next(begun)
    gone = weakref.ref(begun)
    gc.disable()
    try:
        del begun
        assert gone() is None
    finally:
        gc.enable()
    loader.close()
