# SPDX-License-Identifier: Apache-2.0
"""Where validation falls inside an epoch whose batches change their size. Pure arithmetic."""

from __future__ import annotations


class ValidationPoints:
    """The points of one epoch at which a fractional ``val_check_interval`` validates.

    Lightning validates every v = max(1, int(batches · fraction)) batches. Here the same v, taken at the
    epoch's start, is a number of samples; validation follows the batch that crosses a multiple of it. At a
    constant size these are Lightning's own points.

    Args:
        batches: Of the epoch, at the size in force at its start.
        fraction: The interval, in (0, 1).
        batch_size: In force at the epoch's start, in samples.
    """

    def __init__(self, batches: int, fraction: float, batch_size: int) -> None:
        every = max(1, int(batches * fraction))
        self._stride = every * batch_size
        self._planned = batches // every
        self._passed = 0

    def state(self) -> list[int]:
        """Return what :meth:`from_state` makes them again from."""
        return [self._stride, self._planned, self._passed]

    @classmethod
    def from_state(cls, state: list[int]) -> ValidationPoints:
        """Return the points of an epoch that another process began."""
        points = cls(1, 1.0, 1)
        points._stride, points._planned, points._passed = state
        return points

    def reached(self, consumed: int, *, last: bool) -> bool:
        """Whether validation follows a batch that ends at ``consumed`` samples; ``last`` of the epoch or not."""
        passed = consumed // self._stride
        if last:
            # A smaller last batch, or a dropped tail, must not cost the validation that was planned there.
            passed = max(passed, self._planned)
        due = passed > self._passed
        self._passed = max(passed, self._passed)
        return due
