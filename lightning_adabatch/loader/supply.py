# SPDX-License-Identifier: Apache-2.0
"""What a pass over the data asks of the kinds of data there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_adabatch import generators
from lightning_adabatch.loader.assembly import Assemble
from lightning_adabatch.loader.pieces import BlockStream, Piece
from lightning_adabatch.loader.plan import EpochPlan
from lightning_adabatch.loader.sizes import SizeInForce


class Supply(ABC):
    """The samples of one pass, in order.

    Args:
        plan: The pass.
        stream: The blocks of samples as they arrive.
        assemble: Makes a batch of pieces of blocks.

    Attributes:
        carried: Indices that the pass began with.
        on_demand: Whether samples are fetched by their indices when they are wanted.
        drawn: Called when indices were drawn on demand, before their samples are fetched; or None.
    """

    on_demand = False

    def __init__(self, plan: EpochPlan, stream: BlockStream, assemble: Assemble) -> None:
        self.plan = plan
        self.stream = stream
        self.assemble = assemble
        self.carried: list[Any] = []
        self.drawn: Callable[[], None] | None = None
        # Workers' random collate functions are seeded from this; torch draws it once a pass.
        self.base_seed: int = stream.source._base_seed  # type: ignore[union-attr]

    def prepare(self, size: int) -> int:
        """See that the plan knows enough of what is left to hand out a batch; return the size to ask it for."""
        return size

    def look_again(self) -> None:  # noqa: B027  # most asked for samples when the pass was made
        """Before the first batch: look whether the data has another length than when the pass was made."""

    def take(self, size: int) -> list[Piece]:
        """Return the samples that the plan just handed out."""
        return self.stream.take(size)

    def put_back(self) -> None:
        """Where samples are fetched on demand, have those of the batch in hand, and all after it, fetched again."""
        raise NotImplementedError

    def look_ahead(self) -> None:  # noqa: B027  # most know already
        """Find out whether a batch follows, where that could not be known when the last one was handed out."""

    def finish(self) -> None:  # noqa: B027  # most do nothing
        """Do what the user's data does at its end."""

    def leftover(self) -> list[Any]:
        """Return the indices that the pass did not get to and the next one begins with."""
        return []

    @abstractmethod
    def mark(self) -> Any:
        """Return what of its state belongs to this moment."""

    @abstractmethod
    def state(self, mark: Any, consumed: int) -> dict[str, Any]:
        """Return plain numbers, strings and tensors from which its :class:`Kind` makes it again.

        Args:
            mark: What :meth:`mark` returned.
            consumed: Samples that had been handed out then.
        """


