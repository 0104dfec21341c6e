# SPDX-License-Identifier: Apache-2.0
"""What a strategy says of the processes that train together."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy

from lightning_adabatch.ranks import Ranks


def ranks_of(trainer: pl.Trainer) -> Ranks:
    """Return the data-parallel ranks of a Trainer."""
    strategy: Any = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return Ranks()
    kwargs = strategy.distributed_sampler_kwargs
    return Ranks(kwargs["num_replicas"], kwargs["rank"], strategy.root_device, strategy.world_size)


def shards_of(trainer: pl.Trainer) -> int:
    """Return over how many processes gradients that are plain tensors are divided."""
    strategy: Any = trainer.strategy
    if isinstance(strategy, FSDPStrategy) and strategy.sharding_strategy.name != "NO_SHARD":
        return int(trainer.world_size)
    return 1
