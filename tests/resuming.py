# SPDX-License-Identifier: Apache-2.0
"""Runs that write checkpoints while they go on, runs that resume from one of them, and what must be equal in both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from models import Indexed, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize

SAMPLES = 50


class Separable(Indexed):
    """Samples whose class can be learned, so that losses fall."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__(samples)
        self.y = (self.x[:, 0] > 0).long()


class Augmented(Separable):
    """Samples with noise from the global generators that are named."""

    def __init__(self, *sources: str, samples: int = SAMPLES) -> None:
        super().__init__(samples)
        self.sources = sources

    def __getitem__(self, index: int):
        x, y, index = super().__getitem__(index)
        draws = {"torch": lambda: float(torch.rand(1)), "python": random.random, "numpy": np.random.rand}
        return x + 0.1 * sum(draws[source]() for source in self.sources), y, index


def train_loader(batch_size: int = 4, data: Indexed | None = None, **kwargs: Any) -> DataLoader:
    """Return an ordinary shuffled DataLoader over data that can be learned."""
    order = {} if "sampler" in kwargs else {"shuffle": True}
    return DataLoader(data or Separable(), batch_size, **{**order, **kwargs})


def ours_of(trainer: pl.Trainer) -> AdaptiveBatchSize | None:
    """Return the callback among a Trainer's."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, AdaptiveBatchSize)), None)


class Step(NamedTuple):
    """One training batch, and what the callback knew when it was over."""

    epoch: int
    batch_idx: int
    indices: tuple[int, ...]
    lr: float
    loss: float
    progress: tuple[int, float, bool]  # global_step before it, trainer.num_training_batches, trainer.is_last_batch
    decision: tuple[Any, ...] | None  # batch_size, lr_factor, updates, samples, epochs; None until the batch is over

    @property
    def size(self) -> int:
        return len(self.indices)


class Learner(pl.LightningModule):
    """A small classifier with dropout and momentum that records steps and validations.

    The weights it begins with, and nothing else, depend on torch's global generator when it is made.
    """

    def __init__(
        self,
        schedule: Callable[[Any, pl.Trainer], Any] | None = None,
        interval: str = "epoch",
        *,
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.schedule = schedule
        self.interval = interval
        self.strict = strict
        self.steps: list[Step] = []
        self.validations: list[tuple[int, int, float]] = []  # epoch, global step, val_loss

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        if not self.training:  # nothing is trained: a policy has the training set evaluated
            return loss
        trainer = self.trainer
        rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        progress = (trainer.global_step, trainer.num_training_batches, bool(trainer.is_last_batch))
        indices = tuple(index.tolist())
        self.steps.append(Step(trainer.current_epoch, batch_idx, indices, rate, loss.item(), progress, None))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        ours = ours_of(self.trainer)  # whose hook came before
        if ours is not None:
            decision = (ours.batch_size, ours.lr_factor, ours.updates, ours.samples, ours.epochs)
            self.steps[-1] = self.steps[-1]._replace(decision=decision)

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def on_validation_end(self):
        trainer = self.trainer
        if not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["val_loss"])
            self.validations.append((trainer.current_epoch, trainer.global_step, loss))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.schedule is None:
            return optimizer
        schedule = self.schedule(optimizer, self.trainer)
        scheduler = {"scheduler": schedule, "interval": self.interval, "monitor": "val_loss", "strict": self.strict}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Cut(NamedTuple):
    """A moment at which a checkpoint is written."""

    hook: str  # without the "on_"
    epoch: int = 0
    number: int = 0  # batch of the epoch, −1 for its last; or validation of the epoch
    side: str = "behind"  # whether the hook that writes it is called before or behind ours

    def __str__(self) -> str:
        return f"{self.hook}-{self.epoch}-{self.number}-{self.side}"


class Mark(NamedTuple):
    """How much had happened at a cut."""

    steps: int
    validations: int


class StopHereError(RuntimeError):
    """Raised by a run that is cut for good."""


class Saver(pl.Callback):
    """Writes a checkpoint at each of its cuts, and goes on, or stops there."""

    def __init__(self, root: Path, cuts: Sequence[Cut], side: str = "behind", *, stop: bool = False) -> None:
        self.root = root
        self.cuts = [cut for cut in cuts if cut.side == side]
        self.side = side
        self.stop = stop
        self.marks: dict[Cut, Mark] = {}
        self._validations = 0

    @property
    def state_key(self) -> str:
        return f"Saver-{self.side}"

    def _at(self, hook: str, trainer: pl.Trainer, module: Any, number: int = 0, *, last: bool = False) -> None:
        numbers = {number, -1} if last else {number}
        for cut in self.cuts:
            if cut.hook == hook and cut.epoch == trainer.current_epoch and cut.number in numbers:
                # The module notes a validation in its own hook, which comes after ours.
                validated = len(module.validations) + (hook == "validation_end")
                self.marks[cut] = Mark(len(module.steps), validated)
                trainer.save_checkpoint(self.root / f"{cut}.ckpt")
                if self.stop:
                    raise StopHereError(str(cut))

    def on_train_start(self, trainer, pl_module):
        self._at("train_start", trainer, pl_module)

    def on_train_epoch_start(self, trainer, pl_module):
        self._validations = 0
        self._at("train_epoch_start", trainer, pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._at("train_batch_start", trainer, pl_module, batch_idx, last=trainer.is_last_batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._at("train_batch_end", trainer, pl_module, batch_idx, last=trainer.is_last_batch)

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self._at("validation_start", trainer, pl_module, self._validations)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking and batch_idx == 1:
            self._at("validation_batch_end", trainer, pl_module, self._validations)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self._at("validation_end", trainer, pl_module, self._validations)
            self._validations += 1

    def on_train_epoch_end(self, trainer, pl_module):
        self._at("train_epoch_end", trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self._at("train_end", trainer, pl_module)


@dataclass(frozen=True)
class Setup:
    """What a training script builds: everything new in every process."""

    ours: Callable[[], AdaptiveBatchSize | None]
    train: Callable[[], Any] = train_loader
    validation: Callable[[], Any] | None = lambda: DataLoader(Separable(12), 4)
    module: Callable[[], Learner] = Learner
    callbacks: Callable[[], Sequence[pl.Callback]] = tuple
    trainer: dict[str, Any] = field(default_factory=dict)

    def with_workers(self, workers: int) -> Setup:
        """Return the same training with another number of worker processes."""
        return replace(self, train=lambda: train_loader(num_workers=workers))


@dataclass
class Outcome:
    """What a run did, and what it left behind."""

    module: Learner
    trainer: pl.Trainer
    marks: dict[Cut, Mark]
    draws: list[Any]
    error: BaseException | None

    @property
    def ours(self) -> AdaptiveBatchSize | None:
        return ours_of(self.trainer)

    @property
    def steps(self) -> list[Step]:
        return self.module.steps

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    @property
    def optimizer(self) -> dict[str, Any]:
        return self.trainer.optimizers[0].state_dict()

    @property
    def schedulers(self) -> list[dict[str, Any]]:
        return [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]

    @property
    def metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    @property
    def counts(self) -> tuple[Any, ...]:
        ours, trainer = self.ours, self.trainer
        own = () if ours is None else (ours.batch_size, ours.lr_factor, ours.updates, ours.samples, ours.epochs)
        return (trainer.current_epoch, trainer.global_step, *own)


def seed(value: int) -> None:
    """Seed the global generators."""
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002  # the generator that data sets draw from
    torch.manual_seed(value)


def run(
    setup: Setup,
    root: Path,
    cuts: Sequence[Cut] = (),
    *,
    ckpt_path: Any = None,
    start: int = 1,
    stop: bool = False,
    raises: type[BaseException] = StopHereError,
) -> Outcome:
    """Train as a script does, from its seed on, and write a checkpoint at each cut.

    Args:
        setup: What the script builds.
        root: Where checkpoints are written.
        cuts: When.
        ckpt_path: The checkpoint to resume from, or None.
        start: The global seed.
        stop: Whether the run ends at its first cut.
        raises: What else may end the run.
    """
    seed(start)
    ours = setup.ours()
    before, behind = (Saver(root, cuts, side, stop=stop) for side in ("before", "behind"))
    callbacks = [before, *([] if ours is None else [ours]), behind, *setup.callbacks()]
    module = setup.module()
    trainer = quiet(callbacks, **{"epochs": 3, "root": root, **setup.trainer})
    error: BaseException | None = None
    try:
        trainer.fit(module, setup.train(), setup.validation and setup.validation(), ckpt_path=ckpt_path)
    except (StopHereError, raises) as caught:
        error = caught
    draws = [torch.rand(4).tolist(), random.random(), float(np.random.rand())]  # noqa: NPY002
    return Outcome(module, trainer, {**before.marks, **behind.marks}, draws, error)


def resume(setup: Setup, path: Any, root: Path, cuts: Sequence[Cut] = (), **kwargs: Any) -> Outcome:
    """Go on from a checkpoint as another process does: other weights to begin with, and other generators."""
    return run(setup, root, cuts, ckpt_path=path, **{"start": 77, **kwargs})


def same(a: Any, b: Any) -> bool:
    """Whether nested containers are equal, tensors bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124  # epochs of data without a length are not a number


