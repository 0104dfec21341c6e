# SPDX-License-Identifier: Apache-2.0
"""The user's own loaders, for ``adapt="lr"``: they are left alone, and only what they give is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch.guards import refuse
from lightning_adabatch.loader import iteration_of_its_own, kind_of, known_length, plain_batch_sampler


class FixedLoaders:
    """One or more loaders of any kind; the first one's batches are those that count.

    Args:
        loaders: As Lightning runs over them.
        fewest: Samples of the rank that has the fewest, by which all ranks count; None for this one's own.
    """

    def __init__(self, loaders: Sequence[Any], fewest: int | None = None) -> None:
        self._fewest = fewest
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
        """Training samples, or None where nobody knows."""
        own = self._own_samples
        return own if own is None or self._fewest is None else min(own, self._fewest)

    @property
    def _own_samples(self) -> int | None:
        loader = self._first
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return None
        if isinstance(loader.dataset, IterableDataset):
            return known_length(loader.dataset)
        of_sampler = known_length(getattr(loader.batch_sampler, "sampler", None))
        return known_length(loader.dataset) if of_sampler is None else of_sampler

    def trained(self, batch: Any, batch_idx: int) -> int:
        """Return the samples of a batch, which is that one of the loader's order.

        Raises:
            MisconfigurationException: If neither the loader nor the batch tells.
        """
        if batch is None:
            return 0
        loader, size = self._first, self.initial_batch_size
        if size is not None and self._counts_plainly:
            there = len(loader.batch_sampler.sampler)
            return max(0, min(size, (there if self._fewest is None else min(there, self._fewest)) - batch_idx * size))
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

    @property
    def _counts_plainly(self) -> bool:
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
