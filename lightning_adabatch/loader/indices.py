# SPDX-License-Identifier: Apache-2.0
"""Map-style data, by the indices that a sampler gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_adabatch import generators
from lightning_adabatch.loader.assembly import assembler, block_collate, blocks_apart
from lightning_adabatch.loader.blocks import BlockSampler
from lightning_adabatch.loader.pieces import BlockStream
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.loader.supply import Kind, Supply, begin_with, known_length, settings_of


class IndexSupply(Supply):
    """The samples of one pass, asked for by their indices.

    Args:
        blocks: What is asked of the workers.
        source: The owned ``DataLoader``'s iterator.
        loader: The user's.
        size: Knows the batch size in force.
    """

    def __init__(self, blocks: BlockSampler, source: Iterator[Any], loader: DataLoader[Any], size: SizeInForce) -> None:
        lengths = blocks.in_flight
        super().__init__(blocks.plan, BlockStream(source, lambda block: (lengths.popleft(), block)), assembler(loader))
        self.blocks = blocks
        self.carried = blocks.carried
        self.on_demand = loader.num_workers == 0
        self._size = size
        if self.on_demand:
            blocks.drawn = self._note_drawn

    def look_again(self) -> None:
        """Take the length that the data has now: Lightning makes the first pass before any hook of an epoch."""
        if not self.on_demand or self.blocks.blocks.dispatched > 0:
            return
        self.blocks.sampler_epoch = getattr(self.blocks.sampler, "epoch", None)
        if not self.plan.unsized and self._size.agreed is None:  # what all ranks agreed on stays
            self._size.refresh()
            self.plan.total = int(self._size.epoch_samples) + len(self.carried)
            self.blocks.blocks.available = len(self.carried) + len(self.blocks.sampler)

    def prepare(self, size: int) -> int:
        """Look beyond the batch where the sampler has no length."""
        if self.plan.open:
            self.blocks.see(self.plan.horizon(size))
        return size

    def take(self, size: int) -> list[Any]:
        """Return the samples that the plan just handed out."""
        self.blocks.blocks.note(self._size.device_size if self.plan.in_parts else size)
        return super().take(size)

    def put_back(self) -> None:
        """Have the batch in hand, which begins where the plan stands, fetched again."""
        self.blocks.put_back(self.plan.consumed)

    def _note_drawn(self) -> None:
        if self.drawn is not None:
            self.drawn()

    def finish(self) -> None:
        """Let the sampler come to its end."""
        self.blocks.finish()

    def leftover(self) -> list[Any]:
        """Return the indices that the pass did not get to and the next one begins with."""
        return self.blocks.leftover()

    def mark(self) -> tuple[bool, bool]:
        """Return whether the sampler had begun, and whether it had come to its end."""
        return self.blocks.started is not None, self.blocks.finished

    def state(self, mark: tuple[bool, bool], consumed: int) -> dict[str, Any]:
        """Return where the sampler stood."""
        started, finished = mark
        blocks = self.blocks
        return {
            "total": None if blocks.unsized else self.plan.total,
            "sampler_epoch": blocks.sampler_epoch,
            "order": blocks.order,
            "started": blocks.started if started else None,
            "own": blocks.own_states(),
            "finished": finished,
            "witnesses": blocks.witnesses(consumed),
            "blocks": blocks.blocks.state(),
        }


class Indices(Kind):
    """Map-style data with a sampler and a plain ``BatchSampler``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        batch_sampler: Any = loader.batch_sampler
        self.sampler = batch_sampler.sampler
        self.own_batch_size = batch_sampler.batch_size
        self.drop_last = batch_sampler.drop_last
        self._current = CurrentBlocks()

    def samples(self) -> int | None:
        """Return the length of the sampler; None if it has none."""
        return known_length(self.sampler)

    def epochs_in(self, place: Mapping[str, Any]) -> list[Any]:
        """Return the epochs that loader and sampler shuffled for where a pass stood."""
        return [None, place.get("sampler_epoch")]

    def batches_left(self, plan: EpochPlan, size: int) -> int | float:
        """Return how many batches, or parts of them, follow if ``size`` stays."""
        return at_least_two(plan, float("inf")) if plan.open else plan.batches_left(size)

    def own(self, num_workers: int, worker_init_fn: Any) -> DataLoader[Any]:
        """Build the ``DataLoader`` that fetches the blocks."""
        user = self.loader
        return DataLoader(
            user.dataset,
            batch_sampler=self._current,  # an iterable of lists is all that it needs
            collate_fn=block_collate(user),
            pin_memory=user.pin_memory and not blocks_apart(user),
            **settings_of(user, num_workers, worker_init_fn),
        )

    def begin(self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, carried: list[Any]) -> Supply:
        """Begin a pass."""
        blocks = self._current.blocks = BlockSampler(self.sampler, plan, carried, size, self.generators)
        return IndexSupply(blocks, iter(owned), self.loader, size)

    def go_on(
        self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, place: Mapping[str, Any]
    ) -> Supply | None:
        """Begin a pass where another one stood, or return None if the order is another."""
        if "sampler_epoch" not in place or (not plan.open and plan.total != place["total"]):
            return None
        if place["sampler_epoch"] is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(place["sampler_epoch"])
        blocks = BlockSampler(self.sampler, plan, list(place["carried"]), size, self.generators)
        blocks.blocks.go_on(place["blocks"])
        if place["started"] is None:
            generators.set_states(self.generators, place["own"])
        elif not blocks.replay(place["started"], place["witnesses"], finished=place["finished"]):
            return None
        if plan.over:
            blocks.leftover()  # draws, where tails are carried
        self._current.blocks = blocks
        return IndexSupply(blocks, begin_with(owned, place["base_state"]), self.loader, size)


def at_least_two(plan: EpochPlan, estimate: float) -> int | float:
    """Return how many batches follow by an estimate, for a plan of which nobody knows the end.

    One follows for sure, and that it is the last one is said when it is handed out: until then there are two.
    """
    if plan.over:
        return 0
    more = max(estimate, plan.parts_left + 2)
    return more if plan.max_batches is None else min(more, plan.max_batches - plan.batches)


class CurrentBlocks:
    """The batch sampler that the owned ``DataLoader`` is built with; each pass puts its own in."""

    blocks: Iterator[list[Any]]

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.blocks)
