# SPDX-License-Identifier: Apache-2.0
"""A loader whose batch size can change between any two batches, exactly, with any number of workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_adabatch.loader.blocks import BlockSampler, BlockStream, Piece, SizeInForce
from lightning_adabatch.loader.cut import can_cut, cut, join
from lightning_adabatch.loader.parcel import collate_apart, pack
from lightning_adabatch.loader.plan import EpochPlan, Tail


class ElasticLoader:
    """Iterates over a map-style data set in batches of whatever size is in force when each is asked for.

    A plain iterable that owns a ``DataLoader`` made from the user's settings. Workers fetch *blocks* of
    samples; batches of exactly the size in force are cut from the stream of blocks. With a constant size
    every block is one batch and nothing is copied; with no workers blocks are fetched on demand.

    It draws from the global random state exactly what the user's ``DataLoader`` would draw.

    Args:
        loader: The user's; read, never changed. Map-style, with a sampler that has a length and a plain
            ``BatchSampler``.
        tail: What happens to samples that do not fill a batch; None: ``"drop"`` if the loader drops
            them, else ``"keep"``.
        max_batches: No pass has more batches, or None.
        max_samples: No pass has more samples, or None.

    Attributes:
        dataset, sampler, num_workers, drop_last, worker_init_fn: As in a ``DataLoader``. Everything else
            that a ``DataLoader`` has is read from the user's.
        own_batch_size: The user's, in samples.
        max_batches: No pass has more batches, or None.
        nominal: While True, ``len`` is that of the user's loader.

    Example:
        >>> loader = ElasticLoader(DataLoader(range(10), batch_size=2))
        >>> batches = iter(loader)
        >>> next(batches)
        tensor([0, 1])
        >>> loader.resize(5)
        >>> next(batches), len(loader)
        (tensor([2, 3, 4, 5, 6]), 3)
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        tail: Tail | None = None,
        max_batches: int | None = None,
        max_samples: int | None = None,
    ) -> None:
        batch_sampler: Any = loader.batch_sampler
        self.loader = loader
        self.dataset = loader.dataset
        self.sampler: Any = batch_sampler.sampler
        self.own_batch_size: int = batch_sampler.batch_size
        self.drop_last: bool = batch_sampler.drop_last
        self.num_workers = loader.num_workers
        self.worker_init_fn = loader.worker_init_fn
        self.tail: Tail = tail or ("drop" if self.drop_last else "keep")
        self.nominal = False
        self.max_batches = max_batches
        self._size = SizeInForce(self.sampler, max_samples, self.own_batch_size)
        self._source = _CurrentBlocks()
        self._owned: DataLoader[Any] | None = None
        self._carried: list[Any] = []  # indices that the next pass begins with
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        # The pass begun last, or that handed out a batch last. Passes hold their loader and end their workers
        # when the last reference to them goes, as a DataLoader's do: so it holds them weakly.
        self._latest: weakref.ref[Pass] | None = None

    def __getattr__(self, name: str) -> Any:
        """Read any other setting from the user's loader."""
        if name == "loader" or name.startswith("__"):  # not there yet while unpickling or copying
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def epoch_samples(self) -> int:
        """Samples of one pass, carried ones apart."""
        self._size.refresh()  # the length of a sampler may move
        return self._size.epoch_samples

    @property
    def batch_size(self) -> int:
        """Samples of the next batch, the epoch's tail apart; never more than one epoch holds."""
        return self._size.batch_size

    @property
    def batch_sampler(self) -> BatchSampler:
        """A batch sampler as a ``DataLoader`` of the size in force would have it, for code that looks there."""
        return BatchSampler(self.sampler, self.batch_size, self.drop_last)

    @property
    def fresh_length(self) -> int:
        """Batches of a pass that starts now and keeps the size in force."""
        self._size.refresh()
        return self._fresh_plan().batches_left(self.batch_size)

    def resize(self, batch_size: int) -> None:
        """Set the size of the batches to come, in samples, ≥ 1."""
        self._size.set(batch_size)

    def __len__(self) -> int:
        """Batches of the current pass: those handed out, and those to come if the size stays."""
        if self.nominal:
            full, rest = divmod(len(self.sampler), self.own_batch_size)
            # Even where the user's loader would have none: no epoch is empty.
            return full + (rest > 0 and not (self.drop_last and full > 0))
        latest = self._latest_pass
        return self.fresh_length if latest is None else latest.length

    def __iter__(self) -> Iterator[Any]:
        """Begin a new pass now: the position is its start before the first batch is asked for.

        Passes are independent of each other, as a ``DataLoader``'s are: looking at a batch in the middle of
        an epoch leaves the epoch alone. Persistent workers serve only the pass begun last.
        """
        self._size.refresh()
        latest = self._latest_pass
        if latest is not None and (latest.plan.over or self.loader.persistent_workers):
            latest.release()
        if self._owned is None:
            self._owned = _own(self, self._source)
        blocks = BlockSampler(self.sampler, self._fresh_plan(), self._carried, self._size)
        self._source.current = blocks
        begun = Pass(self, blocks, iter(self._owned), _assembler(self))
        self._latest = weakref.ref(begun)
        self._passes.add(begun)
        return begun

    def carry_from(self, ended: Pass) -> None:
        """Begin the next pass with what this one left over, where tails are carried."""
        if self.tail == "carry":
            self._carried = ended.blocks.leftover()

    def close(self) -> None:
        """End the worker processes; the next pass starts new ones."""
        for begun in self._passes:
            if isinstance(begun.source, _MultiProcessingDataLoaderIter):
                begun.source._shutdown_workers()  # what Lightning itself calls for a DataLoader
            begun.release()
        self._owned = None

    @property
    def _latest_pass(self) -> Pass | None:
        return None if self._latest is None else self._latest()

    @property
    def _iterator(self) -> Any:
        # Lightning ends the workers of what stands under this name, and then sets it to None.
        latest = self._latest_pass
        return None if latest is None else latest.source

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        del value
        self.close()

    def _fresh_plan(self) -> EpochPlan:
        total = self.epoch_samples + len(self._carried)
        return EpochPlan(total, self.own_batch_size, self.tail, self.max_batches)

    def _handed_out(self, begun: Pass) -> None:
        """Note which pass is going on, and, once it is over, what the next one begins with."""
        self._latest = weakref.ref(begun)
        if begun.plan.over:
            self.carry_from(begun)


