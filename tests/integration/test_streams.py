# SPDX-License-Identifier: Apache-2.0
"""Iterable data sets and samplers without a length: exact sizes, every sample once, all of Lightning's counts."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Recorder, Stated, Streamed, adapt, fit, loader
from torch.utils.data import DataLoader, default_collate

from lightning_adabatch import AdaptiveBatchSize, Constant, GeoDamp, Policy, RadaDamp, Schedule

STATED = "ignore:Your `IterableDataset` has `__len__` defined"


class Endless:
    """A sampler that nobody can ask how much it gives."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(range(self.samples))


def expected_sizes(samples: int, wanted: list[int], own: int, tail: str, start: int = 0) -> list[int]:
    """Return the sizes of an epoch's batches, the n-th of which is wanted to have ``wanted[n]``, by hand."""
    sizes: list[int] = []
    left = samples
    while left:
        size = wanted[min(start + len(sizes), len(wanted) - 1)]
        if tail == "keep":
            size = min(size, left)
            size += left - size == 1 and 1 < size != own
        elif size > left:
            size = sizes[-1] if sizes else left
            if size > left:
                break
        sizes.append(size)
        left -= size
    return sizes


def data(kind: str, samples: int, batch_size: int, **kwargs) -> DataLoader:
    if kind == "sampler":
        return loader(samples, batch_size, sampler=Endless(samples), **kwargs)
    if kind == "stream":
        return DataLoader(Streamed(samples), batch_size, **kwargs)
    stated = {"too little": samples // 2, "true": samples, "too much": samples * 2}[kind]
    return DataLoader(Stated(samples, stated), batch_size, **kwargs)


@pytest.mark.filterwarnings(STATED)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["stream", "true", "too little", "too much", "sampler"])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("wanted", [[4, 16, 7, 7, 30, 3], [16, 4], [4], [8, 9, 10, 11, 12, 13, 14]])
def test_sizes_are_exact_and_every_sample_comes_once(kind, workers, drop, wanted, tmp_path):
    """C46: whatever its length, sizes change at once, no sample is lost, and every epoch validates at its end."""
    module = Recorder()
    train = data(kind, 103, 4, num_workers=workers, drop_last=drop)
    ours = adapt(*wanted, max_batch_size=64)
    if wanted[0] != 4:
        train = data(kind, 103, wanted[0], num_workers=workers, drop_last=drop)
    trainer = fit(module, train, loader(8, 8), callbacks=[ours], epochs=3, root=tmp_path, num_sanity_val_steps=0)
    start, ends = 0, []
    for epoch in range(3):
        sizes = expected_sizes(103, wanted, wanted[0], "drop" if drop else "keep", start)
        assert module.sizes_in(epoch) == sizes
        seen = module.seen_in(epoch)
        assert max(seen.values()) == 1
        assert sum(seen.values()) == sum(sizes)
        start += len(sizes)
        ends.append(start)
    assert module.validations == ends
    assert [number for number, batch in enumerate(module.batches, 1) if batch.last] == ends
    assert trainer.num_training_batches == len(module.batches) - ends[-2]
    assert (ours.updates, ours.samples) == (start, sum(module.sizes))


@pytest.mark.parametrize("collate", ["own", "default"])
@pytest.mark.parametrize("workers", [0, 2])
def test_collate_functions(collate, workers, tmp_path):
    """Samples are collated after the cut, so any collate function works."""

    def own(samples):
        assert type(samples) is list
        return default_collate(samples)

    module = Recorder()
    train = DataLoader(Streamed(50), 4, num_workers=workers, collate_fn=own if collate == "own" else None)
    fit(module, train, callbacks=[adapt(4, 6, 20, max_batch_size=64)], epochs=1, root=tmp_path)
    assert module.sizes == [4, 6, 20, 20]
    assert sorted(module.seen_in(0).elements()) == list(range(50))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_constant_size_gives_the_batches_of_a_data_loader(workers, tmp_path):
    """A rule that keeps the size trains the batches that a DataLoader gives, in its order, to the same weights."""
    plain, module = Recorder(), Recorder()
    fit(plain, DataLoader(Streamed(50), 4, num_workers=workers), epochs=2, root=tmp_path)
    ours = AdaptiveBatchSize(Constant(), max_batch_size=4)
    fit(module, DataLoader(Streamed(50), 4, num_workers=workers), callbacks=[ours], epochs=2, root=tmp_path)
    if workers < 2:  # of two workers the last batches are short, and a DataLoader does not join them
        assert [batch.indices for batch in module.batches] == [batch.indices for batch in plain.batches]
        assert torch.equal(module.net.weight, plain.net.weight)
    order = [index for batch in module.batches for index in batch.indices]
    assert order == [index for batch in plain.batches for index in batch.indices]


