# SPDX-License-Identifier: Apache-2.0
"""The elastic loader: exact sizes, every sample once, the same batches with any number of workers."""

import gc
import multiprocessing
import weakref
from collections import Counter
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_adabatch.loader import ElasticLoader
from lightning_adabatch.loader.message import SMALL

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def make(length, batch_size, workers=0, *, persistent=False, prefetch=2, limits=None, **settings_of_user):
    """Return an elastic loader over the numbers below ``length``."""
    if workers:
        settings_of_user |= {"persistent_workers": persistent, "prefetch_factor": prefetch}
    tail = settings_of_user.pop("tail", None)
    loader = DataLoader(range(length), batch_size=batch_size, num_workers=workers, **settings_of_user)
    return ElasticLoader(loader, tail=tail, **(limits or {}))


def run(loader, sizes, epochs=1):
    """Return the batches of each epoch as lists; batch number k of the run asks for ``sizes[k % len(sizes)]``."""
    number, seen = 0, []
    for _ in range(epochs):
        loader.resize(sizes[number % len(sizes)])
        batches, epoch = iter(loader), []
        while True:
            loader.resize(sizes[number % len(sizes)])
            batch = next(batches, None)
            if batch is None:
                break
            epoch.append(batch.tolist())
            number += 1
        seen.append(epoch)
    return seen


def expected_sizes(length, own, tail, sizes, epochs):
    """Return the batch sizes of each epoch, by the words of the rules for an epoch's end."""
    number, carried, result = 0, 0, []
    for _ in range(epochs):
        left, epoch = length + carried, []
        while left > 0:
            wanted = min(sizes[number % len(sizes)], length)  # never more than one epoch's samples
            if tail == "keep":
                batch = min(wanted, left)  # what is left is one batch
                if left == wanted + 1 and wanted not in (1, own):
                    batch = left  # a single leftover sample joins, where the size is not the loader's own
            elif wanted <= left:
                batch = wanted
            else:
                batch = epoch[-1]  # more than what is left was asked for: on with the size that was in force
            left -= batch
            epoch.append(batch)
            number += 1
            if tail != "keep" and left < batch:
                break  # it was the last when it was handed out, whatever size is asked for next
        carried = left if tail == "carry" else 0
        result.append(epoch)
    return result


def lengths(epochs):
    """Return the sizes of the batches of each epoch."""
    return [[len(batch) for batch in epoch] for epoch in epochs]


def children():
    """Return the worker processes that are alive."""
    return {process.pid for process in multiprocessing.active_children()}


@dataclass(frozen=True)
class Setup:
    length: int
    own: int
    drop_last: bool
    tail: str | None
    sizes: list[int]

    @property
    def tail_in_force(self):
        return self.tail or ("drop" if self.drop_last else "keep")

    def run(self, workers=0, *, shuffle=False, **more):
        # A generator of its own, since where workers are persistent a DataLoader draws less from the global one; and
        # not RandomSampler, which draws once more after its last index, if it is asked.
        order = SubsetRandomSampler(range(self.length), torch.Generator().manual_seed(7)) if shuffle else None
        more |= {"sampler": order, "drop_last": self.drop_last, "tail": self.tail}
        loader = make(self.length, self.own, workers, **more)
        seen = run(loader, self.sizes, epochs=3)
        loader.close()
        return seen


SETUPS = st.builds(
    Setup,
    length=st.integers(1, 40),
    own=st.integers(1, 12),
    drop_last=st.booleans(),
    tail=st.sampled_from([None, "keep", "carry", "drop"]),
    sizes=st.lists(st.integers(1, 45) | st.integers(1, 6), min_size=1, max_size=12),
)


@settings(max_examples=300, deadline=None)
@given(SETUPS)
def test_batches_have_exactly_the_sizes_that_the_rules_say(setup):
    """Whatever sizes are asked for, each batch has its size, and only an epoch's end differs, as specified."""
    expected = expected_sizes(setup.length, setup.own, setup.tail_in_force, setup.sizes, epochs=3)
    assert lengths(setup.run()) == expected


@settings(max_examples=300, deadline=None)
@given(SETUPS, st.booleans())
def test_every_sample_is_seen_once_per_epoch(setup, shuffle):
    """Kept tails give every sample once per epoch, dropped ones none twice, carried ones lose and repeat nothing."""
    epochs = [list(chain(*epoch)) for epoch in setup.run(shuffle=shuffle)]
    everything = list(range(setup.length))
    if setup.tail_in_force == "keep":
        assert [sorted(epoch) for epoch in epochs] == [everything] * 3
    elif setup.tail_in_force == "drop":
        assert all(len(set(epoch)) == len(epoch) and set(epoch) <= set(everything) for epoch in epochs)
    else:
        # Epoch after epoch, in order: only the last of them may still owe samples.
        flat = list(chain(*epochs))
        starts = range(0, len(flat), setup.length)
        whole = [sorted(flat[start : start + setup.length]) for start in starts if start + setup.length <= len(flat)]
        assert len(whole) >= 2
        assert all(epoch == everything for epoch in whole)


