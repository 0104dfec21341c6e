# SPDX-License-Identifier: Apache-2.0
"""Resume of streams, of samplers without a length and of batch samplers: bit for bit, as for plain loaders."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Indexed, Recorder, Streamed, adapt, quiet
from resuming import Augmented, Cut, Outcome, Separable, Setup, assert_goes_on, resume, run
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

SCRIPT = [4, 4, 8, 6, 6, 12, 16, 5, 5, 3, 11, 11, 2, 20, 4, 4, 9, 9, 30, 6]  # up and down

CUTS = [
    Cut("train_start"),
    Cut("train_batch_start", 0, 0),
    Cut("train_batch_start", 1, 2),
    Cut("train_batch_end", 0, 0, "before"),
    Cut("train_batch_end", 0, 0),
    Cut("train_batch_end", 0, 3, "before"),
    Cut("train_batch_end", 0, 3),
    Cut("train_batch_end", 1, 1),
    Cut("train_batch_end", 1, -1, "before"),
    Cut("train_batch_end", 1, -1),
    Cut("train_batch_end", 2, -1),
    Cut("validation_start", 1),
    Cut("validation_end", 1),
    Cut("train_epoch_end", 0),
    Cut("train_epoch_end", 1),
    Cut("train_epoch_start", 1),
]
FEW = [Cut("train_batch_end", 0, 3), Cut("train_batch_end", 1, -1), Cut("train_epoch_end", 0)]


SEEDS = itertools.count()  # every process begins with others


class Learnable(Streamed):
    """A stream of samples that can be learned."""

    def __init__(self, samples=50):
        super().__init__(samples)
        self.indexed = Separable(samples)


class Shuffled(IterableDataset):
    """A stream in an order that it draws when it begins, with noise from torch's global generator if asked."""

    def __init__(self, *sources):
        self.data = Augmented(*sources)

    def __iter__(self):
        for index in torch.randperm(len(self.data)).tolist():
            yield self.data[index]


class OwnShuffled(Shuffled):
    """Draws order and noise from a NumPy generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(next(SEEDS))

    def __iter__(self):
        for index in self.rng.permutation(len(self.data)).tolist():
            x, *rest = self.data[index]
            yield x + 0.1 * self.rng.standard_normal(), *rest


class Unsized(Sampler):
    """A random order without a length, drawn from the global generator or from one of its own."""

    def __init__(self, generator=None):
        self.generator = generator

    def __iter__(self):
        return iter(torch.randperm(50, generator=self.generator).tolist())


class Grouped:
    """Groups of a random order, of the size that it has when each is asked for."""

    def __init__(self, batch_size=4):
        self.batch_size = batch_size

    def __iter__(self):
        order = self.shuffled()
        while order:
            group, order = order[: self.batch_size], order[self.batch_size :]
            yield group

    def shuffled(self):
        return torch.randperm(50).tolist()


class OwnGrouped(Grouped):
    """The same by a generator of Python's own."""

    def __init__(self):
        super().__init__()
        self.rng = random.Random(next(SEEDS))

    def shuffled(self):
        return self.rng.sample(range(50), 50)


def stream(make, workers=0, **kwargs):
    return lambda: DataLoader(make(), 4, num_workers=workers, **kwargs)


def scripted(**kwargs):
    return lambda: adapt(*SCRIPT, max_batch_size=64, **kwargs)


SETUPS = {
    "stream": Setup(scripted(), stream(Learnable)),
    "stream-2-workers": Setup(scripted(), stream(Learnable, 2)),
    "stream-drop": Setup(scripted(), stream(Learnable, drop_last=True)),
    "shuffled-stream": Setup(scripted(), stream(Shuffled)),
    "augmented-stream": Setup(scripted(), stream(lambda: Shuffled("torch"))),
    "stream-in-parts": Setup(scripted(max_device_batch_size=5), stream(Learnable)),
    "unsized-sampler": Setup(scripted(), lambda: DataLoader(Separable(), 4, sampler=Unsized())),
    "unsized-sampler-2-workers": Setup(
        scripted(), lambda: DataLoader(Separable(), 4, sampler=Unsized(), num_workers=2)
    ),
    "own-generator-stream": Setup(scripted(), stream(OwnShuffled)),
    "own-generator-groups": Setup(scripted(), lambda: DataLoader(Separable(), batch_sampler=OwnGrouped())),
    "groups": Setup(scripted(), lambda: DataLoader(Separable(), batch_sampler=Grouped())),
    "groups-2-workers": Setup(scripted(), lambda: DataLoader(Separable(), batch_sampler=Grouped(), num_workers=2)),
}


