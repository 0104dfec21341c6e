# SPDX-License-Identifier: Apache-2.0
"""Data sets of Hugging Face's ``datasets``: ``make test-integrations`` installs it and runs this."""

from __future__ import annotations

import os

import pytest
import torch
from libraries import DATA, SAMPLES, assert_same_training, check
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Recorder, adapt, fit
from resuming import Cut, Learner, Setup, assert_goes_on, resume, run
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch import AdaptiveBatchSize, Constant, GeoDamp

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import
datasets = pytest.importorskip("datasets", reason="needs lightning-adabatch[integrations]")

pytestmark = [
    pytest.mark.integrations,
    # Arrow has threads of its own, which workers that fork do not use.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]

TOKENS = [[1 + (index * 7 + place) % 19 for place in range(1 + index % 6)] for index in range(SAMPLES)]


def text(samples: int = SAMPLES):
    """Token lists of one to six tokens."""
    columns = {"tokens": TOKENS[:samples], "label": DATA.y[:samples].tolist(), "index": list(range(samples))}
    return datasets.Dataset.from_dict(columns)


def numbers(samples: int = SAMPLES):
    """The samples of the other tests, as columns."""
    columns = {"x": DATA.x[:samples].tolist(), "y": DATA.y[:samples].tolist(), "index": list(range(samples))}
    return datasets.Dataset.from_dict(columns)


def vectors(samples: int = SAMPLES):
    """The same, as tensors."""
    return numbers(samples).with_format("torch")


def pad(rows):
    """Pad to the longest of the batch, as a tokenizer's collator does."""
    tokens = pad_sequence([torch.as_tensor(row["tokens"]) for row in rows], batch_first=True)
    return tokens, torch.tensor([int(row["label"]) for row in rows]), torch.tensor([int(row["index"]) for row in rows])


def bag() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.EmbeddingBag(20, 4, mode="mean", padding_idx=0), nn.Linear(4, 2))


class Reader(Recorder):
    """A bag of words; sees that each batch is padded to its own longest list, and no further."""

    def __init__(self) -> None:
        super().__init__()
        self.net = bag()

    def training_step(self, batch, batch_idx):
        expected = pad_sequence([torch.tensor(TOKENS[i]) for i in batch[2].tolist()], batch_first=True)
        assert torch.equal(batch[0], expected)
        return super().training_step(batch, batch_idx)


class Columns(Recorder):
    """Takes batches as dicts of columns."""

    def sample(self, batch):
        assert torch.equal(batch["x"], DATA.x[batch["index"]])
        return batch["x"], batch["y"], batch["index"]

    def training_step(self, batch, batch_idx):
        return super().training_step(self.sample(batch), batch_idx)

    def validation_step(self, batch, batch_idx):
        return super().validation_step(self.sample(batch), batch_idx)


class Learning(Learner):
    """Resumes: with dropout and momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(bag(), nn.Dropout(0.3), nn.Linear(2, 2))


def validation(**kwargs):
    return DataLoader(text(20), 8, collate_fn=pad, **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [None, "torch"])
def test_padded_text(form, workers, tmp_path):
    """C45: samples are collated after the cut, so each batch has its size, and the padding of its own samples."""
    train = DataLoader(text().with_format(form), 4, shuffle=True, collate_fn=pad, num_workers=workers)
    check(Reader(), train, validation(), tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors(workers, tmp_path):
    """``with_format("torch")`` and torch's own collate function: dicts of columns are cut and joined."""
    train = DataLoader(vectors(), 4, shuffle=True, num_workers=workers)
    check(Columns(), train, DataLoader(vectors(20), 8), tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mapped_and_filtered_view(workers, tmp_path):
    """What ``select`` and ``shuffle`` leave has the length and order of its own."""
    picked = vectors().shuffle(seed=1).select(range(30))
    module = Columns()
    train = DataLoader(picked, 4, num_workers=workers)
    fit(module, train, callbacks=[adapt(4, 9, 3, 16)], epochs=1, root=tmp_path)
    assert module.sizes == [4, 9, 3, 14]
    assert [index for batch in module.batches for index in batch.indices] == picked["index"][:].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_stream(workers, tmp_path):
    """``to_iterable_dataset()`` is a stream: its shards go to the workers, and sizes are exact all the same."""
    stream = numbers().to_iterable_dataset(num_shards=4).with_format("torch")
    assert isinstance(stream, IterableDataset)
    check(Columns(), DataLoader(stream, 4, num_workers=workers), DataLoader(vectors(20), 8), tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_padded_stream_in_a_shuffled_order(workers, tmp_path):
    """A shuffle buffer, and a collate function of one's own."""
    stream = text().to_iterable_dataset(num_shards=4).shuffle(seed=5, buffer_size=16)
    module = Reader()
    check(module, DataLoader(stream, 4, num_workers=workers, collate_fn=pad), validation(), tmp_path)
    order = [index for batch in module.batches if batch.epoch == 0 for index in batch.indices]
    assert order != list(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
def test_constant_is_the_plain_run(workers, tmp_path):
    """With Constant() batches, order and weights are those of a run without the callback, bit for bit."""
    plain, module = Reader(), Reader()
    for net, callbacks in ((plain, []), (module, [AdaptiveBatchSize(Constant())])):
        torch.manual_seed(3)
        train = DataLoader(text(), 8, shuffle=True, collate_fn=pad, num_workers=workers)
        fit(net, train, validation(), callbacks=callbacks, root=tmp_path)
    assert_same_training(module, plain)


def test_what_needs_a_length_is_refused_for_a_stream(tmp_path):
    """A stream of the library has no length: the rule that counts in epochs is refused by name."""
    train = DataLoader(numbers().to_iterable_dataset(), 4)
    with pytest.raises(MisconfigurationException, match="without a length and max_batch_size=None"):
        fit(Columns(), train, callbacks=[adapt(4)], root=tmp_path)
    with pytest.raises(MisconfigurationException, match=r"GeoDamp.*counts in epochs"):
        fit(Columns(), train, callbacks=[AdaptiveBatchSize(GeoDamp(2, 1), max_batch_size=64)], root=tmp_path)


def shuffled(workers):
    return lambda: DataLoader(text(), 4, shuffle=True, collate_fn=pad, num_workers=workers)


def stream_of(workers):
    def train():
        stream = text().to_iterable_dataset(num_shards=4).shuffle(seed=5, buffer_size=16)
        return DataLoader(stream, 4, collate_fn=pad, num_workers=workers)

    return train


CUTS = [Cut("train_batch_end", 0, 2), Cut("train_batch_end", 0, 4, "before"), Cut("train_batch_end", 1, 3)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("train", [shuffled, stream_of])
def test_resume_is_bitwise(train, workers, tmp_path):
    """Cut in the middle of an epoch, the resumed run does what the run that was not cut did."""

    def ours():
        return adapt(4, 9, 3, 16, 16, 5, 8, 6, 11, max_batch_size=64)

    setup = Setup(ours, train(workers), validation, Learning)
    uncut = run(setup, tmp_path, CUTS)
    for cut in CUTS:
        resumed = resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)
        assert_goes_on(uncut, resumed, uncut.marks[cut])
        assert resumed.steps