@settings(max_examples=25, deadline=None)
@given(SETUPS, st.integers(1, 2), st.integers(1, 3), st.booleans(), st.booleans())
def test_batches_do_not_depend_on_workers(setup, workers, prefetch, persistent, shuffle):
    """Any number of workers and blocks in flight gives the batches that no workers give, in the same order."""
    with_workers = setup.run(workers, prefetch=prefetch, persistent=persistent, shuffle=shuffle)
    assert with_workers == setup.run(shuffle=shuffle)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_batch_after_a_resize_has_the_new_size(workers):
    """Growth and shrinkage in mid-pass are exact at once, and the numbers go on without a gap."""
    [epoch] = run(make(40, 4, workers), [4, 4, 9, 2, 2, 13])
    assert [len(batch) for batch in epoch] == [4, 4, 9, 2, 2, 13, 4, 40 - (4 + 4 + 9 + 2 + 2 + 13 + 4)]
    assert list(chain(*epoch)) == list(range(40))


@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_more_than_is_left_goes_on_with_the_size_in_force(tail):
    """With 74 samples and 16 asked for when 10 are left, one more batch of 8 comes; 2 are dropped or carried."""
    loader = make(74, 8, tail=tail)
    epochs = run(loader, [8] * 8 + [16], epochs=1)
    assert lengths(epochs) == [[8] * 9]
    loader.resize(16)
    first = next(iter(loader)).tolist()
    assert first == ([72, 73, *range(14)] if tail == "carry" else list(range(16)))


@WORKERS
def test_carried_samples_begin_the_next_pass(workers):
    """What an epoch leaves is carried over several epochs, in order, and a pass of single samples takes the rest."""
    loader = make(10, 4, workers, tail="carry")
    epochs = run(loader, [4], epochs=4)
    # 10 = 4 + 4 + 2; 2 + 10 = 3 · 4; 10 = 4 + 4 + 2; 2 + 10 = 3 · 4
    assert lengths(epochs) == [[4] * 2, [4] * 3, [4] * 2, [4] * 3]
    assert list(chain(*epochs[0], *epochs[1])) == [*range(10), *range(10)]
    assert epochs[1][0] == [8, 9, 0, 1]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_carried_rest_is_all_there_is(length, sizes):
    """Five shuffled epochs of carried tails and one of single samples hold every sample exactly six times."""
    loader = make(length, 3, tail="carry", shuffle=True)
    seen = Counter(chain.from_iterable(chain.from_iterable(run(loader, sizes, epochs=5))))
    seen.update(chain.from_iterable(chain.from_iterable(run(loader, [1]))))
    assert seen == dict.fromkeys(range(length), 6)


@WORKERS
def test_weighted_sampler_gives_what_it_drew(workers):
    """Every index that a WeightedRandomSampler draws is trained, as often as it was drawn."""
    sampler = WeightedRandomSampler([0.0] * 10 + [1.0] * 5, 40, generator=torch.Generator().manual_seed(3))
    drawn = list(WeightedRandomSampler([0.0] * 10 + [1.0] * 5, 40, generator=torch.Generator().manual_seed(3)))
    [epoch] = run(make(15, 4, workers, sampler=sampler), [4, 7, 3])
    assert list(chain(*epoch)) == drawn


@WORKERS
def test_subset_sampler_gives_its_subset(workers):
    """A sampler that is shorter than the data set sets the length of the epoch, and caps the batch size."""
    loader = make(100, 4, workers, sampler=SubsetRandomSampler(range(50, 61)))
    [epoch] = run(loader, [4, 5])
    assert [len(batch) for batch in epoch] == [4, 5, 11 - 4 - 5]
    assert sorted(chain(*epoch)) == list(range(50, 61))
    loader.resize(64)
    assert loader.batch_size == 11


class Liar(Sampler):
    """Claims ten indices and gives seven."""

    def __len__(self):
        return 10

    def __iter__(self):
        return iter(range(7))


@WORKERS
def test_sampler_that_lies_about_its_length_is_named(workers):
    """A sampler that gives fewer indices than its length says ends the pass with its name and both numbers."""
    loader = make(10, 4, workers, sampler=Liar())
    with pytest.raises(RuntimeError, match=r"Liar has a length of 10 but gave only 7 indices. Make its __len__"):
        run(loader, [4])
    loader.close()


