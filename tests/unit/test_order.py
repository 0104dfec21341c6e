# SPDX-License-Identifier: Apache-2.0
"""Whether the order of an epoch is the same for another number of ranks, and where they stand in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_adabatch.loader import ElasticLoader, for_ranks, lost
from lightning_adabatch.loader.order import order_of

DATA = range(48)


def distributed(ranks=1, rank=0, samples=48, **kwargs):
    """Return a sampler of one of some ranks."""
    return DistributedSampler(range(samples), num_replicas=ranks, rank=rank, **kwargs)


def place(**changes):
    """Return a place of a rank after 6 of its samples, in batches of 3."""
    known = {
        "total": 24,
        "consumed": 6,
        "batches": 2,
        "last_size": 3,
        "over": False,
        "carried": [],
        "sampler_epoch": 0,
        "order": "as stored",
        "base_state": torch.zeros(4),
        "started": None,
        "witnesses": ["4", "5"],
        "blocks": [3, 0, 3, 3],
    }
    return {**known, **changes}


# The name of an order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_orders_that_do_not_depend_on_the_number_of_ranks_have_a_name(ranks):
    """Distributed samplers that pad deal out one order, whatever the number of ranks and whichever the rank."""
    names = {order_of(distributed(ranks, rank, shuffle=False)) for rank in range(ranks)}
    assert names == {"as stored"} == {order_of(SequentialSampler(DATA))}
    assert {order_of(distributed(ranks, rank, seed=5)) for rank in range(ranks)} == {order_of(distributed(seed=5))}
    assert order_of(distributed(seed=5)) is not None


def test_another_seed_is_another_order():
    """The name tells shuffles of two seeds apart, and from what is not shuffled."""
    assert len({order_of(distributed(seed=seed)) for seed in (0, 5, 50)} | {"as stored"}) == 4


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(DATA),
        WeightedRandomSampler([1.0] * 48, 48),
        SubsetRandomSampler(DATA),
        distributed(drop_last=True),
        distributed(shuffle=False, drop_last=True),
        list(DATA),
        None,
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_other_orders_have_none(sampler):
    """What draws from a generator, drops samples by rank, or is unknown may depend on the number of ranks."""
    assert order_of(sampler) is None


# Another number of ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [RandomSampler(DATA), SequentialSampler(DATA), distributed()])
@pytest.mark.parametrize("order", [None, "as stored", "another"])
def test_as_many_ranks_go_on_with_the_place_as_it_is(sampler, order):
    """Where the number of ranks stayed nothing is changed; the witnesses then tell whether the order is the same."""
    given_place = place(order=order, carried=[1, 2], consumed=7)
    found = for_ranks(given_place, 2, 2, sampler, 24)
    assert found == given_place
    assert found is not given_place


@pytest.mark.parametrize(("before", "now"), [(2, 1), (2, 3), (2, 4), (1, 2), (1, 3), (4, 2), (3, 2)])
def test_another_number_of_ranks_shares_what_was_consumed(before, now):
    """All ranks together stand where they stood; each has its share of it, and no witnesses to compare with."""
    given_place = place()
    found = for_ranks(given_place, before, now, distributed(now, 0, shuffle=False), 48 // now)
    assert found["consumed"] * now == 6 * before
    assert found["last_size"] == 3 * before // now
    assert found["total"] == 48 // now
    assert found["witnesses"] is None
    kept = set(given_place) - {"consumed", "last_size", "total", "witnesses"}
    assert {name: found[name] for name in kept} == {name: given_place[name] for name in kept}
    assert given_place["consumed"] == 6  # what was given is left alone


@pytest.mark.parametrize(
    ("changes", "now", "sampler"),
    [
        ({"order": None}, 1, SequentialSampler(DATA)),
        ({"order": None}, 1, RandomSampler(DATA)),
        ({}, 1, RandomSampler(DATA)),
        ({}, 1, distributed()),
        ({"order": order_of(distributed(seed=1))}, 1, distributed(seed=2)),
        ({}, 5, distributed(5, shuffle=False)),
        ({"consumed": 7}, 4, distributed(4, shuffle=False)),
        ({"carried": [3]}, 1, SequentialSampler(DATA)),
    ],
    ids=[
        "no known order",
        "no known order at all",
        "order not known now",
        "shuffled now",
        "another seed",
        "12 samples on 5 ranks",
        "14 samples on 4 ranks",
        "carried samples",
    ],
)
def test_a_place_that_other_ranks_do_not_have_is_lost(changes, now, sampler):
    """Without a common order and a common border between samples there is no place to go on."""
    given_place = place(**changes)
    assert for_ranks(given_place, 2, now, sampler, 48 // now) == lost(given_place)


def test_nothing_begins_at_a_lost_place():
    """A lost place is none for any length of data, and still says what was carried and how many batches there were."""
    given_place = place(carried=[1, 2])
    assert lost(given_place) == {**given_place, "lost": True}
    assert given_place["total"] == 24
    loader = ElasticLoader(DataLoader(DATA, 3))
    begun = iter(loader)
    next(begun)
    loader.place_at(lost(begun.state_dict(at_mark=False)))
    assert [index for batch in loader for index in batch.tolist()] == list(DATA)
    assert loader.lost_place


@given(
    before=st.integers(1, 6),
    now=st.integers(1, 6),
    per_batch=st.integers(1, 4),
    batches=st.integers(0, 6),
    shuffle=st.booleans(),
)
def test_other_ranks_go_on_with_what_nobody_had(before, now, per_batch, batches, shuffle):
    """Real passes over 120 samples: what the ranks had before and what they have now is every sample once."""
    samples = 120  # of which 1 to 6 ranks have the same number

    def loaders(ranks):
        samplers = [distributed(ranks, rank, samples, shuffle=shuffle, seed=3) for rank in range(ranks)]
        return [ElasticLoader(DataLoader(range(samples), per_batch, sampler=sampler)) for sampler in samplers]

    had, places = [], []
    for loader in loaders(before):
        loader.sampler.set_epoch(2)
        begun = iter(loader)
        had += [index for _ in range(min(batches, len(loader))) for index in next(begun).tolist()]
        places.append(begun.state_dict(at_mark=False))
    lost_places = set()
    have = []
    for rank, loader in enumerate(loaders(now)):
        own = places[rank] if rank < before else places[0]
        loader.place_at(for_ranks(own, before, now, loader.sampler, samples // now))
        have += [index for batch in loader for index in batch.tolist()]
        lost_places.add(loader.lost_place)
    assert lost_places == {len(had) % now > 0}
    assert sorted(have if len(had) % now else had + have) == list(range(samples))
