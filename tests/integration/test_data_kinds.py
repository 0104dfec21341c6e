# SPDX-License-Identifier: Apache-2.0
"""What stands behind a DataLoader: samplers, collate functions, workers, subclasses, and too little data."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, adapt, fit, loader
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, WeightedRandomSampler

SCRIPT = [4, 9, 3, 16]
SIZES = [4, 9, 3, 7]  # of 23 samples in the first epoch; then 16 and 7


# Samplers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_weighted_sampling_survives(workers, tmp_path):
    """C42: 90/10 classes weighted to halves stay halves; the sampler is the user's, and draws ``num_samples``."""
    rare = torch.arange(1000) >= 900
    sampler = WeightedRandomSampler(torch.where(rare, 1 / 100, 1 / 900).double(), 800)
    samplers = []

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            samplers.append(self.trainer.train_dataloader.sampler)
            return super().training_step(batch, batch_idx)

    module, ours = Net(), adapt(20, 30, 7, 50, 41)
    torch.manual_seed(0)
    fit(module, DataLoader(Indexed(1000), 20, sampler=sampler, num_workers=workers), callbacks=[ours], root=tmp_path)
    for epoch in range(2):
        drawn = module.seen_in(epoch)
        assert sum(drawn.values()) == 800
        assert sum(times for index, times in drawn.items() if rare[index]) / 800 == pytest.approx(0.5, abs=0.05)
    assert all(one is sampler for one in samplers)
    assert ours.epochs == 2.0
    assert module.sizes[:5] == [20, 30, 7, 50, 41]


def test_subset_sampler(tmp_path):
    """A SubsetRandomSampler sets the length of the epoch, and nothing outside of it is ever trained."""
    subset = list(range(0, 46, 2))
    module, ours = Recorder(), adapt(*SCRIPT)
    fit(module, DataLoader(Indexed(46), 4, sampler=SubsetRandomSampler(subset)), callbacks=[ours], root=tmp_path)
    assert module.sizes == [*SIZES, 16, 7]
    assert module.seen_in(0) == module.seen_in(1) == Counter(subset)
    assert ours.epochs == 2.0


# Collate functions ----------------------------------------------------------------------------------------


class Sentences(Dataset):
    """Samples of unequal length, as dicts of a string, a tensor, and an object of their own."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int):
        return {"name": f"sentence {index}", "words": torch.full((1 + index % 5,), index), "tags": {index, -1}}


def pad(rows):
    words = pad_sequence([row["words"] for row in rows], batch_first=True, padding_value=-7)
    return {"name": [row["name"] for row in rows], "words": words, "tags": [row["tags"] for row in rows]}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_padding(workers, tmp_path):
    """C45: samples are collated after the cut: each batch is padded to its own longest sample, dicts stay in order."""

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            index = batch["words"][:, 0]
            rows = [Sentences()[i] for i in index.tolist()]
            expected = pad(rows)
            assert (batch["name"], batch["tags"]) == (expected["name"], expected["tags"])
            assert torch.equal(batch["words"], expected["words"])
            return super().training_step((torch.randn(len(index), 4), index % 2, index), batch_idx)

    module = Net()
    train = DataLoader(Sentences(), 4, shuffle=True, collate_fn=pad, num_workers=workers)
    fit(module, train, callbacks=[adapt(*SCRIPT)], root=tmp_path)
    assert module.sizes == [*SIZES, 16, 7]
    assert module.seen_in(0) == module.seen_in(1) == Counter(range(23))


class Graphs:
    """A batch that is no tensor and no container, as graph libraries have it."""

    def __init__(self, rows) -> None:
        self.rows = rows
        self.num_graphs = len(rows)


class GraphLoader(DataLoader):
    """Passes its settings through, and has a collate function and an attribute of its own."""

    def __init__(self, dataset, batch_size=1, follow=(), **kwargs) -> None:
        self.follow = follow
        super().__init__(dataset, batch_size, collate_fn=Graphs, **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
def test_subclass_with_a_collate_function_of_its_own(workers, tmp_path):
    """C45: a subclass that passes through keeps its collate function and attributes: graph batches of the new size."""
    graphs, followed = [], set()

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            graphs.append(batch.num_graphs)
            followed.add(self.trainer.train_dataloader.follow)
            x, y, index = (torch.stack([torch.as_tensor(row[k]) for row in batch.rows]) for k in range(3))
            return super().training_step((x, y, index), batch_idx)

    module = Net()
    train = GraphLoader(Indexed(23), 4, follow="x", num_workers=workers)
    fit(module, train, loader(8, 8), callbacks=[adapt(*SCRIPT)], root=tmp_path)
    assert graphs == module.sizes == [*SIZES, 16, 7]
    assert followed == {"x"}
    assert module.validations == [4, 6]


# Settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"pin_memory": True},
        {"pin_memory": True, "num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        {"num_workers": 1, "timeout": 30},
        {"generator": torch.Generator().manual_seed(3), "shuffle": True},
    ],
    ids="-".join,
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_settings_of_the_loader(settings, tmp_path):
    """Whatever the settings, sizes are exact and every sample is seen once; pinning without a device only warns."""
    module = Recorder()
    fit(module, loader(23, 4, **settings), callbacks=[adapt(*SCRIPT)], root=tmp_path)
    assert module.sizes == [*SIZES, 16, 7]
    assert module.seen_in(0) == module.seen_in(1) == Counter(range(23))


def to_come(left, size, before, drop_last):
    """Return how many batches of a size there are in what is left of an epoch."""
    if drop_last:
        return left // (size if size <= left else before)
    joins = left % size == 1 and left > size != 8  # a leftover of one joins the batch before, but at the own size
    return -(-left // size) - joins


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_the_loader_says_of_itself(drop_last, tmp_path):
    """C48: in every step batch_size is the size in force, and len, as the Trainer's, is delivered plus to come."""
    said = []

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            train, trainer = self.trainer.train_dataloader, self.trainer
            assert len(train) == trainer.num_training_batches
            said.append((batch_idx + 1, train.batch_size, len(train)))
            return super().training_step(batch, batch_idx)

    module, script = Net(), [8, 20, 3, 11, 11, 40, 5, 5, 17]
    train = loader(103, 8, shuffle=True, drop_last=drop_last)
    fit(module, train, callbacks=[adapt(*script)], epochs=3, root=tmp_path)
    assert [size for _, size, _ in said] == (script + [17] * 20)[: len(said)]
    left = 0
    for (done, size, length), batch in zip(said, module.batches, strict=True):
        left = (103 if done == 1 else left) - batch.size
        assert length == done + to_come(left, size, batch.size, drop_last)
        assert batch.last == (length == done)
        assert batch.size in {size, size + 1} or batch.last or drop_last


