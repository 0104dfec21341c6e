# SPDX-License-Identifier: Apache-2.0
"""One pass over the data, counted in samples: how large the next batch is and how many will follow.

Pure arithmetic. Positions are counted in samples, never in batches: a number of batches has no meaning
once their size moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Tail = Literal["keep", "carry", "drop"]

_TREND_STEPS = 4  # the size moves at every batch once it moved at this many in a row


def parts_of(size: int, device_limit: int | None, least_parts: int = 1) -> int:
    """Return in how many parts a batch of ``size`` samples is handed out."""
    needed = 1 if device_limit is None else -(-size // device_limit)
    return max(needed, min(least_parts, size))


def fills(size: int, parts: int, unit: int, device_limit: int | None) -> bool:
    """Whether all parts of a batch but the last one can be batches of ``unit`` samples, as they were without us."""
    return unit <= (device_limit or unit) and parts * unit >= size > (parts - 1) * unit


@dataclass
class EpochPlan:
    """Where one pass over the data stands.

    Whether a batch is the last one is settled when it is handed out and never revised.

    Args:
        total: Samples of the pass, those carried over from the pass before included.
        initial: The loader's own batch size, which decides whether a single leftover sample may stand alone.
        tail: What happens to the samples that do not fill a batch: one smaller batch, carried into the
            next pass, or dropped.
        max_batches: The pass ends after this many batches, or None.
        most: An open plan ends with this many samples, or None.
        open: More samples may follow than ``total``, the ones that are known: see :meth:`see`.
        device_limit: A batch of more samples is handed out in parts of about equal size, micro-batches that
            make one update together; None for no limit. ``max_batches`` and ``batches`` count the parts.
        least_parts: Every batch is handed out in so many parts at least, as far as it has the samples; what is kept of
            an epoch's rest only if no part has a single sample then.
        unit: Samples of one of the user's batches, of which ``initial`` has several; 0 for none. What is left after
            batches of ``initial`` is handed out in such parts, as far as it fills them, as it was without us,
        drop_unit: and where incomplete batches are dropped, an incomplete one of these is.

    Attributes:
        consumed: Samples handed out.
        batches: Batches handed out, each part of one counts.
        last_size: Samples of the last batch, all parts together; 0 before the first.
        over: No batch follows.
        unsized: It was open when it began.
        part: Which part of the batch was handed out last, from 1.
        part_size: Its samples.
        rest: Samples of the batch that are still to be handed out, in ``parts_left`` parts.
    """

    total: int
    initial: int
    tail: Tail
    max_batches: int | None = None
    consumed: int = 0
    batches: int = 0
    last_size: int = 0
    over: bool = False
    open: bool = False
    most: int | None = None
    device_limit: int | None = None
    part: int = 0
    part_size: int = 0
    rest: int = 0
    parts_left: int = 0
    least_parts: int = 1
    unit: int = 0
    drop_unit: bool = False
    filled: bool = False  # whether the parts of the batch in hand are of the unit, but for the last one

    def __post_init__(self) -> None:
        """A pass without samples or without batches is over before it starts."""
        self.over = (self.total == 0 and not self.open) or self.max_batches == 0
        self.unsized = self.open

    @property
    def own_size(self) -> int:
        """The initial batch size, as far as the data go."""
        return self.initial if self.unsized else min(self.initial, self.total)

    @property
    def left(self) -> int:
        """Samples not handed out yet, of those that are known."""
        return self.total - self.consumed

    def horizon(self, size: int) -> int:
        """Return the position up to which an open plan must see to hand out a batch of ``size``.

        The batch itself; then the two samples that tell whether it is the last one or a single sample will be
        left, or, where an incomplete batch is not trained, all of the next one.
        """
        return self.consumed + size + (2 if self.tail == "keep" else size)

    def see(self, known: int, *, more: bool) -> None:
        """Take note of the samples that are known of an open plan; without ``more`` they are all."""
        if self.open:
            self.total, self.open = known, more

    def next_size(self, size: int) -> int:
        """Return how many samples the next batch has when ``size`` are wanted; 0 if the pass is over."""
        if self.over:
            return 0
        if self.tail == "keep":
            batch = min(size, self.left)
            single = self.left - size == 1 and self.batches + 1 != self.max_batches
            return batch + 1 if single and self._single_joins(size) else batch
        return self._whole(size) if size <= self.left else self._size_in_force(self.left)

    def hand_out(self, size: int) -> int:
        """Take the next batch, or the next part of one, off what is left; return its samples, 0 if the pass is over."""
        if self.rest == 0 and not self._begin(size):
            self.over = True
            return 0
        handed = min(self.unit, self.rest) if self.filled else -(-self.rest // self.parts_left)
        self.consumed += handed
        self.batches += 1
        self.part += 1
        self.part_size = handed
        self.rest -= handed
        self.parts_left -= 1
        if self.rest == 0:
            self.over = self.left < self._least_to_follow() or self.batches == self.max_batches
        return handed

    def parts(self, size: int, *, left: bool = False) -> int:
        """Return in how many parts a batch is handed out; ``left``: it is an epoch's rest that is kept."""
        return parts_of(size, self.device_limit, 1 if left and size < 2 * self.least_parts else self.least_parts)

    @property
    def in_parts(self) -> bool:
        """Whether batches may have several parts."""
        return self.device_limit is not None or self.least_parts > 1

    def _begin(self, size: int) -> bool:
        batch = self.next_size(size)
        if batch == 0:
            return False
        self._divide(batch, left=self.tail == "keep" and batch < size)
        self.filled = size == self.own_size and fills(self.last_size, self.parts_left, self.unit, self.device_limit)
        return True

    def begin_again(self, device_limit: int) -> None:
        """Have the batch in hand handed out once more, from its first part on, by another ``device_limit``."""
        self.device_limit = device_limit
        self.consumed -= self.last_size - self.rest
        self.batches -= self.part
        self.over = self.filled = False
        self._divide(self.last_size)

    def _divide(self, batch: int, *, left: bool = False) -> None:
        parts = self.parts(batch, left=left)
        if self.max_batches is not None and parts > self.max_batches - self.batches:
            parts = self.max_batches - self.batches  # the last batch is as large as the parts that there may be
            batch = min(batch, parts * (self.device_limit or batch))
        self.last_size, self.rest, self.parts_left, self.part = batch, batch, parts, 0

    def batches_left(self, size: int) -> int:
        """Return how many batches, or parts of them, follow if ``size`` stays."""
        if self.over:
            return 0
        left = self.left - self.rest
        if self.tail == "keep":
            full, rest = divmod(left, size)
            joins = rest == 1 and full > 0 and self._single_joins(size)
            count = full * self.parts(size)
            if joins:
                count += self.parts(size + 1) - self.parts(size)
            elif rest:
                count += self.parts(rest, left=True)
        else:
            fitting = self._whole(size) if size <= left else self._size_in_force(left)
            full, rest = divmod(left, fitting) if fitting else (0, 0)
            units = self._units(fitting, rest)
            count = full * self.parts(fitting) + (self.parts(units) if units else 0)
        count += self.parts_left
        return count if self.max_batches is None else min(count, self.max_batches - self.batches)

    def _single_joins(self, size: int) -> bool:
        # A batch of one breaks BatchNorm. Where the user chose the size it is theirs to answer for; where
        # we chose it the leftover sample joins the batch before it.
        return size > 1 and size != self.own_size

    def _size_in_force(self, left: int) -> int:
        # More is wanted than is left: the epoch goes on with the size that was in force. One of unknown length
        # may be shorter than its first batch: no epoch is empty.
        size = left if self.unsized and self.last_size == 0 else self.last_size
        return size if size <= left else self._units(size, left)

    def _whole(self, size: int) -> int:
        # Of data that have less than a batch an incomplete unit is dropped, too.
        return self._units(size, size) or size

    def _units(self, size: int, left: int) -> int:
        # What of less than a batch is trained after one of ``size``, where incomplete batches are dropped.
        return left // self.unit * self.unit if self.drop_unit and size == self.own_size else 0

    def _least_to_follow(self) -> int:
        # Fewer samples than these are no batch.
        if self.tail == "keep":
            return 1
        return min(self.unit, self.last_size) if self.drop_unit and self.last_size == self.own_size else self.last_size


