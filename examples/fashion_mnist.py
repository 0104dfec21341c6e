# SPDX-License-Identifier: Apache-2.0
"""The paper's experiment on Fashion-MNIST (section 5.2, figure 2): one run per call, and the report over all runs.

python examples/fashion_mnist.py --method RadaDamp --seed 1000 --data DIR      # DIR has the four original files
python examples/fashion_mnist.py --method RadaDamp --seed 1000 --data DIR --resume   # goes on where it was cut
python examples/fashion_mnist.py --report examples/results/fashion_mnist --author fashion_mnist_runs.csv

A run writes a checkpoint and a CSV row after every epoch. Without ``--data`` it trains on the 6,000 images that come
with the examples.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from fashion import FashionData, FashionImages, PaperNet
from fashion_curves import Curve, LastRecord
from fashion_report import report
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize, Constant, Cooldown, GeoDamp, Policy, RadaDamp

LR = 0.005
#: λ and the baseline of the code that made the paper's numbers; its batch size never falls below B0 either.
AUTHOR = RadaDamp(grad_norm_weight=0.05, warmup=50)
PRINTED = RadaDamp()  # Algorithm 1: λ = 1e-3, d̂_0 = t_0, no floor
STAGES = GeoDamp(factor=1.219231, delay=10)


@dataclass(frozen=True)
class Method:
    """A rule, what it moves, and the optimizer that it moves it for."""

    policy: Policy
    adapt: Literal["batch_size", "lr"] = "batch_size"
    floor: bool = False  # at B0
    cooldown: bool = False
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    optimizer: Callable[..., torch.optim.Optimizer] | None = None  # None: the paper's SGD


METHODS = {
    "RadaDamp": Method(AUTHOR, floor=True),
    "GeoDamp": Method(STAGES),
    "GeoDamp-LR (SGD)": Method(STAGES, adapt="lr"),
    "RadaDamp-LR": Method(AUTHOR, adapt="lr"),
    "Adagrad": Method(
        Constant(),
        adapt="lr",
        # "set it to be 0.003 for all optimizers": without it, Adagrad ends 0.9 points higher.
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, LR, weight_decay=0.003),
    ),
    # Why it ends less accurate than GeoDamp, and what helps: see results/README.md.
    "RadaDamp, cooldown": Method(AUTHOR, floor=True, cooldown=True),
    "RadaDamp, sqrt LR": Method(AUTHOR, floor=True, lr_scaling="sqrt"),
    "RadaDamp, sqrt LR, cooldown": Method(AUTHOR, floor=True, lr_scaling="sqrt", cooldown=True),
    "RadaDamp, linear LR, cooldown": Method(AUTHOR, floor=True, lr_scaling="linear", cooldown=True),
    "RadaDamp printed, linear LR, cooldown": Method(PRINTED, floor=True, lr_scaling="linear", cooldown=True),
    "RadaDamp as printed": Method(PRINTED),
    # From what is printed to what the author ran, one change each.
    "RadaDamp printed, floor": Method(PRINTED, floor=True),
    "RadaDamp printed, warmup": Method(RadaDamp(warmup=50)),
    "RadaDamp printed, lambda": Method(RadaDamp(grad_norm_weight=0.05)),
}


class WholeBatches(FashionImages):
    """Images of which a batch is fetched and mirrored at once, without a list of single ones in between."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return a batch."""
        rows = torch.tensor(indices)
        images = self.images[rows]
        if self.flip:
            mirrored = torch.rand(len(rows), 1, 1, 1) < 0.5
            images = torch.where(mirrored, images.flip(-1), images)
        return images, self.labels[rows]


def as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Collate what :class:`WholeBatches` made a batch of already."""
    return batch


class WholeData(FashionData):
    """The same data in whole batches, which two CPU cores need."""

    images = WholeBatches

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return an ordinary loader, of whole batches."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True, collate_fn=as_it_is)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the test images."""
        return DataLoader(self.test_set, batch_size=500, collate_fn=as_it_is)


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that appear at once, on any file system: a run may be cut while one is written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write beside the last one, and put it in its place in one step."""
        part = f"{path}.part"
        super().save_checkpoint(checkpoint, part, storage_options)
        os.replace(part, path)  # noqa: PTH105


class Net(PaperNet):
    """The paper's network with a method's optimizer, and the test loss beside the accuracy."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] | None) -> None:
        super().__init__(LR)
        self.optimizer = optimizer

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Measure loss and accuracy."""
        del batch_idx
        images, labels = batch
        scores = self.net(images)
        self.accuracy(scores, labels)
        self.log("test_accuracy", self.accuracy)
        self.log("test_loss", torch.nn.functional.cross_entropy(scores, labels), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the method's optimizer, or the paper's."""
        return super().configure_optimizers() if self.optimizer is None else self.optimizer(self.parameters())


def callback(args: argparse.Namespace) -> AdaptiveBatchSize:
    """Return a method's callback."""
    method, moves = METHODS[args.method], METHODS[args.method].adapt == "batch_size"
    policy = method.policy
    if method.cooldown:
        policy = Cooldown(policy, start=args.epochs - cooldown_of(args), end=args.epochs)
    return AdaptiveBatchSize(
        policy,
        max_batch_size=args.max_batch_size if moves else None,
        min_batch_size=args.batch_size if method.floor else 1,
        adapt=method.adapt,
        lr_scaling=method.lr_scaling,
        # The author's batches seem to have been full. A last batch of the few samples that are left, another number
        # each time that the size moves, is a full step along a noisy gradient: 33 % were seen after such a one.
        tail=args.tail if moves else None,
    )


