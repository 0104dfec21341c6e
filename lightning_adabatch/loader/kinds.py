# SPDX-License-Identifier: Apache-2.0
"""Which kind of data a loader has."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from lightning_adabatch import generators
from lightning_adabatch.loader.groups import Groups
from lightning_adabatch.loader.indices import Indices
from lightning_adabatch.loader.streams import Stream
from lightning_adabatch.loader.supply import Kind, own_generators

# Batches by which a batch sampler shows whether it reads its size.
_PROBED = 4


def kind_of(loader: DataLoader[Any]) -> Kind:
    """Return the kind of a loader's data."""
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader)
    return Indices(loader) if plain_batch_sampler(loader.batch_sampler) else Groups(loader)


def plain_batch_sampler(batch_sampler: Any) -> bool:
    """Whether a batch sampler only groups its sampler's indices: then it counts as its sampler."""
    if not isinstance(batch_sampler, BatchSampler):
        return False
    method = type(batch_sampler).__iter__
    # torchdata has one of its own, which groups in the same way and remembers where it is.
    torchdata = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return method is BatchSampler.__iter__ or method is getattr(
        getattr(torchdata, "BatchSampler", None), "__iter__", None
    )


def settable_batch_size(batch_sampler: Any) -> bool:
    """Whether a batch sampler has an integer ``batch_size`` that can be set."""
    size = getattr(batch_sampler, "batch_size", None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return False
    try:
        batch_sampler.batch_size = size
    except AttributeError:
        return False
    return True


def follows_its_size(batch_sampler: Any) -> bool:
    """Whether a batch sampler reads its ``batch_size`` for each batch, as far as a few batches show.

    It is asked on a copy, and the generators are put back. One that counts in samples, and after its size was halved
    never gives as many as it says then, but more, does not follow. Nor does one that gives single samples when it is
    told to give several.
    """
    size, before = batch_sampler.batch_size, generators.capture()
    other = size // 2 or _PROBED
    own = own_generators([batch_sampler, getattr(batch_sampler, "sampler", None)])
    states = generators.states_of(own)
    try:
        asked = _apart(batch_sampler)
        batches = iter(asked)
        first = len(next(batches))
        asked.batch_size = other
        after = [len(batch) for batch in islice(batches, _PROBED)]
    except Exception:  # noqa: BLE001  # what it cannot do now it will say when it is asked in earnest
        return True
    finally:
        generators.restore(before)
        generators.set_states(own, states)
    stays = size in {first, *after} and other not in after
    return not (stays and max(after, default=0) > other) and not (size == 1 and after[1:] and max(after) == 1)


def _apart(sampler: Any) -> Any:
    """Return a copy that can be asked: it shares the data with the original, and no queue or generator but torch's."""
    other = copy.copy(sampler)
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
            setattr(other, name, copy.deepcopy(value))
        elif isinstance(value, (list, dict, set, deque)):
            setattr(other, name, copy.copy(value))
        elif isinstance(value, Sampler):
            setattr(other, name, _apart(value))
    return other


def iteration_of_its_own(loader: Any) -> str | None:
    """Return the method by which a ``DataLoader``'s subclass iterates in a way of its own, or None."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    known = (DataLoader, getattr(torchdata, "StatefulDataLoader", DataLoader))
    for method in ("__iter__", "_get_iterator", "__len__"):
        if all(getattr(type(loader), method) is not getattr(kind, method) for kind in known):
            return method
    return None