@dataclass
class BlockPlan:
    """How many samples workers fetch at a time, ahead of the batches that will be cut from them.

    A block should end where a batch will end, for then nothing is copied. At a constant size every block
    is one batch. After a change the next block is sized so that its end falls on a batch border again;
    while the size moves at every batch the borders to come are extrapolated. All of it depends only on
    what was handed out, never on timing, and a wrong guess costs a copy, never exactness.

    Args:
        plan: The pass that the blocks serve.
        available: Samples that there are to fetch; a limited pass hands out fewer.

    Attributes:
        dispatched: Samples in the blocks so far.
    """

    plan: EpochPlan
    available: int | float
    dispatched: int = 0
    _recent: list[int] = field(default_factory=list)
    _first_size: int = 0
    _moved: bool = False

    def note(self, size: int) -> None:
        """Remember the size of a batch just handed out."""
        self._recent.append(size)
        if len(self._recent) > _TREND_STEPS + 1:
            del self._recent[0]

    def next_block(self, size: int) -> int:
        """Return the samples of the next block when ``size`` is in force; 0 when there is none to fetch now."""
        self._first_size = self._first_size or size
        self._moved = self._moved or size != self._first_size
        block = int(min(self.reach(size), self.available)) - self.dispatched
        first = self.plan.unsized and self.dispatched == 0  # it is trained, even if it is all there is
        seen = self.plan.tail == "keep" or self._moved or self.plan.in_parts or first
        if block < size and not seen:
            return 0  # a tail that nobody will see, unless the size changes: then it is asked for again
        self.dispatched += block
        return block

    def reach(self, size: int) -> int:
        """Return where the next block ends if there is enough to fetch."""
        return self._border_beyond(self.dispatched, size)

    def state(self) -> list[int]:
        """Return what its guesses rest on."""
        return [self._first_size, int(self._moved), *self._recent]

    def go_on(self, state: list[int]) -> None:
        """Take over the guesses of the process before."""
        self._first_size, self._moved, self._recent = state[0], bool(state[1]), state[2:]

    def _border_beyond(self, position: int, size: int) -> int:
        border = self.plan.consumed  # the end of the batch that is being cut
        if border > position:
            return border
        trend = self._trend() if self._moved else 0.0
        if trend == 0.0:
            return border + ((position - border) // size + 1) * size
        step = 1
        while border <= position:
            border += max(1, round(size + step * trend))
            step += 1
        return border

    def _trend(self) -> float:
        if len(self._recent) <= _TREND_STEPS or self._recent[-1] == self._recent[-2]:
            return 0.0
        steps = [after - before for before, after in pairwise(self._recent)]
        return sum(steps) / len(steps) if all(steps) else 0.0