def cooldown_of(args: argparse.Namespace) -> float:
    """Return the length of the cooldown in epochs; 0 for a method without one."""
    return args.cooldown * args.epochs if METHODS[args.method].cooldown else 0.0


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Return what a run that goes on must have in common with the one that was cut."""
    names = ("data", "limit", "batch_size", "max_batch_size", "tail", "precision")
    return {name: str(getattr(args, name)) for name in names} | {"cooldown": f"{cooldown_of(args):g} to {args.epochs}"}


def check(args: argparse.Namespace, last: Path, path: Path) -> None:
    """Refuse to overwrite a run, and to go on with one of other settings.

    Raises:
        SystemExit: With what was found and what to do.
    """
    if not last.exists():
        # One row and no checkpoint: it was cut between the two.
        if path.exists() and len(path.read_text().splitlines()) > 2:
            raise SystemExit(f"{path} is of a run without a checkpoint, {last}. Give another --out.")
        return
    if not args.resume:
        raise SystemExit(f"{last.parent} has a run already. Go on with it by --resume, or give another --out.")
    checkpoint = torch.load(last, weights_only=True)
    was, now = dict(checkpoint["callbacks"][Curve.__qualname__]["settings"]), settings_of(args)
    length, _, until = was.pop("cooldown", "0 to 0").partition(" to ")
    # A run of more epochs, or one with a cooldown, may branch off from another before any cooldown has begun.
    starts = [
        float(end) - float(cool) for cool, end in ((length, until), (cooldown_of(args), args.epochs)) if float(cool)
    ]
    same = f"{length} to {until}" == now.pop("cooldown")
    if was != now:
        raise SystemExit(f"{last} is of a run with {was}, and this one has {now}. Give the same ones.")
    done = checkpoint["epoch"] + 1
    if not same and starts and done > min(starts):
        raise SystemExit(
            f"{last} is of a run with a cooldown of {length} epochs until {until}, after {done} epochs; this one has "
            f"one of {cooldown_of(args):g} until {args.epochs}. Give the same --epochs and --cooldown, or a checkpoint "
            "of before the cooldown."
        )


def train(args: argparse.Namespace) -> Path:
    """Make one run, or go on with it, and return the path of its CSV.

    Raises:
        SystemExit: If there is a run already and it is not to be gone on with, or is one of other settings.
    """
    name = f"{args.method}-{args.seed}".replace(" ", "_").replace(",", "")
    last, path = args.out / name / "last.ckpt", args.out / f"{name}.csv"
    check(args, last, path)
    pl.seed_everything(args.seed, verbose=False)
    adaptive, record = callback(args), LastRecord()
    curve = Curve(path, args.method, args.seed, adaptive, record, settings_of(args))
    saved = ModelCheckpoint(last.parent, last.stem, save_top_k=1, enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=1,
        max_epochs=args.epochs,
        precision=args.precision,
        logger=record,
        callbacks=[adaptive, curve, saved],
        plugins=[WholeCheckpoints()],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = WholeData(args.batch_size, data=args.data, limit=args.limit)
    trainer.fit(Net(METHODS[args.method].optimizer), datamodule=data, ckpt_path=last if last.exists() else None)
    curve.write()  # also where nothing was left to train
    return path


def arguments(given: Any = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="RadaDamp")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--data", help="folder with the four original files; default: 6,000 images beside this file")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--batch-size", type=int, default=256, help="B0")
    parser.add_argument("--max-batch-size", type=int, default=1024)
    parser.add_argument("--tail", choices=("carry", "keep", "drop"), default="carry", help="an epoch's last samples")
    parser.add_argument("--precision", default="32-true", help="Lightning's: 32-true, bf16-mixed, ...")
    parser.add_argument("--cooldown", type=float, default=0.2, help="its share of the epochs, for a rule that has one")
    parser.add_argument("--accelerator", default="auto", help="Lightning's: auto, cpu, gpu, mps")
    parser.add_argument("--threads", type=int, help="of a CPU, for one run; default: all cores")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was cut")
    parser.add_argument("--out", type=Path, default=Path("fashion_mnist"), help="where CSV and checkpoint go")
    parser.add_argument("--report", type=Path, metavar="DIR", help="gather the CSVs of a folder instead of training")
    parser.add_argument("--author", type=Path, metavar="CSV", help="with --report: runs to draw behind")
    args = parser.parse_args(given)
    if not 0 < args.cooldown <= 1:
        parser.error(f"--cooldown {args.cooldown} must be a share of the epochs, in (0, 1].")
    if args.data is not None:
        args.data = str(Path(args.data).resolve())
    return args


def main(args: argparse.Namespace) -> None:
    """Train or report."""
    if args.report is not None:
        report(args.report, args.author)
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # that is why
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    start = time.perf_counter()
    path = train(args)
    print(f"{args.method}, seed {args.seed}: {time.perf_counter() - start:.0f} s; rows in {path}")


if __name__ == "__main__":
    main(arguments())
