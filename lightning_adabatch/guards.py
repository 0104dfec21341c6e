# SPDX-License-Identifier: Apache-2.0
"""What a set-up must be: every one that is not supported is refused by name before the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as cb
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch.hooks import calls_hooks
from lightning_adabatch.loader import iteration_of_its_own
from lightning_adabatch.settings import Settings

_NAME = "AdaptiveBatchSize"

_SUPPORTED_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy)
_REFUSED_STRATEGIES = (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy)  # by inheritance kinds of these

_REFUSED_CALLBACKS: tuple[tuple[type[pl.Callback], str], ...] = (
    (cb.GradientAccumulationScheduler, "remove it; the batch size is adapted by this callback"),
    (cb.StochasticWeightAveraging, "remove it, or average the weights after training"),
)


def refuse(what: str, remedy: str) -> MisconfigurationException:
    """Return the error for a set-up that does not work, with what to do instead."""
    return MisconfigurationException(f"{_NAME} does not support {what}. What to do: {remedy}.")


def check_trainer(trainer: pl.Trainer, own: type[pl.Callback]) -> None:
    """Refuse what can be seen of the Trainer before anything is loaded.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    if not isinstance(trainer, pl.Trainer):
        package = type(trainer).__module__.partition(".")[0]
        raise refuse(
            f"the Trainer of {package}, another package than lightning with classes of its own",
            f"write 'import lightning.pytorch as pl' wherever {package} is imported",
        )
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
    if not isinstance(strategy, _SUPPORTED_STRATEGIES) or isinstance(strategy, _REFUSED_STRATEGIES):
        raise refuse(
            type(strategy).__name__,
            "train on one device, or with strategy='ddp', 'ddp_spawn', 'fsdp' or ModelParallelStrategy(...)",
        )
    if isinstance(strategy, FSDPStrategy) and "HYBRID" in strategy.sharding_strategy.name:
        raise refuse(
            f"FSDPStrategy(sharding_strategy={strategy.sharding_strategy.name!r})",
            "set sharding_strategy='FULL_SHARD', or use ModelParallelStrategy",
        )


def check_module(trainer: pl.Trainer, module: pl.LightningModule, settings: Settings) -> None:
    """Refuse what can be seen of the module and its optimizers.

    Args:
        trainer: The Trainer.
        module: That it trains.
        settings: The callback's arguments.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    # Lightning stands an optimizer without groups in for none.
    if not any(optimizer.param_groups for optimizer in trainer.optimizers):
        raise refuse(
            f"{type(module).__name__}, which has no optimizer", "return an optimizer from configure_optimizers"
        )
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    for optimizer in trainer.optimizers:
        _check_optimizer(optimizer, settings, scaled=scaler is not None)
    fused = any(group.get("fused") for optimizer in trainer.optimizers for group in optimizer.param_groups)
    if fused and scaler is not None:
        raise refuse(
            f"a fused optimizer with precision={trainer.precision!r}: it unscales gradients where nobody sees them",
            "set fused=False in the optimizer, or use precision='bf16-mixed'",
        )


def _check_optimizer(optimizer: Optimizer, settings: Settings, *, scaled: bool) -> None:
    name = type(optimizer).__name__
    if scaled and not calls_hooks(optimizer):
        raise refuse(
            f"{name}, which did not run Optimizer.__init__, with a gradient scaler: whether it stepped cannot be seen",
            "use precision='bf16-mixed', or the optimizer that it wraps",
        )
    if settings.moves_lr and any(group.get("lr") is None for group in optimizer.param_groups):
        raise refuse(
            f"{name} without a learning rate of its own, which past max_batch_size would be lowered",
            "give it lr=... (for Adafactor with relative_step=False), or set max_batch_size=math.inf",
        )


def check_parts(trainer: pl.Trainer) -> None:
    """Refuse what does not go together with updates of several micro-batches.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    if not trainer.lightning_module.automatic_optimization:
        raise refuse("max_device_batch_size with manual optimization", "remove max_device_batch_size")
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise refuse(
            "LBFGS with updates of several micro-batches: it evaluates the last of them again, and the others not",
            "set neither accumulate_grad_batches nor max_device_batch_size, and no policy that follows the variance "
            "of gradients",
        )
    wrapped = trainer.strategy.model
    if isinstance(wrapped, DistributedDataParallel) and wrapped.static_graph:
        raise refuse(
            "DDPStrategy(static_graph=True) with updates of several micro-batches",
            "leave static_graph out, or set neither accumulate_grad_batches nor max_device_batch_size, and no policy "
            "that follows the variance of gradients",
        )
    if _steps_seldom(trainer):
        raise refuse(
            "a scheduler with a frequency other than 1 together with micro-batches",
            "set frequency=1 in configure_optimizers, or neither accumulate_grad_batches nor max_device_batch_size",
        )


