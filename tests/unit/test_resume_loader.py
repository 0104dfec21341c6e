# SPDX-License-Identifier: Apache-2.0
"""A pass that was cut goes on in another process with the batches that the uncut pass would have had."""

from __future__ import annotations

import io
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from lightning_adabatch import generators
from lightning_adabatch.loader import ElasticLoader

EPOCHS = 3
NONE = st.just(0)
ONCE = ("stored", "shuffled", "own generator", "distributed")  # orders that give every sample exactly once
ORDERS = (*ONCE, "weighted", "weighted, own generator", "replacement", "replacement, own generator", "two generators")


def through_a_file(state):
    """Return what another process reads of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def seed_everything(seed):
    """Seed the three global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def user_loader(order, length, own, workers, seed):
    """Return a user's DataLoader over the numbers below ``length``, with the seed of its process."""
    data = range(length)
    generator = torch.Generator().manual_seed(seed)
    weights = [float(index % 5) + 0.5 for index in data]
    kwargs = {
        "stored": {},
        "shuffled": {"shuffle": True},
        "own generator": {"shuffle": True, "generator": generator},
        "distributed": {"sampler": DistributedSampler(data, num_replicas=1, rank=0, seed=4)},
        "weighted": {"sampler": WeightedRandomSampler(weights, length)},
        "weighted, own generator": {"sampler": WeightedRandomSampler(weights, length, generator=generator)},
        "replacement": {"sampler": RandomSampler(data, replacement=True)},
        "replacement, own generator": {"sampler": RandomSampler(data, replacement=True, generator=generator)},
        "two generators": {
            "sampler": RandomSampler(data, replacement=True, generator=generator),
            "generator": torch.Generator().manual_seed(seed + 1),
        },
    }[order]
    return DataLoader(data, own, num_workers=workers, **kwargs)


@dataclass(frozen=True)
class Setup:
    """A run of epochs, and the batch at which it is cut."""

    order: str
    length: int
    own: int
    tail: str
    sizes: tuple[int, ...]
    epoch: int = 0  # in which it is cut
    batches: int = 1  # of that epoch, before the cut
    at_mark: bool = False
    workers: int = 0
    workers_after: int = 0
    max_batches: int | None = None

    def process(self, seed, workers):
        """Return the run as a new process makes it."""
        seed_everything(seed)
        loader = user_loader(self.order, self.length, self.own, workers, seed)
        return Process(ElasticLoader(loader, tail=self.tail, max_batches=self.max_batches), self.sizes)


class Process:
    """A training loop: it asks for another size after every batch, and draws from torch's generator."""

    def __init__(self, loader, sizes):
        self.loader = loader
        self.sizes = sizes
        self.number = 0
        self.resize()

    def resize(self):
        self.loader.resize(self.sizes[self.number % len(self.sizes)])

    def begin(self, epoch):
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(epoch)
        self.live = iter(self.loader)

    def fetch(self):
        batch = next(self.live, None)
        return None if batch is None else batch.tolist()

    def end_batch(self):
        torch.rand(1)  # dropout
        self.number += 1
        self.resize()

    def rest(self):
        """Return the batches of the rest of the pass."""
        seen = []
        while (batch := self.fetch()) is not None:
            seen.append(batch)
            self.end_batch()
        return seen

    def epochs(self, first, last):
        """Return the batches of whole epochs."""
        seen = []
        for epoch in range(first, last):
            self.begin(epoch)
            seen.append(self.rest())
        return seen


def uncut(setup):
    """Return the batches of each epoch of a run that nobody cuts."""
    process = setup.process(1, setup.workers)
    seen = process.epochs(0, EPOCHS)
    process.loader.close()
    return seen


def cut(setup):
    """Return the batches of each epoch of a run that is cut and goes on in a new process."""
    first = setup.process(1, setup.workers)
    seen = first.epochs(0, setup.epoch)
    first.begin(setup.epoch)
    begun = []
    for _ in range(setup.batches):
        batch = first.fetch()
        if batch is None:
            pytest.fail("the epoch has no such batch")
        begun.append(batch)
        first.end_batch()
    drawn = {}
    if setup.at_mark:
        first.live.mark()
        if not first.live.plan.over:
            first.fetch()  # was begun, and is begun again
            torch.rand(1)
            drawn = {"torch": first.live.generator}
    saved = through_a_file(
        {
            "pass": first.live.state_dict(at_mark=setup.at_mark),
            "generators": {**generators.capture(), **drawn},
            "carried": list(first.loader.carried),
        }
    )
    first.loader.close()

    second = setup.process(99, setup.workers_after)
    second.number = first.number
    second.resize()
    second.loader.place_at(saved["pass"])
    second.live = iter(second.loader)
    assert not second.loader.lost_place
    second.loader.place_at(None)
    second.loader.carried = saved["carried"]
    generators.restore(saved["generators"])
    seen.append(begun + second.rest())
    seen += second.epochs(setup.epoch + 1, EPOCHS)
    second.loader.close()
    return seen


