# SPDX-License-Identifier: Apache-2.0
"""A loader whose batch size can change between any two batches, exactly, with any number of workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_adabatch.loader.assembly import assembler, block_collate, blocks_apart
from lightning_adabatch.loader.blocks import BlockSampler, SizeInForce
from lightning_adabatch.loader.passes import Pass
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
        accumulate: The initial batch has so many of the user's, handed out one by one.
        device_limit: Batches of more samples are handed out in parts, or None.

    Attributes:
        dataset, sampler, num_workers, drop_last, worker_init_fn: As in a ``DataLoader``. Everything else
            that a ``DataLoader`` has is read from the user's.
        own_batch_size: The user's, in samples.
        initial_batch_size: That times ``accumulate``.
        max_batches: No pass has more batches, or None.
        nominal: While True, ``len`` is that of the user's loader.
        carried: Indices that the next pass begins with.
        lost_place: Whether the pass begun last could not begin where it was asked to.
        keep: Called with the plan of a pass that begins a batch; whether it may have to be handed out again. None
            for never.

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
        accumulate: int = 1,
        device_limit: int | None = None,
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
        self.initial_batch_size = self.own_batch_size * accumulate
        self._size = SizeInForce(self.sampler, max_samples, self.initial_batch_size, device_limit)
        self._source = _CurrentBlocks()
        self._owned: DataLoader[Any] | None = None
        self.carried: list[Any] = []
        self._place: dict[str, Any] | None = None
        self.lost_place = False
        self.keep: Callable[[EpochPlan], bool] | None = None
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        # The pass begun last, or that handed out a batch last. Passes hold their loader and end their workers
        # when the last reference to them goes, as a DataLoader's do: so it holds them weakly.
        self._latest: weakref.ref[Pass] | None = None

    def __getattr__(self, name: str) -> Any:
        """Read any other setting from the user's loader."""
        if name == "loader" or name.startswith("__"):  # not there yet while unpickling or copying
            raise AttributeError(name)
        return getattr(self.loader, name)

    def available(self) -> int:
        """Return the samples of the sampler that are used."""
        return self._size.available()

    def agree(self, samples: int) -> None:
        """Use no more of the sampler's indices than the rank with the fewest has."""
        self._size.agreed = samples

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
    def device_size(self) -> int:
        """Samples of the next batch's first part."""
        return self._size.device_size

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

    def lower(self, device_limit: int) -> None:
        """Hand out batches of more samples in parts from now on; those of passes that are going on stay."""
        self._size.device_limit = device_limit
        self._size.refresh()

    def __len__(self) -> int:
        """Batches of the current pass: those handed out, and those to come if the size stays."""
        if self.nominal:
            full, rest = divmod(self.available(), self.own_batch_size)
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
        begun = self._begin() if self._place is None else self._go_on(self._place)
        self._latest = weakref.ref(begun)
        self._passes.add(begun)
        return begun

    def place_at(self, place: dict[str, Any] | None) -> None:
        """Have passes begin where another one stood, until this is called with None.

        Args:
            place: From :meth:`Pass.state_dict`. If the sampler does not give the same order again, or the
                number of samples is another, the pass begins at its first sample, and ``lost_place`` is True.
        """
        self._place = place
        self.lost_place = False
        if place is not None:
            self.carried = list(place["carried"])

    @property
    def shuffle_seed(self) -> int | None:
        """The seed of a ``DistributedSampler``, which it does not draw but is given; None for other samplers."""
        return self.sampler.seed if isinstance(self.sampler, DistributedSampler) else None

    @shuffle_seed.setter
    def shuffle_seed(self, seed: int | None) -> None:
        if seed is not None and isinstance(self.sampler, DistributedSampler):
            self.sampler.seed = seed

    def carry_from(self, ended: Pass) -> None:
        """Begin the next pass with what this one left over, where tails are carried."""
        if self.tail == "carry":
            self.carried = ended.blocks.leftover()

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

    def _begin(self) -> Pass:
        blocks = BlockSampler(self.sampler, self._fresh_plan(), self.carried, self._size, self._own_generators)
        return self._pass(blocks, (self.loader.generator or torch.default_generator).get_state())

    def _go_on(self, place: dict[str, Any]) -> Pass:
        """Begin a pass where another one stood; leaves the global generators anywhere."""
        if place["sampler_epoch"] is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(place["sampler_epoch"])
        plan = self._fresh_plan()
        same = plan.total == place["total"]
        plan.batches, plan.last_size = place["batches"], place["last_size"]
        blocks = BlockSampler(self.sampler, plan, self.carried, self._size, self._own_generators)
        if same:
            plan.consumed = place["consumed"]
            plan.over = place["over"] or (self.max_batches is not None and plan.batches >= self.max_batches)
            blocks.blocks.go_on(place["blocks"])
            if place["started"] is None:
                self.own_generators = place["own"]
            else:
                same = blocks.replay(place["started"], place["witnesses"], finished=place["finished"])
            if same and plan.over:
                blocks.leftover()  # draws, where tails are carried
        if not same:
            plan.consumed, plan.over = 0, plan.total == 0 or plan.batches == self.max_batches
            blocks = BlockSampler(self.sampler, plan, self.carried, self._size, self._own_generators)
        self.lost_place = not same
        # The base seed of the workers is drawn once more, without a trace on the sampler's generator.
        assert self._owned is not None  # for the type checker: __iter__ made it
        base = torch.Generator()
        base.set_state(place["base_state"].cpu())
        self._owned.generator = base
        try:
            return self._pass(blocks, place["base_state"])
        finally:
            self._owned.generator = self.loader.generator

    def _pass(self, blocks: BlockSampler, base_state: torch.Tensor) -> Pass:
        assert self._owned is not None  # for the type checker: __iter__ made it
        self._source.current = blocks
        source = iter(self._owned)
        return Pass(blocks, source, assembler(self.loader), self._size, base_state, self._handed_out, self._keeps)

    @property
    def own_generators(self) -> list[torch.Tensor]:
        """The states of the loader's and the sampler's own generators."""
        return [one.get_state() for one in self._own_generators]

    @own_generators.setter
    def own_generators(self, states: list[torch.Tensor]) -> None:
        for one, state in zip(self._own_generators, states, strict=False):
            one.set_state(state.cpu())

    @property
    def _own_generators(self) -> list[torch.Generator]:
        """Those of the loader and the sampler, each once."""
        found = [getattr(owner, "generator", None) for owner in (self.loader, self.sampler)]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())

    def _fresh_plan(self) -> EpochPlan:
        total = self.epoch_samples + len(self.carried)
        limit = self._size.device_limit
        return EpochPlan(total, self.initial_batch_size, self.tail, self.max_batches, device_limit=limit)

    def _keeps(self, plan: EpochPlan) -> bool:
        return self.keep is not None and self.keep(plan)

    def _handed_out(self, begun: Pass) -> None:
        """Note which pass is going on, and, once it is over, what the next one begins with."""
        if self._latest_pass is not begun:
            self._latest = weakref.ref(begun)
        if begun.plan.over:
            self.carry_from(begun)


class _CurrentBlocks:
    """The batch sampler that the owned ``DataLoader`` is built with; each pass puts its own in."""

    current: BlockSampler

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.current)


def _own(loader: ElasticLoader, source: _CurrentBlocks) -> DataLoader[Any]:
    """Build the ``DataLoader`` that fetches the blocks, with all of the user's settings."""
    user = loader.loader
    return DataLoader(
        loader.dataset,
        batch_sampler=source,  # an iterable of lists is all that it needs
        num_workers=loader.num_workers,
        collate_fn=block_collate(user),
        pin_memory=user.pin_memory and not blocks_apart(user),
        timeout=user.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=user.multiprocessing_context,
        generator=user.generator,
        prefetch_factor=user.prefetch_factor,
        persistent_workers=user.persistent_workers,
        pin_memory_device=user.pin_memory_device,
    )
