# SPDX-License-Identifier: Apache-2.0
"""One frozen record per update, and the rule that says which of them are worth writing down."""

from __future__ import annotations

from dataclasses import asdict, dataclass

PREFIX = "adabatch/"
BATCH_SIZE = PREFIX + "batch_size"

#: A size that moved by this share against the last one logged is logged at once.
_NOTABLE_CHANGE = 0.1


@dataclass(frozen=True)
class Record:
    """What one update used, and where the run stands after it.

    Attributes:
        batch_size: Samples that the update really had.
        updates: Model updates so far, this one included: the x axis.
        samples: Training samples so far.
        epochs: Samples divided by the number of training samples, or None where nobody knows that.
        lr_factor: What multiplied the learning rate in this update.
        damping: What the policy had asked for, before rounding and caps.
        device_batch_size: Samples on one rank, or None where that is all of them.
        loss: The policy's estimate of the training loss, else the last loss observed, or None.
        grad_norm_sq: The same of the squared gradient norm.
        grad_variance: The same of the trace of the covariance of single samples' gradients.
        gradient_diversity: As measured last, or None.
        evaluated: Samples that measurements before decisions took so far, or None for none.
        skipped: Batches without an update and observations that were not finite, or None for none so far.
    """

    batch_size: int
    updates: int
    samples: int
    epochs: float | None
    lr_factor: float
    damping: float
    device_batch_size: int | None = None
    loss: float | None = None
    grad_norm_sq: float | None = None
    grad_variance: float | None = None
    gradient_diversity: float | None = None
    evaluated: int | None = None
    skipped: int | None = None

    def metrics(self) -> dict[str, float]:
        """Return the values that say something, by their tags."""
        return {PREFIX + name: float(value) for name, value in asdict(self).items() if value is not None}


class Gate:
    """Decides which records are logged at once.

    A record is logged when the update count is a multiple of the interval, and when the size changed notably
    since the last one logged; each epoch's last one is logged too, when the epoch ends. So a short epoch hides
    nothing, and a rule that moves at every update costs nothing.

    Args:
        every: The interval in updates; 0 logs nothing.

    Attributes:
        logged_size: The size logged last, or, before anything is, that of the first update; in samples.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.logged_size: int | None = None

    @property
    def open(self) -> bool:
        """Whether anything is logged."""
        return self._every > 0

    def admits(self, updates: int, batch_size: int) -> bool:
        """Whether the record of this update is logged at once; if so, its size is what the next compare with."""
        if not self.open:
            return False
        known = batch_size if self.logged_size is None else self.logged_size
        self.note(known)
        due = updates % self._every == 0 or abs(batch_size - known) >= _NOTABLE_CHANGE * known
        if due:
            self.note(batch_size)
        return due

    def note(self, batch_size: int) -> None:
        """Take a size for the last one logged."""
        self.logged_size = batch_size
