# SPDX-License-Identifier: Apache-2.0
"""What is said once in a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_adabatch.policies import Constant, Policy, lost_with_checkpoint

SMALL = 10  # times smaller than the size in force


class Notices:
    """Tells the user what is allowed and seldom meant.

    Args:
        policy: The rule.

    Attributes:
        tail_is_due: Whether a small last batch is worth a word: nobody said what should become of it, and it could be
            carried.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._loss_is_due = self._gradients_are_due = self._updates_are_due = True
        self.tail_is_due = False

    def state(self) -> None:
        """Say of a rule of the user's own that a run with it cannot go on from a checkpoint."""
        lost = lost_with_checkpoint(self._policy)
        if lost is not None:
            rank_zero_warn(
                f"AdaptiveBatchSize: the state of {self._policy!r} holds a {lost}, which a checkpoint does not bring "
                "back: the run cannot be resumed. Use numbers, strings and torch tensors, in lists, tuples and dicts, "
                "and one frozen dataclass or NamedTuple around them."
            )

    def laid_out(self, samplers: Sequence[Any], multiple_of: int) -> None:
        """Say of samplers that lay out their indices for batches of one size that other sizes are to come.

        Args:
            samplers: That batches are drawn from.
            multiple_of: Of which all sizes are multiples.
        """
        for sampler in samplers:
            size = getattr(sampler, "batch_size", None)
            if isinstance(self._policy, Constant) or isinstance(size, bool) or not isinstance(size, int):
                continue
            if size > 1 and multiple_of % size:
                rank_zero_warn(
                    f"AdaptiveBatchSize: {type(sampler).__name__} has a batch_size of its own, {size}. If it lays out "
                    "its indices for batches of that size (so many of each class), batches of other sizes cut its "
                    f"groups. Set multiple_of={size}, or what its groups have, or adapt='lr' to leave the batch size "
                    "alone."
                )

    def no_loss(self, *, manual: bool) -> None:
        """Say that the policy follows a loss, and how it is to be shown.

        Args:
            manual: Whether optimization is manual.
        """
        if not self._loss_is_due:
            return
        self._loss_is_due = False
        remedy = (
            "Call self.manual_backward(loss) in training_step, not loss.backward()"
            if manual
            else "Return the loss from training_step, as a tensor or under 'loss' in a dict"
        )
        rank_zero_warn(f"AdaptiveBatchSize: no loss was seen, which {self._policy!r} follows. {remedy}.")

    def no_gradients(self) -> None:
        """Say that the policy follows gradients, and how they are to be shown."""
        if not self._gradients_are_due:
            return
        self._gradients_are_due = False
        rank_zero_warn(
            f"AdaptiveBatchSize: no gradients were seen, which {self._policy!r} follows, so that no decision is made. "
            "They are measured when Lightning steps the optimizer: call optimizer.step(closure) on what "
            "self.optimizers() or optimizer_step gives you, and not on the optimizer inside of it."
        )

    def no_updates(self) -> None:
        """Say that an epoch went by without an update, and how updates are to be shown."""
        if not self._updates_are_due:
            return
        self._updates_are_due = False
        rank_zero_warn(
            "AdaptiveBatchSize: an epoch went by and no optimizer was seen to step, so that the batch size stays as it "
            "is. Under manual optimization step what self.optimizers() gives you, and not an optimizer inside of it. "
            "(Nothing is wrong if you accumulate by hand over more than an epoch.)"
        )

    def small_tail(self, trained: int, wanted: int, initial: int) -> None:
        """Say that an epoch's last batch is much smaller than the others.

        With sizes that move, what is left at an epoch's end is another number each time; at B0 it is the user's own
        choice.

        Args:
            trained: Samples of an update.
            wanted: Samples that were asked for.
            initial: B0.
        """
        if self.tail_is_due and trained * SMALL <= wanted != initial:
            self.tail_is_due = False
            rank_zero_info(
                f"AdaptiveBatchSize: an epoch's last batch had {trained} samples instead of {wanted}. Its step is as "
                "long as any other, along a noisier gradient, and validation comes right after it. Set tail='carry' to "
                "move such samples into the next epoch, or tail='drop'."
            )
