# SPDX-License-Identifier: Apache-2.0
"""Functions that stand in for methods of instances for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Remembers what was replaced, so that it can be put back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, what stood there, ours)

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Put a function over a method of an instance.

        Raises:
            AttributeError: If there is no such method: nobody would call what stands in for it.
        """
        if not callable(getattr(owner, name, None)):
            raise AttributeError(  # noqa: TRY004  # it is the attribute that is missing
                f"{type(owner).__name__} has no method {name!r}: lightning_adabatch needs lightning >= 2.6, < 2.7; "
                "install that."
            )
        self._replaced.append((owner, name, vars(owner).get(name), function))
        setattr(owner, name, function)

    def take_off(self, owner: Any, name: str) -> None:
        """Put back what stood in one place."""
        entry = next(entry for entry in self._replaced if entry[0] is owner and entry[1] == name)
        self._replaced.remove(entry)
        _undo(*entry)

    def undo(self) -> None:
        """Put back everything; safe to call twice."""
        while self._replaced:
            _undo(*self._replaced.pop())


def _undo(owner: Any, name: str, before: Any, ours: Any) -> None:
    if vars(owner).get(name) is not ours:
        return  # wrapped once more by somebody else, who holds on to ours: it does nothing from now on
    if before is None:
        delattr(owner, name)  # the method of the class is behind it
    else:
        setattr(owner, name, before)
