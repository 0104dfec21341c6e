# SPDX-License-Identifier: Apache-2.0
"""Train the paper's network with a constant and with adaptive batch sizes, and compare them.

python examples/quickstart.py                      # 6,000 images that come with the examples, a minute or two
python examples/quickstart.py --data DIR           # all 60,000, from a folder with the four original files
python examples/quickstart.py --download           # all 60,000, downloaded by torchvision
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib as mpl
from fashion import FashionData, PaperNet
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_adabatch import AdaptiveBatchSize, Constant, Cooldown, Policy, RadaDamp

mpl.use("Agg")
import matplotlib.pyplot as plt  # after the backend that needs no screen

COLUMNS = ("updates", "samples", "epochs", "batch size", "LR factor", "accuracy", "seconds")
LAST = 10  # epochs over which the accuracy that is printed is a mean: it moves by a point from one to the next


class History(pl.Callback):
    """Notes where the run stands after every epoch."""

    def __init__(self, adaptive: AdaptiveBatchSize) -> None:
        self.adaptive = adaptive
        self.rows: list[tuple[float, ...]] = []
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add a row of :data:`COLUMNS`."""
        del pl_module
        if not trainer.sanity_checking:
            now, seconds = self.adaptive, time.perf_counter() - self.start
            accuracy = float(trainer.callback_metrics["accuracy"])
            row = (now.updates, now.samples, now.epochs, now.batch_size, now.lr_factor, accuracy, seconds)
            self.rows.append(row)


def methods(args: argparse.Namespace) -> dict[str, AdaptiveBatchSize]:
    """Return what is compared: a constant size, Algorithm 1 of the paper, and where the README says to start."""
    start = RadaDamp(grad_norm_weight=0.05, warmup=50)
    policies: dict[str, tuple[Policy, dict[str, Any]]] = {
        "constant": (Constant(), {}),
        "RadaDamp": (RadaDamp(), {}),
        "recommended": (
            Cooldown(start, start=0.8 * args.epochs, end=args.epochs),
            {"min_batch_size": args.batch_size, "lr_scaling": "linear"},
        ),
    }
    # Full batches only: what is left at an epoch's end is another number each time that the size moves.
    return {
        name: AdaptiveBatchSize(policy, max_batch_size=args.max_batch_size, tail="carry", **settings)
        for name, (policy, settings) in policies.items()
    }


def train(name: str, adaptive: AdaptiveBatchSize, args: argparse.Namespace) -> list[tuple[float, ...]]:
    """Train once and return the history, a row per epoch."""
    pl.seed_everything(args.seed, workers=True)
    history = History(adaptive)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        callbacks=[adaptive, history],
        logger=TensorBoardLogger(args.out, name="tensorboard", version=name),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = FashionData(args.batch_size, args.num_workers, args.data, args.download, args.limit)
    trainer.fit(PaperNet(), datamodule=data)
    return history.rows


def table(runs: dict[str, list[tuple[float, ...]]]) -> str:
    """Return the last row of every run, with the mean accuracy at the end, and the batch size after each epoch."""
    formats = ("{:,.0f}", "{:,.0f}", "{:.1f}", "{:,.0f}", "{:.3f}", "{:.2%}", "{:.0f}")
    lines = [f"{'':12}" + "".join(f"{column:>12}" for column in COLUMNS)]
    for name, rows in runs.items():
        accuracies = [row[5] for row in rows[-LAST:]]
        last = (*rows[-1][:5], sum(accuracies) / len(accuracies), *rows[-1][6:])
        cells = [style.format(value) for style, value in zip(formats, last, strict=True)]
        lines.append(f"{name:12}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append(f"(accuracy: mean of the last {LAST} epochs)")
    for name, rows in runs.items():
        lines.append(f"Batch size after each epoch, {name}: " + " ".join(f"{row[3]:.0f}" for row in rows))
    return "\n".join(lines)


def draw(runs: dict[str, list[tuple[float, ...]]], path: Path) -> None:
    """Draw batch size, LR factor and accuracy against updates and against epochs."""
    panels = {"batch size": 3, "LR factor": 4, "test accuracy": 5}
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharey="col", layout="constrained")
    for across, (label, x) in zip(axes, {"updates": 0, "epochs": 2}.items(), strict=True):
        for axis, (title, y) in zip(across, panels.items(), strict=True):
            for name, rows in runs.items():
                axis.plot([row[x] for row in rows], [row[y] for row in rows], label=name)
            axis.set(xlabel=label, title=f"{title} against {label}")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, dpi=110)


def arguments(given: Any = None) -> argparse.Namespace:
    """Read the command line; what depends on the data is settled here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with the four original Fashion-MNIST files")
    parser.add_argument("--download", action="store_true", help="have torchvision download Fashion-MNIST")
    parser.add_argument("--epochs", type=int, help="default: 30; 20 on all of the data")
    parser.add_argument("--num-workers", type=int, default=0, help="worker processes of the train loader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, help="the initial one; default: 64; 256 on all of the data")
    parser.add_argument("--max-batch-size", type=int, help="default: twice the initial one; four times on all data")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--out", type=Path, default=Path("logs/quickstart"), help="where logs and picture go")
    args = parser.parse_args(given)
    full = args.data is not None or args.download
    args.epochs = args.epochs or (20 if full else 30)
    args.batch_size = args.batch_size or (256 if full else 64)
    args.max_batch_size = args.max_batch_size or args.batch_size * (4 if full else 2)
    return args


def main(args: argparse.Namespace) -> None:
    """Train all, print the table, draw the picture, and say how to look at the logs."""
    runs = {name: train(name, adaptive, args) for name, adaptive in methods(args).items()}
    picture = args.out / "quickstart.png"
    draw(runs, picture)
    print(f"\n{table(runs)}\n\nPicture: {picture}")
    print(f"Logs:    tensorboard --logdir {args.out / 'tensorboard'}, then open http://localhost:6006")


if __name__ == "__main__":
    main(arguments())
