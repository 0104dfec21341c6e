# SPDX-License-Identifier: Apache-2.0
"""Sums over the gradients of single samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

_MOST = 2**26  # numbers in the gradients that are held at once, as far as more than one sample's are


class SampleGradients:
    """Sums up the gradients of single samples, and their squared norms, many samples at once where that works.

    Args:
        loss: Returns the loss of a batch, or None; its parameters are those that the gradients are of.
        notify: Told once if samples have to be taken one by one, and why.
        renew: Has buffers and metrics as they were: what a step puts there while many samples are taken at once
            is of no use outside of that.

    Attributes:
        most: The most samples to be added at once; less once so many did not fit into memory.
    """

    def __init__(
        self, loss: nn.Module, notify: Callable[[str], None], renew: Callable[[], None] = lambda: None
    ) -> None:
        self._loss = loss
        self._notify = notify
        self._renew = renew
        self._parameters = {name: p for name, p in loss.named_parameters() if p.requires_grad}
        self._places = _places(loss, [dict(loss.named_parameters()), dict(loss.named_buffers())])
        self._at_once = True
        first = next(iter(self._parameters.values()))
        # The sum over squares that are all positive loses nothing that the sum over gradients does not.
        self._kind = torch.float32 if first.device.type == "mps" else torch.float64
        self._gradients = {name: torch.zeros_like(p, dtype=self._kind) for name, p in self._parameters.items()}
        self._squares = torch.zeros((), dtype=self._kind, device=first.device)
        self._samples = 0
        self.most = max(1, _MOST // max(1, sum(p.numel() for p in self._parameters.values())))

    def add(self, batches: Sequence[Any], counted: int | None = None) -> None:
        """Add batches of one sample each: the first ``counted``. Of others it is computed, for ranks that wait."""
        counted = len(batches) if counted is None else min(counted, len(batches))
        try:
            together = self._together(batches) if self._at_once and len(batches) > 1 else None
        except torch.OutOfMemoryError:
            half = self.most = len(batches) // 2
        else:
            if together is not None:
                self._add_all(together, counted)
            else:
                for place, batch in enumerate(batches):
                    self._add_one(batch, counts=place < counted)
            return
        # Only here is let go what the error holds.
        self.add(batches[:half], min(counted, half))
        self.add(batches[half:], max(0, counted - half))

    def sums(self) -> Tensor:
        """Return number, sum of the squared norms, and sum of the gradients, in one vector."""
        number = torch.full_like(self._squares, self._samples)
        return torch.cat([torch.stack([number, self._squares]), *(g.flatten() for g in self._gradients.values())])

    def _together(self, batches: Sequence[Any]) -> dict[str, Tensor] | None:
        """Return every sample's gradients, a row each; None where they have to be taken one by one."""
        stacked = _stacked(batches)
        if stacked is None:
            self._say("its samples do not have tensors of the same shapes alone")
            return None
        parameters = {name: p.detach() for name, p in self._parameters.items()}
        # Given as arguments, for a step may write into them.
        buffers = {name: buffer.clone() for name, buffer in self._loss.named_buffers()}
        try:
            found: dict[str, Tensor] = vmap(grad(self._loss_of), in_dims=(None, None, 0), randomness="different")(
                parameters, buffers, stacked
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # what is wrong with the step itself, one sample shows as well
            self._at_once = False
            self._say(f"torch.func cannot take its training_step ({type(error).__name__})")
            return None
        finally:
            self._renew()
        return found

    def _add_all(self, found: dict[str, Tensor], counted: int) -> None:
        for name, gradients in found.items():
            counts = gradients[:counted]
            self._gradients[name] += counts.sum(0, dtype=self._kind)
            self._squares += torch.linalg.vector_norm(counts, dtype=self._kind).square()
        self._samples += counted

    def _add_one(self, batch: Any, *, counts: bool) -> None:
        with torch.enable_grad():
            loss = self._loss(batch)
            if loss is None:
                return
            if self._samples == 0:
                _check_graph(loss)
            found = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        if not counts:
            return
        for name, gradient in zip(self._parameters, found, strict=True):
            if gradient is not None:
                wide = gradient.to(self._kind)
                self._gradients[name] += wide
                self._squares += wide.square().sum()
        self._samples += 1

    def _loss_of(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Any:
        given = {**parameters, **buffers}
        there = {place: given[name] for place, name in self._places.items() if name in given}
        return functional_call(self._loss, there, (batch,), tie_weights=False)

    def _say(self, why: str) -> None:
        self._notify(
            f"AdaptiveBatchSize: the gradients of single samples are taken one by one, which is slow: {why}. "
            "A smaller fraction in the policy costs less."
        )


def _places(module: nn.Module, named: list[dict[str, Tensor]]) -> dict[str, str]:
    """Return by which name each place of a parameter or buffer is known: shared ones have several.

    A module that is registered twice counts once: torch.func.functional_call takes what it put there itself for the
    original when it comes there again, and leaves it behind.
    """
    names = {id(tensor): name for tensors in named for name, tensor in tensors.items()}
    return {
        f"{prefix}.{name}" if prefix else name: names[id(tensor)]
        for prefix, owner in module.named_modules()
        for own in (owner._parameters, owner._buffers)
        for name, tensor in own.items()
        if tensor is not None
    }


def _check_graph(loss: Tensor) -> None:
    """Refuse a graph that hides what is in it from ``torch.autograd.grad``, which would say that there is nothing.

    Raises:
        RuntimeError: With what to do.
    """
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("CheckpointFunction"):
            raise RuntimeError(
                "AdaptiveBatchSize cannot take the gradients of single samples through "
                "torch.utils.checkpoint.checkpoint(use_reentrant=True). What to do: set use_reentrant=False."
            )
        ahead += [following for following, _ in node.next_functions]


def _stacked(batches: Sequence[Any]) -> Any:
    """Return a batch of batches; None where they are not alike, or hold anything but tensors."""
    flat, shapes = zip(*(tree_flatten(batch) for batch in batches), strict=True)
    kinds = [[(one.shape, one.dtype) if isinstance(one, Tensor) else None for one in leaves] for leaves in flat]
    if any(shape != shapes[0] for shape in shapes) or any(kind != kinds[0] for kind in kinds) or None in kinds[0]:
        return None
    return tree_unflatten([torch.stack(column) for column in zip(*flat, strict=True)], shapes[0])
