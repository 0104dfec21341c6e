# SPDX-License-Identifier: Apache-2.0
"""All generators that training draws from in this process: the global ones, and those that the user's objects hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import IterableDataset

from lightning_adabatch import generators

# Under these names data sets have others that they are made of, and what they put their samples through.
_PARTS = ("dataset", "datasets", "transform", "target_transform", "transforms")


def capture(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the states of all of them."""
    state = generators.capture(trainer.strategy.root_device)
    held = _held(trainer)
    return {**state, "held": generators.states_of(held)} if held else state


def restore(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Set them to states that :func:`capture` returned."""
    generators.restore(state, trainer.strategy.root_device)
    if "held" in state:
        generators.set_states(_held(trainer), state["held"])


def _held(trainer: pl.Trainer) -> dict[str, generators.Own]:
    """Return the generators of the module, of the training data and of what collates it, by where they are.

    Not those of streams, nor of samplers: how far they are belongs to a pass.
    """
    holders = {f"module.{name}": part for name, part in trainer.lightning_module.named_modules()}
    combined = trainer.fit_loop._combined_loader
    for number, loader in enumerate([] if combined is None else combined.flattened):
        holders[f"collate.{number}"] = getattr(loader, "collate_fn", None)
        holders.update(_parts(getattr(loader, "dataset", None), f"data.{number}", set()))
    found = [(place, held) for place, holder in holders.items() if (held := generators.held_by(holder))]
    return {f"{place}.{name}": one for place, held in found for name, one in held.items()}


def _parts(data: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if data is None or isinstance(data, IterableDataset) or id(data) in seen:
        return
    seen.add(id(data))
    yield place, data
    attributes = getattr(data, "__dict__", {})  # not what properties make up
    for name in _PARTS:
        part = attributes.get(name)
        for number, one in enumerate(part if isinstance(part, (list, tuple)) else [part]):
            yield from _parts(one, f"{place}.{name}.{number}", seen)
