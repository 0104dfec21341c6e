# SPDX-License-Identifier: Apache-2.0
"""Cooldown: another rule, with more damping towards the end of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_adabatch.policies.base import Observation, Policy, Progress, is_finite
from lightning_adabatch.policies.checks import check_unit, count


@dataclass(frozen=True)
class Cooldown(Policy[Any]):
    r"""Follow another rule, and take the noise away towards the end of training.

    .. math::
        s(e) &= \min\left(1, \max\left(0, \frac{e - \text{start}}{\text{end} - \text{start}}\right)\right) \\
        \text{damping} &= \text{rule's damping} \,/\, \left(1 - s(e) + \frac{s(e)}{\text{factor}}\right)

    At the cap the learning rate that the rule gives is multiplied by a number that falls along a line, from 1 at
    ``start`` to 1 / ``factor`` at ``end``; below the cap the batch grows instead. Before ``start`` nothing differs, and
    so the rule can be changed to one with a cooldown when a run resumes, from any checkpoint written before.

    Args:
        policy: The rule; its state is this one's.
        start: Where the cooldown begins, in ``unit``; finite, ≥ 0.
        end: Where it is complete, usually the end of training; finite, > ``start``. It stays complete afterwards.
        factor: What the damping is multiplied by at ``end``; finite, ≥ 1.
        unit: What ``start`` and ``end`` count: ``"updates"``, ``"samples"`` or ``"epochs"``.

    Raises:
        ValueError: If ``policy`` is no rule, or a value is outside of its range.

    Example:
        >>> from lightning_adabatch import Constant
        >>> rule = Cooldown(Constant(), start=6, end=10, factor=5)
        >>> [rule.damping(None, Progress(0, 0, epochs, 8, 8, 64, 0.1)) for epochs in (0.0, 6.0, 8.5, 10.0)]
        [1.0, 1.0, 2.0, 5.0]

    Notes:
        1. In the source the learning rate decays; that the batch grows below the cap is Smith et al.'s trade of one
           for the other.
        2. A rule that follows what it measures sees the losses and gradients of the cooldown too, and answers with
           another damping of its own: RadaDamp's rises, as the gradients become smaller. A rule that reads
           ``progress.batch_size`` sees the size with the cooldown in it.
        3. With ``lr_scaling`` the learning rate follows the batch while that grows, so that below the cap it rises.

    References:
        Hägele et al., Scaling laws and compute-optimal training beyond fixed training durations, NeurIPS 2024.
        Smith et al., Don't decay the learning rate, increase the batch size, ICLR 2018.
    """

    policy: Policy
    start: float
    end: float
    factor: float = 20.0
    unit: Literal["updates", "samples", "epochs"] = "epochs"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not isinstance(self.policy, Policy):
            raise ValueError(  # noqa: TRY004  # a ValueError for every argument
                f"policy={self.policy!r} must be a rule, such as RadaDamp()."
            )
        check_unit(self.unit)
        if not (is_finite(self.start) and self.start >= 0):
            raise ValueError(f"start={self.start!r} must be a finite number of {self.unit} >= 0.")
        if not (is_finite(self.end) and self.end > self.start):
            raise ValueError(f"end={self.end!r} must be a finite number of {self.unit} > start={self.start!r}.")
        if not (is_finite(self.factor) and self.factor >= 1):
            raise ValueError(f"factor={self.factor!r} must be a finite number >= 1, such as 20.")

    @property
    def requires(self) -> frozenset[str]:  # type: ignore[override]  # the rule's own
        """What the rule asks for."""
        return self.policy.requires

    @property
    def uses_epochs(self) -> bool:  # type: ignore[override]  # depends on the unit
        """Whether the rule or the cooldown counts epochs."""
        return self.unit == "epochs" or self.policy.uses_epochs

    @property
    def fraction(self) -> float:
        """The share of the training set that the rule is measured on, for the rules that have one."""
        return self.policy.fraction  # type: ignore[attr-defined,no-any-return]

    @property
    def state_owner(self) -> Policy:
        """The rule: it goes on from the checkpoints of a run without a cooldown, and the other way round."""
        return self.policy.state_owner

    def init(self) -> Any:
        """Return the rule's state before the first observation."""
        return self.policy.init()

    def update(self, state: Any, observation: Observation) -> Any:
        """Return the rule's state after one more update."""
        return self.policy.update(state, observation)

    def needs(self, state: Any, progress: Progress) -> frozenset[str]:
        """Return what the rule asks for before this decision."""
        return self.policy.needs(state, progress)

    def take(self, state: Any, progress: Progress) -> Any:
        """Return the rule's state after what was measured."""
        return self.policy.take(state, progress)

    def damping(self, state: Any, progress: Progress) -> float:
        """Return the rule's damping, divided by what is left of the learning rate."""
        now = count(self.unit, progress)
        done = min(1.0, max(0.0, (now - self.start) / (self.end - self.start)))
        return self.policy.damping(state, progress) / ((1.0 - done) + done / self.factor)

    def estimates(self, state: Any) -> Mapping[str, float]:
        """Return what the rule believes."""
        return self.policy.estimates(state)

    def notice(self, state: Any) -> str | None:
        """Return what the rule has to say."""
        return self.policy.notice(state)
