# SPDX-License-Identifier: Apache-2.0
"""Where a run stands between two updates, as a checkpoint has it, and how another process takes that up."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_adabatch.bridge import Bridge, prepare
from lightning_adabatch.checkpoint import FRESH, Snapshot
from lightning_adabatch.controller import Controller
from lightning_adabatch.data import TrainData
from lightning_adabatch.division import Division
from lightning_adabatch.evaluation import Evaluation
from lightning_adabatch.limits import Decision
from lightning_adabatch.logbook import Logbook
from lightning_adabatch.meter import Meter
from lightning_adabatch.policies import Observation
from lightning_adabatch.ranks import Ranks
from lightning_adabatch.rates import Rates
from lightning_adabatch.report import BATCH_SIZE
from lightning_adabatch.update import Update


class Standing:
    """Takes the state of a run's parts, and gives it to those of another one.

    Args:
        bridge: Of the Trainer.
        ranks: That train together.
        data: The training data.
        update: The update in hand.
        division: Of updates into parts.
        evaluation: Of the training set.
        rates: The learning rates.
        logbook: What is logged.
    """

    def __init__(
        self,
        bridge: Bridge,
        ranks: Ranks,
        data: TrainData,
        update: Update,
        division: Division,
        evaluation: Evaluation,
        rates: Rates,
        logbook: Logbook,
    ) -> None:
        self._resume = bridge.resume
        self._memory = bridge.memory
        self._ranks = ranks
        self._data = data
        self._update = update
        self._division = division
        self._evaluation = evaluation
        self._rates = rates
        self._logbook = logbook

    def resume_from(self, snapshot: Snapshot | None, checkpoint: dict[str, Any]) -> None:
        """Have the run go on from a checkpoint, if the run in it had begun."""
        self._data.places.restored = snapshot
        if snapshot is not None:
            self._data.lowered = snapshot.device_limit
            self._memory.fitted = snapshot.fitted
            prepare(checkpoint, snapshot.place)

    def go_on(self, controller: Controller, restored: Snapshot, apply: Callable[[Decision], None]) -> None:
        """Stand where the run of the checkpoint stood; ``apply`` puts its decision in force."""
        # A sampler that divides the data may give some samples twice, so that all ranks have as many.
        controller.load_state_dict(restored.rule, padding=max(restored.ranks, self._ranks.count))
        self._update.meter.put_back([Observation(*row) for row in restored.rows])
        self._logbook.go_on(restored.logged)
        apply(controller.decision)
        end = self._data.places.find(restored)
        own, divided_anew = restored.of_rank(self._ranks.rank), self._data.places.divided_anew
        self._resume.go_on(dict(restored.place), own, restored.metrics, end, divided_anew=divided_anew)
        if restored.inside_step:
            rank_zero_info(
                f"AdaptiveBatchSize: the checkpoint was written inside a step; training goes on after update "
                f"{controller.updates}, the last one that was complete."
            )
        self._data.places.restored = None

    def state_dict(self, controller: Controller | None, *, alone: bool) -> dict[str, Any]:
        """Return what another process needs to go on after the last update that was made.

        Args:
            controller: Of the run; None before training starts.
            alone: Ask no other rank, and compute nothing that takes all of them.
        """
        if controller is None:
            return dict(FRESH) if self._data.places.restored is None else self._data.places.restored.state_dict()
        update, resume, meter = self._update, self._resume, self._update.meter
        if resume.batch_processed:
            update.settle()
        # Hooks of others may come before ours: what this update will have changed is worked out on copies.
        settled = self._division.whole and (bool(update.stepped) or resume.batch_processed)
        updated, trained, used = settled and bool(update.stepped), 0, controller.decision
        if settled:
            trained = self._division.trained(update.batch)
            controller, meter = self._after_update(controller, trained, alone=alone)
        metrics = resume.metrics(alone=alone and self._ranks.several)
        if updated:
            metrics[BATCH_SIZE] = torch.tensor(float(trained))
        place, own = resume.state(settled=settled)
        everybody = [own] if alone else self._ranks.gather(own)
        snapshot = Snapshot(
            rule=controller.state_dict(),
            rows=[list(astuple(row)) for row in meter.peek(alone=alone)],
            logged=self._logbook.state_after(controller.updates if updated else None, used, trained),
            place=place,
            metrics=metrics,
            ranks=self._ranks.count,
            own=everybody[:1] if _all_equal(everybody) else everybody,
            whole=not (alone and self._ranks.several),
            inside_step=resume.batch_begun and not (settled and resume.batch_processed),
            fitted=self._memory.fitted_after(settled=settled),
            device_limit=self._data.lowered,
        )
        return snapshot.state_dict()

    def _after_update(self, controller: Controller, trained: int, *, alone: bool) -> tuple[Controller, Meter]:
        """Return controller and meter as they will be after the update in hand; those of the run stay as they are."""
        update = self._update
        updated = bool(update.stepped)
        meter = update.meter.copy(alone=alone)
        # A decision that needs the training set evaluated is made now, and known when our hook comes. A rank that
        # may ask no other cannot: the decision before it stands, and the run that goes on decides at the next.
        ask = self._evaluation.recall if alone and self._ranks.several else self._evaluation.measure
        controller = controller.copy(meter.peek, ask)
        if updated and not update.closed:
            meter.close(trained, update.stepped, self._division.effective)
        if not update.counted:
            controller.end_batch(trained, updated=updated, learning_rate=self._rates.base)
        if updated and controller.cadence.due(controller.updates):
            meter.clear()
        return controller, meter

    def last_state(self, controller: Controller | None) -> dict[str, Any]:
        """Return the state after an exception, asking nobody; empty if what raised would raise again."""
        try:
            return self.state_dict(controller, alone=True)
        except Exception as error:  # noqa: BLE001  # the one that ended the run is what the user is to see
            rank_zero_warn(
                f"AdaptiveBatchSize: its state could not be taken ({type(error).__name__}: {error}); a checkpoint that "
                "is written now cannot be resumed. Use the last one that was written before."
            )
            return {}


def _all_equal(states: Sequence[Any]) -> bool:
    first, *others = [pickle.dumps(state) for state in states] if len(states) > 1 else [b""]
    return all(other == first for other in others)
