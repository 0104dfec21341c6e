# SPDX-License-Identifier: Apache-2.0
"""The elastic loader: blocks, cut, tail, position. Knows nothing of policies or of Lightning."""

from lightning_adabatch.loader.elastic import ElasticLoader
from lightning_adabatch.loader.kinds import (
    follows_its_size,
    iteration_of_its_own,
    kind_of,
    plain_batch_sampler,
    settable_batch_size,
)
from lightning_adabatch.loader.order import for_ranks, lost
from lightning_adabatch.loader.passes import Pass
from lightning_adabatch.loader.plan import EpochPlan, Tail
from lightning_adabatch.loader.supply import Kind, known_length

__all__ = [
    "ElasticLoader",
    "EpochPlan",
    "Kind",
    "Pass",
    "Tail",
    "follows_its_size",
    "for_ranks",
    "iteration_of_its_own",
    "kind_of",
    "known_length",
    "lost",
    "plain_batch_sampler",
    "settable_batch_size",
]
