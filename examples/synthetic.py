# SPDX-License-Identifier: Apache-2.0
"""The paper's synthetic experiment (section 5.1, figure 1): a linear network of three layers on a linear problem.

python examples/synthetic.py --seeds 50

AdaDamp (Eq. 3, Theorem 1) against SGD with a decaying step size, AdaGrad, gradient descent, and RadaDamp, the practical
rule. Writes one row per run and the figure, and prints the medians.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import lightning.pytorch as pl
import torch
from synthetic_figure import Point, bands_of, draw_figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_adabatch import AdaDamp, AdaptiveBatchSize, PolynomialDamp, RadaDamp

SAMPLES, TEST, FEATURES = 10_000, 2_000, 100
RATE = 2.5e-3
EPOCHS = 70
CLOSE = 1.02  # times the test loss of the least-squares solution: the level that runs are compared at


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A table of features and targets, of which many rows are fetched at once."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one row."""
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return several rows, as a batch."""
        rows = torch.tensor(indices)
        return self.x[rows], self.y[rows]


def as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Collate what :class:`Rows` made a batch of already."""
    return batch


@dataclass(frozen=True)
class Problem:
    """One draw of the data, split into 8,000 and 2,000, and its least-squares solution's losses."""

    train: Rows
    test: Rows
    train_loss: float
    test_loss: float

    @classmethod
    def draw(cls, seed: int) -> Problem:
        """Draw x ~ N(0, I), w* ~ N(0, I), y = x·w* + noise of variance d / 100 = 1."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, FEATURES, generator=generator)
        w = torch.randn(FEATURES, generator=generator)
        y = x @ w + math.sqrt(FEATURES / 100) * torch.randn(SAMPLES, generator=generator)
        parts = Rows(x[TEST:], y[TEST:]), Rows(x[:TEST], y[:TEST])
        solution = torch.linalg.lstsq(parts[0].x.double(), parts[0].y.double().unsqueeze(1)).solution
        losses = [float(((part.x.double() @ solution).squeeze(1) - part.y.double()).square().mean()) for part in parts]
        return cls(*parts, *losses)


class Linear(pl.LightningModule):
    """Three linear layers without bias: a linear function, and a loss that is not convex in its weights."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        layers = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        self.net = nn.Sequential(*layers, nn.Linear(FEATURES, 1, bias=False))
        self.optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        del batch_idx
        x, y = batch
        return (self.net(x).squeeze(1) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the method's optimizer."""
        return self.optimizer(self.parameters())


class Curve(pl.Callback):
    """Takes the test loss after updates that are at most 2 % apart."""

    def __init__(self, test: Rows) -> None:
        self.test = test
        self.points: list[Point] = []
        self.samples = 0
        self._next = 1

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: list[Tensor], batch_idx: int
    ) -> None:
        """Measure, now and then."""
        del outputs, batch_idx
        size = len(batch[1])
        self.samples += size
        if trainer.global_step < self._next:
            return
        self._next = max(trainer.global_step + 1, math.ceil(1.02 * trainer.global_step))
        with torch.no_grad():
            loss = float((pl_module.net(self.test.x).squeeze(1) - self.test.y).square().mean())
        ours = next((one for one in trainer.callbacks if isinstance(one, AdaptiveBatchSize)), None)
        evaluated = 0.0 if ours is None else ours.evaluated / (SAMPLES - TEST)
        self.points.append(Point(trainer.global_step, self.samples / (SAMPLES - TEST), size, loss, evaluated))


@dataclass(frozen=True)
class Method:
    """An optimizer with a batch size, and the rule that moves it."""

    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]
    rule: Callable[[Problem], AdaptiveBatchSize] | None = None


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=RATE)


