# SPDX-License-Identifier: Apache-2.0
"""WebDataset's tar shards: ``make test-integrations`` installs it and runs this."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from libraries import DATA, SAMPLES, assert_same_training, check
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Recorder, adapt, fit, loader
from resuming import Cut, Setup, assert_goes_on, resume, run
from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch import AdaptiveBatchSize, Constant, GeoDamp

wds = pytest.importorskip("webdataset", reason="needs lightning-adabatch[integrations]")

pytestmark = pytest.mark.integrations

SHARDS = [7, 23, 11, 19]  # samples


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Four tar files of unequal length."""
    root = tmp_path_factory.mktemp("shards")
    paths, numbers = [], iter(range(SAMPLES))
    for shard, samples in enumerate(SHARDS):
        paths.append(str(root / f"{shard}.tar"))
        with wds.TarWriter(paths[-1]) as tar:
            for _ in range(samples):
                number = next(numbers)
                sample = {"x.npy": DATA.x[number].numpy(), "y.cls": int(DATA.y[number]), "number.cls": number}
                tar.write({"__key__": f"{number:04d}", **sample})
    return paths


def shards(urls, *, shuffle: int = 0, seed: int = 0):
    """The pipeline that the library's documentation shows; its workers share out the shards."""
    data = wds.WebDataset(urls, shardshuffle=False, workersplitter=wds.split_by_worker)
    return data.shuffle(shuffle, seed=seed).decode().to_tuple("x.npy", "y.cls", "number.cls")


class Shards(Recorder):
    """Sees that each sample arrived as it was written."""

    def training_step(self, batch, batch_idx):
        assert torch.equal(batch[0], DATA.x[batch[2]])
        assert torch.equal(batch[1], DATA.y[batch[2]])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [0, 20])
def test_shards(urls, workers, shuffle, tmp_path):
    """C46: sizes change at once over shards of any length, every sample comes once, every epoch validates."""
    train = DataLoader(shards(urls, shuffle=shuffle), batch_size=4, num_workers=workers)
    assert isinstance(train.dataset, IterableDataset)
    module = Shards()
    check(module, train, loader(20, 8), tmp_path)
    if not workers:
        order = [index for batch in module.batches if batch.epoch == 0 for index in batch.indices]
        assert (order == list(range(SAMPLES))) == (not shuffle)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings("ignore:.with_length.. only sets the value of __len__")
@pytest.mark.parametrize("workers", [0, 2])
def test_stated_length(urls, workers, tmp_path):
    """``with_length`` is a hint for totals; rules that count in epochs have what they need."""
    train = DataLoader(shards(urls).with_length(SAMPLES), batch_size=4, num_workers=workers)
    check(Shards(), train, loader(20, 8), tmp_path)
    module, ours = Shards(), AdaptiveBatchSize(GeoDamp(2, 1), max_batch_size=64)
    fit(module, train, callbacks=[ours], root=tmp_path)
    assert (module.sizes, ours.epochs) == ([4] * 15 + [8] * 7 + [4], 2.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_dicts_and_a_collate_function(urls, workers, tmp_path):
    """Samples as the library's dicts, with the name of their shard, collated after the cut."""
    sources: set[str] = set()

    def collate(samples):
        sources.update(sample["__url__"] for sample in samples)
        columns = [np.stack([sample[name] for sample in samples]) for name in ("x.npy", "y.cls", "number.cls")]
        return tuple(torch.from_numpy(column) for column in columns)

    data = wds.WebDataset(urls, shardshuffle=False).decode()
    check(Shards(), DataLoader(data, 4, num_workers=workers, collate_fn=collate), loader(20, 8), tmp_path)
    assert sources == set(urls)


def test_endless_shards_with_an_epoch_of_their_own(urls, tmp_path):
    """``resampled=True`` never ends, and ``with_epoch`` says how many samples are an epoch."""
    data = (
        wds.WebDataset(urls, shardshuffle=False, resampled=True)
        .decode()
        .to_tuple("x.npy", "y.cls", "number.cls")
        .with_epoch(50)
    )
    module, ours = Shards(), adapt(4, 9, 3, 16, max_batch_size=64)
    fit(module, DataLoader(data, 4), loader(8, 8), callbacks=[ours], root=tmp_path, num_sanity_val_steps=0)
    assert module.sizes == [4, 9, 3, 16, 16, 2, 16, 16, 16, 2]
    assert module.validations == [6, 10]


@pytest.mark.parametrize("workers", [0, 1])
def test_constant_is_the_plain_run(urls, workers, tmp_path):
    """With Constant() batches, order and weights are those of a run without the callback, bit for bit.

    Of two workers a DataLoader gives two short batches at the end, which are joined here.
    """
    plain, module = Shards(), Shards()
    for net, callbacks in ((plain, []), (module, [AdaptiveBatchSize(Constant(), max_batch_size=8)])):
        train = DataLoader(shards(urls), batch_size=8, num_workers=workers)
        fit(net, train, loader(20, 8), callbacks=callbacks, root=tmp_path)
    assert_same_training(module, plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bitwise(urls, workers, tmp_path):
    """Cut in the middle of an epoch, the stream is begun again and goes on where it stood."""

    def ours():
        return adapt(4, 9, 3, 16, 16, 5, 8, 6, 11, max_batch_size=64)

    cuts = [Cut("train_batch_end", 0, 2), Cut("train_batch_end", 1, 3)]
    setup = Setup(ours, lambda: DataLoader(shards(urls), batch_size=4, num_workers=workers))
    uncut = run(setup, tmp_path, cuts)
    for cut in cuts:
        resumed = resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)
        assert_goes_on(uncut, resumed, uncut.marks[cut])
        assert resumed.steps


REFUSED = r"does not support the train loader WebLoader.*What to do: pass a torch.utils.data.DataLoader.*adapt='lr'"


@pytest.mark.parametrize("batched", ["by the loader", "by the pipeline"])
def test_the_loader_of_the_library_is_refused(urls, batched, tmp_path):
    """C83: ``WebLoader`` is a pipeline and no DataLoader: refused by name, with the remedy, before the first batch."""
    module = Shards()
    if batched == "by the loader":
        train = wds.WebLoader(shards(urls), batch_size=4)
    else:
        train = wds.WebLoader(shards(urls).batched(4), batch_size=None)
    with pytest.raises(MisconfigurationException, match=REFUSED):
        fit(module, train, callbacks=[adapt(4, 9, max_batch_size=64)], root=tmp_path)
    assert module.batches == []


def test_batches_of_the_pipeline_are_refused(urls, tmp_path):
    """C83: a pipeline that batches by itself leaves no size to adapt: the remedy says where to put it."""
    train = DataLoader(shards(urls).batched(4), batch_size=None)
    with pytest.raises(MisconfigurationException, match=r"DataLoader\(batch_size=None\).*single samples"):
        fit(Shards(), train, callbacks=[adapt(4, 9, max_batch_size=64)], root=tmp_path)


def test_the_loader_of_the_library_with_adapt_lr(urls, tmp_path):
    """With adapt="lr" the library's loader is left alone, and the learning rate takes the damping."""
    module = Shards()
    train = wds.WebLoader(shards(urls), batch_size=4)
    fit(module, train, loader(20, 8), callbacks=[adapt(4, 8, adapt="lr")], root=tmp_path, num_sanity_val_steps=0)
    assert module.sizes == [4] * 30
    assert module.seen_in(1) == Counter(range(SAMPLES))
    assert module.validations == [15, 30]
    assert [batch.lr for batch in module.batches] == [0.1] + [0.05] * 29
