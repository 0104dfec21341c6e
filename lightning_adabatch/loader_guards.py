# SPDX-License-Identifier: Apache-2.0
"""What train loaders must be: every one that is not supported is refused by name before the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch.guards import refuse
from lightning_adabatch.loader import (
    ElasticLoader,
    follows_its_size,
    iteration_of_its_own,
    kind_of,
    plain_batch_sampler,
    settable_batch_size,
)
from lightning_adabatch.settings import Settings

_OR_LR = "or leave the batch size alone with adapt='lr'"


def check_loader(loader: Any, settings: Settings, ranks: int) -> None:
    """Refuse a train loader whose batch size cannot be changed exactly.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise refuse(
            f"the train loader {name}: it cannot change the batch size of it",
            f"pass a torch.utils.data.DataLoader, {_OR_LR}",
        )
    method = iteration_of_its_own(loader)
    if method is not None:
        raise refuse(
            f"{name}, which overrides {method}: it cannot change the batch size of it",
            f"use a plain DataLoader, {_OR_LR}",
        )
    if loader.batch_sampler is None:
        raise refuse(
            "DataLoader(batch_size=None): it cannot change the batch size of it",
            f"set a batch_size in the DataLoader, and let the data set give single samples, {_OR_LR}",
        )
    if not getattr(loader, "in_order", True):
        raise refuse(
            "DataLoader(in_order=False), with which batches depend on timing",
            "remove in_order=False from the DataLoader",
        )
    if isinstance(loader.dataset, IterableDataset):
        if settings.tail == "carry":
            raise refuse(
                f"tail='carry' with the iterable data set {type(loader.dataset).__name__}, whose samples cannot be "
                "fetched a second time",
                "set tail='keep' or tail='drop'",
            )
    elif not plain_batch_sampler(loader.batch_sampler):
        _check_groups(loader.batch_sampler, settings, ranks)
    if kind_of(loader).samples() == 0:
        raise refuse(f"an empty {type(loader.dataset).__name__}: there is nothing to train on", "give it samples")


def _check_groups(batch_sampler: Any, settings: Settings, ranks: int) -> None:
    name = type(batch_sampler).__name__
    if not settable_batch_size(batch_sampler):
        raise refuse(
            f"the batch sampler {name}, which has no integer batch_size that can be set: it cannot change the batch "
            "size of it",
            "give it an attribute batch_size that its __iter__ reads, pass sampler=... and batch_size=... to the "
            f"DataLoader instead of batch_sampler=..., {_OR_LR}",
        )
    if not follows_its_size(batch_sampler):
        raise refuse(
            f"the batch sampler {name}, whose batches stay as they are when its batch_size is set: it cannot change "
            "the batch size of it",
            f"have its __iter__ read self.batch_size for each batch, {_OR_LR}",
        )
    if ranks > 1:
        raise refuse(
            f"the batch sampler {name} on {ranks} ranks: only it knows how many batches of which size each rank has",
            "pass sampler=... and batch_size=... to the DataLoader instead of batch_sampler, or train on one device",
        )
    if settings.tail is not None:
        raise refuse(
            f"tail={settings.tail!r} with the batch sampler {name}, which says itself what becomes of the rest",
            "remove tail",
        )


def check_together(
    loaders: Sequence[ElasticLoader], mode: str, settings: Settings, *, accumulate: int, share: bool
) -> None:
    """Refuse several train loaders that cannot go together.

    Args:
        loaders: The first one's size is the batch size.
        mode: Of the ``CombinedLoader``.
        settings: The callback's arguments.
        accumulate: ``Trainer(accumulate_grad_batches=...)``.
        share: Whether the Trainer limits the epoch to a share of the data, or overfits.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    if len(loaders) == 1:
        if loaders[0].kind.in_batches and accumulate > 1:
            raise refuse(
                f"the batch sampler {loaders[0].order_giver} with accumulate_grad_batches: its batch_size need not be "
                "samples, so that nobody knows how many fit on a device",
                "set accumulate_grad_batches=1, and max_device_batch_size if updates are too large for a device",
            )
        return
    if mode == "sequential":
        raise refuse(
            'CombinedLoader(mode="sequential") for training', "use the mode min_size, max_size_cycle or max_size"
        )
    for loader in loaders:
        if loader.available() is None:
            raise refuse(
                f"{loader.order_giver} with a length that nobody knows, beside other train loaders",
                "train on map-style data sets with samplers that have a length",
            )
    if settings.max_device_batch_size is not None or accumulate > 1:
        raise refuse(
            "several train loaders with micro-batches",
            "set neither max_device_batch_size nor accumulate_grad_batches",
        )
    if share:
        raise refuse(
            "several train loaders with overfit_batches or a fraction for limit_train_batches",
            "limit the epoch by a number of batches, such as limit_train_batches=100",
        )
    if mode == "max_size" and loaders[0].fresh_length < max(loader.fresh_length for loader in loaders):
        raise refuse(
            'CombinedLoader(mode="max_size") whose first loader ends before another: its size is the batch size',
            "put the loader with the most batches first",
        )


def check_ranks(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Refuse loaders that are not alike on all ranks.

    Args:
        everybody: By rank, what must be the same on all.

    Raises:
        MisconfigurationException: If it is not.
    """
    for what, first in everybody[0].items():
        found = [facts[what] for facts in everybody]
        if any(one != first for one in found):
            listed = ", ".join(str(one[0] if isinstance(one, list) and len(one) == 1 else one) for one in found)
            raise refuse(
                f"train loaders whose {what} is another one on each rank ({listed}): all ranks make the same decisions",
                f"give the loaders of all ranks the same {what}",
            )


def check_length(settings: Settings, samples: int | None) -> None:
    """Refuse what needs a length that the training data does not have.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    if samples is not None:
        return
    if settings.adapt == "batch_size" and settings.max_batch_size is None:
        raise refuse(
            "training data without a length and max_batch_size=None",
            "set max_batch_size, or give the data set a __len__",
        )
    if settings.policy.uses_epochs:
        batches = "" if settings.adapt == "batch_size" else " and have a DataLoader with a batch_size make its batches"
        raise refuse(
            f"training data without a length in samples with {settings.policy!r}, which counts in epochs",
            f"count in updates or samples, or give the data set a __len__{batches}",
        )
