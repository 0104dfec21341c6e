# SPDX-License-Identifier: Apache-2.0
"""The samples of the batch in hand, handed out once more in smaller parts."""

from __future__ import annotations

from collections.abc import Callable

from lightning_adabatch.loader.pieces import Piece
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.supply import Supply


class Again:
    """What a pass keeps of the batch in hand, so that its samples can be handed out once more.

    Where samples are fetched by their indices when they are wanted, these are put back, and the samples are fetched
    again: what a collate function made of them cannot be cut. Else these are the pieces of blocks that arrived, if
    they are asked for: all samples of the batch stay in memory until it is forgotten.

    Args:
        supply: The samples of the pass.
        keep: Called with the plan when a batch begins, where samples are fetched on demand right before they are;
            whether to keep it.
    """

    def __init__(self, supply: Supply, keep: Callable[[EpochPlan], bool]) -> None:
        self._supply = supply
        self._keep = keep
        self._pieces: list[Piece] | None = None
        if supply.on_demand:
            supply.drawn = self._begin

    @property
    def possible(self) -> bool:
        """Whether the samples of the batch in hand are still there."""
        return self._supply.on_demand or self._pieces is not None

    def forget(self) -> None:
        """Let go of a batch that was trained."""
        self._pieces = None

    def note(self, pieces: list[Piece]) -> None:
        """Remember what the part that is handed out now was made of."""
        if not self._supply.on_demand:
            self._begin()
            if self._pieces is not None:
                self._pieces += pieces

    def hand_out(self, device_limit: int) -> None:
        """Go back to the batch's first sample; its parts have at most ``device_limit`` samples from now on."""
        self._supply.plan.begin_again(device_limit)
        if self._supply.on_demand:
            self._supply.put_back()
        else:
            self._supply.stream.put_back(self._pieces or [])
            self._pieces = None

    def _begin(self) -> None:
        plan = self._supply.plan
        if plan.part == 1:
            keep = self._keep(plan)
            self._pieces = [] if keep and not self._supply.on_demand else None
