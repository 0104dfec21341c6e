# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of a run: plain numbers, strings and tensors, that any process can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

from lightning_adabatch.plain import plain

VERSION = 3
FRESH: dict[str, Any] = {"version": VERSION, "begun": False}  # of a run that has not begun to train


@dataclass(frozen=True)
class Snapshot:
    """A run between two updates.

    Attributes:
        rule: Counts, decision and the policy's state.
        rows: What was measured since the last decision: loss, squared gradient norm and samples of each update.
        logged: The size logged last, and the record of the last update where it was not written yet.
        place: Where the fit stands.
        metrics: The single values of ``callback_metrics``.
        ranks: Data-parallel ranks.
        own: What each rank has for itself: its generators and its place in the data. One entry if all are equal.
        whole: Whether ``own`` speaks for all ranks; not in a checkpoint that one of them wrote alone.
        inside_step: Whether a batch had begun that the checkpoint does not know of.
        fitted: The most samples that went through one forward and backward pass.
        device_limit: What ``max_device_batch_size`` was lowered to when memory was used up; None if it was not.
    """

    rule: Mapping[str, Any]
    rows: Sequence[Sequence[Any]]
    logged: Mapping[str, Any]
    place: Mapping[str, Any]
    metrics: Mapping[str, Any]
    ranks: int
    own: Sequence[Mapping[str, Any]]
    whole: bool
    inside_step: bool
    fitted: int
    device_limit: int | None

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`from_state_dict` reads."""
        state: dict[str, Any] = plain({"version": VERSION, "begun": True, **asdict(self)})
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Snapshot | None:
        """Return the snapshot in a state, None where the run had not begun.

        Raises:
            ValueError: For the state of another version.
        """
        if state.get("version") != VERSION:
            raise ValueError(f"its state has the version {state.get('version')!r}, and {VERSION} is what can be read")
        if not state["begun"]:
            return None
        return cls(**{name: state[name] for name in cls.__dataclass_fields__})

    def of_rank(self, rank: int) -> Mapping[str, Any]:
        """Return what belongs to a rank; a rank that was not there takes after the first one."""
        return self.own[rank if rank < len(self.own) else 0]

    def carried(self, rank: int, ranks: int) -> list[Any]:
        """Return the indices that a rank begins the next epoch with."""
        if ranks == self.ranks:
            return list(self.of_rank(rank).get("carried", []))
        everything = [index for own in self.own for index in own.get("carried", [])]
        # All must have the same number, as a DistributedSampler sees to in the same way.
        padded = islice(cycle(everything), -(-len(everything) // ranks) * ranks)
        return list(padded)[rank::ranks]
