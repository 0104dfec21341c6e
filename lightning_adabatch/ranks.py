# SPDX-License-Identifier: Apache-2.0
"""The data-parallel ranks of a run, and the little that they tell each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes of a run.

    Args:
        count: Ranks that train on different data.
        rank: This one among them, from 0.
        device: Where tensors for the others must be.
        processes: That must agree: model-parallel ones share their data. With one, a process group that somebody
            else made is left alone.
    """

    def __init__(
        self, count: int = 1, rank: int = 0, device: torch.device | None = None, processes: int | None = None
    ) -> None:
        self.count = count
        self.rank = rank
        self.device = device or torch.device("cpu")
        self.processes = processes or count

    @property
    def several(self) -> bool:
        """Whether there is anybody to talk to."""
        return self.processes > 1

    def mean(self, rows: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes, in double precision: one collective."""
        total = rows.to(self.device, torch.float64) / self.processes
        dist.all_reduce(total)
        return total

    def smallest(self, value: int) -> int:
        """Return the smallest of the processes' values."""
        if not self.several:
            return value
        least = torch.tensor(value, device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's value, by data-parallel rank."""
        if not self.several:
            return [value]
        everybody: list[Any] = [None] * self.processes
        dist.all_gather_object(everybody, (self.rank, value))
        by_rank = dict(reversed(everybody))  # of processes that share their data, the first one's
        return [by_rank[rank] for rank in range(self.count)]