def _steps_seldom(trainer: pl.Trainer) -> bool:
    """Whether a scheduler steps every so many batches, which Lightning counts by parts."""
    return any(config.interval == "step" and config.frequency != 1 for config in trainer.lr_scheduler_configs)


def check_variance(trainer: pl.Trainer, settings: Settings, loaders: int) -> None:
    """Refuse what hides the gradients of an update's first part from a policy that follows their variance.

    Args:
        trainer: The Trainer.
        settings: The callback's arguments.
        loaders: Elastic ones.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    what = f"{settings.policy!r}, which follows the variance of gradients,"
    another = "use a policy that does without, such as RadaDamp()"
    if not trainer.lightning_module.automatic_optimization:
        raise refuse(f"{what} with manual optimization", another)
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
        raise refuse(
            f"{what} with {type(trainer.strategy).__name__}: no rank sees the gradients of its own samples",
            f"use strategy='ddp', or {another}",
        )
    if settings.adapt == "lr" and trainer.accumulate_grad_batches == 1:
        raise refuse(
            f"{what} with adapt='lr' and updates of one batch each, which is left whole",
            "set Trainer(accumulate_grad_batches=2) or more, with a batch_size in the DataLoader that is so much "
            f"smaller, or {another}",
        )
    if loaders > 1:
        raise refuse(f"{what} with several train loaders", another)
    if _steps_seldom(trainer):
        raise refuse(
            f"{what} together with a scheduler with a frequency other than 1",
            f"set frequency=1 in configure_optimizers, or {another}",
        )


def check_evaluation(trainer: pl.Trainer, settings: Settings, loaders: Sequence[Any]) -> None:
    """Refuse what keeps the training set from a policy that has something measured on it.

    Args:
        trainer: The Trainer.
        settings: The callback's arguments.
        loaders: The user's train loaders.

    Raises:
        MisconfigurationException: For a set-up that is not supported.
    """
    what = f"{settings.policy!r}, which measures {' and '.join(sorted(settings.evaluates))} on the training set,"
    another = "use a policy that does without, such as RadaDamp()"
    if not trainer.lightning_module.automatic_optimization:
        raise refuse(f"{what} with manual optimization: its training_step trains", another)
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
        raise refuse(f"{what} with {type(trainer.strategy).__name__}", f"use strategy='ddp', or {another}")
    if len(loaders) > 1:
        raise refuse(f"{what} with several train loaders", another)
    loader = loaders[0]
    if not isinstance(loader, DataLoader) or iteration_of_its_own(loader) is not None:
        raise refuse(f"{what} with the train loader {type(loader).__name__}", f"use a plain DataLoader, or {another}")
    if loader.batch_sampler is None:
        raise refuse(
            f"{what} with DataLoader(batch_size=None)",
            f"set a batch_size in the DataLoader, and let the data set give single samples, or {another}",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise refuse(
            f"{what} with the iterable data set {type(loader.dataset).__name__}",
            f"use a map-style data set, or {another}",
        )


def divisible(trainer: pl.Trainer, loaders: int) -> bool:
    """Whether updates may be divided into micro-batches at all."""
    try:
        check_parts(trainer)
    except MisconfigurationException:
        return False
    return loaders == 1


def divisible_in_mid_run(trainer: pl.Trainer, loaders: int) -> bool:
    """Whether updates may be divided when memory is used up.

    Several processes would have to agree on it at every step, and what stands between the module and the
    gradients (DDP) does not get over a backward pass that was broken off.
    """
    return divisible(trainer, loaders) and isinstance(trainer.strategy, SingleDeviceStrategy)