class _CurrentBlocks:
    """The batch sampler that the owned ``DataLoader`` is built with; each pass puts its own in."""

    current: BlockSampler

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.current)


class Pass(Iterator[Any]):
    """One pass over the data.

    Attributes:
        plan: Where it stands.
        blocks: What was asked of the workers.
    """

    def __init__(
        self,
        loader: ElasticLoader,
        blocks: BlockSampler,
        source: Iterator[Any],
        assemble: Callable[[list[Piece], int], Any],
    ) -> None:
        self.blocks = blocks
        self.plan = blocks.plan
        self._loader = loader
        self._assemble = assemble
        # Workers' random collate functions are seeded from this; torch draws it once a pass.
        self._base_seed: int = source._base_seed  # type: ignore[attr-defined]
        self._stream = BlockStream(source, blocks.in_flight)

    @property
    def source(self) -> Iterator[Any] | None:
        """The owned ``DataLoader``'s iterator; None once the pass is over or closed."""
        return self._stream.source

    @property
    def length(self) -> int:
        """Batches handed out, and those to come if the size in force stays."""
        return self.plan.batches + self.plan.batches_left(self._loader.batch_size)

    def __next__(self) -> Any:
        size = self.plan.hand_out(self._loader._size.batch_size)
        if size == 0:
            self.blocks.finish()
            self.release()
            raise StopIteration
        self.blocks.blocks.note(size)
        batch = self._assemble(self._stream.take(size), self._base_seed + self.plan.batches)
        if self.plan.over or self._loader._latest_pass is not self:
            self._loader._handed_out(self)
        return batch

    def release(self) -> None:
        """Let go of the worker processes, unless they are persistent."""
        self._stream.source = None


def _assembler(loader: ElasticLoader) -> Callable[[list[Piece], int], Any]:
    """Return what makes a batch of pieces and a seed; the counterpart of what :func:`_own` collates with."""
    pin = bool(loader.pin_memory) and torch.accelerator.is_available()

    def whole(pieces: list[Piece], seed: int) -> Any:
        del seed
        return pieces[0].block

    def cut_and_join(pieces: list[Piece], seed: int) -> Any:
        del seed
        cuts = [piece.block if piece.whole else cut(piece.block, piece.start, piece.stop) for piece in pieces]
        return cuts[0] if len(cuts) == 1 else join(cuts, pin=pin)

    def collate(pieces: list[Piece], seed: int) -> Any:
        samples: Sequence[Any] = [s for piece in pieces for s in piece.block[piece.start : piece.stop]]
        batch = collate_apart(loader.collate_fn, samples, seed)
        return pin_memory(batch) if pin else batch  # type: ignore[no-untyped-call]

    if loader.num_workers == 0:
        return whole
    return cut_and_join if _cuts(loader) else collate


def _own(loader: ElasticLoader, source: _CurrentBlocks) -> DataLoader[Any]:
    """Build the ``DataLoader`` that fetches the blocks, with all of the user's settings."""
    user = loader.loader
    apart = loader.num_workers > 0 and not _cuts(loader)
    return DataLoader(
        loader.dataset,
        batch_sampler=source,  # an iterable of lists is all that it needs
        num_workers=loader.num_workers,
        collate_fn=pack if apart else user.collate_fn,
        pin_memory=user.pin_memory and not apart,
        timeout=user.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=user.multiprocessing_context,
        generator=user.generator,
        prefetch_factor=user.prefetch_factor,
        persistent_workers=user.persistent_workers,
        pin_memory_device=user.pin_memory_device,
    )


def _cuts(loader: ElasticLoader) -> bool:
    return loader.collate_fn is default_collate and can_cut()
