# SPDX-License-Identifier: Apache-2.0
"""Lightning's callbacks that average weights and unfreeze layers, beside ours."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from models import Indexed, Recorder, adapt, loader, quiet
from torch.utils.data import DataLoader

SIZES = [8, 8, 16, 16, 16, 5, 5, 32]


class Weights(Recorder):
    """Records its weights after every update, and in every validation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.trained: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def on_train_batch_end(self, *args):
        self.trained.append(self.net.weight.detach().clone())

    def on_validation_epoch_start(self):
        super().on_validation_epoch_start()
        if not self.trainer.sanity_checking:
            self.validated.append(self.net.weight.detach().clone())


def ema(weights, decay=0.9):
    """Return the averages after each of the updates, in plain arithmetic: the first one is the first weights."""
    found = [weights[0]]
    for one in weights[1:]:
        found.append(decay * found[-1] + (1 - decay) * one)
    return found


def means(weights):
    """Return the running means of the weights after each of the updates."""
    return [torch.stack(weights[: k + 1]).mean(0) for k in range(len(weights))]


KINDS = {
    "WeightAveraging": (WeightAveraging, means),
    "EMAWeightAveraging": (lambda: EMAWeightAveraging(decay=0.9), ema),
}


@pytest.mark.parametrize("before", [True, False], ids=["theirs first", "ours first"])
@pytest.mark.parametrize("name", KINDS)
def test_averages_are_those_of_the_updates(name, before, tmp_path):
    """Sizes are those decided, the weights those without the average, and the average that of one update each."""
    make, average = KINDS[name]
    runs = []
    for theirs in ([], [make()]):
        module, ours = Weights(), adapt(*SIZES, lr_scaling="linear")
        trainer = quiet([*theirs, ours] if before else [ours, *theirs], epochs=3, root=tmp_path)
        trainer.fit(module, loader(64, 8), loader(8, 8))
        runs.append((module, trainer))
    (plain, _), (averaged, trainer) = runs
    assert averaged.sizes == plain.sizes
    assert len(set(averaged.sizes)) > 2
    assert [batch.indices for batch in averaged.batches] == [batch.indices for batch in plain.batches]
    assert all(map(torch.equal, averaged.trained, plain.trained))
    expected = average(averaged.trained)
    at = [position - 1 for position in averaged.validations]
    assert [torch.allclose(found, expected[k], atol=1e-6) for k, found in zip(at, averaged.validated, strict=True)] == [
        True
    ] * 3
    assert torch.allclose(averaged.net.weight, expected[-1], atol=1e-6)  # Lightning leaves the average behind
    assert trainer.global_step == len(averaged.trained)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("name", KINDS)
def test_averages_go_on_after_a_cut(name, tmp_path):
    """A run that is cut in the middle of an epoch ends with the weights and the average of one that is not."""
    make, _ = KINDS[name]

    def train(path=None, steps=-1):
        module = Weights()
        saved = ModelCheckpoint(tmp_path / str(steps), every_n_train_steps=7, filename="cut", save_top_k=-1)
        callbacks = [adapt(*SIZES), make(), *([] if path else [saved])]
        trainer = quiet(callbacks, epochs=3, max_steps=steps, enable_checkpointing=not path, root=tmp_path)
        trainer.fit(module, DataLoader(Indexed(64), 8, shuffle=True), ckpt_path=path)
        return module

    torch.manual_seed(0)
    uncut = train()
    torch.manual_seed(0)
    cut = train(steps=7)
    resumed = train(tmp_path / "7" / "cut.ckpt")
    assert [batch.indices for batch in cut.batches + resumed.batches] == [batch.indices for batch in uncut.batches]
    assert all(map(torch.equal, cut.trained + resumed.trained, uncut.trained))
    assert torch.equal(resumed.net.weight, uncut.net.weight)


class Transfer(Recorder):
    """A head on a backbone; records the learning rates of all groups in use."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(4, 4)
        self.used: list[list[float]] = []

    def loss(self, x, y):
        return super().loss(self.backbone(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        optimizer.register_step_post_hook(
            lambda one, *_: self.used.append([float(group["lr"]) for group in one.param_groups])
        )
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


@pytest.mark.parametrize("before", [True, False], ids=["theirs first", "ours first"])
def test_a_backbone_that_is_unfrozen_has_the_factor(before, tmp_path):
    """Its learning rate is made of the head's: each is that of the run without us, times the factor once."""
    runs = []
    for sizes in ((8,), (8, 8, 16, 16, 32, 16, 8, 64)):
        module, ours = Transfer(), adapt(*sizes, max_batch_size=8)
        theirs = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.2)
        trainer = quiet([theirs, ours] if before else [ours, theirs], epochs=5, root=tmp_path)
        trainer.fit(module, loader(24, 8))
        runs.append(module.used)
    factors = [1.0, 1.0, 0.5, 0.5, 0.25, 0.5, 1.0] + [0.125] * 8
    assert [len(rates) for rates in runs[1]] == [1] * 3 + [2] * 12
    for plain, used, factor in zip(*runs, factors, strict=True):
        assert used == pytest.approx([rate * factor for rate in plain])
