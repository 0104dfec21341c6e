# SPDX-License-Identifier: Apache-2.0
"""What is measured on the training set before a decision: right, counted apart, and without a trace."""

from __future__ import annotations

import csv
import math
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gradients import gradients_of_samples
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from models import Indexed, Measuring, Recorder, Watch, adapt, fit, loader, quiet
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_adabatch import AdaDamp, AdaptiveBatchSize
from lightning_adabatch.evaluation import Evaluation
from lightning_adabatch.ranks import Ranks
from lightning_adabatch.subset import Chunk, chunks, subset

LOSS, DIVERSITY = frozenset({"full_loss"}), frozenset({"gradient_diversity"})


def measure(requires, module=None, train=None, fraction=1.0, ours=None, **kwargs):
    """Train an epoch; return what was measured before each decision, and the callback."""
    policy = Measuring([4], requires=requires, fraction=fraction)
    callback = AdaptiveBatchSize(policy, **(ours or {}))
    fit(module or Recorder(lr=0.0), train or loader(22, 4, shuffle=True), callbacks=[callback], epochs=1, **kwargs)
    return policy.measured, callback


class Weights(Recorder):
    """Remembers its weights at the beginning of each batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.past: list[Any] = []

    def on_train_batch_start(self, batch, batch_idx):
        self.past.append({name: value.clone() for name, value in self.state_dict().items()})


# Right ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapt", ["batch_size", "lr"])
def test_full_loss_is_that_of_the_weights_at_the_decision(adapt, tmp_path):
    """Before the first update, and after each: the mean over all 22 samples, in batches of 4 and 2."""
    module, data = Weights(lr=0.5), Indexed(22)
    found, _ = measure(LOSS, module, ours={"adapt": adapt}, root=tmp_path)
    assert len(found) == len(module.past) + 1 == 7
    for measured, weights in zip(found, [*module.past, module.state_dict()], strict=True):
        reference = Recorder()
        reference.load_state_dict(weights)
        assert measured == {"full_loss": pytest.approx(reference.loss(data.x, data.y).item(), rel=1e-6)}
    assert found[0] != found[-1]


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_fraction_is_always_the_same_samples(fraction, tmp_path):
    """With weights that stay, every evaluation of a shuffled loader's data gives the same loss, of the subset's."""
    found, ours = measure(LOSS, fraction=fraction, root=tmp_path)
    indices, data = subset(list(range(22)), fraction), Indexed(22)
    expected = Recorder().loss(data.x[indices], data.y[indices]).item()
    assert [one["full_loss"] for one in found] == pytest.approx([expected] * 7, rel=1e-6)
    assert ours._controller.evaluated == 7 * math.ceil(fraction * 22)


def test_training_set_of_a_subset_sampler(tmp_path):
    """Samples that a SubsetRandomSampler leaves out, such as those to validate on, are left out."""
    data, indices = Indexed(22), [1, 5, 6, 9, 20]
    found, _ = measure(LOSS, train=DataLoader(data, 4, sampler=SubsetRandomSampler(indices)), root=tmp_path)
    assert found[0]["full_loss"] == pytest.approx(Recorder().loss(data.x[indices], data.y[indices]).item(), rel=1e-6)


@pytest.mark.parametrize("adapt", ["batch_size", "lr"])
def test_training_set_that_is_overfitted(adapt, tmp_path):
    """Of overfit_batches=2 the 8 samples are the training set."""
    data, flags = Indexed(22), {"overfit_batches": 2}
    found, ours = measure(LOSS, train=loader(22, 4), ours={"adapt": adapt}, root=tmp_path, **flags)
    assert found[0]["full_loss"] == pytest.approx(Recorder().loss(data.x[:8], data.y[:8]).item(), rel=1e-6)
    assert ours._controller.evaluated == 8 * len(found)


class ListInEvaluation(Recorder):
    """Returns what it found where it is not trained, as torchvision's models for detection do."""

    def loss(self, x, y):
        return super().loss(x, y) if self.training else [x].values()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes on exceptions are new in Python 3.11")
