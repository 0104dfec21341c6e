# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``AdaptiveBatchSize``, checked when they are given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_adabatch.controller import Cadence
from lightning_adabatch.limits import Limits, LRScaling, round_down, round_up
from lightning_adabatch.loader import Tail
from lightning_adabatch.plain import plain
from lightning_adabatch.policies import EVALUATED, OBSERVED, Constant, Policy

_MEASURED = OBSERVED | EVALUATED
_MOST = 2**62  # beyond any data set, and every ratio of such numbers is a float

Adapt = Literal["batch_size", "lr"]


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see ``AdaptiveBatchSize`` for the meaning of each.

    Raises:
        ValueError: For a value outside of its range, and for values that contradict each other.
    """

    policy: Policy[Any]
    max_batch_size: int | float | None
    min_batch_size: int
    adapt: Adapt
    dwell: int
    wait: int
    multiple_of: int
    max_device_batch_size: int | None
    lr_scaling: LRScaling
    tail: Tail | None

    def __post_init__(self) -> None:
        """Check every argument by itself, then those that belong together."""
        self._check_policy()
        for name in ("max_batch_size", "min_batch_size", "dwell", "wait", "multiple_of", "max_device_batch_size"):
            object.__setattr__(self, name, plain(getattr(self, name)))  # NumPy's integers are integers
        for name, least in (("min_batch_size", 1), ("dwell", 1), ("wait", 0), ("multiple_of", 1)):
            _check_integer(name, getattr(self, name), least)
        if self.max_device_batch_size is not None:
            _check_integer("max_device_batch_size", self.max_device_batch_size, 1, usual=64)
        if isinstance(self.max_batch_size, float) and self.max_batch_size.is_integer():
            # An int that passed through a command line's int | float comes out as a float.
            object.__setattr__(self, "max_batch_size", int(self.max_batch_size))
        if self.max_batch_size is not None and not _is_infinite(self.max_batch_size):
            _check_integer(
                "max_batch_size", self.max_batch_size, 1, usual=1024, also="math.inf (.inf in YAML), or None"
            )
        _check_choice("adapt", self.adapt, get_args(Adapt))
        _check_choice("lr_scaling", self.lr_scaling, get_args(LRScaling))
        _check_choice("tail", self.tail, (None, *get_args(Tail)))
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is below min_batch_size={self.min_batch_size}. "
                "Raise the first or lower the second."
            )
        if self.max_batch_size is not None and self.max_batch_size < self.multiple_of:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is below multiple_of={self.multiple_of}. "
                "Raise the first or lower the second."
            )
        if self.adapt == "lr":
            self._check_only_lr_moves()

    @property
    def cadence(self) -> Cadence:
        """When decisions are made."""
        return Cadence(self.dwell, self.wait)

    @property
    def follows_variance(self) -> bool:
        """Whether the policy asks for the variance of gradients, of which only an update in parts tells."""
        return "grad_variance" in self.policy.requires

    @property
    def moves_lr(self) -> bool:
        """Whether the learning rate may have to move."""
        if isinstance(self.policy, Constant):
            return False
        return self.adapt == "lr" or self.lr_scaling != "none" or self.max_batch_size != math.inf

    @property
    def evaluates(self) -> frozenset[str]:
        """What the policy may have measured on the training set, right before a decision."""
        return EVALUATED & self.policy.requires

    def limits(
        self,
        initial_batch_size: int,
        training_samples: int | None,
        epoch_samples: float,
        ranks: int = 1,
        *,
        resumed: bool = False,
    ) -> Limits:
        """Return the bounds of a run, all in samples over all ranks.

        Args:
            initial_batch_size: The run's first.
            training_samples: Of the training set; None where nobody knows.
            epoch_samples: Of one epoch; ``math.inf`` where nobody knows.
            ranks: Each has the same share of every batch.
            resumed: The run goes on: its first size was checked when it began, maybe on other ranks.

        Raises:
            MisconfigurationException: If the initial size is not within the bounds, or not a multiple.
        """
        initial, multiple = initial_batch_size, self.multiple_of * ranks
        of_ranks = "" if ranks == 1 else f" * {ranks} ranks"
        if self.adapt == "lr":
            return Limits(initial, cap=initial, adapt="lr")
        if initial % multiple and not resumed:
            raise MisconfigurationException(
                f"AdaptiveBatchSize: the initial batch size {initial} is not a multiple of "
                f"multiple_of={self.multiple_of}{of_ranks}. "
                f"Set batch_size={round_up(initial, multiple) // ranks} in the DataLoader, or another multiple_of."
            )
        given = max(initial, training_samples or 0) if self.max_batch_size is None else self.max_batch_size
        cap = given if given == math.inf else round_down(given, multiple)
        # Of a single sample on each rank no variance can be seen: a rule that follows it would end there.
        least = 2 * ranks if self.follows_variance else 1
        floor = round_up(max(self.min_batch_size, least), multiple)
        if initial < least and not resumed:
            raise MisconfigurationException(
                f"AdaptiveBatchSize: {self.policy!r} follows the variance of gradients, which needs two samples per "
                f"rank, and the initial batch size is {initial}{of_ranks and f' on {ranks} ranks'}. Set batch_size=2 "
                "or more in the DataLoader."
            )
        if cap < multiple:
            raise MisconfigurationException(
                f"AdaptiveBatchSize: max_batch_size={given} is below {multiple}, the smallest multiple of "
                f"multiple_of={self.multiple_of}{of_ranks}. Set max_batch_size={round_up(initial, multiple)} or more."
            )
        here = f" (here {given})" if self.max_batch_size is None else ""
        bounds = f"min_batch_size={self.min_batch_size} and max_batch_size={self.max_batch_size}{here}"
        if multiple > 1:
            bounds += f" as multiples of multiple_of={self.multiple_of}{of_ranks}"
        if floor > cap:
            raise MisconfigurationException(
                f"AdaptiveBatchSize: no batch size is within {floor} and {cap}, which are {bounds}. Set a larger "
                "max_batch_size, or a smaller min_batch_size."
            )
        if not (floor <= initial <= cap or resumed):
            raise MisconfigurationException(
                f"AdaptiveBatchSize: the initial batch size {initial} is not within {floor} and {cap}, which are "
                f"{bounds}. Change batch_size in the DataLoader, or the bounds."
            )
        return Limits(initial, cap, floor, multiple, epoch_samples, "batch_size", self.lr_scaling)

    def _check_policy(self) -> None:
        if not isinstance(self.policy, Policy):
            raise ValueError(  # noqa: TRY004  # a ValueError for every argument
                f"policy={self.policy!r} must be an instance of a Policy, such as RadaDamp()."
            )
        requires: Any = self.policy.requires
        if not isinstance(requires, (set, frozenset)) or not all(isinstance(name, str) for name in requires):
            raise ValueError(
                f"{type(self.policy).__name__}.requires={requires!r} must be a frozenset of names out of "
                f"{', '.join(sorted(_MEASURED))}."
            )
        unknown = sorted(requires - _MEASURED)
        if unknown:
            raise ValueError(
                f"{type(self.policy).__name__}.requires asks for {', '.join(unknown)}; what can be measured is "
                f"{', '.join(sorted(_MEASURED))}. Take the others out of requires."
            )

    def _check_only_lr_moves(self) -> None:
        idle = {
            "max_batch_size": (self.max_batch_size, None),
            "min_batch_size": (self.min_batch_size, 1),
            "multiple_of": (self.multiple_of, 1),
            "max_device_batch_size": (self.max_device_batch_size, None),
            "lr_scaling": (self.lr_scaling, "none"),
            "tail": (self.tail, None),
        }
        for name, (value, default) in idle.items():
            if value != default:
                raise ValueError(
                    f"{name}={value!r} has no effect with adapt='lr', which keeps the batch size as it is. "
                    f"Remove {name}, or set adapt='batch_size'."
                )


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and value == math.inf


def _check_integer(name: str, value: Any, least: int, *, usual: int = 1, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        allowed = f"an integer >= {least}" + (f" and <= {_MOST}" if isinstance(value, int) and value > _MOST else "")
        allowed += f", {also}" if also else ""
        near = int(value) if isinstance(value, float) and least <= value <= _MOST else usual
        raise ValueError(f"{name}={value!r} must be {allowed}. Set for example {name}={near}.")


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}.")
