# SPDX-License-Identifier: Apache-2.0
"""Streams: ``IterableDataset``, of which nobody knows where they end before they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_adabatch import generators
from lightning_adabatch.loader.assembly import Assemble, assembler, block_collate, blocks_apart
from lightning_adabatch.loader.indices import at_least_two
from lightning_adabatch.loader.pieces import BlockStream, Piece
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.loader.supply import Kind, Supply, known_length, settings_of

# Samples that are gone past at a time where a stream is begun again with no workers.
_STEP = 256
# Nor more at once than these: a size without a cap may be far beyond what a stream has, and is asked for by a list.
_MOST = 2**16
# So many of the samples before a place are remembered by what they look like, to know the order again.
_WITNESSES = 8


class Block(NamedTuple):
    """What a worker collated, and of how many samples: the last block of its stream may be short."""

    samples: int
    content: Any


class StreamMark(NamedTuple):
    """Where a stream stood between two batches."""

    before: int  # samples that had arrived before the last batch was looked for,
    generator: torch.Tensor | None  # torch's generator then,
    drawn: int  # and those that had arrived after it
    last: list[Piece]  # the last samples that were handed out, with no workers


class StreamSupply(Supply):
    """The samples of one pass over a stream.

    With workers the order of the samples depends on how many a worker fetches at a time, each in turn. So blocks
    keep their size until the batches have twice as many samples, or half: a few numbers say how to begin again.

    Args:
        owned: The ``DataLoader`` that fetches the blocks.
        plan: The pass, open.
        assemble: Makes a batch of pieces of blocks.
        size: Knows the batch size in force.
        own: The user's generators that the stream may draw from.
        block: Samples that a worker fetches at a time at first.
        epochs: That the user's objects shuffle for.
    """

    def __init__(
        self,
        owned: DataLoader[Any],
        plan: EpochPlan,
        assemble: Assemble,
        size: SizeInForce,
        own: Mapping[str, generators.Own],
        block: int,
        epochs: list[Any],
    ) -> None:
        self._begun = {"global": generators.capture(), "own": generators.states_of(own)}
        self._blocks: Any = owned.batch_sampler
        self._workers = owned.num_workers
        self._size = size
        self._set_block(block)
        self._history: list[list[int]] = [[0, self._block]]  # from which block on which size was asked for
        super().__init__(plan, BlockStream(iter(owned), _length_of), assemble)
        self._drawn = self._arrived = 0  # samples, and blocks
        self._ended = False
        self._before = StreamMark(0, None, 0, [])
        self._last: list[Piece] = []
        self._epochs = epochs

    def prepare(self, size: int) -> int:
        """Look beyond the batch, to know whether it is the last one."""
        plan = self.plan
        self._before = StreamMark(self._drawn, torch.default_generator.get_state(), 0, [])
        if self._workers:
            self._follow(min(self._size.device_size, _MOST))
        horizon = plan.horizon(size)
        while self._drawn < horizon and not self._ended:
            self._pull(horizon - self._drawn)
        most = math.inf if self._size.max_samples is None else self._size.max_samples
        plan.see(int(min(self._drawn, most)), more=not self._ended and self._drawn < most)
        return size

    def take(self, size: int) -> list[Piece]:
        """Return the samples that the plan just handed out."""
        pieces = super().take(size)
        if not self._workers:
            self._last = pieces
        return pieces

    def mark(self) -> StreamMark:
        """Return what has arrived."""
        return self._before._replace(drawn=self._drawn, last=self._last)

    def state(self, mark: StreamMark, consumed: int) -> dict[str, Any]:
        """Return how to begin the stream again and go past what was handed out."""
        del consumed
        return {
            "total": None,
            "order": None,
            "started": self._begun,
            "workers": self._workers,
            "history": [list(entry) for entry in self._history],
            "before": mark.before,
            "before_state": mark.generator,
            "drawn": mark.drawn,
            "epochs": self._epochs,
            "witnesses": _witnesses(mark.last),
        }

    def go_past(self, place: Mapping[str, Any]) -> bool:
        """Let what had arrived arrive again, and drop what was handed out; whether there was as much."""
        for arrived, block in place["history"][1:]:
            while self._arrived < arrived and not self._ended:
                self._pull(0)
                self._drop()
            self._set_block(block)
        self._history = [list(entry) for entry in place["history"]]
        for drawn, state in ((place["before"], place["before_state"]), (place["drawn"], None)):
            while self._drawn < drawn and not self._ended:
                self._pull(drawn - self._drawn, step=_STEP)
                self._drop()
            if state is not None:
                torch.default_generator.set_state(state.cpu())
        self._before = StreamMark(place["before"], place["before_state"], place["drawn"], self._last)
        known = place["witnesses"]
        same = not known or _witnesses(self._last)[-len(known) :] == known
        return self._drawn >= self.plan.consumed and same

    def _pull(self, missing: int, step: int | None = None) -> None:
        """Let a block arrive; with no workers it has what is missing, ``step`` at a time."""
        if not self._workers:
            self._set_block(min(missing, step or _MOST))
        self._blocks.batch_size = self._block  # another pass, for a look at a batch, may have set its own
        arrived = self.stream.pull()
        self._drawn += arrived
        self._arrived += 1
        self._ended = arrived == 0

    def _drop(self) -> None:
        taken = self._drawn - self.stream.held
        pieces = self.stream.take(min(self.stream.held, self.plan.consumed - taken))
        if not self._workers:
            self._last = [*self._last, *pieces][-_WITNESSES:]

    def _follow(self, size: int) -> None:
        if size >= 2 * self._block or 2 * size <= self._block:
            self._set_block(size)
            if self._history[-1][0] == self._arrived:
                self._history.pop()
            self._history.append([self._arrived, size])

    def _set_block(self, size: int) -> None:
        self._block = self._blocks.batch_size = size


class Stream(Kind):
    """An ``IterableDataset``."""

    can_carry = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        assert loader.batch_size is not None  # for the type checker: loaders without one are refused
        self.own_batch_size = loader.batch_size
        self.drop_last = loader.drop_last

    def samples(self) -> int | None:
        """Return None: a stated length is a hint, and no more."""
        return None

    def hint(self) -> int | None:
        """Return the length that the data set states, or None."""
        return known_length(self.loader.dataset)

    @property
    def owners(self) -> list[Any]:
        """Whose generators a stream may draw from."""
        return [self.loader, self.loader.dataset]

    def batches_left(self, plan: EpochPlan, size: int) -> int | float:
        """Return how many batches, or parts of them, follow if ``size`` stays; an estimate for an open plan."""
        known = [samples for samples in (self.hint(), plan.most) if samples is not None]
        if not plan.open:
            return plan.batches_left(size)
        if not known:
            return at_least_two(plan, math.inf)
        expected = replace(plan, total=max(min(known), plan.consumed), open=False)
        return at_least_two(plan, expected.batches_left(size))

    def own(self, num_workers: int, worker_init_fn: Any) -> DataLoader[Any]:
        """Build the ``DataLoader`` that fetches the blocks."""
        user = self.loader
        return DataLoader(
            user.dataset,
            batch_size=self.own_batch_size,
            collate_fn=_Counted(block_collate(user)) if num_workers else _as_they_are,
            # Where samples are collated after the cut, with no workers too, batches are pinned then.
            pin_memory=bool(user.pin_memory and num_workers and not blocks_apart(user)),
            **settings_of(user, num_workers, worker_init_fn),
        )

    def begin(self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, carried: list[Any]) -> Supply:
        """Begin a pass."""
        del carried
        return self._supply(owned, plan, size, size.device_size)

    def go_on(
        self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, place: Mapping[str, Any]
    ) -> Supply | None:
        """Begin the stream again and go past what was handed out; None where that gives another order."""
        if place.get("workers") != owned.num_workers:
            return None
        self.set_epochs(place["epochs"])
        generators.restore(place["started"]["global"])
        generators.set_states(self.generators, place["started"]["own"])
        supply = self._supply(owned, plan, size, place["history"][0][1])
        return supply if supply.go_past(place) else None

    def _supply(self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, block: int) -> StreamSupply:
        assemble = assembler(self.loader, samples=True)
        return StreamSupply(owned, plan, assemble, size, self.generators, block, self.epochs)


class _Counted:
    """Collates a block and says how many samples it has."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Block:
        return Block(len(samples), self._collate(samples))


def _witnesses(pieces: list[Piece]) -> list[str]:
    """Return what the last few samples look like, in what is not drawn at random: whole numbers and texts."""
    samples = [sample for piece in pieces for sample in piece.block[piece.start : piece.stop]]
    return [repr(_firm(sample)) for sample in samples[-_WITNESSES:]]


def _firm(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: _firm(value) for key, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        return [_firm(value) for value in sample[:_WITNESSES]]
    if isinstance(sample, torch.Tensor) and sample.numel() == 1 and not sample.is_floating_point():
        return sample.item()
    return sample if isinstance(sample, (int, str, bytes)) else None


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _length_of(arrived: Any) -> tuple[int, Any]:
    return arrived if isinstance(arrived, Block) else (len(arrived), arrived)
