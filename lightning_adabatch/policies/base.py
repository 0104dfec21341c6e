# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a rule: what it sees, where it stands, and the three functions that it is made of."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Generic

from typing_extensions import TypeVar

from lightning_adabatch.plain import plain

State = TypeVar("State", default=Any)

#: What a policy can ask for in ``requires`` that comes with every observation.
OBSERVED = frozenset({"loss", "grad_norm_sq", "grad_variance"})

#: What a policy can ask for in ``requires`` that is evaluated right before a decision, in ``Progress.measured``.
EVALUATED = frozenset({"full_loss", "gradient_diversity"})


@dataclass(frozen=True)
class Observation:
    """What one model update measured; equal on all ranks.

    Attributes:
        loss: Mean training loss over the update's samples; None where the policy does not ask for it.
        grad_norm_sq: Squared 2-norm of the averaged gradient, unscaled and before clipping; None where
            the policy does not ask for it.
        batch_size: Samples really trained in the update, an epoch's tail included.
        grad_variance: Trace of the covariance of the gradients of single samples, tr Σ, estimated from this
            update without bias, so that noise may make it negative; None where the policy does not ask for it.
    """

    loss: float | None
    grad_norm_sq: float | None
    batch_size: int
    grad_variance: float | None = None


@dataclass(frozen=True)
class Progress:
    """Where the run stands when a decision is made.

    Attributes:
        updates: Model updates so far (the paper's k).
        samples: Training samples processed so far, over all ranks.
        epochs: ``samples`` divided by the number of training samples; fractional.
        initial_batch_size: B0, in samples.
        batch_size: The batch size in force now, in samples.
        cap: The maximum batch size in samples, or ``math.inf``.
        learning_rate: Of the first parameter group, before the LR factor.
        measured: What :meth:`Policy.needs` asked for, by name. ``"full_loss"``: mean training loss over the
            training set, or over the policy's ``fraction`` of it. ``"gradient_diversity"``: over the same
            samples, the mean of the squared norms of their gradients divided by the squared norm of the mean
            of their gradients; unitless, ≥ 1.
    """

    updates: int
    samples: int
    epochs: float
    initial_batch_size: int
    batch_size: int
    cap: int | float
    learning_rate: float
    measured: Mapping[str, float] = field(default_factory=dict)


def is_finite(value: Any) -> bool:
    """Whether a hyperparameter is a finite number, and not something that only looks like one."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)  # NumPy's are too
    except OverflowError:  # an integer beyond all floats
        return False


class Policy(ABC, Generic[State]):
    """A rule for the batch size: frozen hyperparameters, an explicit immutable state, three pure functions.

    A policy answers with a *damping*: the wanted batch size divided by the initial one. Rounding, the cap,
    the floor and the learning rate past the cap are none of its business; they live in the limits, once for
    all policies.

    To write one, subclass ``Policy`` as a frozen dataclass and override :meth:`damping`; override
    :meth:`init` and :meth:`update` too where the rule remembers something. The state is None, or a frozen
    dataclass or ``NamedTuple`` of numbers and lists of numbers.

    Attributes:
        requires: What is measured for this policy, or nothing: of :data:`OBSERVED` at every update, of
            :data:`EVALUATED` right before a decision. What is not asked for is not computed. A policy that asks
            for anything of the second kind has a field ``fraction`` in (0, 1], the share of the training set
            that it is measured on.
        uses_epochs: Whether the rule reads ``progress.epochs``, which is NaN for data without a length: there such
            a policy is refused.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Double(Policy[None]):
        ...     every: int = 100  # updates
        ...     requires = frozenset()
        ...     def damping(self, state: None, progress: Progress) -> float:
        ...         return 2.0 ** (progress.updates // self.every)
        >>> Double(every=10)
        Double(every=10)
    """

    requires: frozenset[str] = frozenset({"loss"})
    uses_epochs: bool = False

    @property
    def state_owner(self) -> Policy[Any]:
        """The rule that the state belongs to: this one, but for a rule that wraps another and adds no memory."""
        return self

    def init(self) -> State:
        """Return the state before the first observation."""
        return None  # type: ignore[return-value]  # a policy without memory has None for its state

    def update(self, state: State, observation: Observation) -> State:
        """Return the state after one more update; never changes ``state``."""
        del observation
        return state

    def needs(self, state: State, progress: Progress) -> frozenset[str]:
        """Return what of :data:`EVALUATED` is to be measured for this decision; each costs a pass over data."""
        del state, progress
        return EVALUATED & self.requires

    def take(self, state: State, progress: Progress) -> State:
        """Return the state after ``progress.measured``; called before :meth:`damping` where something was measured."""
        del progress
        return state

    @abstractmethod
    def damping(self, state: State, progress: Progress) -> float:
        """Return the wanted batch size divided by the initial one; unitless, > 0, ``math.inf`` allowed."""

    def estimates(self, state: State) -> Mapping[str, float]:
        """Return what the policy believes, for the logs, by the names of what it measures (``"loss"``, …)."""
        del state
        return {}

    def notice(self, state: State) -> str | None:
        """Return what the user should know about this state, or None. The first one in a run is said."""
        del state
        return None


def dump_state(policy: Policy[Any], state: Any) -> dict[str, Any]:
    """Return a policy's state as plain numbers, with the name of the class that it belongs to."""
    return {"class": _name(policy.state_owner), "state": plain(_fields(state) if _has_fields(state) else state)}


def lost_with_checkpoint(policy: Policy[Any]) -> str | None:
    """Return what kind of thing in a policy's first state a checkpoint would not bring back, by name; or None."""
    strange = _strange(dump_state(policy, policy.init())["state"])
    return None if strange is None else f"{strange.__module__}.{strange.__qualname__}"


def _strange(value: Any) -> type | None:
    """Return the first type in a state that ``torch.load(weights_only=True)`` does not give back."""
    kind = type(value)
    if kind in {dict, list, tuple}:
        parts = [*value, *value.values()] if kind is dict else value
        return next((found for found in map(_strange, parts) if found is not None), None)
    of_torch = kind.__module__.partition(".")[0] == "torch"
    return None if value is None or of_torch or kind in {bool, int, float, complex, str, bytes} else kind


def load_state(policy: Policy[Any], dumped: Mapping[str, Any]) -> Any:
    """Return the state that :func:`dump_state` wrote.

    Raises:
        ValueError: If it is that of another policy, or of another version of this one.
    """
    name = _name(policy.state_owner)
    if dumped["class"] != name:
        raise ValueError(f"the state is that of {dumped['class']}, and the policy is {name}")
    fresh, stored = policy.init(), dumped["state"]
    if not _has_fields(fresh):
        return stored
    if not isinstance(stored, Mapping) or stored.keys() != _fields(fresh).keys():
        raise ValueError(f"the state is {stored}, and {name} has the fields {', '.join(_fields(fresh))}")
    return type(fresh)(**stored)


def _name(policy: Policy[Any]) -> str:
    return f"{type(policy).__module__}.{type(policy).__qualname__}"


def _has_fields(state: Any) -> bool:
    return hasattr(state, "_asdict") or dataclasses.is_dataclass(state)


def _fields(state: Any) -> dict[str, Any]:
    if hasattr(state, "_asdict"):
        return dict(state._asdict())
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