def test_an_error_in_an_evaluation_says_that_it_was_one(tmp_path):
    """The user wrote a training_step, and not that it is called in evaluation mode."""
    with pytest.raises(AttributeError) as caught:
        fit(ListInEvaluation(), loader(8, 4), callbacks=[AdaptiveBatchSize(AdaDamp())], root=tmp_path)
    [note] = caught.value.__notes__
    assert "evaluated training_step for the policy" in note
    assert "What to do" in note


class Item(Recorder):
    """Looks at a value, which torch.func cannot."""

    def loss(self, x, y):
        loss = super().loss(x, y)
        return loss * 2 if loss.item() > 1.0 else loss


class Doubled(Recorder):
    """The same with what torch.func can do."""

    def loss(self, x, y):
        loss = super().loss(x, y)
        return torch.where(loss > 1.0, loss * 2, loss)


class Norms(Recorder):
    """Has batch normalization and dropout, which mix and draw in training mode alone."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.net(self.drop(self.norm(x))), y)


class Ragged(Recorder):
    """Gets a batch of samples of several shapes, padded, with names."""

    def training_step(self, batch, batch_idx):
        x, y, index, names = batch
        assert len(names) == len(x)
        return super().training_step((x[:, :4], y, index), batch_idx)


def ragged(samples):
    """Pad a batch to a length of its own."""
    length = 4 + max(index for _, _, index in samples) % 3
    x = torch.stack([torch.cat([x, torch.zeros(length - 4)]) for x, _, _ in samples])
    ys, indices = (torch.tensor([int(sample[k]) for sample in samples]) for k in (1, 2))
    return x, ys, indices, [str(index) for index in indices]


@pytest.mark.parametrize(
    ("module", "settings", "why"),
    [
        (Recorder, {}, None),
        (Doubled, {}, None),
        (Item, {}, "torch.func cannot take its training_step (RuntimeError)"),
        (Ragged, {"collate_fn": ragged}, "its samples do not have tensors of the same shapes alone"),
    ],
)
def test_gradient_diversity_is_that_of_a_loop(module, settings, why, tmp_path, recwarn):
    """To 1e-5, at once and one by one; what costs more is said once."""
    rows = gradients_of_samples((Doubled if module is Item else module)(), Indexed(22))
    expected = rows.square().sum(1).mean() / rows.mean(0).square().sum()
    found, ours = measure(DIVERSITY, module(lr=0.0), loader(22, 4, **settings), root=tmp_path)
    assert [one["gradient_diversity"] for one in found] == pytest.approx([expected.item()] * 7, rel=1e-5)
    assert ours._controller.evaluated == 7 * 22
    said = [str(warning.message) for warning in recwarn if "one by one" in str(warning.message)]
    assert len(said) == (why is not None)
    assert why is None or why in said[0]


def test_gradient_diversity_in_evaluation_mode(tmp_path, recwarn):
    """Batch normalization has its running statistics and dropout is off, so that a sample has its own gradient."""
    found, _ = measure(DIVERSITY, Norms(), root=tmp_path)
    rows = gradients_of_samples(Norms().eval(), Indexed(22))
    assert found[0]["gradient_diversity"] == pytest.approx(
        (rows.square().sum(1).mean() / rows.mean(0).square().sum()).item(), rel=1e-5
    )
    assert not [warning for warning in recwarn if "one by one" in str(warning.message)]


def test_a_frozen_parameter_has_no_gradient(tmp_path):
    """What is not trained is not in the gradients."""
    module = Recorder(lr=0.0)
    module.net.bias.requires_grad_(requires_grad=False)
    found, _ = measure(DIVERSITY, module, root=tmp_path)
    rows = gradients_of_samples(Recorder(), Indexed(22))[:, :8]
    expected = (rows.square().sum(1).mean() / rows.mean(0).square().sum()).item()
    assert found[0]["gradient_diversity"] == pytest.approx(expected, rel=1e-5)


# Without a trace --------------------------------------------------------------------------------------------


class Drawing(Indexed):
    """Draws at random, from all global generators and one of its own, for every sample."""

    def __init__(self, samples):
        super().__init__(samples)
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        drawn = float(torch.rand(1)) + random.random() + np.random.rand() + self.rng.random()  # noqa: NPY002
        return x + 0.1 * drawn, y, index


class Busy(Recorder):
    """Draws, logs, counts in buffers and metrics, and has a part that is frozen."""

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9)
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.average = torch.zeros(())
        self.draws: list[float] = []
        self.modes: list[Any] = []

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = super().training_step(batch, batch_idx) + 0.01 * random.random() + 0.01 * torch.rand(())
        self.mean(loss.detach())
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict({"one": loss, "two": loss * 2}, on_step=True, on_epoch=True)
        if not self.training:
            self.log("evaluated", loss)
        return loss

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.net(self.drop(self.frozen(self.norm(x)))), y)

    def on_fit_start(self):
        self.frozen.eval()
        with torch.inference_mode():
            self.of_validation = torch.ones(3)

    def on_train_batch_start(self, batch, batch_idx):
        self.modes.append([module.training for module in self.modules()])

    def on_train_batch_end(self, *_):
        self.draws += [float(torch.rand(1)), random.random(), float(np.random.rand())]  # noqa: NPY002


@pytest.mark.parametrize("requires", [LOSS, DIVERSITY, LOSS | DIVERSITY], ids="+".join)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*one by one", "ignore:Found 1 module.s. in eval mode")
def test_nothing_is_left_behind(requires, workers, tmp_path):
    """Weights, buffers, metrics, logs, generators, modes and batches are those of a run with the same sizes."""
    results = []
    for policy in (None, Measuring([4, 4, 6, 9], requires=requires, fraction=0.5)):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        module = Busy()
        ours = adapt(4, 4, 6, 9) if policy is None else AdaptiveBatchSize(policy)
        train = DataLoader(Drawing(50), 4, shuffle=True, num_workers=workers)
        trainer = fit(module, train, callbacks=[ours], root=tmp_path)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.append((module, metrics, [ours.updates, ours.samples, ours.epochs]))
    (plain, *one), (measured, *other) = results
    assert one == other
    assert plain.draws == measured.draws
    assert plain.modes == measured.modes
    assert plain.batches == measured.batches
    assert torch.equal(plain.average, measured.average)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, measured.state_dict()[name]), name


class Counting(Recorder):
    """Counts in metrics, and in tensors that are there from the first step on."""

    def __init__(self, metric):
        super().__init__(lr=0.0)
        self.metric = metric()

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        self.metric(self.net(x), y)
        loss = super().training_step(batch, batch_idx)
        self.total = getattr(self, "total", 0.0) + loss.detach()
        return loss


def accuracy():
    return MulticlassAccuracy(2)


@pytest.mark.parametrize("metric", [accuracy, lambda: MetricCollection([accuracy()]), lambda: MulticlassAUROC(2)])
@pytest.mark.filterwarnings("ignore:.*one by one", "ignore:No .* samples in targets")
def test_metrics_of_the_step_beside_gradient_diversity(metric, tmp_path):
    """What torch.func leaves in them when it cannot take a step is gone before samples are taken one by one."""
    rows = gradients_of_samples(Recorder(), Indexed(22))
    expected = (rows.square().sum(1).mean() / rows.mean(0).square().sum()).item()
    module = Counting(metric)
    found, _ = measure(DIVERSITY, module, root=tmp_path)
    assert [one["gradient_diversity"] for one in found] == pytest.approx([expected] * 7, rel=1e-5)
    plain = Counting(metric)
    fit(plain, loader(22, 4, shuffle=True), callbacks=[adapt(4)], epochs=1, root=tmp_path)
    data = Indexed(22)
    losses = [plain.loss(data.x[batch.indices], data.y[batch.indices]).item() for batch in module.batches]
    assert module.total.item() == pytest.approx(sum(losses), rel=1e-5)


def test_loss_is_summed_in_double_precision(tmp_path):
    """Of a module in double precision all digits are there."""
    found, _ = measure(LOSS, Recorder(lr=0.0), loader(22, 4), precision="64-true", root=tmp_path)
    data = Indexed(22)
    expected = Recorder().double().loss(data.x.double(), data.y).item()
    assert found[0]["full_loss"] == pytest.approx(expected, rel=1e-13)


# Its cost ---------------------------------------------------------------------------------------------------


def test_cost_is_counted_apart_and_logged(tmp_path):
    """Samples that were evaluated are in no other count, in the log, and in the checkpoint."""
    rows = []

    class Log(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            rows.append((ours.updates, ours._controller.evaluated))

    ours = AdaptiveBatchSize(AdaDamp(fraction=0.5), max_batch_size=8, dwell=2)
    logger = CSVLogger(tmp_path, name="", version="run")
    flags = {"logger": logger, "log_every_n_steps": 1}
    fit(Recorder(), loader(22, 4), callbacks=[ours, Log()], epochs=1, root=tmp_path, **flags)
    assert ours.samples == 22
    assert rows == [(k, 11 * (1 + k // 2)) for k in range(1, len(rows) + 1)]
    assert ours.state_dict()["rule"]["evaluated"] == rows[-1][1]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        logged = [float(row["adabatch/evaluated"]) for row in csv.DictReader(file)]
    assert logged == [evaluated for _, evaluated in rows]


class Saves(Callback):
    """Asks for the state before our hook."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.states.append(next(c for c in trainer.callbacks if isinstance(c, AdaptiveBatchSize)).state_dict())


