# SPDX-License-Identifier: Apache-2.0
"""Whether the order of an epoch is the same for another number of ranks, and where they stand in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DistributedSampler, SequentialSampler


def order_of(sampler: Any) -> str | None:
    """Return a name for the order over all ranks, where it does not depend on their number; None where it may."""
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        return f"shuffled by seed {sampler.seed}" if sampler.shuffle else "as stored"
    return "as stored" if isinstance(sampler, SequentialSampler) else None


def for_ranks(place: Mapping[str, Any], before: int, now: int, sampler: Any, total: int) -> dict[str, Any]:
    """Return the place at which each of ``now`` ranks goes on when there were ``before``.

    Args:
        place: From :meth:`Pass.state_dict` of one of the ranks.
        before: Ranks that were at this place.
        now: Ranks that go on.
        sampler: Of this rank, now.
        total: Samples of this rank's pass, now.
    """
    if before == now:
        return dict(place)
    consumed = place["consumed"] * before
    known = place["order"] is not None and place["order"] == order_of(sampler)
    if not known or consumed % now or place["carried"]:
        return lost(place)
    last_size = place["last_size"] * before // now
    return {**place, "consumed": consumed // now, "last_size": last_size, "total": total, "witnesses": None}


def lost(place: Mapping[str, Any]) -> dict[str, Any]:
    """Return a place that no pass can begin at."""
    return {**place, "lost": True}
