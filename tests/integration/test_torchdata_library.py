# SPDX-License-Identifier: Apache-2.0
"""torchdata's ``StatefulDataLoader``: ``make test-integrations`` installs it and runs this."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from libraries import DATA, SAMPLES, assert_same_training, check
from models import Recorder, Streamed, adapt, fit, loader
from resuming import Augmented, Cut, Separable, Setup, assert_goes_on, resume, run
from torch.utils.data import default_collate

from lightning_adabatch import AdaptiveBatchSize, Constant

pytest.importorskip("torchdata.stateful_dataloader", reason="needs lightning-adabatch[integrations]")
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of the library about torch
]

SCRIPT = [4, 9, 3, 16, 16, 5, 8, 6, 11]


def ours():
    return adapt(*SCRIPT, max_batch_size=64)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_map_style(workers, shuffle, tmp_path):
    """C46: sizes change at once, every sample comes once, in the loader's own order, and every epoch validates."""
    module = Recorder()
    check(module, StatefulDataLoader(DATA, 4, shuffle=shuffle, num_workers=workers), loader(20, 8), tmp_path)
    orders = [[i for batch in module.batches if batch.epoch == epoch for i in batch.indices] for epoch in range(2)]
    assert (orders[0] == list(range(SAMPLES))) == (not shuffle)
    assert (orders[0] == orders[1]) == (not shuffle)


