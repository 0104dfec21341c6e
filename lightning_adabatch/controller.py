# SPDX-License-Identifier: Apache-2.0
"""The loop of a rule, without torch and without Lightning: counts, observations, decisions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from lightning_adabatch.limits import Decision, Limits
from lightning_adabatch.policies import OBSERVED, Observation, Policy, Progress, dump_state, load_state

#: Measures by name what a policy asks for.
Evaluate = Callable[[frozenset[str]], Mapping[str, float]]


@dataclass(frozen=True)
class Cadence:
    """When decisions are made.

    Args:
        dwell: Updates from one decision to the next, ≥ 1.
        wait: No decision before this many updates, ≥ 0.
    """

    dwell: int = 1
    wait: int = 0

    def due(self, updates: int) -> bool:
        """Whether a decision follows the update with this count (0: the start of the run)."""
        return updates >= self.wait and updates % self.dwell == 0


class Controller:
    """Counts updates and samples, feeds a policy, and holds the decision in force.

    It works in any training loop: call :meth:`start` once, and :meth:`end_batch` after every batch.

    Args:
        policy: The rule.
        limits: The bounds of the run.
        cadence: When decisions are made.
        training_samples: Samples of the training set, for ``epochs``; None where nobody knows.
        observe: Returns the observations since the last decision, oldest first. Called once per decision: it
            may copy from a device.
        notify: Takes what the user should be told; called once per kind of message.
        evaluate: Measures what a policy needs for a decision beyond the observations, by name; as ``"evaluated"``
            it may say how many samples that took. Not needed for a policy that asks for nothing of the kind.

    Attributes:
        updates: Model updates so far.
        samples: Training samples processed so far.
        evaluated: Samples that evaluations took so far; they are not among ``samples``.
        skipped: Batches without an update, and observations and evaluations that were not finite.
        decision: What the next update uses.
        state: The policy's.
        latest: The last finite observation, or None.
    """

    def __init__(
        self,
        policy: Policy[Any],
        limits: Limits,
        cadence: Cadence,
        *,
        training_samples: int | None,
        observe: Callable[[], Sequence[Observation]],
        notify: Callable[[str], None],
        evaluate: Evaluate | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.cadence = cadence
        self._training_samples = training_samples
        self._before: tuple[int, float] = (0, 0.0)  # samples and epochs when the training set was another one
        self._observe = observe
        self._notify = notify
        self._evaluate = evaluate or _cannot_evaluate
        self._said: set[str] = set()
        self.updates = 0
        self.samples = 0
        self.skipped = 0
        self.evaluated = 0
        self.state = policy.init()
        self.latest: Observation | None = None
        self.decision = Decision(1.0, limits.initial_batch_size, limits.initial_batch_size, 1.0)

    @property
    def epochs(self) -> float:
        """Samples processed, divided by the number of training samples; NaN where nobody knows that.

        Those of a training set of another length count as a share of that one, so that it does not fall.
        """
        samples, epochs = self._before
        return epochs + (self.samples - samples) / self._training_samples if self._training_samples else math.nan

    def count_by(self, training_samples: int | None) -> None:
        """Count epochs of a training set of another length from now on; None where nobody knows it."""
        if training_samples != self._training_samples:
            if self._training_samples:
                self._before = (self.samples, self.epochs)
            self._training_samples = training_samples

    def start(self, learning_rate: Callable[[], float]) -> Decision:
        """Decide for the first update; nothing has been observed."""
        initial = self.limits.decide(1.0)
        if initial is not None:  # B0 itself may be more than one epoch holds
            self.decision = initial
        if self.cadence.due(0):
            before = self._place()
            try:
                self._decide(learning_rate)
            except BaseException:
                self._return_to(before)
                raise
        return self.decision

    def end_batch(self, trained: int, *, updated: bool, learning_rate: Callable[[], float]) -> Decision:
        """Count a batch of ``trained`` samples, decide if it is time, and return what the next one uses.

        ``learning_rate`` is asked only for a decision: reading it may wait for a device.
        """
        before = self._place()
        try:
            self.samples += trained
            if updated:
                self.updates += 1
                if self.cadence.due(self.updates):
                    self._take(self._observe())
                    self._decide(learning_rate)
            else:
                self.skipped += 1
        except BaseException:  # a policy that raises, or Ctrl-C while a device is waited for: all of it or nothing
            self._return_to(before)
            raise
        return self.decision

    def move_to(self, limits: Limits, training_samples: int | None) -> None:
        """Go on with other data: the decision in force is bounded anew."""
        self.limits = limits
        self.count_by(training_samples)
        self.decision = limits.decide(self.decision.damping) or self.decision

    def copy(self, observe: Callable[[], Sequence[Observation]], evaluate: Evaluate | None = None) -> Controller:
        """Return another controller that stands where this one does, and tells nobody anything.

        Args:
            observe: What it takes observations from.
            evaluate: What it has measure for a decision; None: what this one has.
        """
        other = copy.copy(self)
        other._observe, other._notify, other._said = observe, _ignore, set()
        other._evaluate = evaluate or self._evaluate
        other.state = copy.deepcopy(self.state)  # a policy may change a list in it
        return other

    def let_go(self) -> None:
        """Keep the counts, and nothing of the fit."""
        self._observe, self._notify, self._evaluate = _nothing, _ignore, _cannot_evaluate

    def state_dict(self) -> dict[str, Any]:
        """Return counts, decision and policy state as plain numbers; hyperparameters are not among them."""
        latest = self.latest
        return {
            "updates": self.updates,
            "samples": self.samples,
            "epochs": None if math.isnan(self.epochs) else self.epochs,  # to be shown before training goes on
            "skipped": self.skipped,
            "training_samples": self._training_samples,
            "before": list(self._before),
            "evaluated": self.evaluated,
            "initial_batch_size": self.limits.initial_batch_size,
            "batch_size": self.decision.batch_size,
            "lr_factor": self.decision.lr_factor,
            "damping": self.decision.damping,
            "latest": None if latest is None else list(astuple(latest)),
            "policy": dump_state(self.policy, self.state),
        }

    def load_state_dict(self, state: Mapping[str, Any], padding: int = 0) -> None:
        """Go on where another controller stood; its decision is bounded by the limits of this one.

        Args:
            state: Of the other one.
            padding: Training sets whose lengths differ by less are the same, divided in another way.

        Raises:
            ValueError: If the state is that of another policy.
        """
        self.state = load_state(self.policy, state["policy"])
        self.updates, self.samples, self.skipped = state["updates"], state["samples"], state["skipped"]
        self.evaluated = state["evaluated"]
        self._before = (state["before"][0], state["before"][1])
        there, here = state["training_samples"], self._training_samples
        if there and here and there != here:
            self._training_samples = there
            if abs(there - here) < padding:  # the epoch in hand counts by its own length
                samples, epochs = self._before
                whole = math.floor(self.epochs)
                if whole > epochs:
                    self._before = (samples + round((whole - epochs) * there), float(whole))
                self._training_samples = here
            self.count_by(here)
        self.latest = None if state["latest"] is None else Observation(*state["latest"])
        self.decision = self.limits.decide(state["damping"], state["batch_size"]) or self.decision

    def _place(self) -> tuple[int, int, int, int, Any, Observation | None, Decision]:
        return self.updates, self.samples, self.skipped, self.evaluated, self.state, self.latest, self.decision

    def _return_to(self, place: tuple[int, int, int, int, Any, Observation | None, Decision]) -> None:
        self.updates, self.samples, self.skipped, self.evaluated, self.state, self.latest, self.decision = place

    def _take(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            measured = (observation.loss, observation.grad_norm_sq, observation.grad_variance)
            if all(value is None or math.isfinite(value) for value in measured):
                self.state = self.policy.update(self.state, observation)
                self.latest = observation
            else:
                self.skipped += 1

    def _decide(self, learning_rate: Callable[[], float]) -> None:
        if self.policy.requires & OBSERVED and self.latest is None:
            return  # nothing observed yet: the damping of a policy that observes is 1
        progress = Progress(
            updates=self.updates,
            samples=self.samples,
            epochs=self.epochs,
            initial_batch_size=self.limits.initial_batch_size,
            batch_size=self.decision.batch_size,
            cap=self.limits.cap,
            learning_rate=learning_rate(),
        )
        needed = self.policy.needs(self.state, progress)
        if needed:
            found = self._evaluate(needed)
            self.evaluated += int(found.get("evaluated", 0))
            measured = {name: found[name] for name in needed}
            if not all(math.isfinite(value) for value in measured.values()):
                self.skipped += 1
                return  # no information: the decision stands
            progress = replace(progress, measured=measured)
            self.state = self.policy.take(self.state, progress)
        damping = self.policy.damping(self.state, progress)
        decision = self._bounded(damping)
        notice = self.policy.notice(self.state)
        if notice is not None:
            self._say("notice", notice)
        if decision is None:
            self._say(
                "damping",
                f"{self.policy!r} returned the damping {damping!r}; the batch size stays as it was. A damping must be "
                "> 0 (math.inf is allowed)." + self._why_nan(damping),
            )
        else:
            self.decision = decision

    def _bounded(self, damping: Any) -> Decision | None:
        try:
            return self.limits.decide(damping)
        except TypeError:  # most often a rule without a return
            raise TypeError(
                f"{type(self.policy).__name__}.damping returned {damping!r}. Let it return a number > 0, the batch "
                "size wanted in multiples of the initial one."
            ) from None

    def _why_nan(self, damping: float) -> str:
        if not math.isnan(damping) or self._training_samples:
            return ""
        return (
            " Nobody knows the length of the data, so that progress.epochs is nan: set uses_epochs = True in a policy "
            "that reads it, and it is refused for such data when the fit starts."
        )

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._notify(message)


def _cannot_evaluate(names: frozenset[str]) -> Mapping[str, float]:
    raise ValueError(
        f"the policy needs {', '.join(sorted(names))} for a decision, and this controller measures observations alone. "
        "Give it a function that measures them as evaluate."
    )


def _nothing() -> Sequence[Observation]:
    return ()


def _ignore(message: str) -> None:
    del message
