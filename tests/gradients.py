# SPDX-License-Identifier: Apache-2.0
"""Gradients of single samples, one by one, and what follows from them by definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gradients_of_samples(module: Any, data: Any) -> Tensor:
    """Return the gradient of every sample's own loss, a row each, by a loop in double precision."""
    module = module.double()
    rows = []
    for x, y in zip(data.x.double(), data.y, strict=True):
        module.zero_grad()
        module.loss(x[None], y[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    return torch.stack(rows)


def variance_of_two(gradients: Tensor, firsts: list[list[int]], every: list[int]) -> float:
    """Return tr Σ from the mean gradients of an update's first parts, one for each rank, and of all of its samples."""
    small = sum(gradients[first].mean(0).square().sum().item() for first in firsts) / len(firsts)
    large = gradients[every].mean(0).square().sum().item()
    return (small - large) / (1 / len(firsts[0]) - 1 / len(every))


def read(meter):
    """Return the closed rows of a meter, and forget them."""
    rows = meter.peek()
    meter.clear()
    return rows
