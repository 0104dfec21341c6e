# SPDX-License-Identifier: Apache-2.0
"""One pass over the data: hands out batches, and says where it stands so that another process can go on there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_adabatch.loader.again import Again
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.loader.supply import Kind, Supply


class Mark(NamedTuple):
    """Where a pass stood between two batches."""

    consumed: int
    batches: int
    last_size: int
    over: bool
    supply: Any  # what the supply says of that moment


class Pass(Iterator[Any]):
    """One pass over the data.

    Args:
        supply: The samples.
        kind: Of the data.
        size: Knows the batch size in force.
        base_state: The state of the generator from which the base seed was drawn.
        handed_out: Called with the pass after every batch.
        keep: Called with the plan when a batch begins; whether it may have to be handed out again.

    Attributes:
        plan: Where it stands.
        again: Hands the batch in hand out once more.
        marked: Where it stood when :meth:`mark` was called last, or at its beginning.
        generator: The state of torch's global generator before the last batch, its first part, was fetched.
    """

    def __init__(
        self,
        supply: Supply,
        kind: Kind,
        size: SizeInForce,
        base_state: Tensor,
        handed_out: Callable[[Pass], None],
        keep: Callable[[EpochPlan], bool],
    ) -> None:
        self.supply = supply
        self.plan = supply.plan
        self._kind = kind
        self._size = size
        self._base_state = base_state
        self._handed_out = handed_out
        self.again = Again(supply, keep)
        self.generator = torch.default_generator.get_state()
        self.mark()

    @property
    def source(self) -> Iterator[Any] | None:
        """The owned ``DataLoader``'s iterator; None once the pass is over or closed."""
        return self.supply.stream.source

    @property
    def length(self) -> int | float:
        """Batches handed out, and those to come if the size in force stays; ``math.inf`` where nobody knows."""
        return self.plan.batches + self._kind.batches_left(self.plan, self._size.batch_size)

    def __next__(self) -> Any:
        plan, supply = self.plan, self.supply
        if plan.batches == 0:
            supply.look_again()
        wanted = self._size.batch_size
        if plan.rest == 0:
            self.generator = torch.default_generator.get_state()
            self.again.forget()
            if not plan.over:
                wanted = supply.prepare(wanted)
        size = plan.hand_out(wanted)
        if size == 0:
            supply.finish()
            self.release()
            raise StopIteration
        pieces = supply.take(size)
        self.again.note(pieces)
        batch = supply.assemble(pieces, supply.base_seed + plan.batches)
        self._handed_out(self)
        return batch

    def look_ahead(self) -> None:
        """Find out whether a batch follows, where that could not be known when the last one was handed out."""
        self.supply.look_ahead()

    def mark(self) -> None:
        """Remember that what was handed out was used, and that nothing else was begun."""
        plan = self.plan
        self.marked = Mark(plan.consumed, plan.batches, plan.last_size, plan.over, self.supply.mark())

    def state_dict(self, *, at_mark: bool) -> dict[str, Any]:
        """Return plain numbers, strings and tensors from which :class:`ElasticLoader` makes this pass again.

        Args:
            at_mark: Where it stood at the last mark, instead of now.
        """
        mark = self.marked
        if not at_mark:
            self.mark()
            mark, self.marked = self.marked, mark
        return {
            "consumed": mark.consumed,
            "batches": mark.batches,
            "last_size": mark.last_size,
            "over": mark.over,
            "carried": list(self.supply.carried),
            "base_state": self._base_state,
            **self.supply.state(mark.supply, mark.consumed),
        }

    def release(self) -> None:
        """Let go of the worker processes, unless they are persistent."""
        self.supply.stream.source = None
