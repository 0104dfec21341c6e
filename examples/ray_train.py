# SPDX-License-Identifier: Apache-2.0
"""Train the paper's network with an adaptive batch size on several workers of Ray Train.

python examples/ray_train.py                       # a Ray of its own on this machine: two workers, a CPU core each

On a cluster, with `lightning-adabatch[examples,ray]` on every node: from one of its nodes, or as a job from elsewhere.

python examples/ray_train.py --address auto --num-workers 8 --out /shared/folder
ray job submit --working-dir examples -- python ray_train.py --num-workers 8 --out /shared/folder
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
import ray.train
from fashion import FashionData, PaperNet
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_adabatch import AdaptiveBatchSize, RadaDamp


def train(config: dict[str, Any]) -> dict[str, float]:
    """Train in one of the workers and return what came of it: Ray calls this in each, and gives us the first one's."""
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    adaptive = AdaptiveBatchSize(RadaDamp(), max_batch_size=config["max_batch_size"], tail="carry")
    trainer = pl.Trainer(
        accelerator="cpu",  # "gpu" together with ScalingConfig(use_gpu=True)
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        max_epochs=config["epochs"],
        callbacks=[adaptive],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    # A DataLoader has the samples of one worker; the callback counts those of all of them.
    data = FashionData(config["batch_size"] // ray.train.get_context().get_world_size())
    prepare_trainer(trainer).fit(PaperNet(), datamodule=data)
    accuracy = float(trainer.callback_metrics["accuracy"])
    return {"updates": adaptive.updates, "batch size": adaptive.batch_size, "accuracy": accuracy}


def arguments(given: Any = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=2, help="of Ray Train: processes that train together")
    parser.add_argument("--batch-size", type=int, default=64, help="the initial one, over all workers")
    parser.add_argument("--max-batch-size", type=int, default=128, help="over all workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS", "local"), help="of a cluster, or 'auto'")
    parser.add_argument("--out", type=Path, default=Path("logs/ray"), help="of Ray's results; on a cluster shared")
    return parser.parse_args(given)


def main(args: argparse.Namespace) -> dict[str, float]:
    """Start or find Ray, train, and print what the run came to."""
    local = {"num_cpus": args.num_workers, "include_dashboard": False, "log_to_driver": False}
    ray.init(args.address, logging_level=logging.ERROR, **(local if args.address == "local" else {}))
    result = TorchTrainer(
        train,
        train_loop_config={name: vars(args)[name] for name in ("epochs", "batch_size", "max_batch_size", "seed")},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(storage_path=str(args.out.resolve())),
    ).fit()
    ray.shutdown()
    print(", ".join(f"{name} {value:.6g}" for name, value in result.return_value.items()))
    return result.return_value


if __name__ == "__main__":
    main(arguments())