@pytest.mark.parametrize("workers", [0, 2])
def test_stream(workers, tmp_path):
    """Its streams too."""
    check(Recorder(), StatefulDataLoader(Streamed(SAMPLES), 4, num_workers=workers), loader(20, 8), tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_function(workers, tmp_path):
    """Samples are collated after the cut, as with a DataLoader."""
    sizes = []

    def collate(samples):
        sizes.append(len(samples))
        return default_collate(samples)

    module = Recorder()
    train = StatefulDataLoader(DATA, 4, shuffle=True, collate_fn=collate, num_workers=workers)
    check(module, train, loader(20, 8), tmp_path)
    assert sizes == module.sizes


def train_constant(make, tmp_path, callbacks=()):
    """Train from the same seed; return the module, and what is drawn next."""
    torch.manual_seed(3)
    module = Recorder()
    fit(module, make(), loader(20, 8), callbacks=callbacks, root=tmp_path, epochs=3)
    return module, torch.rand(1).item()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_constant_is_the_plain_run(shuffle, workers, tmp_path):
    """With Constant() batches, order and weights are those of the same loader without the callback, bit for bit.

    With workers the library begins its shuffling sampler twice per epoch, and the first permutation that it draws is
    lost. Here the sampler begins once: the order does not depend on the number of workers, and is that of the plain
    run without any.
    """

    def make(workers):
        return lambda: StatefulDataLoader(DATA, 8, shuffle=shuffle, num_workers=workers)

    ours = AdaptiveBatchSize(Constant(), max_batch_size=8)
    module, draw = train_constant(make(workers), tmp_path, [ours])
    plain, plain_draw = train_constant(make(0 if shuffle else workers), tmp_path)
    assert_same_training(module, plain)
    if workers and shuffle:
        _, plain_draw = train_constant(make(workers), tmp_path)
    assert draw == plain_draw


CUTS = [Cut("train_batch_end", 0, 3, "before"), Cut("train_batch_end", 1, -1), Cut("train_batch_end", 1, 3)]
SETUPS = {
    "in order": lambda workers: StatefulDataLoader(Separable(), 4, num_workers=workers),
    "shuffled": lambda workers: StatefulDataLoader(Separable(), 4, shuffle=True, num_workers=workers),
    "own generator": lambda workers: StatefulDataLoader(
        Separable(), 4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(9)
    ),
    "stream": lambda workers: StatefulDataLoader(Streamed(50), 4, num_workers=workers),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SETUPS)
def test_resume_is_bitwise(name, workers, tmp_path):
    """Cut at any moment, the resumed run does what the uncut one did: the place is the callback's, not the loader's."""
    setup = Setup(ours, lambda: SETUPS[name](workers))
    uncut = run(setup, tmp_path, CUTS)
    for cut in CUTS:
        path = tmp_path / f"{cut}.ckpt"
        assert not torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"].get("combined_loader")
        resumed = resume(setup, path, tmp_path)
        assert_goes_on(uncut, resumed, uncut.marks[cut])
        assert resumed.steps


def test_resume_with_draws_of_the_data(tmp_path):
    """Samples that draw from torch's generator are drawn as they would have been."""
    setup = Setup(ours, lambda: StatefulDataLoader(Augmented("torch"), 4, shuffle=True))
    uncut = run(setup, tmp_path, CUTS)
    for cut in CUTS:
        assert_goes_on(uncut, resume(setup, tmp_path / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


def test_resume_with_another_number_of_workers(tmp_path):
    """The place is kept in samples: a run with no workers goes on with two, and the other way round."""
    cut = Cut("train_batch_end", 1, 3)
    for before, behind in ((0, 2), (2, 0)):
        root = tmp_path / str(before)
        uncut = run(Setup(ours, lambda before=before: SETUPS["shuffled"](before)), root, [cut])
        resumed = resume(Setup(ours, lambda behind=behind: SETUPS["shuffled"](behind)), root / f"{cut}.ckpt", root)
        assert [step.indices for step in resumed.steps] == [
            step.indices for step in uncut.steps[uncut.marks[cut].steps :]
        ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_given_back(shuffle, workers, tmp_path):
    """After the fit the loader is the same object, has its own size, and goes on from a state of its own."""

    def make():
        generator = torch.Generator().manual_seed(9)
        return StatefulDataLoader(DATA, 4, shuffle=shuffle, num_workers=workers, generator=generator)

    train = make()
    trainer = fit(Recorder(), train, callbacks=[adapt(4, 9, 3)], root=tmp_path)
    assert trainer.train_dataloader is train
    assert train.batch_size == train.batch_sampler.batch_size == 4
    batches = iter(train)
    begun = [next(batches)[2].tolist() for _ in range(3)]
    state = train.state_dict()
    rest = [batch[2].tolist() for batch in batches]
    again = make()
    again.load_state_dict(state)
    assert [batch[2].tolist() for batch in again] == rest
    assert [len(indices) for indices in begun + rest] == [4] * 15
    assert sorted(index for indices in begun + rest for index in indices) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
def test_adapt_lr_leaves_it_alone(workers, tmp_path):
    """With adapt="lr" the Trainer runs over the user's loader itself, at its own size."""
    seen = []

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            seen.append(self.trainer.train_dataloader)
            return super().training_step(batch, batch_idx)

    module = Net()
    train = StatefulDataLoader(DATA, 4, shuffle=True, num_workers=workers)
    fit(module, train, loader(20, 8), callbacks=[adapt(4, 8, adapt="lr")], root=tmp_path, num_sanity_val_steps=0)
    assert all(one is train for one in seen)
    assert module.sizes == [4] * 30
    assert module.seen_in(0) == module.seen_in(1) == Counter(range(SAMPLES))
    assert module.validations == [15, 30]
    assert [batch.lr for batch in module.batches] == [0.1] + [0.05] * 29


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_adapt_lr_resumes_by_the_state_of_the_loader(workers, shuffle, tmp_path):
    """With adapt="lr" the place is the loader's, which Lightning saves: no warning, and no sample twice or never."""
    cut = Cut("train_batch_end", 1, 3)
    setup = Setup(
        lambda: adapt(4, 8, adapt="lr"),
        lambda: StatefulDataLoader(Separable(), 4, shuffle=shuffle, num_workers=workers),
    )
    uncut = run(setup, tmp_path, [cut])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AdaptiveBatchSize")
        resumed = resume(setup, tmp_path / f"{cut}.ckpt", tmp_path)
    before = uncut.steps[: uncut.marks[cut].steps]
    for epoch in (1, 2):
        seen = [i for step in (*before, *resumed.steps) if step.epoch == epoch for i in step.indices]
        assert sorted(seen) == list(range(50))
    assert resumed.counts == uncut.counts
