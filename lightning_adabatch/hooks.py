# SPDX-License-Identifier: Apache-2.0
"""Hooks on optimizers, also on those that wrap another one and never ran ``Optimizer.__init__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def registered(optimizer: Any, kind: str, hook: Callable[..., Any]) -> list[Any]:
    """Return the handle of a hook, or nothing where the optimizer has no place for one.

    Args:
        optimizer: Of any kind. One that asks the optimizer inside for what it lacks hands the hook on.
        kind: Such as ``"step_post"``.
        hook: The hook.
    """
    try:
        return [getattr(optimizer, f"register_{kind}_hook")(hook)]
    except AttributeError:
        return []


def calls_hooks(optimizer: Any) -> bool:
    """Whether hooks are called when it steps: by itself, or by the optimizer inside of it."""
    if getattr(type(optimizer).step, "hooked", False):  # torch sees to that when Optimizer.__init__ runs
        return True
    places = "_optimizer_step_post_hooks"
    return hasattr(optimizer, places) and places not in vars(optimizer)
