# SPDX-License-Identifier: Apache-2.0
"""Which samples are evaluated: the same ones each time, shared out among the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Chunk(NamedTuple):
    """Samples that are evaluated together."""

    indices: list[int]
    counts: bool  # whether in the mean; else it is there so that all ranks have the same number of chunks


def subset(indices: list[int], fraction: float) -> list[int]:
    """Return so large a share of the indices, rounded up, in their order: always the same ones."""
    if fraction >= 1:
        return indices
    count = math.ceil(round(fraction * len(indices), 6))
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))
    return [indices[place] for place in sorted(order[: max(1, count)].tolist())]


def chunks(own: list[int], size: int, number: int, spare: int) -> Iterator[Chunk]:
    """Return the indices in chunks, and then the last one again until there are ``number`` of them.

    Args:
        own: The indices.
        size: Samples of one chunk at most.
        number: Of chunks, at least as many as the indices fill.
        spare: An index for a rank that has none.
    """
    last = [spare]
    for place in range(number):
        chunk = own[place * size : (place + 1) * size]
        last = chunk or last
        yield Chunk(last, counts=bool(chunk))
