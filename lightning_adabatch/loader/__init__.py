# SPDX-License-Identifier: Apache-2.0
"""The elastic loader: blocks, cut, tail, position. Knows nothing of policies or of Lightning."""

from lightning_adabatch.loader.elastic import ElasticLoader
from lightning_adabatch.loader.order import for_ranks, lost
from lightning_adabatch.loader.passes import Pass
from lightning_adabatch.loader.plan import EpochPlan, Tail

__all__ = ["ElasticLoader", "EpochPlan", "Pass", "Tail", "for_ranks", "lost"]
