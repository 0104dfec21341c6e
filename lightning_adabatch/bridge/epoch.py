# SPDX-License-Identifier: Apache-2.0
"""Where the epoch stands, over all of its loaders: the first one's batches are those that count."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_adabatch.bridge.slot import Slot
from lightning_adabatch.loader import Pass


class EpochMark(NamedTuple):
    """Where the epoch stood between two updates."""

    passes: list[Pass]  # over each loader
    over: bool
    wrapped: list[bool]  # which loaders had come to their end before


class Epoch:
    """The passes over the train loaders that make one epoch, and how the ``CombinedLoader``'s mode joins them.

    Args:
        slot: Where the loaders are.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._ruler = 0
        self._marked: EpochMark | None = None

    @property
    def fresh_length(self) -> int | float:
        """Batches of an epoch that starts now and keeps the sizes; ``math.inf`` where nobody knows."""
        return self._of_all([loader.fresh_length for loader in self._slot.loaders])

    @property
    def planned_length(self) -> int | float:
        """Batches of an epoch at the initial sizes as they were without us; ``math.inf`` where nobody knows."""
        return self._of_all([loader.planned_length for loader in self._slot.loaders])

    def _of_all(self, lengths: list[int | float]) -> int | float:
        return min(lengths) if self._slot.mode == "min_size" else max(lengths)

    @property
    def exact(self) -> bool:
        """Whether :attr:`length` is more than an estimate."""
        return not any(one.plan.open for one in self._slot.passes)

    @property
    def length(self) -> int | float:
        """Batches handed out, and those to come if the sizes stay; ``math.inf`` where nobody knows."""
        passes = self._slot.passes
        if len(passes) == 1:
            return passes[0].length
        if self._slot.mode == "min_size":
            return min(one.length for one in passes)
        steps = self._slot.fetched
        return max([steps, *(one.length for one, ended in zip(passes, self._slot.wrapped, strict=True) if not ended)])

    @property
    def over(self) -> bool:
        """Whether no batch follows."""
        passes = self._slot.passes
        return passes[0].plan.over if len(passes) == 1 else self._joined([one.plan.over for one in passes])

    @property
    def ruler(self) -> int:
        """Which loader decides how long an epoch is at the sizes in force; that one is not begun again."""
        lengths = [loader.fresh_length for loader in self._slot.loaders]
        return lengths.index(self.fresh_length)

    @property
    def consumed(self) -> int:
        """Samples that were handed out of the loader that decided the epoch's length at its beginning."""
        return self._slot.passes[self._ruler].plan.consumed

    @property
    def trained(self) -> int:
        """Samples of the first loader's last batch, all parts together; 0 if it gives none any more."""
        plan = self._slot.live.plan
        exhausted = self._slot.mode == "max_size" and plan.batches < self._slot.fetched
        return 0 if exhausted else plan.last_size

    @property
    def begun(self) -> bool:
        """Whether a batch was fetched since the last mark."""
        marked = self.marked
        passes = self._slot.passes
        return any(
            now is not then or now.plan.batches > then.marked.batches
            for now, then in zip(passes, marked.passes, strict=True)
        )

    @property
    def marked(self) -> EpochMark:
        """Where it stood at the last mark, or at its beginning."""
        if self._marked is not None:
            return self._marked
        passes = self._slot.passes
        return EpochMark(passes, self._joined([one.marked.over for one in passes]), self._slot.wrapped)

    def begin(self) -> None:
        """Note that an epoch begins: its passes will be others."""
        self._ruler = self.ruler if len(self._slot.loaders) > 1 else 0
        self._marked = None

    def forget(self) -> None:
        """Let go of the passes: they hold worker processes."""
        self._marked = None

    def mark(self) -> None:
        """Remember that what was handed out was used, and that nothing else was begun."""
        passes = self._slot.passes
        for one in passes:
            one.mark()
        if len(passes) == 1:
            self._marked = EpochMark(passes, passes[0].plan.over, [False])
            return
        self._marked = EpochMark(passes, self.over, self._slot.wrapped)

    def look_ahead(self) -> None:
        """Find out whether a batch follows, where that could not be known before."""
        for one in self._slot.passes:
            one.look_ahead()

    def state(self, *, at_mark: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return where each pass stands, and what is to be known of all of them, as plain numbers."""
        mark = self.marked
        passes = mark.passes if at_mark else self._slot.passes
        wrapped = mark.wrapped if at_mark else self._slot.wrapped
        return [one.state_dict(at_mark=at_mark) for one in passes], {"ruler": self._ruler, "wrapped": wrapped}

    def go_on(self, state: dict[str, Any]) -> None:
        """Go on where another process stood, with passes that do."""
        self._slot.wrapped = state["wrapped"]
        self._ruler = state["ruler"]
        self._marked = EpochMark(self._slot.passes, self.over, self._slot.wrapped)

    def _joined(self, ends: list[bool]) -> bool:
        """Return whether the epoch is over, by which passes are."""
        if self._slot.mode == "min_size":
            return any(ends)
        return all(end or ended for end, ended in zip(ends, self._slot.wrapped, strict=True))
