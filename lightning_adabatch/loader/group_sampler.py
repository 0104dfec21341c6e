# SPDX-License-Identifier: Apache-2.0
"""What is asked of a batch sampler of the user's own: groups of indices, each of the size in force when it is asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_adabatch import generators
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce

# So many of the indices before a place are remembered by what they look like, to know the order again,
_WITNESSES = 8
# and so many groups for that: beyond those that workers have in flight.
_GROUPS = 256


class GroupSampler:
    """Asks the user's batch sampler for groups of indices, of the size in force at that moment.

    Args:
        batch_sampler: The user's; its ``batch_size`` is set.
        plan: The pass: it says in how many parts a group goes to the device.
        size: Knows the batch size in force.
        own: The user's generators.

    Attributes:
        waiting: Groups that were drawn and not asked for by a ``DataLoader``.
        groups: Samples of the groups that were drawn and not handed out.
        drawn: Samples of all groups so far.
        in_flight: Samples of the parts that were asked for and did not arrive.
        ended: Whether the batch sampler has come to its end.
        started: The generators' state when it began; None before.
        history: How many groups in a row were asked for with which size.
        name: Of the batch sampler's class.
        asked: Called when a ``DataLoader`` asked for a part of a group, or None.
    """

    def __init__(
        self, batch_sampler: Any, plan: EpochPlan, size: SizeInForce, own: Mapping[str, generators.Own]
    ) -> None:
        self.groups: deque[int] = deque()
        self.drawn = 0
        self.in_flight: deque[int] = deque()
        self.ended = False
        self.started: dict[str, Any] | None = None
        self.history: list[list[int]] = []
        self.name = type(batch_sampler).__name__
        self._batch_sampler = batch_sampler
        self._plan = plan
        self._size = size
        self._own = own
        self.asked: Callable[[], None] | None = None
        self.waiting: deque[list[Any]] = deque()
        self._current: list[Any] = []  # the group that was asked for last
        self._parts: deque[list[Any]] = deque()  # what is to come of it
        self._source: Iterator[Any] | None = None
        self._kept: deque[tuple[int, list[Any]]] = deque(maxlen=_GROUPS)  # with the position where each begins

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the next part of a group."""
        if not self._parts:
            if not self.waiting and not self.draw(self._size.batch_size):
                raise StopIteration
            self._current = self.waiting.popleft()
            self._divide()
        part = self._parts.popleft()
        self.in_flight.append(len(part))
        if self.asked is not None:
            self.asked()
        return part

    def shorten(self, samples: int) -> int:
        """Have the group that is asked for next no more samples than that, if it was not asked for; return them."""
        if self.waiting:
            self.waiting[0] = self.waiting[0][:samples]
        return samples

    def last(self, consumed: int) -> list[Any]:
        """Return the last few indices that had been handed out when so many samples were."""
        return [index for first, group in self._kept for index in group if first + len(group) <= consumed][-_WITNESSES:]

    def put_back(self) -> None:
        """Have the group that was asked for last asked for once more, from its beginning, in other parts."""
        self._divide()

    def _divide(self) -> None:
        group, left, position = self._current, self._plan.parts(len(self._current)), 0
        self._parts.clear()
        while left:
            step = -(-(len(group) - position) // left)
            self._parts.append(group[position : position + step])
            position, left = position + step, left - 1

    def draw(self, size: int) -> bool:
        """Ask for one more group; whether there was one."""
        if self.ended:
            return False
        if self._source is None:
            self.started = {"global": generators.capture(), "own": generators.states_of(self._own)}
            self._source = iter(self._batch_sampler)
        self._batch_sampler.batch_size = size
        if self.history and self.history[-1][1] == size:
            self.history[-1][0] += 1
        else:
            self.history.append([1, size])
        group = next((list(found) for found in self._source if found), None)  # an empty one trains nothing
        if group is None:
            self.ended = True
            return False
        self._kept.append((self.drawn, group))
        self.waiting.append(group)
        self.groups.append(len(group))
        self.drawn += len(group)
        return True

    def own_states(self) -> dict[str, Any]:
        """Return the states of the own generators before the batch sampler began."""
        return generators.states_of(self._own) if self.started is None else self.started["own"]

    def go_past(self, place: Mapping[str, Any]) -> bool:
        """Ask again for the groups that had been asked for, and drop those that were handed out."""
        generators.restore(place["started"]["global"])
        generators.set_states(self._own, place["started"]["own"])
        for count, size in place["history"]:
            for _ in range(count):
                self.draw(size)
        self.started = place["started"]
        samples = 0
        while samples < place["consumed"] and self.groups:
            samples += self.groups.popleft()
            self.waiting.popleft()
        same = [repr(index) for index in self.last(samples)] == place["witnesses"]
        return bool(samples == place["consumed"]) and same