def setups(workers=NONE):
    """Setups that are cut at any batch of any epoch."""
    return st.builds(
        Setup,
        order=st.sampled_from(ORDERS),
        length=st.integers(1, 40),
        own=st.integers(1, 10),
        tail=st.sampled_from(["keep", "carry", "drop"]),
        sizes=st.lists(st.integers(1, 45) | st.integers(1, 6), min_size=1, max_size=8).map(tuple),
        epoch=st.integers(0, EPOCHS - 1),
        batches=st.integers(0, 45),
        at_mark=st.booleans(),
        workers=workers,
        workers_after=workers,
        max_batches=st.sampled_from([None, None, None, 2, 5]),
    )


def at_a_batch_of_the_epoch(setup, whole):
    """Return the setup with a cut that the epoch has: before its first batch, after its last, or between."""
    return replace(setup, batches=setup.batches % (len(whole[setup.epoch]) + 1))


def check_samples(setup, seen):
    """See that each epoch has every sample as often as its tail says."""
    if setup.order not in ONCE or setup.max_batches is not None:
        return
    epochs = [list(chain(*epoch)) for epoch in seen]
    everything = list(range(setup.length))
    if setup.tail == "keep":
        assert [sorted(epoch) for epoch in epochs] == [everything] * EPOCHS
    elif setup.tail == "drop":
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    else:  # what is still owed at the end apart, nothing is lost and nothing is there twice
        counts = Counter(chain(*epochs))
        assert max(counts.values()) <= EPOCHS
        assert min(counts[index] for index in everything) >= EPOCHS - 1


@settings(max_examples=400)
@given(setups())
def test_a_pass_goes_on_where_it_was_cut(setup):
    """Cut at any batch, a run has the batches of the uncut one, in this epoch and in all that follow."""
    whole = uncut(setup)
    seen = cut(at_a_batch_of_the_epoch(setup, whole))
    assert seen == whole
    check_samples(setup, seen)


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])  # to shrink takes minutes
@given(setups(st.sampled_from([0, 2])))
def test_a_pass_goes_on_with_any_number_of_workers(setup):
    """The same with workers, and with another number of them after the cut.

    A generator of the loader's own is drawn from ahead of time by workers: the epochs after the one that was cut are
    the same only with as many of them.
    """
    whole = uncut(setup)
    seen = cut(at_a_batch_of_the_epoch(setup, whole))
    known = EPOCHS if setup.workers == setup.workers_after or "generator" not in setup.order else setup.epoch + 1
    assert seen[:known] == whole[:known]
    check_samples(setup, seen)


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(Setup("own generator", 12, 4, "keep", (4,), batches=0), id="own generator before its first draw"),
        pytest.param(Setup("own generator", 12, 4, "keep", (4,), 1, 0, at_mark=True), id="the same in the first batch"),
        pytest.param(Setup("two generators", 12, 4, "keep", (4,), 1, 0), id="two of them"),
        pytest.param(Setup("own generator", 11, 4, "carry", (4, 1), batches=3), id="over, its tail carried"),
        pytest.param(Setup("own generator", 14, 6, "drop", (6, 14, 1), batches=2), id="over, its tail dropped"),
        pytest.param(Setup("weighted", 9, 10, "carry", (1, 6, 18), 2, 2), id="a first batch of carried samples alone"),
        pytest.param(Setup("shuffled", 40, 4, "keep", (4,), 1, 0, workers=2), id="no workers after the first draw"),
    ],
)
def test_a_pass_goes_on_from_its_ends(setup):
    """Places at which a sampler has begun and gave nothing, or not begun, or gave everything but its last draw."""
    assert cut(setup) == uncut(setup)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at_mark", [False, True])
