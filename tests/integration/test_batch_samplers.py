# SPDX-License-Identifier: Apache-2.0
"""Batch samplers of the user's own with a batch_size that can be set: what they yield is trained and logged."""

from __future__ import annotations

import random
import warnings
from collections import deque

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, adapt, fit, loader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_adabatch import AdaptiveBatchSize, Constant


class Buckets:
    """Batches of samples of one bucket; what a bucket does not fill is a smaller batch."""

    def __init__(self, samples: int, buckets: int, batch_size: int, *, sized: bool = True) -> None:
        self.samples, self.buckets, self.batch_size = samples, buckets, batch_size
        if not sized:
            self.__class__ = _UnsizedBuckets

    def __iter__(self):
        for bucket in range(self.buckets):
            members = list(range(bucket, self.samples, self.buckets))
            while members:
                batch, members = members[: self.batch_size], members[self.batch_size :]
                yield batch

    def __len__(self):
        lengths = [len(range(bucket, self.samples, self.buckets)) for bucket in range(self.buckets)]
        return sum(-(-length // self.batch_size) for length in lengths)


class _UnsizedBuckets(Buckets):
    __len__ = None


class Tokens:
    """Batches of at most ``batch_size`` x 10 tokens; sample i has 1 + i % 10 of them."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def __iter__(self):
        batch: list[int] = []
        for index in range(self.samples):
            if sum(1 + i % 10 for i in [*batch, index]) > 10 * self.batch_size:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def train(module, sampler, *sizes, workers=0, validation=True, **kwargs):
    """Fit under a script of sizes; return the callback and the Trainer."""
    settings = {"num_sanity_val_steps": 0, "epochs": 2, **kwargs}
    ours = settings.pop("ours", None) or adapt(*sizes, max_batch_size=64)
    data = DataLoader(Indexed(60), batch_sampler=sampler, num_workers=workers)
    trainer = fit(module, data, loader(8, 8) if validation else None, callbacks=[ours], **settings)
    return ours, trainer


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("sizes", [(4, 16), (4, 8, 3), (4, 5, 6, 7, 8, 9), (4, 2)])
def test_all_that_it_yields_is_trained_and_counted(sizes, sized, workers, tmp_path):
    """Every sample once per epoch, one validation after each, and counts of what was really trained."""
    module = Recorder()
    ours, trainer = train(module, Buckets(60, 3, 4, sized=sized), *sizes, workers=workers, root=tmp_path)
    for epoch in range(2):
        assert sorted(module.seen_in(epoch).elements()) == list(range(60))
    ends = [len(module.sizes_in(0)), len(module.sizes)]
    assert module.validations == ends
    assert [number for number, batch in enumerate(module.batches, 1) if batch.last] == ends
    assert (ours.updates, ours.samples, ours.epochs) == (ends[1], 120, 2.0)
    assert trainer.num_training_batches == ends[1] - ends[0]
    assert max(module.sizes) == max(sizes)
    if workers == 0:
        # Decided for the next batch; near the end of an epoch it is asked for one batch ahead.
        wanted = [sizes[min(number, len(sizes) - 1)] for number in range(ends[0])]
        asked = [size for size, want in zip(module.sizes_in(0), wanted, strict=True) if size <= want]
        assert len(asked) == len(wanted)
        assert module.sizes[:2] == list(sizes[:2])


def test_constant_size_is_a_plain_run(tmp_path):
    """With the size it has, the batches, weights and validations are those of a run without the callback."""
    plain, module = Recorder(), Recorder()
    flags = {"val_check_interval": 0.5, "root": tmp_path, "num_sanity_val_steps": 0}
    fit(plain, DataLoader(Indexed(60), batch_sampler=Buckets(60, 3, 4)), loader(8, 8), **flags)
    train(module, Buckets(60, 3, 4), ours=AdaptiveBatchSize(Constant()), val_check_interval=0.5, root=tmp_path)
    assert module.batches == plain.batches
    assert module.validations == plain.validations
    assert torch.equal(module.net.weight, plain.net.weight)


def test_budget_of_tokens(tmp_path):
    """C77: batches filled up to a budget follow it, and all samples are seen."""
    module = Recorder()
    ours, _ = train(module, Tokens(60, 4), 4, 8, 12, root=tmp_path)
    for epoch in range(2):
        assert sorted(module.seen_in(epoch).elements()) == list(range(60))
    tokens = [sum(1 + index % 10 for index in batch.indices) for batch in module.batches]
    assert tokens[0] <= 40 < tokens[1] <= 80 < tokens[2] <= 120
    assert max(tokens) <= 120
    assert ours.samples == 120


def test_micro_batches(tmp_path):
    """A group of more than fits on a device is trained in parts, in one update."""
    module = Recorder()
    ours = adapt(4, 10, max_batch_size=64, max_device_batch_size=6)
    ours, trainer = train(module, Buckets(60, 3, 4), ours=ours, epochs=1, root=tmp_path)
    assert module.sizes[:5] == [4, 5, 5, 6, 5][: len(module.sizes[:5])]
    assert trainer.global_step == ours.updates < len(module.batches)
    assert sorted(module.seen_in(0).elements()) == list(range(60))


def test_size_is_given_back(tmp_path):
    """After the fit, also one that ends in an exception, the batch sampler has its own size again."""

    class Fails(Recorder):
        def training_step(self, batch, batch_idx):
            if len(self.batches) == 3:
                raise RuntimeError("as told")
            return super().training_step(batch, batch_idx)

    for module in (Recorder(), Fails()):
        sampler = Buckets(60, 3, 4)
        try:
            train(module, sampler, 4, 8, root=tmp_path)
        except RuntimeError as error:
            assert str(error) == "as told"  # noqa: PT017
        assert sampler.batch_size == 4


def test_size_is_given_back_after_reloads(tmp_path):
    """A loader that is made anew from the same batch sampler finds it as it was, and the size in force goes on."""
    module, sampler = Recorder(), Buckets(60, 3, 4)
    train(module, sampler, 4, 10, reload_dataloaders_every_n_epochs=1, epochs=3, root=tmp_path)
    assert sampler.batch_size == 4
    assert module.sizes_in(1) == module.sizes_in(2) == [10] * 6


@pytest.mark.parametrize("limit", [3, 0.5])
def test_limits(limit, tmp_path):
    """An int limits the batches; a share ends the epoch with the group that reaches it."""
    module = Recorder()
    train(module, Buckets(60, 3, 4), 4, 6, limit_train_batches=limit, epochs=1, root=tmp_path)
    assert len(module.sizes) == 3 if limit == 3 else 28 <= sum(module.sizes) < 28 + 6
    assert module.validations == [len(module.sizes)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_share_of_what_a_batch_sampler_yields(drop_last, tmp_path):
    """Whether it drops an incomplete batch only its length says: a share is that of a run without the callback."""

    class Own(BatchSampler):
        def __iter__(self):
            left = list(self.sampler)
            while len(left) >= (self.batch_size if self.drop_last else 1):
                batch, left = left[: self.batch_size], left[self.batch_size :]
                yield batch

    runs = []
    for callbacks in ([], [AdaptiveBatchSize(Constant())]):
        module, data = Recorder(), Indexed(37)
        train_loader = DataLoader(data, batch_sampler=Own(SequentialSampler(data), 4, drop_last))
        fit(module, train_loader, callbacks=callbacks, limit_train_batches=0.5, root=tmp_path)
        runs.append([batch.indices for batch in module.batches])
    assert runs[0] == runs[1]
    assert len(runs[0]) == 2 * (4 if drop_last else 5)


@pytest.mark.parametrize(("sampler", "whole"), [(Buckets(80, 16, 8), 8), (Tokens(80, 5), 5)], ids=["buckets", "tokens"])
def test_a_share_of_batches_of_any_size(sampler, whole, tmp_path):
    """Batches that are not full, or whose size is not in samples: half of them, give or take one."""
    module = Recorder()
    data = DataLoader(Indexed(80), batch_sampler=sampler)
    if isinstance(sampler, Tokens):
        Tokens.__len__ = lambda self: sum(1 for _ in self)
    try:
        fit(module, data, callbacks=[AdaptiveBatchSize(Constant())], epochs=1, limit_train_batches=0.5, root=tmp_path)
        length = len(sampler)
    finally:
        if isinstance(sampler, Tokens):
            del Tokens.__len__
    assert abs(len(module.batches) - length // 2) <= 1
    assert len(module.batches) == whole or isinstance(sampler, Tokens)


def test_plain_batch_sampler_counts_as_its_sampler(tmp_path):
    """A BatchSampler, and a subclass that does not group in another way, are exact as a plain loader is."""

    class WithKeyword(BatchSampler):
        def __init__(self, sampler, batch_size, drop_last, more=None):
            super().__init__(sampler, batch_size, drop_last)
            self.more = more

    module = Recorder()
    train(module, WithKeyword(SequentialSampler(range(60)), 4, drop_last=False, more=1), 4, 16, 8, root=tmp_path)
    assert module.sizes_in(0) == [4, 16, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("tail", ["keep", "carry", "drop"])
def test_tail_is_refused(tail, tmp_path):
    """What becomes of the rest is for the batch sampler to say."""
    module = Recorder()
    with pytest.raises(MisconfigurationException, match=f"tail='{tail}' with the batch sampler Buckets.* remove tail"):
        train(module, Buckets(60, 3, 4), ours=adapt(4, 8, tail=tail), root=tmp_path)
    assert module.batches == []


def test_batch_sampler_that_takes_its_size_for_constant(tmp_path):
    """One that loses samples when its size changes is named at the epoch's end, with what to do."""

    class Strides(Buckets):
        def __iter__(self):
            for start in range(0, self.samples, self.batch_size):
                yield list(range(start, min(start + self.batch_size, self.samples)))

    module = Recorder()
    with pytest.warns(UserWarning, match=r"Strides gave .* of 60 in an epoch in which .*batch_size once for each"):
        train(module, Strides(60, 1, 4), 4, 3, epochs=1, root=tmp_path)
    assert sum(module.sizes) < 60


@pytest.mark.parametrize("sized", [True, False], ids=["plain grouping", "own grouping"])
def test_users_reach_their_own_batch_sampler(sized, tmp_path):
    """A hook that tells it the epoch finds it where a DataLoader has it."""

    class Told(BatchSampler if sized else Buckets):
        told = ()

        def set_epoch(self, epoch):
            self.told = (*self.told, epoch)

    class Tells(Recorder):
        def on_train_epoch_start(self):
            self.trainer.train_dataloader.batch_sampler.set_epoch(self.current_epoch)

    sampler = Told(SequentialSampler(range(60)), 4, False) if sized else Told(60, 1, 4)
    train(Tells(), sampler, 4, 8, root=tmp_path)
    assert set(sampler.told) == {0, 1}


class Balanced(torch.utils.data.Sampler):
    """Lays out its indices for batches of eight: two of each class, say."""

    batch_size = 8

    def __iter__(self):
        return iter(range(60))

    def __len__(self):
        return 60


@pytest.mark.parametrize(("policy", "multiple_of", "said"), [(None, 1, 1), (None, 8, 0), (Constant(), 1, 0)])
def test_a_sampler_that_lays_out_batches_is_named(policy, multiple_of, said, tmp_path):
    """Other batch sizes cut its groups, which nobody else can know."""
    ours = AdaptiveBatchSize(policy, max_batch_size=16, multiple_of=multiple_of)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Recorder(), DataLoader(Indexed(60), 8, sampler=Balanced()), callbacks=[ours], epochs=1, root=tmp_path)
    found = [str(one.message) for one in caught if "Balanced has a batch_size of its own, 8" in str(one.message)]
    assert len(found) == said
    assert all("Set multiple_of=8" in message for message in found)


class Shuffled(Buckets):
    """Draws from a generator of its own, of any kind, and takes its samples off a queue that is filled once."""

    def __init__(self, generator):
        super().__init__(60, 1, 4)
        self.generator = generator
        self.queue = deque(range(60))

    def __iter__(self):
        while self.queue:
            batch = [self.queue.popleft() for _ in range(min(self.batch_size, len(self.queue)))]
            drawn = (
                self.generator.random()
                if hasattr(self.generator, "random")
                else torch.rand(1, generator=self.generator)
            )
            yield batch if drawn < 0.5 else batch[::-1]

    def __len__(self):
        return 15


class Drawn(BatchSampler):
    """Groups what its sampler draws in a way of its own."""

    def __iter__(self):
        yield from super().__iter__()


GENERATORS = {
    "torch": lambda: Shuffled(torch.Generator().manual_seed(0)),
    "random": lambda: Shuffled(random.Random(0)),
    "numpy": lambda: Shuffled(np.random.default_rng(0)),
    "of its sampler": lambda: Drawn(RandomSampler(range(60), generator=torch.Generator().manual_seed(0)), 4, False),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_asking_a_batch_sampler_leaves_no_trace(name, tmp_path):
    """Whether it follows its size is seen on a copy: generators and queues are as they were."""
    runs = []
    for callbacks in ([], [AdaptiveBatchSize(Constant())]):
        module = Recorder()
        data = DataLoader(Indexed(60), batch_sampler=GENERATORS[name]())
        fit(module, data, callbacks=callbacks, epochs=1, root=tmp_path)
        runs.append([batch.indices for batch in module.batches])
    assert runs[1] == runs[0]
    assert sorted(index for batch in runs[1] for index in batch) == list(range(60))
