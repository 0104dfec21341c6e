# SPDX-License-Identifier: Apache-2.0
"""Small modules and data sets that record what a Trainer did with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_adabatch import AdaptiveBatchSize, Observation, Policy, Progress, RadaDamp


class Indexed(Dataset):
    """Samples that know their index: (4 features, class, index)."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 4, generator=generator)
        self.y = torch.randint(2, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index], index


class Streamed(IterableDataset):
    """The samples of :class:`Indexed` as a stream, shared out to the workers."""

    def __init__(self, samples: int) -> None:
        self.indexed = Indexed(samples)

    def __iter__(self):
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(start, len(self.indexed), step):
            yield self.indexed[index]


class Stated(Streamed):
    """A stream that says how long it is, rightly or not."""

    def __init__(self, samples: int, stated: int) -> None:
        super().__init__(samples)
        self.stated = stated

    def __len__(self) -> int:
        return self.stated


def loader(samples: int, batch_size: int, **kwargs: Any) -> DataLoader:
    """Return an ordinary DataLoader over :class:`Indexed`."""
    return DataLoader(Indexed(samples), batch_size, **kwargs)


@dataclass
class Batch:
    """One training batch as ``training_step`` saw it."""

    epoch: int
    indices: list[int]
    lr: float
    planned: float  # trainer.num_training_batches
    last: bool  # trainer.is_last_batch

    @property
    def size(self) -> int:
        return len(self.indices)


class Recorder(pl.LightningModule):
    """A linear classifier that records batches, validations and sizes of validation batches."""

    def __init__(self, lr: float = 0.1, schedule=None, interval: str = "epoch", **optimizer_kwargs: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # the same weights in every test, and no draw from the global state
            torch.manual_seed(0)
            self.net = torch.nn.Linear(4, 2)
        self.lr = lr
        self.schedule = schedule
        self.interval = interval
        self.optimizer_kwargs = optimizer_kwargs
        self.batches: list[Batch] = []
        self.validations: list[int] = []  # training batches before each validation
        self.validation_sizes: list[int] = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if not self.training:  # nothing is trained: a policy has the training set evaluated
            return self.loss(x, y)
        trainer = self.trainer
        rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        planned, last = trainer.num_training_batches, trainer.is_last_batch
        self.batches.append(Batch(trainer.current_epoch, index.tolist(), rate, planned, last))
        return self.loss(x, y)

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def on_validation_epoch_start(self):
        if not self.trainer.sanity_checking:
            self.validations.append(len(self.batches))

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.validation_sizes.append(len(x))
        self.log("val_loss", self.loss(x, y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, **self.optimizer_kwargs)
        if self.schedule is None:
            return optimizer
        scheduler = {"scheduler": self.schedule(optimizer), "interval": self.interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @property
    def sizes(self) -> list[int]:
        return [batch.size for batch in self.batches]

    def sizes_in(self, epoch: int) -> list[int]:
        return [batch.size for batch in self.batches if batch.epoch == epoch]

    def seen_in(self, epoch: int) -> Counter[int]:
        return Counter(index for batch in self.batches if batch.epoch == epoch for index in batch.indices)


class Scripted(Recorder):
    """A module whose losses are given: their gradient is 0 everywhere."""

    def __init__(self, losses: list[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.losses = losses

    def loss(self, x, y):
        value = self.losses[min(len(self.batches), len(self.losses)) - 1]
        return self.net.weight.sum() * 0.0 + value


@dataclass(frozen=True)
class Sizes(Policy):
    """Ask for given sizes: the n-th for update n, the last one from then on."""

    sizes: list[int] = field(default_factory=list)
    requires = frozenset()

    def damping(self, state: Any, progress: Progress) -> float:
        return self.sizes[min(progress.updates, len(self.sizes) - 1)] / progress.initial_batch_size


@dataclass(frozen=True)
class Listening(Sizes):
    """Ask for given sizes, and note every observation."""

    seen: list[Observation] = field(default_factory=list)
    requires = frozenset({"loss", "grad_norm_sq"})

    def update(self, state: Any, observation: Observation) -> Any:
        self.seen.append(observation)
        return state


@dataclass(frozen=True)
class Measuring(Sizes):
    """Ask for given sizes, and note every observation and what is measured on the training set."""

    seen: list[Observation] = field(default_factory=list)
    measured: list[dict[str, float]] = field(default_factory=list)
    requires: frozenset[str] = frozenset({"loss", "grad_norm_sq", "grad_variance"})
    fraction: float = 1.0

    def update(self, state: Any, observation: Observation) -> Any:
        self.seen.append(observation)
        return state

    def take(self, state: Any, progress: Progress) -> Any:
        self.measured.append(dict(progress.measured))
        return state


def quiet(callbacks=(), *, epochs: int = 2, root=None, **kwargs: Any) -> pl.Trainer:
    """Return a Trainer on the CPU that writes nothing."""
    settings = {
        "max_epochs": epochs,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**settings, **kwargs})


def fit(module, train, validation=None, **kwargs: Any) -> pl.Trainer:
    """Fit with a quiet Trainer and return it."""
    trainer = quiet(**kwargs)
    trainer.fit(module, train, validation)
    return trainer


def adapt(*sizes: int, **kwargs: Any) -> AdaptiveBatchSize:
    """Return the callback with a script of sizes."""
    return AdaptiveBatchSize(Sizes(list(sizes)), **kwargs)


class Watch(pl.Callback):
    """Notes the callback's last observation and decision after every update."""

    def __init__(self, ours: AdaptiveBatchSize) -> None:
        self.ours = ours
        self.observations: list[Observation] = []
        self.sizes: list[int] = []
        self.updates: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.updates.append(self.ours.updates)
        self.observations.append(self.ours._controller.latest)
        self.sizes.append(self.ours.batch_size)


def observe(module, train, policy=None, **kwargs: Any) -> tuple[AdaptiveBatchSize, Watch]:
    """Fit one epoch under a measuring policy; return the callback, which takes ``ours``, and what it went through."""
    ours = AdaptiveBatchSize(policy or RadaDamp(), **{"max_batch_size": 1024, **kwargs.pop("ours", {})})
    watch = Watch(ours)
    fit(module, train, callbacks=[ours, watch], **{"epochs": 1, **kwargs})
    return ours, watch
