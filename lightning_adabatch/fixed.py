# SPDX-License-Identifier: Apache-2.0
"""The user's own loaders, for ``adapt="lr"``: they are left alone, and only what they give is read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch.guards import refuse
from lightning_adabatch.loader import iteration_of_its_own, kind_of, known_length, plain_batch_sampler
from lightning_adabatch.loader_guards import check_ranks
from lightning_adabatch.ranks import Ranks


class FixedData:
    """What all ranks together train on, with loaders that are left alone: ranks may have batches of other sizes.

    Args:
        loaders: Returns the loaders as Lightning runs over them.
        ranks: That train together.

    Attributes:
        training_samples: Of all ranks; None where nobody knows.
        samples: Of the batch in hand, over all ranks.
        effective: The samples whose plain mean has as much noise as the mean of the ranks' means.
        balance: What this rank's loss is multiplied by, so that the mean over ranks is the mean over samples.
    """

    def __init__(self, loaders: Callable[[], Sequence[Any]], ranks: Ranks) -> None:
        self._loaders = loaders
        self._ranks = ranks
        self._own = FixedLoaders(())
        self._lengths: list[int] | None = None  # samples of each rank, from which those of every batch follow
        self.training_samples: int | None = None
        self.samples = 0
        self.effective = 0.0
        self.balance = 1.0

    def look(self) -> int | None:
        """Look at the loaders as they are now; return the samples of a batch over all ranks, if known: a collective.

        Raises:
            MisconfigurationException: If ranks have loaders with another ``batch_size``.
        """
        self._own = own = FixedLoaders(self._loaders(), self._ranks.count)
        size = own.initial_batch_size
        everybody = self._ranks.gather((size, own.samples, own.counts_plainly))
        check_ranks([{"batch size": of_rank} for of_rank, _, _ in everybody])
        lengths = [samples for _, samples, _ in everybody if samples is not None]
        all_known = len(lengths) == len(everybody)
        self.training_samples = sum(lengths) if all_known else None
        self._lengths = lengths if all_known and all(plainly for _, _, plainly in everybody) else None
        return None if size is None else size * self._ranks.count

    def begin_batch(self, batch: Any, place: int) -> None:
        """Count the samples of a batch, which is that one of the loader's order.

        A collective where only the batches themselves tell, since then each rank may have another number.

        Raises:
            MisconfigurationException: If neither the loader nor the batch tells.
        """
        if self._lengths is not None and self._own.initial_batch_size is not None:
            size, lengths = self._own.initial_batch_size, self._lengths
            here = max(0, min(size, lengths[self._ranks.rank] - place * size))
            if len(set(lengths)) == 1:
                self._count(here, here * len(lengths), _inverse(here) * len(lengths))
            else:
                of_ranks = [max(0, min(size, there - place * size)) for there in lengths]
                self._count(here, sum(of_ranks), sum(map(_inverse, of_ranks)))
            return
        here, ranks = self._own.trained(batch), self._ranks
        if ranks.several:
            means = ranks.mean(torch.tensor([here, _inverse(here)], dtype=torch.float64)).tolist()
            self._count(here, round(means[0] * ranks.count), means[1] * ranks.count)
        else:
            self._count(here, here, _inverse(here))

    def _count(self, here: int, samples: int, inverses: float) -> None:
        count = self._ranks.count
        self.samples = samples
        self.effective = count**2 / inverses
        self.balance = here * count / samples if samples else 1.0


def _inverse(samples: int) -> float:
    return 1.0 / samples if samples else math.inf


class FixedLoaders:
    """One or more loaders of any kind of one rank; the first one's batches are those that count.

    Args:
        loaders: As Lightning runs over them.
        ranks: That share the data where its sampler does not say how many samples are this one's.
    """

    def __init__(self, loaders: Sequence[Any], ranks: int = 1) -> None:
        self._ranks = ranks
        self._first: Any = loaders[0] if loaders else None
        self._several = len(loaders) > 1

    @property
    def initial_batch_size(self) -> int | None:
        """Samples of a batch, or None where only a batch itself tells."""
        for owner in (self._first, getattr(self._first, "batch_sampler", None)):
            size = getattr(owner, "batch_size", None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                return size
        return None

    @property
    def samples(self) -> int | None:
        """Training samples of this rank, or None where nobody knows."""
        loader = self._first
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return None
        if isinstance(loader.dataset, IterableDataset):
            return known_length(loader.dataset)
        of_sampler = known_length(getattr(loader.batch_sampler, "sampler", None))
        of_data = known_length(loader.dataset)
        if of_sampler is not None or of_data is None:
            return of_sampler
        # A batch sampler that hands out indices of its own: over several ranks it gives each a part of them.
        return -(-of_data // self._ranks)

    def trained(self, batch: Any) -> int:
        """Return the samples of a batch.

        Raises:
            MisconfigurationException: If neither the loader nor the batch tells.
        """
        if batch is None:
            return 0
        loader, size = self._first, self.initial_batch_size
        if self._several:
            batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
            if batch is None:  # the first loader ended before another one
                return 0
        if size is not None and _is_listed(batch, size):
            return size
        try:
            with warnings.catch_warnings():  # that it takes the first of several sizes, which is what it is to do
                warnings.simplefilter("ignore")
                return int(extract_batch_size(batch))
        except MisconfigurationException:
            if size is not None:
                return size
            raise refuse(
                f"the train loader {type(loader).__name__}: neither it nor its batch, a {type(batch).__name__}, says "
                "how many samples that has",
                "give the loader an integer attribute batch_size, or let a batch hold a tensor with one row per sample",
            ) from None

    @cached_property
    def counts_plainly(self) -> bool:
        """Whether the samples of a batch follow from its number."""
        loader = self._first
        return (
            not self._several
            and isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and iteration_of_its_own(loader) is None
            and plain_batch_sampler(loader.batch_sampler)
            and kind_of(loader).samples() is not None
        )


def _is_listed(batch: Any, size: int) -> bool:
    """Whether a batch is so many samples in lists, such as images of several shapes, without a tensor of them all."""
    fields = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(fields, (list, tuple)) or any(isinstance(one, Tensor) and one.dim() > 0 for one in fields):
        return False
    lists = [one for one in fields if isinstance(one, (list, tuple))]
    return any(len(one) == size for one in lists) or (fields is batch and not lists and len(batch) == size)
