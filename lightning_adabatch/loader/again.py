# SPDX-License-Identifier: Apache-2.0
"""The samples of the batch in hand, handed out once more in smaller parts."""

from __future__ import annotations

from collections.abc import Callable

from lightning_adabatch.loader.blocks import BlockSampler, BlockStream, Piece
from lightning_adabatch.loader.plan import EpochPlan


class Again:
    """What a pass keeps of the batch in hand, so that its samples can be handed out once more.

    Without workers these are the indices, and the samples are fetched again: what a collate function made of
    them cannot be cut. With workers these are the blocks that arrived, if they are asked for: all samples of the
    batch stay in memory until it is forgotten.

    Args:
        blocks: What is asked of the data set.
        stream: What arrived.
        on_demand: There are no workers.
        keep: Called with the plan when a batch begins, without workers right before its samples are fetched;
            whether to keep it.
    """

    def __init__(
        self, blocks: BlockSampler, stream: BlockStream, *, on_demand: bool, keep: Callable[[EpochPlan], bool]
    ) -> None:
        self._blocks = blocks
        self._stream = stream
        self._on_demand = on_demand
        self._keep = keep
        self._pieces: list[Piece] | None = None
        if on_demand:
            blocks.drawn = self._begin

    @property
    def possible(self) -> bool:
        """Whether the samples of the batch in hand are still there."""
        return self._on_demand or self._pieces is not None

    def forget(self) -> None:
        """Let go of a batch that was trained."""
        self._pieces = None

    def note(self, pieces: list[Piece]) -> None:
        """Remember what the part that is handed out now was made of."""
        if not self._on_demand:
            self._begin()
            if self._pieces is not None:
                self._pieces += pieces

    def hand_out(self, device_limit: int) -> None:
        """Go back to the batch's first sample; its parts have at most ``device_limit`` samples from now on."""
        plan = self._blocks.plan
        plan.begin_again(device_limit)
        if self._on_demand:
            self._blocks.put_back(plan.consumed)
        else:
            self._stream.put_back(self._pieces or [])
            self._pieces = None

    def _begin(self) -> None:
        plan = self._blocks.plan
        if plan.part == 1:
            keep = self._keep(plan)
            self._pieces = [] if keep and not self._on_demand else None
