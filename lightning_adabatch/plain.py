# SPDX-License-Identifier: Apache-2.0
"""Numbers of NumPy as Python's own: a checkpoint that holds others is not read back safely."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """Return a value with NumPy's numbers as Python's, in lists, tuples and dicts too; anything else as it is.

    NumPy's float64 is a float of Python's as well, and still ``torch.load(weights_only=True)`` refuses it.
    """
    if type(value) is dict:
        return {name: plain(part) for name, part in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(plain, value))
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value
