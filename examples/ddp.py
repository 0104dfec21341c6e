# SPDX-License-Identifier: Apache-2.0
"""Train the paper's network on two processes with DDP; the batch size is that of both together.

torchrun --nproc-per-node 2 examples/ddp.py        # the usual way, also across machines
python examples/ddp.py                             # Lightning starts the second process itself
python examples/ddp.py --strategy ddp_spawn        # the same from a notebook or a test
python examples/ddp.py --resume                    # goes on, with a checkpoint of the last run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fashion import FashionData, PaperNet
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_adabatch import AdaptiveBatchSize, RadaDamp


class Report(pl.Callback):
    """Says on every rank how far it came: all of them the same."""

    def __init__(self, adaptive: AdaptiveBatchSize) -> None:
        self.adaptive = adaptive

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a line after each epoch."""
        del pl_module
        now, ranks = self.adaptive, trainer.world_size
        size = f"{now.batch_size} = {ranks} x {(now.batch_size or 0) // ranks}"
        accuracy = float(trainer.callback_metrics["accuracy"])
        line = f"epoch {trainer.current_epoch + 1}: {now.updates:,} updates, batch size {size}, accuracy {accuracy:.2%}"
        print(f"rank {trainer.global_rank}, {line}", flush=True)


def arguments(given: Any = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu", help="cpu (gloo) or gpu (NCCL)")
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "ddp_spawn"])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="the initial one of each process")
    parser.add_argument("--max-batch-size", type=int, default=256, help="of all processes together")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--resume", action="store_true", help="go on with the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("logs/ddp"), help="where logs and checkpoints go")
    return parser.parse_args(given)


def main(args: argparse.Namespace) -> None:
    """Train, with a checkpoint after every epoch."""
    pl.seed_everything(0, workers=True)
    adaptive = AdaptiveBatchSize(RadaDamp(), max_batch_size=args.max_batch_size, tail="carry")
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy=args.strategy,
        max_epochs=args.epochs,
        callbacks=[adaptive, Report(adaptive), ModelCheckpoint(args.out, save_last=True, enable_version_counter=False)],
        logger=TensorBoardLogger(args.out, name="tensorboard"),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FashionData(args.batch_size, limit=args.limit)
    trainer.fit(PaperNet(), datamodule=data, ckpt_path="last" if args.resume else None)
    if torch.distributed.is_initialized():  # without it a process may be torn down while another still talks to it
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(arguments())
