# SPDX-License-Identifier: Apache-2.0
"""A loader whose batch size can change between any two batches, exactly, with any number of workers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_adabatch import generators
from lightning_adabatch.loader.kinds import kind_of
from lightning_adabatch.loader.passes import Pass
from lightning_adabatch.loader.plan import EpochPlan, Tail
from lightning_adabatch.loader.plans import Plans
from lightning_adabatch.loader.sizes import SizeInForce
from lightning_adabatch.loader.supply import Kind


class ElasticLoader:
    """Iterates over a user's data in batches of whatever size is in force when each is asked for.

    A plain iterable that owns a ``DataLoader`` made from the user's settings. Workers fetch *blocks* of
    samples; batches of exactly the size in force are cut from the stream of blocks. With a constant size
    every block is one batch and nothing is copied; with no workers blocks are fetched on demand.

    It draws from the global random state exactly what the user's ``DataLoader`` would draw.

    Args:
        loader: The user's, with a batch size; read, never changed, but for the ``batch_size`` of a batch sampler
            of the user's own.
        tail: What happens to samples that do not fill a batch; None: ``"drop"`` if the loader drops
            them, else ``"keep"``.
        max_batches: No pass has more batches, or None.
        max_samples: No pass has more samples, or None.
        accumulate: The initial batch has so many of the user's, handed out one by one.
        device_limit: Batches of more samples are handed out in parts, or None.
        least_parts: Every batch is handed out in so many parts at least, as far as it has the samples.
        before: Another one of the same loader, which is not used any more: its persistent workers go on here.

    Attributes:
        dataset, sampler, num_workers, drop_last, worker_init_fn: As in a ``DataLoader``. Everything else
            that a ``DataLoader`` has is read from the user's.
        kind: Of the data.
        own_batch_size: The user's, in samples.
        initial_batch_size: That times ``accumulate``.
        max_batches: No pass has more batches, or None.
        nominal: While True, ``len`` is that of the user's loader.
        waits: While True, lengths are those of a run that begins, at the initial batch size: one that goes on with
            another size is planned as the one that was cut had been.
        carried: Indices that the next pass begins with.
        lost_place: Whether the pass begun last could not begin where it was asked to.
        began: Called with a pass that handed out its first batch, or None;
        ended: the same for the last one.
        keep: Called with the plan of a pass that begins a batch; whether it may have to be handed out again. None
            for never.
        trains: Called with a pass that is over; whether it is one that is trained on, which leaves something to the
            next one, and not a look at the data. None for all of them.

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
        least_parts: int = 1,
        before: ElasticLoader | None = None,
    ) -> None:
        self.loader = loader
        self.kind: Kind = kind_of(loader) if before is None else before.kind
        self.dataset = loader.dataset
        self.sampler: Any = self.kind.sampler
        self.own_batch_size: int = self.kind.own_batch_size
        self.drop_last: bool = self.kind.drop_last
        self.num_workers = loader.num_workers
        self.worker_init_fn = loader.worker_init_fn
        self.tail: Tail = tail or ("drop" if self.drop_last else "keep")
        self.nominal = self.waits = False
        self.max_batches = max_batches
        self.initial_batch_size = self.own_batch_size * accumulate
        self._size = SizeInForce(
            self.kind.samples,
            max_samples,
            self.initial_batch_size,
            device_limit,
            least_parts,
            max_batches=max_batches,
            unit=self.own_batch_size if accumulate > 1 else 0,
        )
        drop_unit = tail is None and self.drop_last
        self._plans = Plans(self.kind, self._size, self.tail, max_batches, accumulate=accumulate, drop_unit=drop_unit)
        self.began: Callable[[Pass], None] | None = None
        self.ended: Callable[[Pass], None] | None = None
        self.trains: Callable[[Pass], bool] | None = None
        self._owned: DataLoader[Any] | None = None
        self.carried: list[Any] = []
        self._stated: int | None = None  # the fewest samples that any rank's stream says it has
        self._place: dict[str, Any] | None = None
        self.lost_place = False
        self.keep: Callable[[EpochPlan], bool] | None = None
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        # The pass begun last, or that handed out a batch last. Passes hold their loader and end their workers
        # when the last reference to them goes, as a DataLoader's do: so it holds them weakly.
        self._latest: weakref.ref[Pass] | None = None
        if before is not None:
            self._owned = before.hand_over()

    def hand_over(self) -> DataLoader[Any] | None:
        """Let go of the worker processes, without ending them."""
        for begun in self._passes:
            begun.release()
        owned, self._owned = self._owned, None
        return owned

    def __getattr__(self, name: str) -> Any:
        """Read any other setting from the user's loader."""
        if name == "loader" or name.startswith("__"):  # not there yet while unpickling or copying
            raise AttributeError(name)
        if name in {"state_dict", "load_state_dict"}:  # the state is ours
            raise AttributeError(name)
        return getattr(self.loader, name)

    def available(self) -> int | None:
        """Return the samples that are used; None where nobody knows."""
        return self._size.available()

    @property
    def hint(self) -> int | None:
        """Samples of the data, by which epochs are counted, be they only stated; None where nobody says."""
        available = self.available()
        if available is not None:
            return available
        stated = self.kind.hint()
        return stated if stated is None or self._stated is None else min(stated, self._stated)

    @property
    def order_giver(self) -> str:
        """The name of what gives the order of the samples."""
        giver = self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler
        return type(self.loader.batch_sampler if self.kind.in_batches else giver).__name__

    @property
    def sized(self) -> bool:
        """Whether it has a length, be it an estimate."""
        return self._plans.nominal_length() < math.inf

    def agree(self, samples: int) -> None:
        """Use no more of the sampler's indices than the rank with the fewest has; of a stream only count by that."""
        if self.kind.samples() is None:
            self._stated = samples
        else:
            self._size.agreed = samples

    @property
    def samples_now(self) -> int | None:
        """Samples that the data has now; None where nobody knows, or several ranks agreed on a number."""
        return self.kind.samples() if self._size.agreed is None else None

    @property
    def epoch_samples(self) -> int | float:
        """Samples of one pass, carried ones apart; ``math.inf`` where nobody knows."""
        self._size.refresh()  # the length of a sampler may move
        return self._size.epoch_samples

    @property
    def largest(self) -> int | float:
        """Samples of the largest batch that a pass can have; ``math.inf`` where nobody knows."""
        self._size.refresh()
        return self._size.largest

    @property
    def batch_size(self) -> int:
        """Samples of the next batch, the epoch's tail apart; never more than one epoch holds."""
        return self._size.batch_size

    @property
    def device_size(self) -> int:
        """Samples of the next batch's first part."""
        return self._size.device_size

    @property
    def batch_sampler(self) -> Any:
        """The user's own, or one as a ``DataLoader`` of the size in force would make it, for code that looks there."""
        own = self.loader.batch_sampler
        return BatchSampler(self.sampler, self.batch_size, self.drop_last) if type(own) is BatchSampler else own

    @property
    def planned_length(self) -> int | float:
        """Batches of a pass at the initial size as they were without us; ``math.inf`` where nobody knows."""
        return self._plans.planned_length()

    @property
    def fresh_length(self) -> int | float:
        """Batches of a pass that starts now and keeps the size in force; ``math.inf`` where nobody knows."""
        self._size.refresh()
        return self._plans.first_length() if self.waits else self._plans.length(len(self.carried))

    def ends(self, batches: int) -> Sequence[int]:
        """Return where so many batches of a pass that starts now end at the size in force, in samples."""
        return self._plans.ends(batches, len(self.carried))

    def resize(self, batch_size: int) -> None:
        """Set the size of the batches to come, in samples, ≥ 1."""
        self._size.set(batch_size)

    def resize_with(self, size: int, initial: int) -> None:
        """Keep its proportion to another loader, whose batches had ``initial`` samples and have ``size`` now."""
        self.resize(-(-self.initial_batch_size * size // initial))

    def lower(self, device_limit: int) -> None:
        """Hand out batches of more samples in parts from now on; those of passes that are going on stay."""
        before = self._size.device_limit
        self._size.device_limit = device_limit if before is None else min(before, device_limit)
        self._size.refresh()

    def __len__(self) -> int:
        """Batches of the current pass: those handed out, and those to come if the size stays.

        Raises:
            TypeError: If nobody knows how many there will be.
        """
        latest = self._latest_pass
        now = self.fresh_length if latest is None or self.waits else latest.length
        length = self._plans.nominal_length() if self.nominal else now
        if length == math.inf:
            raise TypeError(f"nobody knows how many batches {type(self.dataset).__name__} has")
        return int(length)

    def __iter__(self) -> Iterator[Any]:
        """Begin a new pass now: the position is its start before the first batch is asked for.

        Passes are independent of each other, as a ``DataLoader``'s are: looking at a batch in the middle of
        an epoch leaves the epoch alone. Persistent workers serve only the pass begun last.
        """
        if self.nominal and not self.sized:
            return iter(())  # of a loader without a length Lightning would fetch a batch while it sets up
        self._size.refresh()
        latest = self._latest_pass
        if latest is not None and (latest.plan.over or self.loader.persistent_workers):
            latest.release()
        if self._owned is None:
            self._owned = self.kind.own(self.num_workers, self.worker_init_fn)
        begun = self._begin() if self._place is None else self._go_on(self._place)
        self._latest = weakref.ref(begun)
        self._passes.add(begun)
        return begun

    def place_at(self, place: dict[str, Any] | None) -> None:
        """Have passes begin where another one stood, until this is called with None.

        Args:
            place: From :meth:`Pass.state_dict`. If the sampler does not give the same order again, or the
                number of samples is another, the pass begins at its first sample, and ``lost_place`` is True; but
                where the place has ``"ended"`` nothing is left of the pass, whatever its order was.
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
            self.carried = ended.supply.leftover()
        elif ended.plan.batches:  # a checkpoint of a run that carried is gone on from, and what it carried is trained
            self.carried = []

    def close(self) -> None:
        """End the worker processes; the next pass starts new ones."""
        for begun in self._passes:
            if isinstance(begun.source, _MultiProcessingDataLoaderIter):
                begun.source._shutdown_workers()  # what Lightning itself calls for a DataLoader
            begun.release()
        self._owned = None

    def give_back(self) -> None:
        """End the worker processes, and undo what was changed of the user's."""
        self.kind.give_back()
        self.close()

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
        assert self._owned is not None  # for the type checker: __iter__ made it
        base_state = (self.loader.generator or torch.default_generator).get_state()
        supply = self.kind.begin(self._owned, self._plans.make(len(self.carried)), self._size, self.carried)
        return Pass(supply, self.kind, self._size, base_state, self._handed_out, self._keeps)

    def _go_on(self, place: dict[str, Any]) -> Pass:
        """Begin a pass where another one stood; leaves the global generators anywhere."""
        assert self._owned is not None  # for the type checker: __iter__ made it
        plan = self._plans.make(len(self.carried))
        plan.batches, plan.last_size, plan.consumed = place["batches"], place["last_size"], place["consumed"]
        plan.over = place["over"] or (self.max_batches is not None and plan.batches >= self.max_batches)
        plan.see(plan.consumed, more=True)
        supply = None if place.get("lost") else self.kind.go_on(self._owned, plan, self._size, place)
        ended = place.get("ended", False)
        self.lost_place = supply is None and not ended
        if supply is None:
            plan = self._plans.make(len(self.carried))
            plan.batches, plan.last_size = place["batches"], place["last_size"]
            plan.over = plan.over or plan.batches == self.max_batches or ended
            supply = self.kind.begin(self._owned, plan, self._size, self.carried)
        return Pass(supply, self.kind, self._size, place["base_state"], self._handed_out, self._keeps)

    @property
    def own_generators(self) -> dict[str, Any]:
        """The states of the loader's and the sampler's own generators."""
        return generators.states_of(self.kind.generators)

    @own_generators.setter
    def own_generators(self, states: dict[str, Any]) -> None:
        generators.set_states(self.kind.generators, states)

    def _keeps(self, plan: EpochPlan) -> bool:
        return self.keep is not None and self.keep(plan)

    def _handed_out(self, begun: Pass) -> None:
        """Note which pass is going on, and, once it is over, what the next one begins with."""
        if self._latest_pass is not begun:
            self._latest = weakref.ref(begun)
        if begun.plan.batches == 1 and self.began is not None:
            self.began(begun)
        if begun.plan.over:
            if self.trains is None or self.trains(begun):
                self.carry_from(begun)
            if self.ended is not None:
                self.ended(begun)