def test_a_checkpoint_before_our_hook_evaluates_once(tmp_path):
    """What was measured for a checkpoint is what the decision itself has, and counts once."""
    passes = []

    class Counts(Recorder):
        def training_step(self, batch, batch_idx):
            passes.extend([] if self.training else [len(batch[0])])
            return super().training_step(batch, batch_idx)

    ours, saves = AdaptiveBatchSize(AdaDamp(), max_batch_size=8), Saves()
    watch = Watch(ours)
    fit(Counts(lr=0.5), loader(22, 4), callbacks=[saves, ours, watch], epochs=1, root=tmp_path)
    assert sum(passes) == 22 * (1 + ours.updates) == ours._controller.evaluated
    assert [state["rule"]["batch_size"] for state in saves.states] == watch.sizes
    assert [state["rule"]["evaluated"] for state in saves.states] == [22 * (1 + k) for k in watch.updates]


def test_a_rank_that_may_ask_nobody_knows_what_is_known(tmp_path):
    """Until it is forgotten, what was measured can be recalled; else it is not a number, and no decision."""
    trainer = quiet(root=tmp_path)
    trainer.fit(Recorder(), loader(4, 4))
    evaluation = Evaluation(trainer, Ranks(), 1.0, lambda: (loader(22, 4), 4, None))
    assert math.isnan(evaluation.recall(LOSS)["full_loss"])
    assert evaluation.recall(LOSS).get("evaluated", 0) == 0
    known = evaluation.measure(LOSS)
    assert evaluation.recall(LOSS) == known
    evaluation.forget()
    assert math.isnan(evaluation.recall(LOSS)["full_loss"])


