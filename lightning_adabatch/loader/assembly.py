# SPDX-License-Identifier: Apache-2.0
"""How pieces of blocks become a batch, and what workers collate a block with so that they can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_adabatch.loader.cut import can_cut, cut, join
from lightning_adabatch.loader.message import Sent
from lightning_adabatch.loader.parcel import collate_apart, pack
from lightning_adabatch.loader.pieces import Piece

#: Makes a batch of pieces and a seed.
Assemble = Callable[[list[Piece], int], Any]


def blocks_apart(loader: DataLoader[Any]) -> bool:
    """Whether workers send samples, to be collated after the cut, since what a user's function makes cannot be cut."""
    return loader.num_workers > 0 and not (loader.collate_fn is default_collate and can_cut())


def block_collate(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """Return what a block is collated with where it is fetched."""
    collate = pack if blocks_apart(loader) else loader.collate_fn
    return Sent(collate) if loader.num_workers else collate


def assembler(loader: DataLoader[Any], *, samples: bool = False) -> Assemble:
    """Return what makes a batch of the pieces of blocks that :func:`block_collate` made.

    Args:
        loader: The user's.
        samples: With no workers, blocks are lists of samples.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    pin = bool(loader.pin_memory) and accelerator is not None and accelerator.type != "mps"  # as in a DataLoader

    def whole(pieces: list[Piece], seed: int) -> Any:
        del seed
        return pieces[0].block

    def cut_and_join(pieces: list[Piece], seed: int) -> Any:
        del seed
        cuts = [piece.block if piece.whole else cut(piece.block, piece.start, piece.stop) for piece in pieces]
        return cuts[0] if len(cuts) == 1 else join(cuts, pin=pin)

    def collate_here(pieces: list[Piece], seed: int) -> Any:
        del seed  # as in a DataLoader with no workers
        return pinned(loader.collate_fn(_samples(pieces)))

    def collate(pieces: list[Piece], seed: int) -> Any:
        return pinned(collate_apart(loader.collate_fn, _samples(pieces), seed))

    def pinned(batch: Any) -> Any:
        return pin_memory(batch) if pin else batch  # type: ignore[no-untyped-call]

    if loader.num_workers == 0:
        return collate_here if samples else whole
    return collate if blocks_apart(loader) else cut_and_join


def _samples(pieces: list[Piece]) -> list[Any]:
    return [sample for piece in pieces for sample in piece.block[piece.start : piece.stop]]
