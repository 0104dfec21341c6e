# SPDX-License-Identifier: Apache-2.0
"""From a damping to a batch size and a learning-rate factor: pure, memoryless, the same for every policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LRScaling = Literal["none", "linear", "sqrt"]

#: A damping above this, or infinite, counts as this: the LR never becomes 0 and nothing overflows.
MAX_DAMPING = 1e12


@dataclass(frozen=True)
class Decision:
    """What the next updates use.

    Attributes:
        damping: What the policy asked for, unitless.
        wanted: ``ceil(B0 * damping)`` in samples, before rounding and the cap.
        batch_size: In samples, over all ranks and micro-batches.
        lr_factor: What the learning rate is multiplied by, > 0.
    """

    damping: float
    wanted: int
    batch_size: int
    lr_factor: float


@dataclass(frozen=True)
class Limits:
    """The bounds of one run.

    Args:
        initial_batch_size: B0, in samples.
        cap: Largest batch size in samples, a multiple of ``multiple``; ``math.inf`` for none.
        floor: Smallest batch size in samples, a multiple of ``multiple``.
        multiple: Batch sizes are multiples of this.
        epoch_samples: Samples of one epoch; no batch is larger.
        adapt: With ``"lr"`` the batch size stays B0, and the LR takes all of the damping.
        lr_scaling: What the LR does while the batch size moves: nothing, B / B0, or its square root.
    """

    initial_batch_size: int
    cap: int | float
    floor: int = 1
    multiple: int = 1
    epoch_samples: int | float = math.inf
    adapt: Literal["batch_size", "lr"] = "batch_size"
    lr_scaling: LRScaling = "none"

    def decide(self, damping: float, in_force: int = 0) -> Decision | None:
        r"""Bound what a policy asks for; None where it asks for nothing that has a meaning (≤ 0 or NaN).

        .. math::
            \text{wanted} = \lceil B_0 \cdot \text{damping} \rceil, \quad
            B = \min(\max(\text{wanted}, \text{floor}), \text{cap}), \quad
            \text{lr factor} = \min(1, \text{cap} / \text{wanted})

        This is what the paper's Algorithm 1 makes of d̂_0 / d̂_k. Being memoryless it gives the LR back as
        soon as the wanted size falls below the cap.

        Args:
            damping: What the policy asks for.
            in_force: The size that a run with other bounds had made of it, in samples. If that was enough, it stays as
                far as these bounds allow: other numbers of ranks round in other ways.
        """
        if not damping > 0.0:
            return None
        # Not NumPy's, since decisions are written into checkpoints; and bounded first: an int may be too large for one.
        damping = float(min(damping, MAX_DAMPING))
        # Rounding first takes off float dust: 0.1 * 3 / 0.1 must not ask for one more sample.
        wanted = max(1, math.ceil(round(self.initial_batch_size * damping, 6)))
        lr_factor = self.cap / wanted if wanted > self.cap else 1.0
        if self.adapt == "lr":
            return Decision(damping, wanted, self.initial_batch_size, lr_factor)
        batch_size = self.bound(max(wanted, in_force))
        if self.lr_scaling != "none":
            growth = batch_size / self.initial_batch_size
            lr_factor *= growth if self.lr_scaling == "linear" else math.sqrt(growth)
        return Decision(damping, wanted, batch_size, lr_factor)

    def bound(self, wanted: int) -> int:
        """Return the size that can be had for one that is wanted, in samples."""
        size = min(max(round_up(wanted, self.multiple), self.floor), self.cap)
        if size <= self.epoch_samples:
            return int(size)
        # An epoch smaller than one multiple is still one batch.
        return round_down(self.epoch_samples, self.multiple) or int(self.epoch_samples)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def round_down(value: float, multiple: int) -> int:
    """Return the largest multiple that is not above the value, which is finite."""
    return int(value) // multiple * multiple