@pytest.fixture(scope="module")
def uncut_run(tmp_path_factory):
    """Return a function that gives the uncut run of a set-up, made once, with a checkpoint for every cut."""
    made: dict[str, tuple[Outcome, object]] = {}

    def get(name: str) -> tuple[Outcome, object]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = run(SETUPS[name], root, CUTS), root
        return made[name]

    return get


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in SETUPS for cut in (FEW if "workers" in name or "parts" in name else CUTS)],
    ids=str,
)
def test_resume_is_bitwise(name, cut, uncut_run, tmp_path):
    """C12: cut at any moment, the resumed run does what the run that was not cut did."""
    uncut, root = uncut_run(name)
    mark = uncut.marks[cut]
    assert_goes_on(uncut, resume(SETUPS[name], root / f"{cut}.ckpt", tmp_path), mark)


def test_chain_of_resumes(tmp_path):
    """A run that is cut again soon after it resumed, within one epoch, goes on from there."""
    for name in ("stream", "augmented-stream", "groups"):
        cuts = [Cut("train_batch_end", 0, 1), Cut("train_batch_end", 0, 2), Cut("train_batch_end", 0, 4)]
        roots = [tmp_path / f"{name}-{number}" for number in range(4)]
        uncut = run(SETUPS[name], roots[0], cuts)
        first = resume(SETUPS[name], roots[0] / f"{cuts[0]}.ckpt", roots[1], cuts[1:])
        second = resume(SETUPS[name], roots[1] / f"{cuts[1]}.ckpt", roots[2], cuts[2:])
        third = resume(SETUPS[name], roots[2] / f"{cuts[2]}.ckpt", roots[3])
        for cut, resumed in zip(cuts, (first, second, third), strict=True):
            assert_goes_on(uncut, resumed, uncut.marks[cut])


@pytest.mark.parametrize(("before", "behind"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_workers_begins_the_epoch_again(before, behind, tmp_path):
    """Of a stream the order is another then: said in a warning, and no sample is lost."""
    cut = Cut("train_batch_end", 1, 1)
    run(replace(SETUPS["stream"], train=stream(Learnable, before)), tmp_path, [cut])
    with pytest.warns(UserWarning, match="order of the epoch .* cannot be made again with Learnable.* num_workers"):
        resumed = resume(replace(SETUPS["stream"], train=stream(Learnable, behind)), tmp_path / f"{cut}.ckpt", tmp_path)
    seen = [index for step in resumed.steps if step.epoch == 1 for index in step.indices]
    assert sorted(seen) == list(range(50))


def test_a_stream_that_became_shorter_begins_again(tmp_path):
    """There are fewer samples than had been trained: the epoch begins again."""
    cut = Cut("train_batch_end", 1, 3)
    run(SETUPS["stream"], tmp_path, [cut])
    shorter = replace(SETUPS["stream"], train=stream(lambda: Learnable(10)))
    with pytest.warns(UserWarning, match="begins again"):
        resumed = resume(shorter, tmp_path / f"{cut}.ckpt", tmp_path)
    assert sorted(index for step in resumed.steps if step.epoch == 1 for index in step.indices) == list(range(10))


class ToldStream(IterableDataset):
    """A stream in an order of the epoch that it was told, which it keeps to itself."""

    _told = 0

    def set_epoch(self, epoch):
        self._told = epoch

    def __iter__(self):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self._told)).tolist()
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        data = Indexed(40)
        return (data[index] for index in order[start::step])


class Tells(Recorder):
    """Tells its stream the epoch when one begins; in the middle of one this is not called again."""

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_was_told_its_epoch(workers, tmp_path):
    """The run that goes on in the middle of the second epoch has that epoch's order."""

    def train(path=None, steps=-1):
        module, saved = (
            Tells(),
            ModelCheckpoint(tmp_path / str(steps), every_n_train_steps=13, filename="cut", save_top_k=-1),
        )
        callbacks = [adapt(4, 4, max_batch_size=4), *([] if path else [saved])]
        flags = {"epochs": 2, "max_steps": steps, "enable_checkpointing": not path, "root": tmp_path}
        trainer = quiet(callbacks, **flags)
        trainer.fit(module, DataLoader(ToldStream(), 4, num_workers=workers), ckpt_path=path)
        return [batch.indices for batch in module.batches]

    uncut = train()
    cut = train(steps=13)
    assert cut + train(tmp_path / "13" / "cut.ckpt") == uncut
    assert sorted(index for batch in uncut[10:] for index in batch) == list(range(40))