class Kind(ABC):
    """A kind of data: how passes over it are made.

    Args:
        loader: The user's; read, never changed.

    Attributes:
        own_batch_size: The user's, in samples.
        drop_last: Whether the user's loader drops an incomplete batch.
        sampler: The user's, or what a ``DataLoader`` has in its place.
        in_batches: Whether the data comes in batches of its own, so that an epoch is a number of them.
        can_carry: Whether what an epoch left over can be known by its indices.
    """

    own_batch_size: int
    drop_last: bool
    in_batches = False
    can_carry = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.sampler: Any = loader.sampler

    @abstractmethod
    def samples(self) -> int | None:
        """Return the samples of an epoch; None where nobody knows."""

    def hint(self) -> int | None:
        """Return about how many samples an epoch has; None where nobody knows."""
        return self.samples()

    def length(self, size: int) -> int | None:
        """Return how many batches the data itself says there are at a size; None where it has no batches of its own."""
        del size
        return None

    @property
    def generators(self) -> dict[str, generators.Own]:
        """Those of the user's own that passes draw from, each once, by where they are."""
        return own_generators(self.owners)

    @property
    def owners(self) -> list[Any]:
        """Whose generators these are."""
        return [self.loader, self.sampler]

    @property
    def epochs(self) -> list[Any]:
        """The epochs that the user's objects shuffle for, None where they have none."""
        return [getattr(owner, "epoch", None) for owner in self.owners]

    def epochs_in(self, place: Mapping[str, Any]) -> list[Any]:
        """Return the epochs that the user's objects shuffled for where a pass stood, None where that is not known."""
        return list(place.get("epochs", []))

    def set_epochs(self, epochs: list[Any]) -> None:
        """Have the user's objects shuffle for the epochs of another process: a hook that told them is not called."""
        for owner, epoch in zip(self.owners, epochs, strict=False):
            if epoch is not None and hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def tell_epoch(self, epoch: int, place: Mapping[str, Any] | None) -> None:
        """Have the user's objects shuffle for an epoch: those that keep it to themselves, and where a pass stood."""
        if place is not None:
            self.set_epochs(self.epochs_in(place))
        for owner in self.owners:
            if hasattr(owner, "set_epoch") and not hasattr(owner, "epoch"):
                owner.set_epoch(epoch)

    def batches_left(self, plan: EpochPlan, size: int) -> int | float:
        """Return how many batches, or parts of them, follow if ``size`` stays; an estimate for an open plan."""
        return plan.batches_left(size)

    @abstractmethod
    def own(self, num_workers: int, worker_init_fn: Any) -> DataLoader[Any]:
        """Build the ``DataLoader`` that fetches blocks, with all of the user's settings."""

    @abstractmethod
    def begin(self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, carried: list[Any]) -> Supply:
        """Begin a pass."""

    @abstractmethod
    def go_on(
        self, owned: DataLoader[Any], plan: EpochPlan, size: SizeInForce, place: Mapping[str, Any]
    ) -> Supply | None:
        """Begin a pass where another one stood, or return None where that is not possible.

        Leaves the global generators anywhere. ``plan`` is changed.
        """

    def give_back(self) -> None:  # noqa: B027  # most change nothing
        """Undo what was changed of the user's objects."""


def own_generators(owners: Sequence[Any]) -> dict[str, generators.Own]:
    """Return the generators that objects have, and those of the samplers that they are made of, each once."""
    holders = {str(number): owner for number, owner in enumerate(owners)}
    for number, owner in enumerate(owners):
        if isinstance(owner, Sampler):
            _add_samplers(holders, str(number), owner)
    found: dict[str, generators.Own] = {}
    for place, holder in holders.items():
        for name, one in generators.held_by(holder).items():
            if not any(one is known for known in found.values()):
                found[f"{place}.{name}"] = one
    return found


def _add_samplers(holders: dict[str, Any], place: str, sampler: Any) -> None:
    """Add the samplers that one has as attributes, and theirs.

    Lightning puts the user's sampler over several processes as the data set of a ``DistributedSampler``.
    """
    held: dict[str, Any] = dict(getattr(sampler, "__dict__", {}))
    if isinstance(sampler, DistributedSampler):
        held.update((f"dataset.{name}", one) for name, one in getattr(sampler.dataset, "__dict__", {}).items())
    for name, value in held.items():
        for number, one in enumerate(_members(value)):
            if isinstance(one, Sampler) and not any(one is known for known in holders.values()):
                holders[f"{place}.{name}.{number}"] = one
                _add_samplers(holders, f"{place}.{name}.{number}", one)


def _members(value: Any) -> Iterable[Any]:
    """Return what may be samplers: a value itself, or the members of a container whose first one is."""
    if isinstance(value, Mapping) and isinstance(next(iter(value.values()), None), Sampler):
        return value.values()
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Sampler):
        return value
    return [value]


def known_length(sized: Any) -> int | None:
    """Return the length of something that may have none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def settings_of(loader: DataLoader[Any], num_workers: int, worker_init_fn: Any) -> dict[str, Any]:
    """Return the arguments of a user's loader that have nothing to do with what is in its batches."""
    return {
        "num_workers": num_workers,
        "timeout": loader.timeout,
        "worker_init_fn": worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
    }


def begin_with(owned: DataLoader[Any], base_state: torch.Tensor) -> Iterator[Any]:
    """Begin a pass of a ``DataLoader`` with a base seed drawn once more, without a trace on the user's generator."""
    user = owned.generator
    base = torch.Generator()
    base.set_state(base_state.cpu())
    owned.generator = base
    try:
        return iter(owned)
    finally:
        owned.generator = user