def adagrad(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdaGrad."""
    return torch.optim.Adagrad(parameters, lr=0.01)


METHODS = {
    "AdaDamp": Method(2, sgd, lambda p: AdaptiveBatchSize(AdaDamp(p.train_loss), max_batch_size=math.inf)),
    # The loss of two samples may be anything. As a baseline it can be so small that a run stays at one sample for much
    # of its 70 epochs: so a mean of 50 updates, and no batch below B0.
    "RadaDamp": Method(
        2, sgd, lambda p: AdaptiveBatchSize(RadaDamp(optimal_loss=p.train_loss, warmup=50), math.inf, 2)
    ),
    # The author's code: a step size of γ · 64 / round(65 + 0.1 (k + 1)).
    "SGD": Method(64, sgd, lambda _: AdaptiveBatchSize(PolynomialDamp(rate=0.1 / 64), adapt="lr")),
    "AdaGrad": Method(64, adagrad),
    "gradient descent": Method(SAMPLES - TEST, sgd),
}


@dataclass(frozen=True)
class Result:
    """When a run was close to the least-squares solution, for the first time and for good; None if it never was."""

    method: str
    seed: int
    first_updates: int | None
    first_epochs: float | None
    updates: int | None
    epochs: float | None
    evaluated: float | None  # epochs of evaluations for the policy, up to there
    final_test_loss: float
    least_squares_test_loss: float


def run(method: str, seed: int, epochs: int) -> tuple[Result, list[Point]]:
    """Train one method on one draw."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    problem, chosen = Problem.draw(seed), METHODS[method]
    pl.seed_everything(seed, verbose=False)
    module, curve = Linear(chosen.optimizer), Curve(problem.test)
    rule = [] if chosen.rule is None else [chosen.rule(problem)]
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*rule, curve],
    )
    trainer.fit(module, DataLoader(problem.train, chosen.batch_size, shuffle=True, collate_fn=as_it_is))
    close = [point.test_loss <= CLOSE * problem.test_loss for point in curve.points]
    first = curve.points[close.index(True)] if any(close) else None
    settled = len(close) - (close[::-1].index(False) if False in close else len(close))
    good = curve.points[settled] if settled < len(close) else None
    when = (
        *((None, None) if first is None else (first.updates, first.epochs)),
        *((None, None, None) if good is None else (good.updates, good.epochs, good.evaluated)),
    )
    return Result(method, seed, *when, curve.points[-1].test_loss, problem.test_loss), curve.points


def print_medians(results: Sequence[Result]) -> None:
    """Print when each method comes within 2 % of the least-squares solution's test loss; medians over the runs."""
    print(" " * 24 + "for the first time" + " " * 12 + "for good")
    print(f"{'method':>17} {'runs':>5} {'updates':>9} {'epochs':>7} {'updates':>12} {'epochs':>7} {'evaluations':>12}")
    for method in METHODS:
        close = [result for result in results if result.method == method and result.updates is not None]
        runs = sum(result.method == method for result in results)
        if not close:
            print(f"{method:>17} {0:>2}/{runs:<2}")
            continue
        names = ("first_updates", "first_epochs", "updates", "epochs", "evaluated")
        first, its_epochs, updates, epochs, evaluated = (
            statistics.median(getattr(result, name) for result in close) for name in names
        )
        print(
            f"{method:>17} {len(close):>2}/{runs:<2} {first:>9.0f} {its_epochs:>7.1f} "
            f"{updates:>12.0f} {epochs:>7.1f} {evaluated:>12.1f}"
        )


def write(path: Path, rows: Sequence[object]) -> None:
    """Write dataclasses as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])  # type: ignore[arg-type]
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)  # type: ignore[call-overload]


def main() -> None:
    """Run, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("synthetic"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work = [(method, seed, args.epochs) for seed, method in product(range(args.seeds), args.methods)]
    done = []
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for one in pool.map(run, *zip(*work, strict=True)):
            done.append(one)
            print(f"\r{len(done)} of {len(work)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    done.sort(key=lambda one: (args.methods.index(one[0].method), one[0].seed))
    results = [result for result, _ in done]
    curves = {m: [points for result, points in done if result.method == m] for m in args.methods}
    bands = [band for method, runs in curves.items() for band in bands_of(method, runs)]
    write(args.out / "synthetic.csv", results)
    write(args.out / "curves.csv", bands)
    draw_figure(bands, statistics.mean(r.least_squares_test_loss for r in results), args.out / "synthetic.png")
    print_medians(results)


if __name__ == "__main__":
    main()
