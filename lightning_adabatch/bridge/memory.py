# SPDX-License-Identifier: Apache-2.0
"""Updates that do not fit into memory: done again in smaller parts, or ended with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_adabatch.bridge.counts import Counts
from lightning_adabatch.bridge.kept import Kept
from lightning_adabatch.bridge.patches import Patches
from lightning_adabatch.bridge.slot import Slot
from lightning_adabatch.loader import EpochPlan

# What CUDA, HIP, XPU and MPS say, cuBLAS, cuDNN, and the CPU, where the class of the error does not say it.
_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")

# The optimizer's state comes with the first step: what fitted into memory before it may not fit after it.
_FIRST_UPDATES = 2


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was used up."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class Memory:
    """Has an update whose forward or backward pass runs out of memory done again, in parts that fit.

    The state that it begins with is copied only where it has larger parts than any update before it.

    Args:
        trainer: The Trainer.
        slot: Where its loader is.
        counts: Its counts.

    Attributes:
        fitted: The most samples that went through one forward and backward pass so far; 0 before the first.
    """

    def __init__(self, trainer: pl.Trainer, slot: Slot, counts: Counts) -> None:
        self.fitted = 0
        self._trainer = trainer
        self._slot = slot
        self._counts = counts
        self._divide: Callable[[int], None] | None = None
        self._setting = ""
        self._failed: BaseException | None = None
        self._evaluated = False  # whether a closure came to its end in the batch in hand: an optimizer may have stepped
        self._kept: Kept | None = None
        self._tried = 0  # samples of the update's largest part
        self._updates = 0
        self._again = False  # whether the update in hand is being done again

    def install(self, patches: Patches, divide: Callable[[int], None] | None, setting: str) -> None:
        """Watch every batch from now on.

        Args:
            patches: Takes note of what is replaced.
            divide: Has updates of several parts of at most so many samples; None where this cannot be.
            setting: The argument that keeps batches small enough.
        """
        self._divide, self._setting = divide, setting
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._watch_run(patches, epoch_loop.automatic_optimization)
        self._watch_run(patches, epoch_loop.manual_optimization)
        self._watch_closures(patches, epoch_loop.automatic_optimization)
        self._wrap_advance(patches, epoch_loop)
        self.begin_epoch()  # of one that goes on in its middle there is no beginning

    def begin_epoch(self) -> None:
        """Be asked for every batch of the loader in use."""
        if self._slot.loader is not None and self._divide is not None:
            self._slot.loader.keep = self._keep

    def end_update(self) -> None:
        """Note that the update in hand fitted."""
        self._updates += 1
        live = self._slot.live
        live.again.forget()
        self.fitted = self.fitted_after(settled=True)
        self._kept, self._tried, self._again = None, 0, False

    def fitted_after(self, *, settled: bool) -> int:
        """Return the most samples that fitted, those of the update in hand among them if it is ``settled``."""
        if not settled or self._slot.loader is None:
            return self.fitted
        return max(self.fitted, self._tried or self._slot.live.plan.part_size)

    def _watch_run(self, patches: Patches, optimization: Any) -> None:
        """All of a batch's forward, backward and step happens within ``run``, and hooks that may be repeated."""
        run = optimization.run

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._evaluated = False
            try:
                return run(*args, **kwargs)
            except Exception as error:
                if out_of_memory(error):
                    self._failed = error
                raise

        patches.put(optimization, "run", watched)

    def _watch_closures(self, patches: Patches, automatic: Any) -> None:
        """Only a closure that did not come to its end leaves the weights as they were."""
        make_closure = automatic._make_closure

        def make_watched_closure(*args: Any, **kwargs: Any) -> Any:
            return _Watched(make_closure(*args, **kwargs), self._note_evaluated)

        patches.put(automatic, "_make_closure", make_watched_closure)

    def _note_evaluated(self) -> None:
        self._evaluated = True

    def _wrap_advance(self, patches: Patches, epoch_loop: Any) -> None:
        """One batch of Lightning's, from fetching it to the hooks that end it: done again it fetches a smaller one."""
        advance_once = epoch_loop.advance
        module = self._trainer.lightning_module

        def advance(data_fetcher: Any) -> None:
            name = module._current_fx_name
            while True:
                try:
                    advance_once(data_fetcher)
                except Exception as error:
                    if error is not self._failed:
                        raise
                    self._failed = None
                    limit = self._smaller()
                    if limit is None:
                        raise self._advice(error) from error
                else:
                    return
                # Only here are the error's frames let go, and all that they hold.
                module._current_fx_name = name
                self._do_again(data_fetcher, limit)

        patches.put(epoch_loop, "advance", advance)

    def _smaller(self) -> int | None:
        """Return the samples of a part that may fit where the one in hand did not; None if it cannot be divided."""
        live = self._slot.live
        size = live.plan.part_size
        if self._divide is None or self._evaluated or size == 1 or not live.again.possible:
            return None
        if self.fitted >= size:
            self.fitted = 0  # memory is in pieces, or samples are not alike
        return max(self.fitted, size // 2)

    def _do_again(self, data_fetcher: Any, limit: int) -> None:
        """Go back to where the update began, as if none of it had been fetched."""
        live, loader = self._slot.live, self._slot.loader
        assert loader is not None  # for the type checker: what is live is its
        assert self._divide is not None
        size = live.plan.part_size
        self._divide(limit)
        self._free(self._trainer)
        if self._kept is not None:
            self._kept.put_back()
        self._say(size, limit)
        loader.lower(limit)
        live.again.hand_out(limit)
        self._count_back(data_fetcher, live.plan.batches)
        self._counts.plan_again()
        self._again = True

    def _say(self, size: int, limit: int) -> None:
        inexact = (
            ""
            if self._kept is not None
            else " (So many had fitted before, so no copy was kept of random generators "
            "and buffers: they go on from where the failure left them.)"
        )
        rank_zero_warn(
            f"AdaptiveBatchSize: {size} samples in one forward and backward pass do not fit into memory. They are "
            f"trained again in parts of at most {limit}, and so is every larger batch that follows. Use "
            f"max_device_batch_size={limit} to have that from the start.{inexact}"
        )

    @staticmethod
    def _free(trainer: pl.Trainer) -> None:
        """Let go of the gradients and of the batch, of which Lightning's logging holds on to a reference."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        results = trainer.fit_loop.epoch_loop._results
        results.batch = results.batch_size = None
        garbage_collection_cuda()
        if trainer.strategy.root_device.type == "mps":
            torch.mps.empty_cache()

    def _count_back(self, data_fetcher: Any, batches: int) -> None:
        """Have Lightning count what it fetched, and trained, of the update as not fetched.

        By these counts it numbers batches, validates, and finds the epoch's end.
        """
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        epoch_loop.restarting = False  # a fit that goes on from a checkpoint has gone on by now
        parts = epoch_loop.batch_progress.current.ready - batches
        for counts in (epoch_loop.batch_progress.current, epoch_loop.batch_progress.total):
            counts.ready -= parts
            counts.started -= parts
            counts.processed -= parts - 1  # the one that failed was not
            counts.completed -= parts - 1
        step = epoch_loop.automatic_optimization.optim_progress.optimizer.step
        for made in (step.current, step.total):
            made.ready = made.completed
        data_fetcher.fetched -= parts

    def _keep(self, plan: EpochPlan) -> bool:
        """Keep what an update begins with, if it may be the first one that does not fit."""
        if plan is not self._slot.live.plan:
            return False
        self._tried = plan.part_size
        new = self._again or self._updates < _FIRST_UPDATES or self._tried > self.fitted
        self._kept = Kept(self._trainer) if new else None
        return new or plan.rest == 0  # of one part the samples are in memory anyway

    def _advice(self, error: BaseException) -> RuntimeError:
        """Return the error that ends the run, with what it said and what to do."""
        size = self._slot.live.plan.part_size
        fitted = f"the most that fitted is {self.fitted}" if self.fitted else "none fitted before"
        if size == 1:
            remedy = "Use a smaller model or samples, a lower precision, or a device with more memory"
        else:
            smaller = self.fitted if 0 < self.fitted < size else size // 2
            if self._setting == "max_batch_size":
                smaller *= self._trainer.world_size
            remedy = f"Set {self._setting}={smaller}, and resume from the last checkpoint"
        return torch.OutOfMemoryError(
            f"{error}\nAdaptiveBatchSize: {size} sample{'s' * (size > 1)} in one forward and backward pass on one "
            f"device do not fit into memory; {fitted}. {remedy}."
        )


class _Watched:
    """A closure that tells when it came to its end; not one that holds itself, for it holds the batch."""

    def __init__(self, closure: Any, done: Callable[[], None]) -> None:
        self._closure = closure
        self._done = done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._closure(*args, **kwargs)
        self._done()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._closure, name)
