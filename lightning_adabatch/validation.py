# SPDX-License-Identifier: Apache-2.0
"""Where validation falls inside an epoch whose batches change their size. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class ValidationPoints:
    """The points of one epoch at which a fractional ``val_check_interval`` validates.

    Lightning validates every v = max(1, int(batches · fraction)) batches. Here the ends of these batches, as they
    would be at the size of the epoch's start, are positions in samples; validation follows the batch that reaches
    the next one. At a constant size these are Lightning's own points.

    Args:
        fraction: The interval, in (0, 1).
        ends: Where the epoch's batches end at the size in force at its start, each part of one counted, in samples.
    """

    def __init__(self, fraction: float, ends: Sequence[int]) -> None:
        every = max(1, int(len(ends) * fraction))
        self._ends = list(ends[every - 1 :: every])
        self._passed = 0

    def state(self) -> list[int]:
        """Return what :meth:`from_state` makes them again from."""
        return [self._passed, *self._ends]

    @classmethod
    def from_state(cls, state: list[int]) -> ValidationPoints:
        """Return the points of an epoch that another process began."""
        points = cls(1.0, [])
        points._passed, *points._ends = state
        return points

    def reached(self, consumed: int, *, last: bool) -> bool:
        """Whether validation follows a batch that ends at ``consumed`` samples; ``last`` of the epoch or not."""
        passed = bisect_right(self._ends, consumed)
        if self._ends and passed == len(self._ends):  # there is more of a stream than it said
            passed += (consumed - self._ends[-1]) // self._ends[0]
        if last:
            # A smaller last batch, or a dropped tail, must not cost the validation that was planned there.
            passed = max(passed, len(self._ends))
        due = passed > self._passed
        self._passed = max(passed, self._passed)
        return due
