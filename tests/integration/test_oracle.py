# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 of the paper, written down directly, against the callback in a real Trainer."""

from __future__ import annotations

import copy
import math

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_adabatch import AdaptiveBatchSize, RadaDamp

SAMPLES, INITIAL, CAP, UPDATES = 333, 6, 20, 200
RATE, RHO, WEIGHT = 0.01, 0.95, 1e-3


class Net(pl.LightningModule):
    """A small network that records what every update used."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.used: list[tuple[int, float]] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.used.append((len(x), self.trainer.optimizers[0].param_groups[0]["lr"]))
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.5)


class Shuffled(Sampler):
    """A new order in each epoch, from a generator of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


def data() -> TensorDataset:
    """A regression problem that a few epochs solve well enough for the cap to bind."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, x @ torch.randn(5, 1, generator=generator))


def algorithm_1(net: torch.nn.Module, generator: torch.Generator, dwell: int) -> list[tuple[int, float]]:
    """Train with lines 1 to 15 of Algorithm 1 and return (samples, learning rate) of every update."""
    x, y = data().tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    wanted, first, average = INITIAL, None, None
    used: list[tuple[int, float]] = []
    while len(used) < UPDATES:
        order = torch.randperm(SAMPLES, generator=generator)
        while len(order) and len(used) < UPDATES:
            size = min(wanted, CAP)
            if len(order) - size == 1 and size != INITIAL:
                size += 1  # a single leftover sample joins
            batch, order = order[:size], order[size:]
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, CAP / wanted)
            used.append((len(batch), optimizer.param_groups[0]["lr"]))
            loss = torch.nn.functional.mse_loss(net(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t = loss.item() + WEIGHT * sum(float(p.grad.square().sum()) for p in net.parameters())
            first = t if first is None else first
            average = t if average is None else RHO * average + (1 - RHO) * t
            if len(used) % dwell == 0:
                wanted = math.ceil(round(INITIAL * first / average, 6))
    return used


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dwell", [1, 7])
def test_callback_is_algorithm_1(dwell, num_workers, tmp_path):
    """The callback gives the sizes and learning rates of Algorithm 1, and its weights to 1e-6, across the cap."""
    torch.manual_seed(0)
    module = Net()
    oracle = copy.deepcopy(module.net)
    expected = algorithm_1(oracle, torch.Generator().manual_seed(7), dwell)
    sampler = Shuffled(torch.Generator().manual_seed(7))
    loader = DataLoader(data(), INITIAL, sampler=sampler, num_workers=num_workers)
    callback = AdaptiveBatchSize(RadaDamp(rho=RHO, grad_norm_weight=WEIGHT), max_batch_size=CAP, dwell=dwell)
    trainer = pl.Trainer(
        max_steps=UPDATES,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader)
    assert [size for size, _ in module.used] == [size for size, _ in expected]
    assert [lr for _, lr in module.used] == pytest.approx([lr for _, lr in expected], rel=1e-9)
    for ours, theirs in zip(module.net.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    sizes = {size for size, _ in expected}
    assert len(sizes) > 5, "the sizes must move, or the test says nothing"
    assert min(lr for _, lr in expected) < 0.5 * RATE, "the cap must bind, or the test says nothing"
