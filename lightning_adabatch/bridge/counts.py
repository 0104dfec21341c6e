# SPDX-License-Identifier: Apache-2.0
"""The counts by which Lightning plans the last batch, validation, schedulers and progress bars, kept true.

Lightning reads the number of batches once, before the first epoch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_adabatch.bridge.epoch import Epoch
from lightning_adabatch.bridge.slot import Slot
from lightning_adabatch.loader import ElasticLoader, Kind, Pass
from lightning_adabatch.sinks import show_total
from lightning_adabatch.validation import ValidationPoints


class Counts:
    """Keeps a Trainer's counts in agreement with its elastic loader.

    Args:
        trainer: The Trainer.
        slot: Where its loaders are.
        epoch: Where the epoch stands.

    Attributes:
        changed: Called when the data turned out to be of another length than an epoch was planned with, or None.
    """

    def __init__(self, trainer: pl.Trainer, slot: Slot, epoch: Epoch) -> None:
        self._trainer = trainer
        self._slot = slot
        self._epoch = epoch
        self._points: ValidationPoints | None = None
        self._marked_points: list[int] | None = None  # as they were after the last update
        self._every_batches: int | None = None  # the interval, where the epoch is a number of batches
        self._planned_val_check_batch: Any = None
        self._warned_short = False
        self._val_check_interval: int | float | None = None
        self._planned_samples: list[int | None] = []
        self._ours: Any = None  # the trainer.val_check_batch that was set here
        self._theirs = False  # somebody has set another one
        self._training = False  # an epoch has begun, or did in another process
        self.changed: Callable[[], None] | None = None

    def limits_of(self, kind: Kind, size: int) -> tuple[int | None, int | None]:
        """Return the most batches and the most samples of an epoch that the Trainer's flags allow.

        A whole number of batches is one, whatever their size; a share is a share of the data, in batches of
        the initial size. What is overfitted is a fixed set of samples.

        Args:
            kind: Of the user's data.
            size: Samples of one of the run's first batches.
        """
        trainer = self._trainer
        limit = trainer.limit_train_batches
        overfit: int | float = trainer.overfit_batches  # type: ignore[attr-defined]  # set late
        if isinstance(limit, float):
            samples = kind.hint()
            if limit == 1.0 or samples is None:  # Lightning refuses a share of what has no length
                return None, None
            full, rest = divmod(samples, size)
            of_its_own = kind.length(size)
            if of_its_own and of_its_own not in {full, full + (rest > 0)}:
                # Batches of any size: a share of the samples.
                return None, int(int(of_its_own * limit) / of_its_own * samples)
            return None, int((of_its_own or full + (rest > 0 and not kind.drop_last)) * limit) * size
        if overfit:
            return None, int(limit) * size
        return int(limit), None

    def overfitted(self, kind: Kind, size: int) -> int | None:
        """Return how many samples of a rank ``overfit_batches`` limits the epoch to; None if it does not."""
        overfit: int | float = self._trainer.overfit_batches  # type: ignore[attr-defined]  # set late
        return self.limits_of(kind, size)[1] if overfit else None

    @property
    def limits_share(self) -> bool:
        """Whether the Trainer limits the epoch to a share of the data, or overfits a fixed set of samples."""
        limit = self._trainer.limit_train_batches
        overfit: int | float = self._trainer.overfit_batches  # type: ignore[attr-defined]  # set late
        return bool(overfit) or (isinstance(limit, float) and limit != 1.0)

    def loaders_made(self) -> None:
        """Take over what Lightning planned with the length at the initial size, and set the true counts."""
        self._planned_val_check_batch = self._trainer.val_check_batch
        # A number of batches or a share of the epoch; None where time decides: the Trainer lacks it then. Lightning
        # itself reads it only now.
        self._val_check_interval = getattr(self._trainer, "val_check_interval", None)
        self._ours, self._theirs = self._trainer.val_check_batch, False
        self._points = None
        for loader in self._slot.loaders:
            loader.began, loader.ended = self._pass_began, self._pass_ended
            loader.trains = self._slot.runs_over
        if self._training:
            self._plan_epoch()  # they may have been made by a hook that came after ours
        else:  # trainer.estimated_stepping_batches is made of it
            self.set(self._epoch.planned_length)

    def begin_epoch(self) -> None:
        """Plan an epoch that starts now: its number of batches and its validation points."""
        loader = self._slot.loader
        if loader is None:
            return
        self._training = True
        for one, ended in zip(self._slot.loaders, self._slot.passes, strict=True):
            one.carry_from(ended)
        self._plan_epoch()

    def _plan_epoch(self) -> None:
        self._epoch.begin()
        batches = self._epoch.fresh_length
        self._planned_samples = self._samples
        self.set(batches)
        self._plan_validation(self._slot.loaders[0], batches)

    def _pass_began(self, begun: Pass) -> None:
        """Plan once more if a hook that came after ours changed the length of the data."""
        if not self._training or not self._slot.runs_over(begun) or self._samples == self._planned_samples:
            return
        self._planned_samples = self._samples
        batches = self._epoch.length
        self.set(batches)
        self._plan_validation(self._slot.loaders[0], batches)
        if self.changed is not None:
            self.changed()

    @property
    def _samples(self) -> list[int | None]:
        """The samples of each loader, where nobody agreed on them with other ranks."""
        return [None if loader.kind.in_batches else loader.samples_now for loader in self._slot.loaders]

    def _pass_ended(self, ended: Pass) -> None:
        """Take note of the last batch of a stream, which is known only now that Lightning fetches it."""
        if ended.plan.unsized and self._slot.runs_over(ended):
            self.set(self._epoch.length)

    def _validate_every(self, batches: float) -> None:
        self._trainer.val_check_batch = self._ours = batches

    @property
    def _left_to_us(self) -> bool:
        """Whether nobody has assigned ``trainer.val_check_batch`` in mid-run."""
        self._theirs = self._theirs or self._ours not in {None, self._trainer.val_check_batch}
        return not self._theirs

    def _plan_validation(self, loader: ElasticLoader, batches: float) -> None:
        interval = self._val_check_interval
        if not self._left_to_us:
            return
        if isinstance(interval, float):
            self._validate_every(self._at_the_end(batches))
            self._points = None
            self._every_batches = None
            if interval != 1.0 and (batches == loader.max_batches or loader.kind.in_batches):
                # The epoch is a number of batches, whatever their size, and so are the points in it.
                self._every_batches = max(1, int(batches * interval))
                self._validate_every(self._every_batches)
            elif interval != 1.0:
                ruler = self._slot.loaders[self._epoch.ruler] if len(self._slot.loaders) > 1 else loader
                self._points = ValidationPoints(interval, ruler.ends(int(batches)))
        self._marked_points = None if self._points is None else self._points.state()
        self._bound_int_interval(math.inf if loader.available() is None else batches)

    def end_batch(self, batch_idx: int) -> None:
        """Make every count agree with what the loader has handed out and what is left at the size in force."""
        if self._slot.loader is None:
            return
        epoch = self._epoch
        epoch.look_ahead()
        batches, over = epoch.length, epoch.over
        self.set(batches)
        if over:  # Lightning asked before it could be known
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        if self._left_to_us:
            self._follow_validation(batch_idx + 1, batches, over=over)
        if self._slot.live.plan.rest == 0:
            epoch.mark()
            self._marked_points = None if self._points is None else self._points.state()
        self._bound_int_interval(batches if epoch.exact else math.inf)

    def _follow_validation(self, ended: int, batches: float, *, over: bool) -> None:
        if self._points is not None:
            self._validate_every(_every(ended, due=self._points.reached(self._epoch.consumed, last=over)))
        elif self._every_batches is not None:
            # An epoch that became short still validates at its end.
            self._validate_every(int(min(self._every_batches, batches)))
        elif isinstance(self._val_check_interval, float):
            self._validate_every(self._at_the_end(batches))

    def plan_again(self) -> None:
        """Follow the loader back to the beginning of an update, which has more parts now."""
        loader, length = self._slot.loader, self._epoch.length
        assert loader is not None  # for the type checker: what is live is its
        self.set(length)
        if self._slot.live.marked.batches == 0:  # as the epoch would have been planned
            self._plan_validation(loader, length)
        elif self._marked_points is not None:
            self._points = ValidationPoints.from_state(self._marked_points)

    def set(self, batches: float) -> None:
        """Set the four counts that must agree: loop, combined loader, its live iterator, and fetcher."""
        fit_loop = self._trainer.fit_loop
        changed = fit_loop.max_batches != batches
        fit_loop.max_batches = batches
        combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
        assert combined is not None  # for the type checker: setup_data made them
        assert fetcher is not None
        combined.limits = [batches] * len(combined.flattened)
        if combined._iterator is not None:
            combined._iterator.limits = combined.limits
        fetcher.length = batches  # type: ignore[assignment]  # infinite where nobody knows
        fetcher.done = fetcher.fetched >= batches
        if changed:
            show_total(self._trainer.progress_bar_callback, batches)

    def validation_state(self, ended: int, *, settled: bool) -> dict[str, Any]:
        """Return the validation points of the epoch, as plain numbers.

        Args:
            ended: Batches that ended.
            settled: The last of them counts as ended, and :meth:`end_batch` was not called for it.
        """
        marked, every = self._marked_points, self._trainer.val_check_batch
        if settled and self._points is not None:
            points = copy.copy(self._points)
            every = _every(ended, due=points.reached(self._epoch.consumed, last=self._epoch.over))
            marked = points.state()
        more = {"val_setting": self._val_setting, "every_batches": self._every_batches}
        return {"points": marked, "val_check_batch": every, **more}

    def go_on(self, state: Mapping[str, Any], *, divided_anew: bool) -> None:
        """Set the counts of an epoch that another process began.

        Args:
            state: What :meth:`validation_state` returned.
            divided_anew: The epoch's batches are others than they were, and so are the points between them.
        """
        loader = self._slot.loader
        if loader is None:
            return
        self._training = True
        self._planned_samples = self._samples
        if divided_anew or state["val_setting"] != self._val_setting:
            self.set(self._epoch.length)
            self._plan_validation(loader, self._epoch.fresh_length)
            if self._points is not None:
                self._points.reached(self._epoch.consumed, last=False)
                self._marked_points = self._points.state()
            return
        self._points = None if state["points"] is None else ValidationPoints.from_state(state["points"])
        self._marked_points = state["points"]
        self._every_batches = state["every_batches"]
        batches = self._epoch.length
        self.set(batches)
        self._validate_every(state["val_check_batch"])
        self._bound_int_interval(batches if self._epoch.exact else math.inf)

    def give_back(self) -> None:
        """Put back what Lightning planned."""
        if self._slot.loader is not None and self._left_to_us:
            self._trainer.val_check_batch = self._planned_val_check_batch

    def _at_the_end(self, batches: float) -> float:
        """Return the interval with which Lightning validates after an epoch's last batch, and only there.

        That is infinity, unless an int ``limit_train_batches`` (``overfit_batches`` too) has it ask another way.
        """
        return batches if isinstance(self._trainer.limit_train_batches, int) and batches else math.inf

    @property
    def _val_setting(self) -> list[Any]:
        return [self._val_check_interval, self._trainer.check_val_every_n_epoch]

    def _bound_int_interval(self, batches: float) -> None:
        """Validate at the end of an epoch that became shorter than an int ``val_check_interval``.

        Args:
            batches: Of the epoch; ``math.inf`` as long as nobody knows.
        """
        trainer = self._trainer
        interval = self._val_check_interval
        if not isinstance(interval, int) or trainer.check_val_every_n_epoch is None or not self._left_to_us:
            return
        self._validate_every(int(min(interval, batches)))
        if batches < interval and trainer.enable_validation and not self._warned_short:
            self._warned_short = True
            rank_zero_warn(
                f"AdaptiveBatchSize: the epoch has {batches} batches now, fewer than val_check_interval={interval}; "
                "validation runs at the end of such an epoch. Use a fraction, such as val_check_interval=0.5, to "
                "validate at a share of the data."
            )


def _every(ended: int, *, due: bool) -> int:
    """Return the interval that makes Lightning validate after this many batches, or not."""
    return ended if due else ended + 1  # it validates where (batch_idx + 1) is divisible by it