# Too little -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_data_smaller_than_the_batch(samples, drop_last, tmp_path):
    """Data that fill no batch are one batch, in every epoch, also where the loader itself would have none."""
    module, ours = Recorder(), adapt(4, 9)
    trainer = fit(module, loader(samples, 4, drop_last=drop_last), loader(8, 8), callbacks=[ours], root=tmp_path)
    assert module.sizes == [samples, samples]
    assert module.validations == [1, 2]
    assert (ours.batch_size, trainer.num_training_batches) == (samples, 1)


class Own:
    """Yields one batch more than it has, and resets itself where it ends."""

    def __init__(self) -> None:
        self.left = 3

    def __iter__(self):
        return self

    def __next__(self):
        self.left -= 1
        if self.left < 0:
            self.left = 3
            raise StopIteration
        return next(iter(loader(4, 4)))


def test_a_sample_that_raises_stop_iteration(tmp_path):
    """It would pass for the end of the epoch, samples before its end: whose fault it is most likely is said."""

    class Ends(Indexed):
        def __getitem__(self, index):
            if index == 5:
                raise StopIteration
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match=r"raised StopIteration, most likely the data set's __getitem__"):
        fit(Recorder(), DataLoader(Ends(12), 4), callbacks=[adapt(4, 8)], root=tmp_path)


@pytest.mark.parametrize(
    ("train", "name"),
    [
        (lambda: (batch for batch in loader(8, 4)), "the train loader generator: it cannot change the batch size"),
        (Own, "the train loader Own: it cannot change the batch size"),
        (list, "the train loader list: it cannot change the batch size"),
        (lambda: loader(0, 4), "an empty Indexed: there is nothing to train on"),
        (lambda: DataLoader([], 4), "an empty list: there is nothing to train on"),
    ],
    ids=["generator", "own", "empty list", "empty data", "no data"],
)
@pytest.mark.filterwarnings("ignore:Total length of")
def test_foreign_and_empty_loaders(train, name, tmp_path):
    """C83: what is no DataLoader, and one that has nothing to give, is refused before the first batch by its name."""
    module = Recorder()
    with pytest.raises(MisconfigurationException, match=rf"AdaptiveBatchSize does not support {name}.*What to do: "):
        fit(module, train(), callbacks=[adapt(4, 8)], root=tmp_path)
    assert module.batches == []


def test_own_loader_with_adapt_lr_keeps_its_epochs(tmp_path):
    """C83: a DataLoader that iterates in its own way is left alone with adapt="lr": no epoch is skipped."""

    class Own(DataLoader):
        def __iter__(self):
            yield from super().__iter__()

    module = Recorder()
    fit(module, Own(Indexed(12), 4), callbacks=[adapt(4, 8, adapt="lr")], epochs=3, root=tmp_path)
    assert [module.sizes_in(epoch) for epoch in range(3)] == [[4, 4, 4]] * 3
    assert [batch.lr for batch in module.batches] == [0.1] + [0.05] * 8
