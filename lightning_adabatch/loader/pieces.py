# SPDX-License-Identifier: Apache-2.0
"""Blocks of samples as they arrive, and how as many as a batch needs are taken off them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lightning_adabatch.loader.parcel import Parcel, unpack


class Piece(NamedTuple):
    """Samples ``start`` to ``stop`` of a block of ``length``."""

    block: Any
    start: int
    stop: int
    length: int

    @property
    def whole(self) -> bool:
        """Whether the piece is all of its block."""
        return self.stop - self.start == self.length


class BlockStream:
    """Samples in order, taken off the blocks as they arrive.

    Args:
        source: Gives the blocks; None once there are no more to come.
        length_of: Returns the samples of a block that ``source`` gave, called once for each, and the block itself.

    Attributes:
        held: Samples that arrived and were not taken.
    """

    def __init__(self, source: Iterator[Any], length_of: Callable[[Any], tuple[int, Any]]) -> None:
        self.source: Iterator[Any] | None = source
        self.held = 0
        self._length_of = length_of
        self._pieces: deque[Piece] = deque()

    def pull(self) -> int:
        """Let one more block arrive; return its samples, 0 if there is none."""
        if self.source is None:
            raise RuntimeError(
                "This pass over the data was closed. With persistent_workers=True a loader has one pass at a time: to "
                "look at a batch while an epoch runs, use a DataLoader of your own, or persistent_workers=False."
            )
        try:
            arrived = next(self.source)
        except StopIteration:
            return 0
        length, block = self._length_of(arrived)
        if isinstance(block, Parcel):
            block = unpack(block)
            if not isinstance(block, (list, tuple)) or len(block) != length:
                raise _not_samples(block, length)
        self._pieces.append(Piece(block, 0, length, length))
        self.held += length
        return length

    def put_back(self, pieces: list[Piece]) -> None:
        """Have pieces that were taken last taken once more."""
        self._pieces.extendleft(reversed(pieces))
        self.held += sum(piece.stop - piece.start for piece in pieces)

    def take(self, size: int) -> list[Piece]:
        """Return the next ``size`` samples as pieces of blocks."""
        taken: list[Piece] = []
        while size > 0:
            if not self._pieces and self.pull() == 0:  # would pass for the end of the epoch
                raise RuntimeError(
                    "The DataLoader ended before its epoch did: something in it raised StopIteration, most likely the "
                    "data set's __getitem__ or the collate_fn. Have it raise another error, or return a sample."
                )
            piece = self._pieces.popleft()
            samples = piece.stop - piece.start
            if samples > size:  # a block that is a batch, as all are while the size stays, is taken as it is
                cut = piece.start + size
                self._pieces.appendleft(piece._replace(start=cut))
                piece, samples = piece._replace(stop=cut), size
            taken.append(piece)
            size -= samples
            self.held -= samples
        return taken


def _not_samples(block: Any, length: int) -> TypeError:
    """Return the error for a data set whose ``__getitems__`` returns a batch, of which nobody knows how to cut it."""
    return TypeError(
        f"The data set's __getitems__ returned a {type(block).__name__} for {length} indices. With num_workers > 0 and "
        "a collate_fn of your own, samples are collated once the batch size is known, so that it must be a list with "
        "one entry per index. Return such a list and collate it in collate_fn, remove __getitems__, or set "
        "num_workers=0."
    )