class Lossless(Recorder):
    """Has no loss for a batch in which a sample is."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if not self.training and 5 in batch[2] else {"loss": loss}


def test_batches_without_a_loss_are_not_in_the_mean(tmp_path):
    """The mean is over the others, of a loss in a dict as well."""
    found, _ = measure(LOSS, Lossless(lr=0.0), root=tmp_path)
    data, rest = Indexed(22), [*range(16, 22)]  # four batches of 4 at once
    assert found[0]["full_loss"] == pytest.approx(Recorder().loss(data.x[rest], data.y[rest]).item(), rel=1e-6)


# Which samples ----------------------------------------------------------------------------------------------


def test_subset_is_a_share_in_order():
    """Rounded up, never empty, sorted, without repetition, and the same each time."""
    for fraction, count in ((1.0, 10), (0.31, 4), (0.3, 3), (0.001, 1)):
        found = subset(list(range(100, 110)), fraction)
        assert len(found) == len(set(found)) == count
        assert found == sorted(found) == subset(list(range(100, 110)), fraction)
    assert subset(list(range(100)), 0.1) != list(range(10))


def test_chunks_are_as_many_as_asked_for():
    """A rank with fewer samples has its last chunk once more, which does not count; with none at all a spare one."""
    assert list(chunks([1, 2, 3], 2, 3, 9)) == [Chunk([1, 2], True), Chunk([3], True), Chunk([3], False)]
    assert list(chunks([], 2, 1, 9)) == [Chunk([9], False)]
