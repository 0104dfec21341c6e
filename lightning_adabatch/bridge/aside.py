# SPDX-License-Identifier: Apache-2.0
"""The training loss of a batch on which nothing is trained, and of which the Trainer and the module keep no trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from lightning_adabatch.bridge.kept import Kept
from lightning_adabatch.bridge.patches import Patches


class TrainingLoss(nn.Module):
    """What ``training_step`` returns for a batch, as a function of the module's parameters.

    It is called past the strategy: what stands between the module and its gradients (DDP) learns nothing of it.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__()
        self.module = trainer.lightning_module
        self._trainer = trainer

    def forward(self, batch: Any, batch_idx: int = 0) -> Tensor | None:
        """Return the loss of a batch that is on its device, a scalar; None where the module returns none."""
        trainer = self._trainer
        arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
        with trainer.precision_plugin.train_step_context():
            output: Any = self.module.training_step(*arguments.values())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return None if loss is None else loss.reshape(())


@contextmanager
def aside(trainer: pl.Trainer) -> Iterator[Callable[[], None]]:
    """Have the module in evaluation mode, and what it logs forgotten; put back what batches change of it.

    Gives a function that puts back its buffers and metrics at once.

    Modes are set past ``train()`` and ``eval()``, which modules override to do other things, too.
    """
    kept, patches = Kept(trainer), Patches()
    modes = [(module, module.training) for module in trainer.lightning_module.modules()]
    try:
        for module, _ in modes:
            module.training = False
            if isinstance(module, pl.LightningModule):
                patches.put(module, "log", _nothing)
                patches.put(module, "log_dict", _nothing)
        yield kept.renew
    finally:
        patches.undo()
        for module, mode in modes:
            module.training = mode
        kept.put_back()


def to_device(trainer: pl.Trainer, batch: Any) -> Any:
    """Return a batch as ``training_step`` gets it, through the hooks for it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def indices_of(loader: DataLoader[Any]) -> tuple[list[int], bool]:
    """Return the indices of the training set, and whether all ranks have the same.

    These are all of the data set's, or those of a ``SubsetRandomSampler``: what any other sampler leaves out or
    repeats is not known before it has been drawn from.
    """
    data: Any = loader.dataset
    sampler: Any = loader.sampler
    shared = isinstance(sampler, DistributedSampler)
    if shared and isinstance(sampler.dataset, _DatasetSamplerWrapper):  # Lightning's, around the user's sampler
        sampler = sampler.dataset._sampler
    indices = sampler.indices if isinstance(sampler, SubsetRandomSampler) else range(len(data))
    return [int(index) for index in indices], shared


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