@pytest.mark.parametrize("tail", ["keep", "carry", "drop"])
@WORKERS
def test_a_look_at_a_batch_leaves_the_pass_alone(workers, tail):
    """``next(iter(loader))`` in the middle of a pass gives a first batch and changes nothing for the pass."""
    loader = make(22, 4, workers, tail=tail)
    run(loader, [4])
    alone = run(make(22, 4, 0, tail=tail), [4], epochs=2)[1]
    going_on = iter(loader)
    seen = [next(going_on).tolist() for _ in range(2)]
    assert 0 in next(iter(loader)).tolist()  # after what is carried, if anything is
    seen += [batch.tolist() for batch in going_on]
    assert seen == alone
    assert len(loader) == len(alone)


@pytest.mark.parametrize("tail", ["keep", "carry", "drop"])
def test_a_look_between_two_passes_loses_nothing(tail):
    """``next(iter(loader))`` between two passes leaves the second as it would have been, a carried rest included."""
    loader = make(22, 4, tail=tail)
    run(loader, [4])
    next(iter(loader))
    assert run(loader, [4]) == run(make(22, 4, tail=tail), [4], epochs=2)[1:]


def test_persistent_workers_serve_every_pass():
    """With persistent workers the processes of the first pass serve the next ones, also one that was left early."""
    loader = make(20, 4, 2, persistent=True)
    before = children()
    assert lengths(run(loader, [4])) == [[4] * 5]
    workers = children() - before
    assert len(workers) == 2
    left_early = iter(loader)
    next(left_early)
    assert lengths(run(loader, [6])) == [[6, 6, 6, 2]]
    assert children() - before == workers
    loader.close()
    assert children() <= before


def test_persistent_workers_have_one_pass_at_a_time():
    """With persistent workers a pass that another one replaced says so, and how to look at a batch instead."""
    loader = make(20, 4, 1, persistent=True)
    replaced = iter(loader)
    next(replaced)
    latest = iter(loader)
    with pytest.raises(RuntimeError, match="one pass at a time: to look at a batch"):
        next(replaced)
    assert next(latest).tolist() == [0, 1, 2, 3]
    loader.close()


@WORKERS
def test_no_worker_is_left_behind(workers):
    """Worker processes end with their pass: when it is over, when its iterator is dropped, when it is closed."""
    loader = make(40, 4, workers)
    before = children()
    over = iter(loader)
    list(over)
    assert children() <= before
    dropped = iter(loader)
    next(dropped)
    assert len(children() - before) == workers
    del dropped
    assert children() <= before
    closed = iter(loader)
    next(closed)
    held = closed.source  # somebody may hold on to the inner iterator, as Lightning does
    loader.close()
    assert children() <= before
    assert held is not None
    assert closed.source is None
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]


@WORKERS
def test_length_counts_batches_handed_out_and_to_come(workers):
    """``len`` is that of a pass that starts now, then of the pass at the size in force, and of the pass it was."""
    loader = make(22, 4, workers)
    assert len(loader) == 6  # 5 · 4 + 2
    batches = iter(loader)
    assert len(loader) == 6
    next(batches)
    assert len(loader) == 6
    loader.resize(9)
    assert len(loader) == 1 + 2  # 4, then 18 = 2 · 9
    next(batches)
    loader.resize(2)
    assert len(loader) == 2 + 4  # 4 + 9, then 9 = 3 · 2 + 3: the single one joins the batch before it
    loader.resize(5)
    assert [len(batch) for batch in batches] == [5, 4]
    assert len(loader) == 4
    del batches
    assert len(loader) == 4 + 1  # a new one: 4 · 5 + 2


@settings(max_examples=200, deadline=None)
@given(SETUPS)
def test_length_is_right_at_every_moment(setup):
    """Before each batch ``len`` is what was handed out and what comes if the size stays; at the end it is the count."""
    loader = make(setup.length, setup.own, drop_last=setup.drop_last, tail=setup.tail)
    batches, handed_out = iter(loader), []
    while True:
        size = setup.sizes[len(handed_out) % len(setup.sizes)]
        loader.resize(size)
        done = len(handed_out)
        asked = [setup.sizes[k % len(setup.sizes)] for k in range(done)] + [size] * (setup.length + 1)
        assert len(loader) == len(expected_sizes(setup.length, setup.own, setup.tail_in_force, asked, 1)[0])
        batch = next(batches, None)
        if batch is None:
            break
        handed_out.append(len(batch))
    assert len(loader) == len(handed_out)


@WORKERS
def test_max_batches_ends_a_pass(workers):
    """A pass has no more batches than its limit, and the next one starts at the beginning."""
    loader = make(40, 4, workers, tail="carry", limits={"max_batches": 3})
    epochs = run(loader, [4, 6], epochs=2)
    assert lengths(epochs) == [[4, 6, 4], [6, 4, 6]]
    assert [epoch[0][0] for epoch in epochs] == [0, 0]
    assert len(make(40, 4, limits={"max_batches": 3})) == 3


