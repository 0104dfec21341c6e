# SPDX-License-Identifier: Apache-2.0
"""Measures updates on the device, and brings the rows to the host once per decision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_adabatch.policies import Observation

_HALVES = (torch.float16, torch.bfloat16)

# This many scalars are kept one by one before they are put into one tensor.
_LOOSE = 256


class Meter:
    """Keeps what each update measured, on the device, until it is read.

    Args:
        requires: What to measure, out of :data:`~lightning_adabatch.policies.OBSERVED`; the rest costs nothing.
        mean: Returns the mean of a tensor over all processes, a collective; None for one process.

    Attributes:
        measures_loss: Whether losses are kept,
        measures_norm: whether gradients are, for their own sake or for that of their variance,
        measures_variance: and whether those of an update's first part are.
        shards: Processes over which gradients that are plain tensors are divided.
    """

    def __init__(self, requires: frozenset[str], mean: Callable[[Tensor], Tensor] | None = None) -> None:
        self.measures_loss = "loss" in requires
        self.measures_variance = "grad_variance" in requires
        self.measures_norm = "grad_norm_sq" in requires or self.measures_variance
        self.shards = 1
        self._shows_norm = "grad_norm_sq" in requires
        self._width = self.measures_loss + self.measures_variance + self.measures_norm
        self._mean = mean
        self._before: list[Observation] = []  # of an unfinished window of the process that was cut
        self._loss: Tensor | None = None  # of the row that is open
        self._parts = 0  # whose losses are in it
        self._weight = 0  # samples of these
        self._share_of = 0  # samples of which they are shares
        self._norms: dict[int, Tensor] = {}  # by optimizer
        self._small: tuple[Tensor, float] | None = None  # the norm of the first part's gradients, and its samples
        self._scalars: list[Tensor] = []  # of the closed rows: loss, the first part's norm, norm; or stacks of them
        self._sizes: list[int] = []  # samples of the closed rows
        self._factors: list[float] = []  # which make their variances of differences between two squared norms

    def open(self) -> None:
        """Begin the row of the next update, forgetting what an update that never came left behind."""
        self._loss = None
        self._parts = self._weight = self._share_of = 0
        self._small = None
        self._norms.clear()

    def loss(self, loss: Tensor, part: int = 1, samples: int = 0, share_of: int = 0) -> None:
        """Take the loss of the update, a scalar, or that of one of its parts.

        The first one of each part counts: LBFGS evaluates several. A part without a loss is left out of the mean.

        Args:
            loss: The mean over the samples of the update or the part, or the part's share of the update's mean.
            part: Which part, from 1.
            samples: Of the part; 0 where the update has no parts.
            share_of: The update's samples, where the loss is a share.
        """
        if self.measures_loss and part > self._parts:
            self._parts = part
            self._weight += samples
            self._share_of = share_of
            value: Any = loss.detach()
            if hasattr(value, "placements"):  # a DTensor, as torch's loss_parallel gives
                value = value.full_tensor()
            # A copy: a captured graph writes the next loss into the same memory. Sums of many halves would not grow.
            share = (value.float() if value.dtype in _HALVES else value.clone()).reshape(1)
            share = share * samples if samples and not share_of else share
            self._loss = share if self._loss is None else self._loss + share

    @property
    def saw_gradients(self) -> bool:
        """Whether the row that is open has gradients of any optimizer."""
        return bool(self._norms)

    def gradients(self, gradients: list[Tensor], optimizer: int = 0, scale: float = 1.0) -> None:
        """Take an optimizer's gradients, unscaled and before clipping; the first call for it in a row counts.

        ``scale`` makes the mean over the update's samples of them.
        """
        if self.measures_norm and optimizer not in self._norms:
            norm = grad_norm(gradients, self.shards).reshape(1)
            self._norms[optimizer] = norm if scale == 1.0 else norm * scale

    def small_gradients(self, gradients: list[Tensor], samples: float, unscale: Callable[[Tensor], Tensor]) -> None:
        """Take the gradients of the update's first part, over so many samples of this process; the first call counts.

        ``unscale`` makes the norm of the mean over those samples of their norm.
        """
        if self.measures_variance and self._small is None:
            self._small = unscale(grad_norm(gradients)).reshape(1), samples

    def close(self, batch_size: int, stepped: Sequence[int] = (0,), effective: float | None = None) -> None:
        """End the row of an update over ``batch_size`` samples, by the optimizers that stepped.

        Args:
            batch_size: Its samples, over all processes.
            stepped: The optimizers.
            effective: The samples whose plain mean has as much noise as the gradients; None for all of them.
        """
        if self.measures_loss:
            loss = _MISSING if self._loss is None else self._loss
            if self._weight != self._share_of:
                loss = loss * (self._share_of / self._weight) if self._share_of else loss / self._weight
            self._scalars.append(loss)
        if self.measures_variance:
            small, samples = (_MISSING, 0.0) if self._small is None else self._small
            self._scalars.append(small)
            large = batch_size if effective is None else effective
            # McCandlish et al., appendix A.1: the squared norm of a mean over n samples holds tr Σ / n of noise.
            self._factors.append(1.0 / (1.0 / samples - 1.0 / large) if 0 < samples < large else math.nan)
        if self.measures_norm:
            self._scalars.append(self._norm(stepped))
        self._sizes.append(batch_size)
        if len(self._scalars) >= _LOOSE:
            self._scalars = [self._stacked()]

    def clear(self) -> None:
        """Forget the closed rows."""
        self._before, self._scalars, self._sizes, self._factors = [], [], [], []

    def peek(self, *, alone: bool = False) -> list[Observation]:
        """Return the closed rows, oldest first, and keep them: the one copy from the device to the host.

        Args:
            alone: Ask nobody else: the other processes may not be there to answer.
        """
        return self._before + self._rows(None if alone else self._mean)

    def put_back(self, observations: list[Observation]) -> None:
        """Go on with the rows of an unfinished window."""
        self._before = list(observations)

    def copy(self, *, alone: bool) -> Meter:
        """Return another meter that has measured the same; ``alone`` it asks nobody else."""
        other = copy.copy(self)
        other._mean = None if alone else self._mean
        other._scalars, other._sizes, other._factors = list(self._scalars), list(self._sizes), list(self._factors)
        return other

    def _rows(self, mean: Callable[[Tensor], Tensor] | None) -> list[Observation]:
        sizes = self._sizes
        if self._width == 0:
            return [Observation(None, None, size) for size in sizes]
        if not sizes:
            return []
        columns = self._columns(mean)
        losses = columns.pop(0) if self.measures_loss else [None] * len(sizes)
        norms: list[Any] = [norm * norm for norm in columns[-1]] if self.measures_norm else [None] * len(sizes)
        variances: list[Any] = [None] * len(sizes)
        if self.measures_variance:
            triples = zip(columns[0], norms, self._factors, strict=True)
            variances = [(small * small - norm) * factor for small, norm, factor in triples]
        if not self._shows_norm:
            norms = [None] * len(sizes)
        return [Observation(*row) for row in zip(losses, norms, sizes, variances, strict=True)]

    def _columns(self, mean: Callable[[Tensor], Tensor] | None) -> list[list[float]]:
        """Return the closed rows' values, by what they are."""
        stacked = self._stacked()
        if mean is None:
            values = stacked.tolist()
        else:  # of the norms the squares: each shard holds its share of the sum, and each first part an estimate
            rows = stacked.double().view(-1, self._width)
            rows[:, self.measures_loss :].square_()
            rows = mean(rows)
            rows[:, self.measures_loss :].sqrt_()
            values = rows.flatten().tolist()
        return [values[column :: self._width] for column in range(self._width)]

    def _norm(self, stepped: Sequence[int]) -> Tensor:
        norms = [self._norms[optimizer] for optimizer in stepped if optimizer in self._norms]
        if not norms:
            return _MISSING
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(_together(norms)).reshape(1)

    def _stacked(self) -> Tensor:
        return _together(self._scalars)


