# SPDX-License-Identifier: Apache-2.0
"""Set-ups of streams, batch samplers and several loaders that are rare, each by itself."""

from __future__ import annotations

import random

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from models import Indexed, Recorder, Stated, Streamed, adapt, fit, loader, quiet
from resuming import Cut, Separable, Setup, assert_goes_on, resume, run
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_adabatch import AdaptiveBatchSize, Constant, GeoDamp
from lightning_adabatch.loader import ElasticLoader, lost

CUT = Cut("train_batch_end", 1, 2)


class Groups:
    """Groups of what a sampler gives; its size is read for each."""

    def __init__(self, sampler, batch_size=4):
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self):
        order = list(self.sampler)
        while order:
            group, order = order[: self.batch_size], order[self.batch_size :]
            yield group


class Half(Groups):
    """Gives half of the data, without saying so."""

    def __init__(self, samples, batch_size=4):
        self.samples, self.batch_size = samples, batch_size

    def __iter__(self):
        self.sampler = range(self.samples // 2)
        yield from super().__iter__()
        del self.sampler


class Pairs(Recorder):
    """Trains on the first loader's part of each batch."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx) if batch["a"] is not None else self.net.weight.sum() * 0


@pytest.mark.parametrize(
    "train",
    [
        lambda: DataLoader(Streamed(40), 4),
        lambda: DataLoader(Indexed(40), batch_sampler=Groups(range(40))),
        lambda: loader(40, 4, shuffle=True),
    ],
)
def test_place_that_is_lost_is_the_beginning(train):
    """Whatever the kind of data, a place marked as lost is that of a pass that has not begun."""
    first = iter(ElasticLoader(train()))
    for _ in range(3):
        next(first)
    again = ElasticLoader(train())
    again.place_at(lost(first.state_dict(at_mark=False)))
    begun = iter(again)
    assert again.lost_place
    assert begun.plan.consumed == 0


class Buffered(IterableDataset):
    """A shuffle buffer that draws from torch's global generator while it runs."""

    def __init__(self):
        self.data = Separable()

    def __iter__(self):
        buffer = []
        for index in range(len(self.data)):
            buffer.append(index)
            if len(buffer) > 8:
                yield self.data[buffer.pop(int(torch.randint(len(buffer), ())))]
        random.Random(0).shuffle(buffer)
        yield from (self.data[index] for index in buffer)


def test_stream_that_cannot_be_begun_again(tmp_path):
    """One that draws from the generator that the model draws from has another order then: said, and begun again."""
    setup = Setup(lambda: adapt(4, 8, 5, max_batch_size=64), lambda: DataLoader(Buffered(), 4))
    run(setup, tmp_path, [CUT])
    with pytest.warns(UserWarning, match="cannot be made again with Buffered"):
        resumed = resume(setup, tmp_path / f"{CUT}.ckpt", tmp_path)
    assert sorted(index for step in resumed.steps if step.epoch == 1 for index in step.indices) == list(range(50))


def test_groups_of_a_sampler_that_is_told_the_epoch(tmp_path):
    """The epoch that a sampler shuffles for comes back on resume."""

    def train():
        data = Separable()
        return DataLoader(data, batch_sampler=Groups(DistributedSampler(data, num_replicas=1, rank=0)))

    setup = Setup(lambda: adapt(4, 8, 5, max_batch_size=64), train)
    uncut = run(setup, tmp_path, [CUT])
    assert_goes_on(uncut, resume(setup, tmp_path / f"{CUT}.ckpt", tmp_path), uncut.marks[CUT])


class Counts(Groups):
    """Has another order at each of its passes, of which it keeps count."""

    def __init__(self, samples, batch_size=4):
        super().__init__(range(samples), batch_size)
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        self.sampler = random.Random(self.passes).sample(range(50), 50)
        return super().__iter__()


def test_groups_of_another_order(tmp_path):
    """A batch sampler whose order is another in a new process: said, and the epoch begins again."""
    setup = Setup(lambda: adapt(4, 8, 5, max_batch_size=64), lambda: DataLoader(Separable(), batch_sampler=Counts(50)))
    run(setup, tmp_path, [CUT])
    with pytest.warns(UserWarning, match="cannot be made again with Counts: the epoch begins again, with all of its"):
        resumed = resume(setup, tmp_path / f"{CUT}.ckpt", tmp_path)
    assert sorted(index for step in resumed.steps if step.epoch == 1 for index in step.indices) == list(range(50))


def test_another_order_of_so_many_batches(tmp_path):
    """With an int limit_train_batches the epoch has the batches that it had left, and that is what is said."""
    limited = {"trainer": {"limit_train_batches": 5}}
    setup = Setup(
        lambda: adapt(4, 8, 5, max_batch_size=64), lambda: DataLoader(Separable(), batch_sampler=Counts(50)), **limited
    )
    run(setup, tmp_path, [CUT])
    with pytest.warns(UserWarning, match="with Counts: the epoch ends after as many batches as it had left, of an"):
        resumed = resume(setup, tmp_path / f"{CUT}.ckpt", tmp_path)
    assert len([step for step in resumed.steps if step.epoch == 1]) == 5 - CUT.number - 1


@pytest.mark.parametrize(
    ("a", "b", "sizes"), [((100, True), (100, False), (10, 30)), ((101, False), (110, False), (10, 20))]
)
def test_first_loader_that_ends_early_in_mid_run(a, b, sizes, tmp_path):
    """What was accepted at the start is not refused later: the first loader gives None where it has ended."""
    train = {"a": loader(a[0], 10, drop_last=a[1]), "b": loader(b[0], 10, drop_last=b[1])}
    module, ours = Pairs(), adapt(*sizes)
    fit(module, CombinedLoader(train, "max_size"), loader(8, 8), callbacks=[ours], epochs=3, root=tmp_path)
    assert ours.samples == sum(module.sizes)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("flags", [{"limit_train_batches": 0.5, "val_check_interval": 0.5}, {"overfit_batches": 2}])
def test_share_of_a_stated_length(flags, tmp_path):
    """At a constant size totals and validations are those of the run without the callback."""
    runs = []
    for ours in ([], [AdaptiveBatchSize(Constant(), max_batch_size=4)]):
        module = Recorder()
        train = DataLoader(Stated(48, 48), 4)
        fit(module, train, loader(8, 8), callbacks=ours, root=tmp_path, num_sanity_val_steps=0, **flags)
        runs.append(([batch.planned for batch in module.batches], module.validations, module.sizes))
    assert runs[0] == runs[1]


def test_fraction_where_the_first_loader_is_cycled(tmp_path):
    """At a constant size validation comes at Lightning's points: the longest loader's data are what is divided."""
    runs = []
    for ours in ([], [AdaptiveBatchSize(Constant())]):
        module = Pairs()
        train = {"a": loader(10, 4), "b": loader(96, 4)}
        flags = {"val_check_interval": 0.25, "epochs": 1, "num_sanity_val_steps": 0}
        fit(module, train, loader(8, 8), callbacks=ours, root=tmp_path, **flags)
        runs.append(module.validations)
    assert runs[0] == runs[1] == [6, 12, 18, 24]


@pytest.mark.parametrize("plain", [True, False])
def test_adapt_lr_knows_the_length_behind_a_batch_sampler(plain, tmp_path):
    """A rule that counts in epochs works with any batch sampler over data with a length."""
    data = Indexed(40)
    batches = BatchSampler(RandomSampler(data), 4, drop_last=False) if plain else Groups(range(40))
    ours = AdaptiveBatchSize(GeoDamp(2, 1), adapt="lr")
    fit(Recorder(), DataLoader(data, batch_sampler=batches), callbacks=[ours], epochs=2, root=tmp_path)
    assert (ours.epochs, ours.lr_factor) == (2.0, 0.25)


def test_batch_that_is_none_between_windows(tmp_path):
    """It is in no window, and no sample of it is counted."""

    class Gaps(IterableDataset):
        def __iter__(self):
            data = Indexed(24)
            for start in range(0, 24, 4):
                rows = torch.arange(start, start + 4)
                yield data.x[rows], data.y[rows], rows
                if start == 4:
                    yield None

    module, ours = Recorder(), adapt(8, 8, adapt="lr")
    train = DataLoader(Gaps(), batch_size=None)
    with pytest.warns(UserWarning, match="yielded None"):
        fit(module, train, callbacks=[ours], epochs=1, root=tmp_path, accumulate_grad_batches=2)
    assert ours.samples <= 24


def test_more_loaders_than_before(tmp_path):
    """A checkpoint of one loader goes on with two from the epoch's beginning, and that is said."""
    cut = Cut("train_batch_end", 0, 2)

    def first():
        return loader(40, 4)

    run(Setup(lambda: adapt(4, 8), first), tmp_path, [cut])
    module = Pairs()
    with pytest.warns(UserWarning, match="the epoch begins again"):
        fit_from(module, {"a": loader(40, 4), "b": loader(40, 4)}, tmp_path / f"{cut}.ckpt", tmp_path)
    assert sorted(module.seen_in(0).elements()) == list(range(40))


def fit_from(module, train, path, root):
    trainer = quiet([adapt(4, 8)], epochs=1, root=root)
    weights = torch.load(path, weights_only=True)
    weights["state_dict"] = module.state_dict()
    weights["optimizer_states"] = [torch.optim.SGD(module.parameters(), 0.1).state_dict()]
    torch.save(weights, path)
    trainer.fit(module, train, ckpt_path=path)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_with_groups(tmp_path):
    """The samples are fixed, whatever the size of the groups."""
    module = Recorder()
    train = DataLoader(Indexed(40), batch_sampler=Groups(range(40)))
    fit(module, train, callbacks=[adapt(4, 8, 5)], epochs=3, root=tmp_path, overfit_batches=2)
    for epoch in range(3):
        assert sorted(module.seen_in(epoch).elements()) == list(range(8))


@pytest.mark.filterwarnings("ignore:Half gave 30 samples of 60")
def test_groups_that_end_early(tmp_path):
    """From the second epoch on the last batch is told, for the length of the data is known not to hold."""
    module = Recorder()
    train = DataLoader(Indexed(60), batch_sampler=Half(60))
    fit(module, train, loader(8, 8), callbacks=[adapt(4, 6)], epochs=3, root=tmp_path, num_sanity_val_steps=0)
    ends = [sum(batch.epoch <= epoch for batch in module.batches) for epoch in range(3)]
    assert module.validations == ends
    assert [number for number, batch in enumerate(module.batches, 1) if batch.last][-2:] == ends[1:]


def test_length_of_a_batch_sampler_is_asked_once_for_each_size(tmp_path):
    """Asking may make all batches, and draw at random: it leaves no trace."""
    asked = []

    class Asked(Groups):
        def __len__(self):
            asked.append(self.batch_size)
            torch.rand(3)
            return len(range(0, 40, self.batch_size))

    train = DataLoader(Indexed(40), batch_sampler=Asked(range(40)))
    fit(Recorder(), train, callbacks=[AdaptiveBatchSize(Constant())], epochs=3, root=tmp_path)
    assert asked.count(4) <= 3


@pytest.mark.parametrize("workers", [0, 2])
def test_out_of_memory_after_a_resume_in_mid_epoch(workers, tmp_path):
    """An update that does not fit is divided there too."""

    class Small(Recorder):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
            return super().training_step(batch, batch_idx)

    path = tmp_path / "cut.ckpt"
    trainer = quiet([adapt(4, 4, 10)], epochs=1, root=tmp_path, max_steps=2)
    trainer.fit(Small(), loader(50, 4, num_workers=workers))
    trainer.save_checkpoint(path)
    module = Small()
    with pytest.warns(UserWarning, match="10 samples in one forward and backward pass do not fit"):
        quiet([adapt(4, 4, 10)], epochs=1, root=tmp_path).fit(
            module, loader(50, 4, num_workers=workers), ckpt_path=path
        )
    assert max(module.sizes) == 5
    assert sorted(module.seen_in(0).elements()) == list(range(8, 50))
