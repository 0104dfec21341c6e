# SPDX-License-Identifier: Apache-2.0
"""The only place that touches Lightning's internals. Each touch is one function that says what and why."""

from lightning_adabatch.bridge.aside import TrainingLoss, aside, indices_of, to_device
from lightning_adabatch.bridge.epoch import Epoch
from lightning_adabatch.bridge.progress import in_epoch, prepare
from lightning_adabatch.bridge.slot import Slot
from lightning_adabatch.bridge.strategy import ranks_of, shards_of
from lightning_adabatch.bridge.trainer import Bridge

__all__ = [
    "Bridge",
    "Epoch",
    "Slot",
    "TrainingLoss",
    "aside",
    "in_epoch",
    "indices_of",
    "prepare",
    "ranks_of",
    "shards_of",
    "to_device",
]