def difference(resumed: Any, uncut: Any) -> str:
    """Return what to read first where two values differ."""
    if not isinstance(uncut, list):
        return f"\n  {resumed}\n  {uncut}"
    number, pair = next((n, pair) for n, pair in enumerate(zip_longest(resumed, uncut)) if not same(*pair))
    return f"{len(resumed)} resumed, {len(uncut)} uncut; number {number}:\n  {pair[0]}\n  {pair[1]}"


def assert_equal(what: str, resumed: Any, uncut: Any) -> None:
    """Both are equal, tensors bit for bit."""
    assert same(resumed, uncut), f"{what}: {difference(resumed, uncut)}"


def assert_same_end(uncut: Outcome, resumed: Outcome) -> None:
    """Both runs ended with the same weights, optimizer, counts, metrics and generators, bit for bit."""
    for what in ("counts", "weights", "optimizer", "schedulers", "metrics", "draws"):
        assert_equal(what, getattr(resumed, what), getattr(uncut, what))


def assert_goes_on(uncut: Outcome, resumed: Outcome, mark: Mark) -> None:
    """The resumed run did from the mark on what the uncut run did, bit for bit."""
    assert_equal("steps", resumed.steps, uncut.steps[mark.steps :])
    assert_equal("validations", resumed.module.validations, uncut.module.validations[mark.validations :])
    assert_same_end(uncut, resumed)