@WORKERS
def test_max_samples_ends_a_pass(workers):
    """A pass has no more samples than its limit, whatever the sizes, and no batch is larger than it."""
    loader = make(40, 4, workers, limits={"max_samples": 15})
    epochs = run(loader, [4, 8], epochs=2)
    assert lengths(epochs) == [[4, 8, 15 - 4 - 8], [8, 4, 15 - 8 - 4]]
    assert [list(chain(*epoch)) for epoch in epochs] == [list(range(15))] * 2
    loader.resize(30)
    assert (loader.batch_size, len(loader)) == (15, 1)


class Overlong(Sampler):
    """Claims ten indices and has more; refuses to be asked for more than a batch of them."""

    def __len__(self):
        return 10

    def __iter__(self):
        yield from range(10 + 4)
        raise AssertionError("asked for more than a batch beyond the length")


@pytest.mark.parametrize("tail", ["keep", "drop"])
@WORKERS
def test_sampler_that_never_ends(workers, tail):
    """A sampler that would go on beyond its length, perhaps for ever, is asked for what its length says."""
    [epoch] = run(make(20, 4, workers, sampler=Overlong(), tail=tail), [4])
    assert list(chain(*epoch)) == list(range(10 if tail == "keep" else 8))


class Growing(Sampler):
    """Has four more indices in each epoch."""

    length = 10

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


@WORKERS
def test_sampler_may_change_its_length_between_passes(workers):
    """Each pass has the length that the sampler has when the pass begins."""
    sampler = Growing()
    loader = make(20, 4, workers, sampler=sampler)
    assert lengths(run(loader, [4])) == [[4, 4, 2]]
    sampler.length = 14
    batches = iter(loader)
    assert len(loader) == 4
    assert [len(batch) for batch in batches] == [4, 4, 4, 2]
    sampler.length = 3
    assert lengths(run(loader, [4])) == [[3]]


#: Floats of a sample, of which a few are more than what a worker sends by value.
WIDE = SMALL // 8


@WORKERS
def test_nothing_is_copied_at_a_constant_size(workers):
    """At a constant size every batch is the very block that was fetched: its memory holds it and no more."""
    features = torch.arange(20 * WIDE).reshape(20, WIDE)
    loader = ElasticLoader(DataLoader(TensorDataset(features), batch_size=4, num_workers=workers))
    batches = [batch for [batch] in loader]
    assert torch.equal(torch.cat(batches), features)
    assert all(batch.untyped_storage().nbytes() == batch.nbytes for batch in batches)
    # A block as large as this comes from a worker in shared memory; a copy of it would not be there.
    assert all(batch.is_shared() == (workers > 0) for batch in batches)


def test_blocks_fall_on_batch_borders_again_after_a_change():
    """After a change of size only the blocks that were in flight are cut; then batches are whole blocks again."""
    features = torch.arange(200.0)[:, None].expand(200, WIDE)
    loader = ElasticLoader(DataLoader(TensorDataset(features), batch_size=4, num_workers=2))
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    loader.resize(6)
    whole = [b.is_shared() and b.untyped_storage().nbytes() == b.nbytes for [b] in batches]
    assert len(whole) == 30  # 200 = 5 · 4 + 30 · 6
    assert not whole[0]
    assert all(whole[4:])  # four blocks of 4 were in flight, three batches of 6 less 2


@WORKERS
def test_empty_epoch_has_no_batch(workers):
    """A sampler without indices gives an epoch without batches."""
    loader = make(10, 4, workers, sampler=SubsetRandomSampler([]))
    assert (len(loader), list(loader)) == (0, [])


def test_nominal_length_is_that_of_the_users_loader():
    """While ``nominal``, ``len`` ignores the size in force; and it has a batch even where all would be dropped."""
    for drop_last, own, length in [(False, 4, 6), (True, 4, 5), (True, 30, 1)]:
        loader = make(22, own, drop_last=drop_last)
        loader.resize(2)
        loader.nominal = True
        assert len(loader) == length


def test_settings_are_those_of_the_users_loader():
    """A loader shows the user's settings, with a batch sampler of the size in force, and leaves the user's alone."""
    user = DataLoader(range(22), batch_size=4, drop_last=True, timeout=0)
    loader = ElasticLoader(user)
    loader.resize(7)
    assert (loader.batch_size, loader.own_batch_size, user.batch_size) == (7, 4, 4)
    assert type(loader.batch_sampler) is BatchSampler
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (7, True)
    assert loader.sampler is user.sampler
    assert loader.timeout == 0
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = loader.colour


def test_a_loader_let_go_is_gone():
    """Nothing holds a loader but its owner: its workers end with the last reference, not at some collection."""
    loader = ElasticLoader(DataLoader(range(8), 2, num_workers=1, persistent_workers=True))
    begun = iter(loader)
    next(begun)
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del begun, loader
        assert gone() is None
    finally:
        gc.enable()