def _together(scalars: list[Tensor]) -> Tensor:
    try:
        return torch.cat(scalars)
    except RuntimeError:  # what had no gradients has its scalar on the CPU
        devices = [scalar.device for scalar in scalars]
        device = next((device for device in devices if device.type != "cpu"), devices[0])
        return torch.cat([scalar.to(device) for scalar in scalars])


#: Stands in the row of an update that never showed its loss or gradients: not finite, so it is dropped.
_MISSING = torch.full((1,), torch.nan)


def grad_norm(gradients: list[Tensor], shards: int = 1) -> Tensor:
    """Return the 2-norm of all gradients together: a float32 scalar on their device, without a host sync.

    Of sharded gradients this process sees only its part: each part is weighed by the number of parts, so that
    the mean of the squares over all processes is the square of the global norm.

    Args:
        gradients: Dense, sparse or distributed tensors of any shapes; with none of them the norm is 0.
        shards: Processes over which those that are plain tensors are divided.
    """
    if not gradients:
        return torch.zeros(())
    first = gradients[0]
    kind, device = torch.float32, first.device
    if all(type(g) is Tensor and g.dtype is kind and g.device == device and not g.is_sparse for g in gradients):
        # What get_total_norm does, without its grouping by device and type, which costs as much again.
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return (norm if shards == 1 else norm * math.sqrt(shards)).detach()
    parts = [_part(g, shards) for g in gradients]
    norms = [
        _plain_norm([part for part, divided in parts if divided == count]) * math.sqrt(count)
        for count in sorted({divided for _, divided in parts})
    ]
    return norms[0].detach() if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)).detach()


def _part(gradient: Tensor, shards: int) -> tuple[Tensor, int]:
    """Return what this process has of a gradient, and over how many processes it is divided."""
    distributed: Any = gradient
    placements = getattr(gradient, "placements", None)  # of a DTensor, which builds without distributed lack
    if placements is None:
        return gradient, shards
    if any(placement.is_partial() for placement in placements):
        return distributed.full_tensor(), 1
    mesh = distributed.device_mesh
    divided = [mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()]
    return distributed.to_local(), math.prod(divided)


def _plain_norm(gradients: list[Tensor]) -> Tensor:
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    # Half precision would overflow when squared.
    full = [g.float() if g.dtype in _HALVES else g for g in dense]
    return torch.nn.utils.get_total_norm(full).float()
