# SPDX-License-Identifier: Apache-2.0
"""A factor on the learning rates of optimizers that multiplies whatever schedulers say, and never compounds.

The factor is on the parameter groups all the time, so that whatever reads a learning rate reads the one in
use; it is off only while a scheduler steps, in states of the optimizer, and after the fit. The optimizer owns the base
learning rates; what stands here is only what is needed to put them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from lightning_adabatch.hooks import registered

_PLANNED: dict[type, str] = {
    OneCycleLR: "total_steps",
    CosineAnnealingLR: "T_max",
    PolynomialLR: "total_iters",
}


_Key = tuple[int, int]

#: Stands where others have the number of an optimizer, before the identity of a tensor.
_TENSOR = -1


class _Applied(NamedTuple):
    base: Any  # float or Tensor, without the factor
    shown: Any  # what the group shows
    version: int | None  # of a tensor, which counts the writes to it: reading its value would wait for the device


class LRFactor:
    """Holds one factor on all parameter groups of some optimizers.

    A learning rate that anybody assigns while the factor is on counts as a new base.

    Args:
        optimizers: Those whose learning rates are multiplied. Groups may be added later.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.factor = 1.0
        self._applied: dict[_Key, _Applied] = {}
        self._held: list[tuple[dict[str, Any], Any, int | None]] = []  # groups with the factor on, and what they show
        self._undo: list[tuple[Any, type]] = []
        self._hooks: list[Any] = []
        self._watch()

    @property
    def base(self) -> float:
        """Learning rate of the first group, without the factor; NaN where it has none."""
        lr = self.optimizers[0].param_groups[0].get("lr")
        return math.nan if lr is None else float(self._base(_key(0, 0, lr), lr))

    def set(self, factor: float) -> None:
        """Put another factor on all groups; 1 gives the base learning rates back, bit for bit."""
        if factor != self.factor:
            self._held = []
        self.factor = factor
        self.refresh()

    def refresh(self) -> None:
        """Put the factor on groups that were added, and on learning rates that were assigned."""
        if (self.factor == 1.0 and not self._applied) or self._holds():
            return
        applied: dict[_Key, _Applied] = {}
        for key, group in self._groups():
            if key in applied:
                continue  # groups share a tensor that the optimizer was given for all of them
            base = self._base(key, group["lr"])
            _assign(group, base if self.factor == 1.0 else base * self.factor)
            applied[key] = _Applied(base, group["lr"], _version(group["lr"]))
        self._applied = {} if self.factor == 1.0 else applied
        self._held = [(group, group["lr"], _version(group["lr"])) for _, group in self._groups()]

    def move_to(self, optimizers: Sequence[Optimizer]) -> None:
        """Give the base learning rates back to the optimizers so far, and put the factor on others."""
        factor = self.factor
        self.set(1.0)
        self.optimizers = list(optimizers)
        self._watch()
        self.set(factor)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Show the base learning rates for a while; what is assigned meanwhile is the new base."""
        factor = self.factor
        self.set(1.0)
        try:
            yield
        finally:
            self.set(factor)

    def bases(self, optimizer: Optimizer) -> list[Any]:
        """Return the base learning rates of an optimizer's groups, as copies."""
        number = self.optimizers.index(optimizer)
        rates = [group.get("lr") for group in optimizer.param_groups]
        bases = [self._base(_key(number, i, lr), lr) for i, lr in enumerate(rates)]
        return [base.clone() if isinstance(base, Tensor) else base for base in bases]

    def guard(self, scheduler: Any) -> None:
        """Take the factor off whenever this scheduler steps, until :meth:`release`; hold its end where it would raise.

        The same for those that it is made of. The scheduler becomes an instance of a subclass of its own class. An
        attribute on the instance would be in its ``state_dict``, which is its ``__dict__``.
        """
        original: Any = type(scheduler)
        if any(scheduler is guarded for guarded, _ in self._undo):
            return
        for part in _parts(scheduler):
            self.guard(part)
        factor = self

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            asked = args or kwargs.get("epoch") is not None  # SequentialLR begins its parts at 0
            if isinstance(self, OneCycleLR) and not asked and self.last_epoch >= self.total_steps - 1:
                # A run that shrank its batches has more updates than were planned: one more step would bring
                # the LR up again, and the one after it would raise.
                return None
            with factor.off():
                return original.step(self, *args, **kwargs)

        def reduce(self: Any, protocol: Any) -> Any:
            # Pickled or copied, with the module that holds it, it is one of the user's class. Pickle itself refuses
            # to make another class than the object's, unless a function does.
            function, arguments, *state = original.__reduce_ex__(self, protocol)
            if arguments == (type(self),):
                function, arguments = object.__new__, (original,)
            return function, arguments, *state

        names = {
            "step": step,
            "__reduce_ex__": reduce,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
        }
        scheduler.__class__ = type(original.__name__, (original,), names)
        self._undo.append((scheduler, original))

    def release(self) -> None:
        """Give the base learning rates and the schedulers back."""
        self.set(1.0)
        self._unwatch()
        while self._undo:
            scheduler, original = self._undo.pop()
            scheduler.__class__ = original

    def _watch(self) -> None:
        """Have states that users take hold the base learning rates: they may be loaded under another factor."""
        self._unwatch()
        self._hooks = [
            handle
            for one in self.optimizers
            for handle in registered(one, "state_dict_post", partial(self._without_factor, one))
        ]

    def _unwatch(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _without_factor(self, optimizer: Optimizer, _: Optimizer, state: dict[str, Any]) -> None:
        for group, base in zip(state["param_groups"], self.bases(optimizer), strict=True):
            if base is not None:
                group["lr"] = base

    def _holds(self) -> bool:
        """Whether the groups are those that got the factor last, and show what they showed then."""
        groups = [group for one in self.optimizers for group in one.param_groups]
        return len(groups) == len(self._held) and all(
            now is group and group["lr"] is lr and (version is None or lr._version == version)
            for now, (group, lr, version) in zip(groups, self._held, strict=True)
        )

    def _groups(self) -> Iterator[tuple[_Key, dict[str, Any]]]:
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                if group.get("lr") is None:
                    continue  # refused, but where the factor stays 1
                yield _key(number, index, group["lr"]), group

    def _base(self, key: _Key, shows: Any) -> Any:
        applied = self._applied.get(key)
        if isinstance(shows, Tensor):
            return shows.clone() if applied is None or applied.version != shows._version else applied.base
        # By identity: what somebody assigned may happen to be equal to what stood there.
        return applied.base if applied is not None and applied.shown is shows else shows


def planned_steps(scheduler: Any) -> float | None:
    """Return for how many steps a scheduler is planned; None for one that goes on for ever.

    ``math.inf`` where a function of the user's says it.
    """
    for kind, attribute in _PLANNED.items():
        if isinstance(scheduler, kind):
            return int(getattr(scheduler, attribute))
    if isinstance(scheduler, LinearLR) and scheduler.end_factor < scheduler.start_factor:  # the other way is a warm-up
        return int(scheduler.total_iters)
    if isinstance(scheduler, (LambdaLR, MultiplicativeLR)):
        return math.inf
    planned = [planned_steps(part) for part in _parts(scheduler)]
    if all(steps is None for steps in planned):
        return None
    if isinstance(scheduler, SequentialLR):  # a part begins at its milestone, and the last one stays
        return int((scheduler._milestones or [0])[-1]) + (planned[-1] or 0)
    return max(steps for steps in planned if steps is not None)


def _parts(scheduler: Any) -> Sequence[Any]:
    """Return what a SequentialLR or a ChainedScheduler is made of."""
    parts: Sequence[Any] = scheduler._schedulers if isinstance(scheduler, (SequentialLR, ChainedScheduler)) else []
    return parts


def _key(optimizer: int, group: int, lr: Any) -> _Key:
    """Return what a learning rate is kept under: a tensor by itself, for several groups may show the same one."""
    return (_TENSOR, id(lr)) if isinstance(lr, Tensor) else (optimizer, group)


def _version(lr: Any) -> int | None:
    return lr._version if isinstance(lr, Tensor) else None


def _assign(group: dict[str, Any], lr: Any) -> None:
    if isinstance(group["lr"], Tensor):  # captured graphs and fused kernels hold on to this very tensor
        with torch.no_grad():
            group["lr"].copy_(lr)
    else:
        group["lr"] = lr
