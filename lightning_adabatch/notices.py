# SPDX-License-Identifier: Apache-2.0
"""What is said once in a fit."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_adabatch.policies import Constant, Policy
from lightning_adabatch.settings import Settings

SMALL = 10  # times smaller than the size in force


class Notices:
    """Tells the user what is allowed and seldom meant.

    Args:
        settings: The callback's arguments.
    """

    def __init__(self, settings: Settings) -> None:
        self._policy: Policy = settings.policy
        self._loss_is_due = True
        # Last batches of a loader whose size nobody changes are the user's own choice.
        self._tail_is_due = settings.adapt == "batch_size" and not isinstance(settings.policy, Constant)

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

    def small_tail(self, trained: int, wanted: int, initial: int) -> None:
        """Say that an epoch's last batch is much smaller than the others.

        With sizes that move, what is left at an epoch's end is another number each time.

        Args:
            trained: Samples of an update.
            wanted: Samples that were asked for.
            initial: B0.
        """
        if self._tail_is_due and trained * SMALL <= wanted != initial:
            self._tail_is_due = False
            rank_zero_info(
                f"AdaptiveBatchSize: an epoch's last batch had {trained} samples instead of {wanted}. Its step is as "
                "long as any other, along a noisier gradient, and validation comes right after it. Set tail='carry' to "
                "move such samples into the next epoch, or tail='drop'."
            )