def test_micro_batches_of_a_stream(tmp_path):
    """An update over more than fits on a device is split here too, its last one as well."""
    module = Recorder()
    ours = adapt(4, 10, 30, max_batch_size=64, max_device_batch_size=6)
    trainer = fit(module, DataLoader(Streamed(50), 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 5, 5, 6, 6, 6, 6, 6, 6]
    assert trainer.global_step == ours.updates == 4
    assert sorted(module.seen_in(0).elements()) == list(range(50))


def test_accumulated_batches_of_a_stream(tmp_path):
    """B0 is that of ``accumulate_grad_batches`` batches; what is left at the end is one update."""
    module = Recorder()
    ours = adapt(8, 12, max_batch_size=64)
    trainer = fit(
        module, DataLoader(Streamed(27), 4), callbacks=[ours], epochs=1, root=tmp_path, accumulate_grad_batches=2
    )
    assert module.sizes == [4, 4, 4, 4, 4, 4, 3]
    assert trainer.global_step == ours.updates == 3


@pytest.mark.filterwarnings(STATED)
@pytest.mark.parametrize(("limit", "sizes"), [(3, [4, 8, 16]), (1.0, [4, 8, 16, 16, 6]), (0.5, [4, 8, 12])])
def test_limits(limit, sizes, tmp_path):
    """An int limits the batches; a share is one of the stated length."""
    module = Recorder()
    train = DataLoader(Stated(50, 50), 4)
    fit(module, train, loader(8, 8), callbacks=[adapt(4, 8, 16)], epochs=1, root=tmp_path, limit_train_batches=limit)
    assert module.sizes == sizes
    assert module.validations == [len(sizes)]


def test_endless_stream_with_a_limit(tmp_path):
    """A stream without an end trains as many batches as the Trainer allows."""

    class Forever(Streamed):
        def __iter__(self):
            while True:
                yield from super().__iter__()

    module = Recorder()
    train = DataLoader(Forever(5), 4)
    ours = adapt(4, 8, 3, max_batch_size=64)
    fit(module, train, loader(8, 8), callbacks=[ours], epochs=2, root=tmp_path, limit_train_batches=3)
    assert module.sizes == [4, 8, 3, 3, 3, 3]
    assert module.validations == [3, 6]
    again = Recorder()
    fit(again, train, callbacks=[adapt(4, 8, 3, max_batch_size=64)], epochs=-1, max_steps=7, root=tmp_path)
    assert again.sizes == [4, 8, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(("interval", "points"), [(2, [2, 4, 7, 9]), (3, [3, 8]), (50, [5, 9])])
def test_int_validation_interval(interval, points, tmp_path):
    """An int counts batches in each epoch, and where the epoch is shorter it validates at its end, with a warning."""
    module = Recorder()
    train = DataLoader(Streamed(50), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flags = {"val_check_interval": interval, "num_sanity_val_steps": 0}
        fit(module, train, loader(8, 8), callbacks=[adapt(4, 8, 16, max_batch_size=64)], root=tmp_path, **flags)
    assert module.sizes == [4, 8, 16, 16, 6, 16, 16, 16, 2]
    assert module.validations == points
    warned = any("fewer than val_check_interval=50" in str(warning.message) for warning in caught)
    assert warned == (interval == 50)


@pytest.mark.filterwarnings(STATED)
def test_fraction_of_a_stated_length(tmp_path):
    """Half of the stated length, in batches of the first size, as Lightning plans it."""
    plain, module = Recorder(), Recorder()
    flags = {"val_check_interval": 0.5, "num_sanity_val_steps": 0, "root": tmp_path}
    fit(plain, DataLoader(Stated(48, 48), 4), loader(8, 8), **flags)
    constant = AdaptiveBatchSize(Constant())
    fit(module, DataLoader(Stated(48, 48), 4), loader(8, 8), callbacks=[constant], **flags)
    assert module.validations == plain.validations == [6, 12, 18, 24]
    grown = Recorder()
    fit(grown, DataLoader(Stated(48, 48), 4), loader(8, 8), callbacks=[adapt(4, 8)], **flags)
    assert grown.sizes_in(0) == [4, 8, 8, 8, 8, 8, 4]
    assert [point for point in grown.validations if point <= 7] == [4, 7]


def test_empty_stream(tmp_path):
    """An epoch that yields nothing trains nothing, and raises nothing, as in Lightning."""
    module = Recorder()
    ours = adapt(4, 8, max_batch_size=64)
    fit(module, DataLoader(Streamed(0), 4), callbacks=[ours], root=tmp_path)
    assert module.sizes == []
    assert ours.updates == 0


def test_one_sample_streams(tmp_path):
    """A stream of one sample, and of fewer than a batch, is one batch, dropped or not."""
    for samples in (1, 3):
        for drop in (False, True):
            module = Recorder()
            ours = adapt(4, max_batch_size=64)
            fit(module, DataLoader(Streamed(samples), 4, drop_last=drop), callbacks=[ours], epochs=2, root=tmp_path)
            assert module.sizes == [samples] * 2


@pytest.mark.parametrize("seen", ["said", "counted"])
def test_a_policy_that_hides_that_it_counts_epochs(seen, tmp_path):
    """A rule of the user's reads progress.epochs of data without a length: it is told what to set, and is refused then.

    On data with a length nothing is wrong.
    """

    class Doubling(Policy[None]):
        uses_epochs = seen == "said"

        def damping(self, state, progress):
            return min(2.0 ** (progress.epochs // 1), 4.0)

    ours = AdaptiveBatchSize(Doubling(), max_batch_size=64)
    data = DataLoader(Streamed(20), 4)
    if seen == "said":
        with pytest.raises(MisconfigurationException, match="counts in epochs"):
            fit(Recorder(), data, callbacks=[ours], root=tmp_path)
    else:
        with pytest.warns(
            UserWarning, match=r"returned the damping nan; .*progress\.epochs is nan: set uses_epochs = "
        ):
            fit(Recorder(), data, callbacks=[ours], root=tmp_path)
    fit(Recorder(), loader(20, 4), callbacks=[ours], root=tmp_path)
    assert ours.batch_size == 16


def test_attributes_and_epochs_without_a_length(tmp_path):
    """Nobody knows how many epochs a number of samples is: the count is not a number, and is not logged."""
    ours = adapt(4, 8, max_batch_size=64)
    seen = []

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            loader = self.trainer.train_dataloader
            if len(seen) < 2:  # later the end is in sight
                with pytest.raises(TypeError, match="nobody knows"):
                    len(loader)
            seen.append(loader.batch_size)
            return super().training_step(batch, batch_idx)

    fit(Net(), DataLoader(Streamed(20), 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert seen[:2] == [4, 8]
    assert math.isnan(ours.epochs)


@pytest.mark.parametrize(
    ("ours", "train", "message"),
    [
        (AdaptiveBatchSize(RadaDamp()), Streamed(20), "without a length and max_batch_size=None.*set max_batch_size"),
        (AdaptiveBatchSize(GeoDamp(2, 1), 64), Streamed(20), "GeoDamp.*counts in epochs.*give the data set a __len__"),
        (AdaptiveBatchSize(Schedule({0: 4}, unit="epochs"), 64), Streamed(20), "Schedule.*counts in epochs"),
        (AdaptiveBatchSize(GeoDamp(2, 1), adapt="lr"), Streamed(20), "GeoDamp.*counts in epochs"),
        (AdaptiveBatchSize(RadaDamp(), 64, tail="carry"), Streamed(20), "tail='carry' with the iterable.*'keep'"),
    ],
)
def test_refused(ours, train, message, tmp_path):
    """What needs a length is refused before the first batch."""
    module = Recorder()
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, DataLoader(train, 4), callbacks=[ours], root=tmp_path)
    assert module.batches == []


def test_schedules_in_updates_and_samples_do_not_need_a_length(tmp_path):
    """Only what counts in epochs does."""
    module = Recorder()
    ours = AdaptiveBatchSize(Schedule({0: 4, 12: 8}, unit="samples"), max_batch_size=64)
    fit(module, DataLoader(Streamed(40), 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert module.sizes == [4, 4, 4, 8, 8, 8, 4]


def test_reload(tmp_path):
    """The size goes on over loaders that are made anew."""

    class Net(Recorder):
        def train_dataloader(self):
            return DataLoader(Streamed(20), 4)

    module = Net()
    ours = adapt(4, 8, max_batch_size=64)
    fit(module, None, callbacks=[ours], epochs=3, root=tmp_path, reload_dataloaders_every_n_epochs=1)
    assert [module.sizes_in(epoch) for epoch in range(3)] == [[4, 8, 8], [8, 8, 4], [8, 8, 4]]


def test_persistent_workers(tmp_path):
    """Workers that live on begin their stream anew in every epoch."""
    module = Recorder()
    train = DataLoader(Streamed(30), 4, num_workers=2, persistent_workers=True)
    fit(module, train, callbacks=[adapt(4, 9, 5, max_batch_size=64)], epochs=3, root=tmp_path)
    for epoch in range(3):
        assert sorted(module.seen_in(epoch).elements()) == list(range(30))
    assert module.sizes == [4, 9, 5, 5, 5, 2, *[5] * 12]


def test_loader_is_given_back(tmp_path):
    """After the fit the user's loader is the same object, as it was."""
    train = DataLoader(Streamed(30), 4)
    trainer = fit(Recorder(), train, callbacks=[adapt(4, 9, max_batch_size=64)], root=tmp_path)
    assert trainer.train_dataloader is train
    assert [len(batch[0]) for batch in train] == [4] * 7 + [2]
