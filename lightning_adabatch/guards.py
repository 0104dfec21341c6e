# SPDX-License-Identifier: Apache-2.0
"""What a set-up must be: every one that is not supported is refused by name before the first batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as cb
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    XLAStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

_NAME = "AdaptiveBatchSize"

_SUPPORTED_STRATEGIES = (DDPStrategy, FSDPStrategy, ModelParallelStrategy)
_REFUSED_STRATEGIES = (DeepSpeedStrategy, XLAStrategy)  # which are kinds of DDPStrategy by inheritance

_REFUSED_CALLBACKS: tuple[tuple[type[pl.Callback], str], ...] = (
    (cb.GradientAccumulationScheduler, "remove it; the batch size is adapted by this callback"),
    (cb.StochasticWeightAveraging, "remove it, or average the weights after training"),
    (cb.WeightAveraging, "remove it, or average the weights after training"),
    (cb.BackboneFinetuning, "remove it"),
)


def refuse(what: str, remedy: str) -> MisconfigurationException:
    """Return the error for a set-up that does not work, with what to do instead."""
    return MisconfigurationException(f"{_NAME} does not support {what}. What to do: {remedy}.")


def check_trainer(trainer: pl.Trainer, own: type[pl.Callback]) -> None:
    """Refuse what can be seen of the Trainer before anything is loaded.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    callbacks: list[Any] = getattr(trainer, "callbacks")  # noqa: B009  # an attribute that Lightning sets late
    if sum(isinstance(callback, own) for callback in callbacks) > 1:
        raise refuse("two AdaptiveBatchSize callbacks in one Trainer", "keep one of them")
    for callback in callbacks:
        for kind, remedy in _REFUSED_CALLBACKS:
            if isinstance(callback, kind):
                raise refuse(f"{kind.__name__} beside it", remedy)
    if trainer.accumulate_grad_batches < 1:
        raise refuse(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})", "set accumulate_grad_batches=1"
        )
    _check_strategy(trainer)


def _check_strategy(trainer: pl.Trainer) -> None:
    strategy = trainer.strategy
    supported = type(strategy) is SingleDeviceStrategy or isinstance(strategy, _SUPPORTED_STRATEGIES)
    if not supported or isinstance(strategy, _REFUSED_STRATEGIES):
        raise refuse(
            type(strategy).__name__,
            "train on one device, or with strategy='ddp', 'ddp_spawn', 'fsdp' or ModelParallelStrategy(...)",
        )
    if isinstance(strategy, FSDPStrategy) and "HYBRID" in strategy.sharding_strategy.name:
        raise refuse(
            f"FSDPStrategy(sharding_strategy={strategy.sharding_strategy.name!r})",
            "set sharding_strategy='FULL_SHARD', or use ModelParallelStrategy",
        )


def check_module(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what can be seen of the module and its optimizers.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    # Lightning stands an optimizer without groups in for none.
    if not any(optimizer.param_groups for optimizer in trainer.optimizers):
        raise refuse(
            f"{type(module).__name__}, which has no optimizer", "return an optimizer from configure_optimizers"
        )
    fused = any(group.get("fused") for optimizer in trainer.optimizers for group in optimizer.param_groups)
    if fused and getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise refuse(
            f"a fused optimizer with precision={trainer.precision!r}: it unscales gradients where nobody sees them",
            "set fused=False in the optimizer, or use precision='bf16-mixed'",
        )


def check_parts(trainer: pl.Trainer) -> None:
    """Refuse what does not go together with updates of several micro-batches.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    if not trainer.lightning_module.automatic_optimization:
        raise refuse("max_device_batch_size with manual optimization", "remove max_device_batch_size")
    if any(config.interval == "step" and config.frequency != 1 for config in trainer.lr_scheduler_configs):
        raise refuse(
            "a scheduler with a frequency other than 1 together with micro-batches",
            "set frequency=1 in configure_optimizers, or neither accumulate_grad_batches nor max_device_batch_size",
        )


def divisible(trainer: pl.Trainer) -> bool:
    """Whether updates may be divided into micro-batches at all."""
    try:
        check_parts(trainer)
    except MisconfigurationException:
        return False
    return True


def divisible_in_mid_run(trainer: pl.Trainer) -> bool:
    """Whether updates may be divided when memory is used up.

    Several processes would have to agree on it at every step, and what stands between the module and the
    gradients (DDP) does not get over a backward pass that was broken off.
    """
    return divisible(trainer) and type(trainer.strategy) is SingleDeviceStrategy


def check_fixed_updates(trainer: pl.Trainer) -> None:
    """Refuse micro-batches with ``adapt="lr"``.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    if trainer.accumulate_grad_batches != 1:
        raise refuse(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) with adapt='lr' yet",
            "set accumulate_grad_batches=1 and a larger batch_size in the DataLoader",
        )


def check_loader(loader: Any) -> None:
    """Refuse a train loader whose batch size cannot be changed exactly.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    _check_is_data_loader(loader)
    _check_iterates_plainly(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise refuse(
            f"the iterable data set {type(loader.dataset).__name__} yet",
            "use a map-style data set",
        )
    _check_samplers(loader)
    if not getattr(loader, "in_order", True):
        raise refuse(
            "DataLoader(in_order=False), with which batches depend on timing",
            "remove in_order=False from the DataLoader",
        )


def check_fixed_loader(loader: Any) -> None:
    """Refuse a train loader of which not even the batch size is known, for ``adapt="lr"``.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    _check_is_data_loader(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise refuse(f"the iterable data set {type(loader.dataset).__name__} yet", "use a map-style data set")
    _check_samplers(loader)


def _check_is_data_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise refuse(
            f"the train loader {type(loader).__name__}: it cannot change the batch size of it",
            "pass a torch.utils.data.DataLoader",
        )


def own_iteration(loader: Any) -> str | None:
    """Return the method by which a DataLoader's subclass iterates in a way of its own, or None."""
    for method in ("__iter__", "_get_iterator"):
        if getattr(type(loader), method) is not getattr(DataLoader, method):
            return method
    return None


def _check_iterates_plainly(loader: DataLoader[Any]) -> None:
    method = own_iteration(loader)
    if method is not None:
        name = type(loader).__name__
        raise refuse(f"{name}, which overrides {method}: its batches are its own", "use a plain DataLoader")


def plain_batch_sampler(batch_sampler: Any) -> bool:
    """Whether a batch sampler only groups its sampler's indices: then it counts as its sampler."""
    return isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__iter__ is BatchSampler.__iter__


def _check_samplers(loader: DataLoader[Any]) -> None:
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        raise refuse("DataLoader(batch_size=None)", "set a batch_size in the DataLoader")
    if not plain_batch_sampler(batch_sampler):
        raise refuse(
            f"the batch sampler {type(batch_sampler).__name__} yet",
            "pass sampler=... and batch_size=... to the DataLoader instead of batch_sampler=...",
        )
    if not hasattr(batch_sampler.sampler, "__len__"):
        raise refuse(
            f"the sampler {type(batch_sampler.sampler).__name__}, which has no length, yet", "give it a __len__"
        )