def test_each_order_goes_on_in_mid_epoch(order, at_mark):
    """Each kind of sampler gives its order again, after two batches and in the second epoch, and the next epoch's."""
    setup = Setup(order, 23, 4, "keep", (4, 4, 6, 3), epoch=1, batches=2, at_mark=at_mark)
    seen = cut(setup)
    assert seen == uncut(setup)
    assert len(seen[1]) > 2
    check_samples(setup, seen)


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 2)])
@pytest.mark.parametrize("order", ["shuffled", "own generator", "weighted"])
def test_workers_may_change_between_two_processes(order, before, after):
    """The number of worker processes before and after the cut means nothing for the order."""
    setup = Setup(order, 30, 4, "keep", (4, 7, 3), epoch=0, batches=3, workers=before, workers_after=after)
    assert cut(setup) == uncut(setup) == uncut(replace(setup, workers=0))


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_carried_samples_are_carried_over_the_cut(batches):
    """A pass that began with samples of the pass before it begins with them again."""
    setup = Setup("shuffled", 10, 4, "carry", (4,), epoch=1, batches=batches)
    seen = cut(setup)
    assert [len(batch) for epoch in seen for batch in epoch] == [4] * 7
    assert sorted(chain(*seen[0], *seen[1])) == sorted([*range(10)] * 2)
    assert seen == uncut(setup)


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_a_limit_of_batches_counts_those_before_the_cut(batches):
    """A pass of three batches has three, however many of them came before the cut."""
    setup = Setup("shuffled", 40, 4, "keep", (4, 5), batches=batches, max_batches=3)
    seen = cut(setup)
    assert [len(epoch) for epoch in seen] == [3] * EPOCHS
    assert seen == uncut(setup)


@pytest.mark.parametrize("batches", [0, 2])
def test_a_place_is_small_and_plain(batches):
    """Whatever the data set's length, a place is some KB that a safe loader reads, also before the first batch."""
    process = Setup("shuffled", 100_000, 4, "keep", (4,)).process(1, 0)
    process.begin(0)
    for _ in range(batches):
        process.fetch()
    place = process.live.state_dict(at_mark=False)
    file = io.BytesIO()
    torch.save(place, file)
    assert len(file.getvalue()) < 40_000
    assert through_a_file(place)["consumed"] == place["consumed"] == 4 * batches


def test_reading_a_place_changes_nothing():
    """A pass whose place is written after every batch hands out what one does that is left alone."""
    watched, left_alone = (Setup("shuffled", 30, 4, "keep", (4, 6)).process(1, 0) for _ in range(2))
    seed_everything(1)
    expected = left_alone.epochs(0, 2)
    seed_everything(1)
    seen = []
    for epoch in range(2):
        watched.begin(epoch)
        seen.append([])
        while (batch := watched.fetch()) is not None:
            for at_mark in (True, False):
                watched.live.state_dict(at_mark=at_mark)
            seen[-1].append(batch)
            watched.end_batch()
    assert seen == expected


def test_a_place_at_the_mark_is_that_of_the_mark():
    """What was handed out after the mark is not counted at the mark, and is now."""
    process = Setup("stored", 30, 4, "keep", (4,)).process(1, 0)
    process.begin(0)
    process.fetch()
    process.live.mark()
    process.fetch()
    process.fetch()
    counted = {at_mark: process.live.state_dict(at_mark=at_mark) for at_mark in (True, False)}
    assert [(counted[at]["consumed"], counted[at]["batches"]) for at in (True, False)] == [(4, 1), (12, 3)]


def place_after(batches, loader):
    """Return the place after some batches of a pass."""
    live = iter(loader)
    for _ in range(batches):
        next(live)
    return through_a_file(live.state_dict(at_mark=False))


class Drifting(Sampler):
    """Shuffles by a generator that is hidden in a list, which nobody can set back."""

    def __init__(self, length, seed):
        self.length = length
        self.random = [np.random.default_rng(seed)]

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.random[0].permutation(self.length).tolist())


def elastic(length, sampler=None, **kwargs):
    """Return an elastic loader of batches of 4."""
    return ElasticLoader(DataLoader(range(length), 4, sampler=sampler), **kwargs)


@pytest.mark.parametrize(("before", "after"), [(30, 31), (30, 29), (30, 5)])
def test_a_place_is_lost_where_the_data_has_another_length(before, after):
    """Other data: the pass begins at its first sample, has all of them, and the loader says so."""
    loader = elastic(after)
    loader.place_at(place_after(2, elastic(before)))
    live = iter(loader)
    assert loader.lost_place
    assert torch.cat(list(live)).tolist() == list(range(after))


