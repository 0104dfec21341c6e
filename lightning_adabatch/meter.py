# SPDX-License-Identifier: Apache-2.0
"""Measures updates on the device, and brings the rows to the host once per decision."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_adabatch.policies import Observation

#: What a policy can ask for in ``requires``.
MEASURES = frozenset({"loss", "grad_norm_sq"})

_LOSS, _NORM = 0, 1


class Meter:
    """Keeps one row per update, on the device, until it is read.

    Args:
        requires: What to measure, out of :data:`MEASURES`; the rest costs nothing.
    """

    def __init__(self, requires: frozenset[str]) -> None:
        self.measures_loss = "loss" in requires
        self.measures_norm = "grad_norm_sq" in requires
        self._rows: Tensor | None = None  # (capacity, 2): loss, gradient norm
        self._sizes: list[int] = []  # samples of each closed row
        self._has_loss = False
        self._has_norm = False

    def open(self) -> None:
        """Begin the row of the next update, forgetting what an update that never came left behind."""
        self._has_loss = False
        self._has_norm = False

    def loss(self, loss: Tensor) -> None:
        """Take the loss of the update, a scalar; the first in a row counts (LBFGS evaluates several)."""
        if self.measures_loss and not self._has_loss:
            self._row(loss.device)[_LOSS] = loss.detach()
            self._has_loss = True

    @torch.no_grad()  # gradients of gradients have a graph; the rows must not
    def gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Take the gradients of the update, unscaled and before clipping; the first call in a row counts."""
        if self.measures_norm and not self._has_norm:
            norm = grad_norm([gradient for gradient in gradients if gradient is not None])
            self._row(norm.device)[_NORM] = norm
            self._has_norm = True

    def close(self, batch_size: int) -> None:
        """End the row of an update over ``batch_size`` samples."""
        self._sizes.append(batch_size)

    def read(self) -> list[Observation]:
        """Return the closed rows, oldest first, and start afresh: the one copy from the device to the host."""
        sizes, self._sizes = self._sizes, []
        if self._rows is None:
            return [Observation(None, None, size) for size in sizes]
        rows = self._rows[: len(sizes)].tolist()
        return [
            Observation(
                loss=row[_LOSS] if self.measures_loss else None,
                grad_norm_sq=row[_NORM] * row[_NORM] if self.measures_norm else None,
                batch_size=size,
            )
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _row(self, device: torch.device) -> Tensor:
        index = len(self._sizes)
        if self._rows is None:
            # MPS has no float64.
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._rows = torch.zeros((16, 2), dtype=dtype, device=device)
        if index == len(self._rows):
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
        return self._rows[index]


def grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together: a float32 scalar on their device, without a host sync.

    Args:
        gradients: Dense or sparse tensors of any shapes; with none of them the norm is 0.
    """
    # Half precision would overflow when squared.
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    full = [g.float() if g.dtype in (torch.float16, torch.bfloat16) else g for g in dense]
    return torch.nn.utils.get_total_norm(full).float()
