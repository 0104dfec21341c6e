# SPDX-License-Identifier: Apache-2.0
"""The elastic loader: blocks, cut, tail, position. Knows nothing of policies or of Lightning."""

from lightning_adabatch.loader.elastic import ElasticLoader, Pass
from lightning_adabatch.loader.plan import EpochPlan, Tail

__all__ = ["ElasticLoader", "EpochPlan", "Pass", "Tail"]