def test_a_place_is_lost_where_the_order_is_another():
    """A sampler that cannot be set back gives another order: the pass begins anew and has every sample once."""
    place = place_after(3, elastic(30, Drifting(30, seed=1)))
    loader = elastic(30, Drifting(30, seed=2))
    loader.place_at(place)
    live = iter(loader)
    assert loader.lost_place
    assert sorted(torch.cat(list(live)).tolist()) == list(range(30))


def test_a_sampler_that_gives_its_order_again_has_its_place():
    """The same sampler seeded alike, whatever its generator is: nothing is lost."""
    place = place_after(3, elastic(30, Drifting(30, seed=1)))
    loader = elastic(30, Drifting(30, seed=1))
    loader.place_at(place)
    live = iter(loader)
    assert not loader.lost_place
    order = np.random.default_rng(1).permutation(30).tolist()
    assert torch.cat(list(live)).tolist() == order[12:]


def test_a_place_is_lost_where_a_generator_is_missing():
    """A place of a loader with a generator of its own is none for a loader without."""
    place = place_after(2, ElasticLoader(DataLoader(range(30), 4, shuffle=True, generator=torch.Generator())))
    loader = ElasticLoader(DataLoader(range(30), 4, shuffle=True))
    loader.place_at(place)
    live = iter(loader)
    assert loader.lost_place
    assert sorted(torch.cat(list(live)).tolist()) == list(range(30))


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_lost_place_keeps_the_limit_of_batches(batches):
    """A pass of three batches that begins anew still has three, those before the cut included."""
    loader = elastic(40, max_batches=3)
    loader.place_at(place_after(batches, elastic(30, max_batches=3)))
    live = iter(loader)
    assert loader.lost_place
    assert len(list(live)) == 3 - batches


def test_a_place_is_for_the_passes_until_it_is_taken_back():
    """Every pass begins at the place until there is none; the next one then begins at the first sample."""
    loader = elastic(12)
    loader.place_at(place_after(2, elastic(12)))
    for _ in range(2):
        assert torch.cat(list(iter(loader))).tolist() == list(range(8, 12))
    loader.place_at(None)
    assert torch.cat(list(iter(loader))).tolist() == list(range(12))


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_shuffle_seed_is_that_of_a_distributed_sampler(shuffle):
    """A DistributedSampler's seed can be read and set; other samplers have none, and none is set on them."""
    loader = elastic(30, DistributedSampler(range(30), num_replicas=2, rank=1, seed=4, shuffle=shuffle))
    assert loader.shuffle_seed == 4
    loader.shuffle_seed = 5
    assert loader.sampler.seed == loader.shuffle_seed == 5
    loader.shuffle_seed = None
    assert loader.shuffle_seed == 5
    other = elastic(30)
    other.shuffle_seed = 5
    assert other.shuffle_seed is None
    assert not hasattr(other.sampler, "seed")


def test_the_epoch_of_a_distributed_sampler_is_set_again():
    """A pass that shuffled for epoch 3 shuffles for it again, without anybody's saying so."""
    samplers = [DistributedSampler(range(30), num_replicas=2, rank=1, seed=4) for _ in range(2)]
    samplers[0].set_epoch(3)
    order = list(samplers[0])
    loader = elastic(30, samplers[1])
    loader.place_at(place_after(2, elastic(30, samplers[0])))
    live = iter(loader)
    assert not loader.lost_place
    assert torch.cat(list(live)).tolist() == order[8:]


def test_agreed_samples_bound_a_pass():
    """A pass has what all ranks have, and a place in it is one only where they agree on as much again."""
    loader = elastic(30)
    loader.agree(10)
    assert (loader.available(), loader.epoch_samples, len(loader)) == (10, 10, 3)
    place = place_after(1, loader)
    assert place["total"] == 10
    assert torch.cat(list(iter(loader))).tolist() == list(range(10))
    for agreed, lost in [(10, False), (11, True), (None, True)]:
        again = elastic(30)
        again.agree(agreed)
        again.place_at(place)
        rest = torch.cat(list(iter(again))).tolist()
        assert again.lost_place is lost
        assert rest == list(range(0 if lost else 4, agreed or 30))
