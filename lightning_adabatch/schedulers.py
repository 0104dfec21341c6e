# SPDX-License-Identifier: Apache-2.0
"""Learning rate schedulers, from the moment that they are made: users step some that nobody else is told of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

# All others call the constructor of the first of these.
_KINDS: tuple[Any, ...] = (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler)


class SchedulerWatch:
    """Knows of every scheduler that is made while it watches.

    The constructors of torch's classes are replaced for that time: a scheduler reads its first learning rates off the
    groups, and takes its first step, when it is made.

    Args:
        around: Returns the context in which one is made.
        made: Called with it.
    """

    _watching: list[SchedulerWatch] = []  # noqa: RUF012  # several fits may be one inside of another
    _originals: list[Callable[..., None]] = []  # noqa: RUF012  # one for each kind while anybody watches

    def __init__(self, around: Callable[[], AbstractContextManager[None]], made: Callable[[Any], None]) -> None:
        self._around = around
        self._made = made

    def begin(self) -> None:
        """Watch from now on."""
        if not self._watching:
            self._originals.extend(kind.__init__ for kind in _KINDS)
            for kind in _KINDS:
                kind.__init__ = _watched(kind.__init__)
        self._watching.append(self)

    def end(self) -> None:
        """Watch no longer; safe to call twice."""
        if self not in self._watching:
            return
        self._watching.remove(self)
        if not self._watching:
            for kind, original in zip(_KINDS, self._originals, strict=True):
                kind.__init__ = original
            self._originals.clear()


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        watching = list(SchedulerWatch._watching)
        with ExitStack() as stack:
            for watch in watching:
                stack.enter_context(watch._around())
            original(self, *args, **kwargs)
        for watch in watching:
            watch._made(self)

    return __init__
