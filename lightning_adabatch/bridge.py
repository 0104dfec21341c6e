# SPDX-License-Identifier: Apache-2.0
"""The only module that touches Lightning's internals. Each touch is one function that says what and why.

Lightning reads the number of batches once, before the first epoch, and plans the last batch, validation,
schedulers and progress bars with it. Here the loader that can change its size is put in its place, and the
counts are kept true after every batch. All is undone by :meth:`Bridge.give_back`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_adabatch.loader import ElasticLoader, EpochPlan, Pass
from lightning_adabatch.sinks import show_total
from lightning_adabatch.validation import ValidationPoints


class Bridge:
    """Puts an elastic loader into a Trainer, and keeps the Trainer's counts true.

    Args:
        trainer: The Trainer.

    Attributes:
        loader: The elastic loader in use; None before Lightning made it, and where none was installed.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.loader: ElasticLoader | None = None
        self._making_train_loaders = False
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, what stood there, ours)
        self._originals: list[tuple[ElasticLoader, Any]] = []
        self._points: ValidationPoints | None = None
        self._planned_val_check_batch: Any = None
        self._warned_short = False
        self._published: int | None = None
        self._metric = torch.tensor(0.0)

    # The loader's place -----------------------------------------------------------------------------

    def install(self, replace: Callable[[Any], ElasticLoader]) -> None:
        """Have every train loader replaced, from now on until :meth:`give_back`.

        Args:
            replace: Makes an elastic loader of a train loader that Lightning is about to use, or refuses it.
        """
        self._wrap_process_dataloader(replace)
        self._wrap_setup_data()
        self._forget_early_loaders()

    def limits_of(self, loader: Any) -> tuple[int | None, int | None]:
        """Return the most batches and the most samples of an epoch that the Trainer's flags allow.

        A whole number of batches is one, whatever their size; a share is a share of the data, in batches of
        the initial size. What is overfitted is a fixed set of samples.
        """
        trainer = self.trainer
        limit = trainer.limit_train_batches
        overfit: int | float = trainer.overfit_batches  # type: ignore[attr-defined]  # set late
        size = loader.batch_sampler.batch_size
        if isinstance(limit, float):
            return None, None if limit == 1.0 else int(len(loader) * limit) * size
        if overfit:
            return None, int(limit) * size
        return int(limit), None

    def _wrap_process_dataloader(self, replace: Callable[[Any], ElasticLoader]) -> None:
        """Every train loader passes here, after the distributed sampler is in and before the first ``iter``."""
        strategy = self.trainer.strategy
        original = strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            processed = original(dataloader)
            if not self._making_train_loaders:
                return processed
            if isinstance(processed, ElasticLoader):  # a CombinedLoader of the user's that is used again
                elastic = processed
            else:
                elastic = replace(processed)
                self._originals.append((elastic, processed))
            elastic.nominal = True
            self.loader = elastic
            return elastic

        self._put(strategy, "process_dataloader", process_dataloader)

    def _wrap_setup_data(self) -> None:
        """Only this tells train loaders from others: ``trainer.training`` does not.

        While Lightning sets up, the loader reports the length at the initial size: an int
        ``val_check_interval`` or a float ``limit_train_batches`` is checked against it, and a grown size
        would raise late in the run. The true counts are set right after.
        """
        fit_loop = self.trainer.fit_loop
        original = fit_loop.setup_data

        def setup_data() -> None:
            self._making_train_loaders = bool(self._replaced)  # not if somebody still calls this after the fit
            try:
                original()
            finally:
                self._making_train_loaders = False
            self._drop_replaced_loaders()
            if self.loader is not None and self.loader.nominal:
                self.loader.nominal = False
                self._planned_val_check_batch = self.trainer.val_check_batch
                self._points = None
                if len(self.train_loaders()) == 1:
                    self._set_counts(len(self.loader))

        self._put(fit_loop, "setup_data", setup_data)

    def _put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Put a function over a method of an instance; what stood there before is put back at the end."""
        self._replaced.append((owner, name, vars(owner).get(name), function))
        setattr(owner, name, function)

    def _drop_replaced_loaders(self) -> None:
        """End the workers of loaders that a reload replaced."""
        current = {id(loader) for loader in self.train_loaders()}
        for elastic, _ in self._originals:
            if id(elastic) not in current:
                elastic.close()
        self._originals = [pair for pair in self._originals if id(pair[0]) in current]

    def _forget_early_loaders(self) -> None:
        """Have loaders made again that somebody asked for before we were there, in another ``setup`` hook."""
        fit_loop = self.trainer.fit_loop
        if fit_loop._combined_loader is not None:
            if fit_loop._data_fetcher is not None:
                fit_loop._data_fetcher.teardown()
            fit_loop._combined_loader = None

    def uses_dataloader_iter(self) -> bool:
        """Whether ``training_step`` takes the iterator and fetches by itself."""
        return isinstance(self.trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)

    def train_loaders(self) -> list[Any]:
        """Return the loaders that the epoch runs over."""
        combined = self.trainer.fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    # Counts -----------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Plan an epoch that starts now: its number of batches and its validation points."""
        loader = self.loader
        if loader is None:
            return
        loader.carry_from(self._live_pass())
        batches = loader.fresh_length
        self._set_counts(batches)
        interval = self._val_check_interval
        if isinstance(interval, float):
            # With infinity Lightning validates after the last batch.
            self.trainer.val_check_batch = math.inf
            self._points = None
            if interval != 1.0 and batches == loader.max_batches:
                # The epoch is a number of batches, whatever their size, and so are the points in it.
                self.trainer.val_check_batch = max(1, int(batches * interval))
            elif interval != 1.0:
                self._points = ValidationPoints(batches, interval, loader.batch_size)
        self._bound_int_interval(batches)

    def end_batch(self, batch_idx: int) -> None:
        """Make every count agree with what the loader has handed out and what is left at the size in force."""
        if self.loader is None:
            return
        batches = self._live_pass().length
        self._set_counts(batches)
        if self._points is not None:
            due = self._points.reached(self.plan.consumed, last=self.plan.over)
            # Lightning validates where (batch_idx + 1) is divisible by this.
            self.trainer.val_check_batch = batch_idx + 1 if due else batch_idx + 2
        self._bound_int_interval(batches)

    @property
    def plan(self) -> EpochPlan:
        """Where the epoch stands."""
        return self._live_pass().plan

    def _live_pass(self) -> Pass:
        """Return the pass that the Trainer runs over: users' code may have begun others, to look at a batch."""
        combined = self.trainer.fit_loop._combined_loader
        assert combined is not None  # for the type checker: setup_data made it
        assert combined._iterator is not None
        begun = combined._iterator.iterators[0]
        assert isinstance(begun, Pass)
        return begun

    def _set_counts(self, batches: int) -> None:
        """Set the four counts that must agree: loop, combined loader, its live iterator, and fetcher."""
        fit_loop = self.trainer.fit_loop
        changed = fit_loop.max_batches != batches
        fit_loop.max_batches = batches
        combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
        assert combined is not None  # for the type checker: setup_data made them
        assert fetcher is not None
        combined.limits = [batches]
        if combined._iterator is not None:
            combined._iterator.limits = combined.limits
        fetcher.length = batches
        fetcher.done = fetcher.fetched >= batches
        if changed:
            show_total(self.trainer.progress_bar_callback, batches)

    @property
    def _val_check_interval(self) -> int | float | None:
        """A number of batches or a share of the epoch; None where time decides: the Trainer lacks it then."""
        return getattr(self.trainer, "val_check_interval", None)

    def _bound_int_interval(self, batches: int) -> None:
        """Validate at the end of an epoch that became shorter than an int ``val_check_interval``."""
        trainer = self.trainer
        interval = self._val_check_interval
        if not isinstance(interval, int) or trainer.check_val_every_n_epoch is None:
            return
        trainer.val_check_batch = min(interval, batches)
        if batches < interval and trainer.enable_validation and not self._warned_short:
            self._warned_short = True
            rank_zero_warn(
                f"AdaptiveBatchSize: the epoch has {batches} batches now, fewer than val_check_interval={interval}; "
                "validation runs at the end of such an epoch. Use a fraction, such as val_check_interval=0.5, to "
                "validate at a share of the data."
            )

    # Metrics ----------------------------------------------------------------------------------------

    def publish(self, name: str, batch_size: int) -> None:
        """Show the size to ``monitor=`` and on the progress bar.

        Written past the public properties: reading those computes all metrics of the module, and would wait
        for the device where one is on the progress bar.
        """
        connector = self.trainer._logger_connector
        if batch_size != self._published:
            self._published = batch_size
            self._metric = torch.tensor(float(batch_size))
        connector._callback_metrics[name] = self._metric
        connector._progress_bar_metrics["batch_size"] = batch_size

    # The end ----------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Put back all that was replaced; safe to call twice."""
        fit_loop = self.trainer.fit_loop
        for owner, name, before, ours in self._replaced:
            if vars(owner).get(name) is not ours:
                continue  # wrapped once more by somebody else, who holds on to ours: it does nothing from now on
            if before is None:
                delattr(owner, name)  # the method of the class is behind it
            else:
                setattr(owner, name, before)
        self._replaced.clear()
        originals = {id(elastic): original for elastic, original in self._originals}
        combined = fit_loop._combined_loader
        if combined is not None:
            combined.flattened = [originals.get(id(loader), loader) for loader in combined.flattened]
        if self.loader is not None:
            self.trainer.val_check_batch = self._planned_val_check_batch
        # Last, for ending a worker that died raises.
        while self._originals:
            self._originals.pop()[0].close()
