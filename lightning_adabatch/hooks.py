# SPDX-License-Identifier: Apache-2.0
"""Hooks on optimizers, also on those that wrap another one and never ran ``Optimizer.__init__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def registered(register: Callable[[Any], Any], hook: Callable[..., Any]) -> list[Any]:
    """Return the handle of a hook, or nothing where the optimizer has no place for one.

    Args:
        register: A bound method of the optimizer, such as ``register_step_post_hook``.
        hook: The hook.
    """
    try:
        return [register(hook)]
    except AttributeError:
        return []


def calls_hooks(optimizer: Optimizer) -> bool:
    """Whether its own ``step`` calls hooks, which torch sees to when ``Optimizer.__init__`` runs."""
    return bool(getattr(type(optimizer).step, "hooked", False))
