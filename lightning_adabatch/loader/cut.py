# SPDX-License-Identifier: Apache-2.0
"""Cut and join batches that ``default_collate`` made, by the rules by which it made them.

Such a batch is a tree. Its leaves are tensors, with the samples along dimension 0, and sequences of
strings, with one string per sample. Mappings and all other sequences are structure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

_TEXT = (str, bytes)
# What default_collate knows by itself. A program may register more, and what their functions return only
# they know: see `can_cut`.
_KNOWN = {"Tensor", "ndarray", "bool", "bool_", "number", "object_", "float", "int", "str", "bytes"}


def can_cut() -> bool:
    """Whether ``default_collate`` makes only what this module can cut: no type was registered with it."""
    types = [kind for entry in default_collate_fn_map for kind in (entry if isinstance(entry, tuple) else (entry,))]
    return all(kind.__name__ in _KNOWN and kind.__module__ in {"torch", "numpy", "builtins"} for kind in types)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of a batch; tensors are views."""
    return _map([batch], lambda leaves: leaves[0][start:stop])


def join(batches: Sequence[Any], *, pin: bool = False) -> Any:
    """Return the samples of several batches as one; tensors are copied.

    Args:
        batches: At least one, of the same structure.
        pin: Put the tensors into page-locked memory: a copy of pinned pieces is not pinned by itself.
    """

    def concatenate(leaves: Sequence[Any]) -> Any:
        if isinstance(leaves[0], torch.Tensor):
            joined = torch.cat(list(leaves))
            return joined.pin_memory() if pin else joined
        return type(leaves[0])(text for leaf in leaves for text in leaf)

    return _map(batches, concatenate)


def _map(trees: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
    """Apply a function to the leaves that stand at the same place of several trees of one structure."""
    first = trees[0]
    if isinstance(first, torch.Tensor) or _is_text(first):
        return leaf(trees)
    if isinstance(first, Mapping):
        return _like_mapping(first, {key: _map([tree[key] for tree in trees], leaf) for key in first})
    if isinstance(first, Sequence) and not isinstance(first, _TEXT):
        return _like_sequence(first, [_map(children, leaf) for children in zip(*trees, strict=True)])
    raise TypeError(
        f"Cannot cut a batch that holds a {type(first).__name__}. default_collate makes tensors, strings, mappings "
        "and sequences; pass a collate_fn of your own to the DataLoader for anything else."
    )


def _is_text(node: Any) -> bool:
    return isinstance(node, Sequence) and not isinstance(node, _TEXT) and len(node) > 0 and isinstance(node[0], _TEXT)


def _like_mapping(model: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    # A mapping may carry more than its items, or need more than them to be made; default_collate's own way.
    try:
        if isinstance(model, MutableMapping):
            clone = copy.copy(model)
            clone.update(items)
            return clone
        return type(model)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _like_sequence(model: Sequence[Any], children: list[Any]) -> Any:
    if type(model) is list:
        return children
    if isinstance(model, tuple) and hasattr(model, "_fields"):
        return type(model)(*children)
    try:
        if isinstance(model, MutableSequence):
            clone = copy.copy(model)
            for index, child in enumerate(children):
                clone[index] = child
            return clone
        return type(model)(children)  # type: ignore[call-arg]
    except TypeError:
        return children
