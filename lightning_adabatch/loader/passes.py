# SPDX-License-Identifier: Apache-2.0
"""One pass over the data: hands out batches, and says where it stands so that another process can go on there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_adabatch.loader.again import Again
from lightning_adabatch.loader.assembly import Assemble
from lightning_adabatch.loader.blocks import BlockSampler, BlockStream, SizeInForce
from lightning_adabatch.loader.plan import EpochPlan


class Mark(NamedTuple):
    """Where a pass stood between two batches."""

    consumed: int
    batches: int
    last_size: int
    over: bool
    started: bool  # whether the sampler had begun
    finished: bool  # whether it had come to its end


class Pass(Iterator[Any]):
    """One pass over the data.

    Args:
        blocks: What is asked of the workers.
        source: The owned ``DataLoader``'s iterator.
        assemble: Makes a batch of pieces of blocks.
        size: Knows the batch size in force.
        base_state: The state of the generator from which ``source`` drew its base seed.
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
        blocks: BlockSampler,
        source: Iterator[Any],
        assemble: Assemble,
        size: SizeInForce,
        base_state: Tensor,
        handed_out: Callable[[Pass], None],
        keep: Callable[[EpochPlan], bool],
    ) -> None:
        self.blocks = blocks
        self.plan = blocks.plan
        self._assemble = assemble
        self._size = size
        self._base_state = base_state
        self._handed_out = handed_out
        # Workers' random collate functions are seeded from this; torch draws it once a pass.
        self._base_seed: int = source._base_seed  # type: ignore[attr-defined]
        self._stream = BlockStream(source, blocks.in_flight)
        on_demand: bool = source._num_workers == 0  # type: ignore[attr-defined]
        self.again = Again(blocks, self._stream, on_demand=on_demand, keep=keep)
        self.generator = torch.default_generator.get_state()
        self.mark()

    @property
    def source(self) -> Iterator[Any] | None:
        """The owned ``DataLoader``'s iterator; None once the pass is over or closed."""
        return self._stream.source

    @property
    def length(self) -> int:
        """Batches handed out, and those to come if the size in force stays."""
        return self.plan.batches + self.plan.batches_left(self._size.batch_size)

    def __next__(self) -> Any:
        if self.plan.rest == 0:
            self.generator = torch.default_generator.get_state()
            self.again.forget()
        size = self.plan.hand_out(self._size.batch_size)
        if size == 0:
            self.blocks.finish()
            self.release()
            raise StopIteration
        self.blocks.blocks.note(size if self.plan.device_limit is None else self._size.device_size)
        pieces = self._stream.take(size)
        self.again.note(pieces)
        batch = self._assemble(pieces, self._base_seed + self.plan.batches)
        self._handed_out(self)
        return batch

    def mark(self) -> None:
        """Remember that what was handed out was used, and that nothing else was begun."""
        plan = self.plan
        self.marked = Mark(
            plan.consumed,
            plan.batches,
            plan.last_size,
            plan.over,
            self.blocks.started is not None,
            self.blocks.finished,
        )

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
            "total": self.plan.total,
            "consumed": mark.consumed,
            "batches": mark.batches,
            "last_size": mark.last_size,
            "over": mark.over,
            "carried": list(self.blocks.carried),
            "sampler_epoch": self.blocks.sampler_epoch,
            "order": self.blocks.order,
            "base_state": self._base_state,
            "started": self.blocks.started if mark.started else None,
            "own": self.blocks.own_states(),
            "finished": mark.finished,
            "witnesses": self.blocks.witnesses(mark.consumed),
            "blocks": self.blocks.blocks.state(),
        }

    def release(self) -> None:
        """Let go of the worker processes, unless they are persistent."""
        self._stream.source = None
