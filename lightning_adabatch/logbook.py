# SPDX-License-Identifier: Apache-2.0
"""What the loggers are told, and when."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_adabatch import sinks
from lightning_adabatch.controller import Controller
from lightning_adabatch.limits import Decision
from lightning_adabatch.policies import OBSERVED
from lightning_adabatch.report import Gate, Record


class Logbook:
    """Writes the records of updates that are worth it, and each epoch's last one.

    Args:
        every: The interval in updates.
        device_size: Returns the samples of one pass on one rank, for the samples of an update over all ranks.
    """

    def __init__(self, every: int, device_size: Callable[[int], int]) -> None:
        self._loggers: Sequence[Logger] = ()
        self._every = every
        self._gate = Gate(0)
        self._device_size = device_size
        self._offset = 0  # of the x axis: steps of fits before this one, by the same Trainer
        # Of the last update, if its record was not written: its decision, its samples, and those of one pass on a rank.
        self._unlogged: tuple[Decision, int, int] | None = None

    def follow(self, steps: int) -> None:
        """Begin where the fits before this one ended on the x axis, after so many steps."""
        self._offset = steps

    def begin(self, loggers: Sequence[Logger]) -> None:
        """Write to these from now on: hooks of others may have put them in after the fit was set up."""
        self._loggers = loggers
        if loggers:
            size, self._gate = self._gate.logged_size, Gate(self._every)
            self._gate.logged_size = size
        sinks.lay_out(loggers)

    def end_update(self, controller: Controller, used: Decision, trained: int) -> None:
        """Write the record of an update if it is time."""
        if self._gate.admits(controller.updates, trained):
            self._write(controller, used, trained, self._device_size(trained))
        else:
            self._unlogged = used, trained, self._device_size(trained)

    def end_epoch(self, controller: Controller) -> None:
        """Write the epoch's last record, whatever ended the epoch."""
        if self._unlogged is not None and self._gate.open:
            self._gate.note(self._unlogged[1])
            self._write(controller, *self._unlogged)

    def state_after(self, updates: int | None, used: Decision, trained: int) -> dict[str, Any]:
        """Return its state as it will be once the update in hand has ended, or as it is.

        Args:
            updates: The count of the update in hand; None for its state as it is.
            used: The decision that the update used.
            trained: Its samples.
        """
        gate, unlogged = copy.copy(self._gate), self._unlogged
        if updates is not None:
            unlogged = None if gate.admits(updates, trained) else (used, trained, self._device_size(trained))
        last = None if unlogged is None else [*astuple(unlogged[0]), unlogged[1]]
        return {"size": gate.logged_size, "last": last, "device": unlogged and unlogged[2], "offset": self._offset}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take over the state of the process before."""
        last = state["last"]
        self._gate.logged_size = state["size"]
        self._offset = state["offset"]
        self._unlogged = None if last is None else (Decision(*last[:-1]), last[-1], state["device"])

    def _write(self, controller: Controller, used: Decision, trained: int, device: int) -> None:
        self._unlogged = None
        latest = controller.latest
        observed = {} if latest is None else {name: getattr(latest, name) for name in OBSERVED}
        estimates = {**observed, **controller.policy.estimates(controller.state)}
        record = Record(
            batch_size=trained,
            updates=controller.updates,
            samples=controller.samples,
            epochs=None if math.isnan(controller.epochs) else controller.epochs,
            lr_factor=used.lr_factor,
            damping=used.damping,
            device_batch_size=device if device < trained else None,
            loss=estimates.get("loss"),
            grad_norm_sq=estimates.get("grad_norm_sq"),
            grad_variance=estimates.get("grad_variance"),
            gradient_diversity=estimates.get("gradient_diversity"),
            evaluated=controller.evaluated or None,
            skipped=controller.skipped or None,
        )
        sinks.write(self._loggers, record, self._offset + record.updates)
