# SPDX-License-Identifier: Apache-2.0
"""Time per step of a Trainer with and without the callback: ``python benchmarks/step.py [--quick]``."""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from timing import Row, header, interleaved
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_adabatch import AdaptiveBatchSize, RadaDamp


class Net(pl.LightningModule):
    """A network and plain SGD."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD: the cheapest step there is."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    """Takes the time from the end of a warm-up to the end of training."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.start = self.end = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        """Note the times."""
        if trainer.global_step == self.warmup:
            self.start = time.perf_counter()
        self.end = time.perf_counter()


def mlp() -> nn.Module:
    """Return three layers for 28 x 28 images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    """Return the paper's network: 111,050 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 30, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(30, 60, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(60, 100, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)),
    )


def step_time(net: Callable[[], nn.Module], size: int, steps: int, *, adaptive: bool) -> float:
    """Return the seconds per step of a Trainer.

    The size is held at ``size`` by the cap, so that both sides do the same work; RadaDamp measures, decides
    and moves the learning rate at every update all the same.
    """
    torch.manual_seed(0)
    warmup = max(2, steps // 10)
    clock = Clock(warmup)
    callbacks: list[pl.Callback] = [clock]
    if adaptive:
        callbacks.insert(0, AdaptiveBatchSize(RadaDamp(), max_batch_size=size))
    data = TensorDataset(torch.randn(size * 20, 1, 28, 28), torch.randint(10, (size * 20,)))
    trainer = pl.Trainer(
        max_epochs=-1,
        max_steps=warmup + steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(Net(net()), DataLoader(data, size, shuffle=True))
    return (clock.end - clock.start) / steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # the least noise on few cores
    print(header())
    for name, net, size, steps, target in (
        ("3-layer MLP, B = 32", mlp, 32, 40 if quick else 600, 1.10),
        ("the paper's CNN, B = 256", cnn, 256, 2 if quick else 30, 1.02),
    ):
        ratio, without, with_callback = interleaved(
            lambda net=net, size=size, steps=steps: step_time(net, size, steps, adaptive=False),  # type: ignore[misc]
            lambda net=net, size=size, steps=steps: step_time(net, size, steps, adaptive=True),  # type: ignore[misc]
            2 if quick else 15,
        )
        times = f"{1000 * without:.3f} -> {1000 * with_callback:.3f} ms"
        print(Row(f"Trainer step with the callback / without, {name}", ratio, target, at_least=False, detail=times))


if __name__ == "__main__":
    main()
