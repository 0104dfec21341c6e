# SPDX-License-Identifier: Apache-2.0
"""What training on a batch changes beside gradients and weights, kept so that it can be put back."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_adabatch.bridge import drawn


class Kept:
    """A copy of the generators, the module's buffers, tensors and metrics, and what was logged in the epoch so far.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        modules = list(trainer.lightning_module.modules())
        self._trainer = trainer
        self._generators = drawn.capture(trainer)
        self._buffers = [
            (owner._buffers, name, buffer, buffer.detach().clone())
            for owner in modules
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        # Tensors that are neither, such as running averages of the user's own: which ones, and no copies, for among
        # them may be a whole data set.
        self._tensors = [(module, dict(_tensors(module))) for module in modules if not isinstance(module, Metric)]
        # What self.log sums up over the epoch stands in metrics of Lightning's own.
        self._logged: dict[str, Any] = trainer.fit_loop.epoch_loop._results
        self._names = set(self._logged)
        metrics = [*self._logged.values(), *(module for module in modules if isinstance(module, Metric))]
        self._metrics = [(metric, {name: _copy(value) for name, value in vars(metric).items()}) for metric in metrics]

    @torch.no_grad()
    def renew(self) -> None:
        """Have buffers, tensors and metrics as they were, as often as asked; generators go on."""
        self._put_back_tensors()
        for metric, attributes in self._metrics:
            vars(metric).clear()
            vars(metric).update({name: _copy(value) for name, value in attributes.items()})

    @torch.no_grad()
    def put_back(self) -> None:
        """Have all of it as it was; once, for the copies are handed over."""
        drawn.restore(self._trainer, self._generators)
        self._put_back_tensors()
        for name in set(self._logged) - self._names:
            del self._logged[name]
        for metric, attributes in self._metrics:
            vars(metric).clear()
            vars(metric).update(attributes)

    def _put_back_tensors(self) -> None:
        for buffers, name, buffer, was in self._buffers:
            buffers[name] = buffer.copy_(was)
        for module, kept in self._tensors:
            for name in [name for name, _ in _tensors(module) if name not in kept]:
                delattr(module, name)
            for name, one in kept.items():
                setattr(module, name, one)


def _tensors(module: Any) -> list[tuple[str, Tensor]]:
    return [(name, one) for name, one in vars(module).items() if isinstance(one, Tensor)]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if type(value) is list else value
