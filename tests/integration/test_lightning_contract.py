# SPDX-License-Identifier: Apache-2.0
"""What ``bridge.py`` takes for granted about Lightning, seen in a plain Trainer: a changed internal fails here."""

from __future__ import annotations

import math
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from models import Recorder, fit, loader


class InMidEpoch(pl.Callback):
    """Calls a function with the Trainer at the end of one batch of the first epoch."""

    def __init__(self, function, batch_idx: int = 1) -> None:
        self.function = function
        self.at = batch_idx
        self.calls = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == self.at:
            self.calls += 1
            self.function(trainer)


def in_mid_epoch(function, **kwargs):
    """Fit plain Lightning on 8 batches of 4 with a callback in the second one; return the module and the Trainer."""
    module, probe = Recorder(), InMidEpoch(function)
    trainer = fit(module, loader(32, 4), loader(8, 8), callbacks=[probe], **{"epochs": 1, **kwargs})
    assert probe.calls == 1
    return module, trainer


def set_four_counts(trainer, batches):
    """Set what ``Bridge._set_counts`` sets."""
    fit_loop = trainer.fit_loop
    fit_loop.max_batches = batches
    fit_loop._combined_loader.limits = [batches]
    fit_loop._combined_loader._iterator.limits = fit_loop._combined_loader.limits
    fit_loop._data_fetcher.length = batches
    fit_loop._data_fetcher.done = fit_loop._data_fetcher.fetched >= batches


def test_internals_have_their_names_and_values(tmp_path):
    """In a running epoch every attribute that the bridge reads exists and holds what the bridge takes it for."""

    def look(trainer):
        fit_loop = trainer.fit_loop
        assert isinstance(fit_loop._combined_loader, CombinedLoader)
        assert fit_loop._combined_loader.flattened == [trainer.train_dataloader]
        assert fit_loop._combined_loader.limits == [8]
        assert fit_loop._combined_loader._iterator.limits == [8]
        assert len(fit_loop._combined_loader._iterator.iterators) == 1
        assert isinstance(fit_loop._data_fetcher, _DataFetcher)
        assert (fit_loop._data_fetcher.length, fit_loop._data_fetcher.fetched) == (8, 2)
        assert fit_loop._data_fetcher.done is False
        assert fit_loop.max_batches == trainer.num_training_batches == 8
        assert trainer.val_check_batch == 8
        assert trainer.val_check_interval == 1.0
        assert trainer.enable_validation is True

    in_mid_epoch(look, root=tmp_path)


def test_process_dataloader_is_asked_for_on_the_instance(tmp_path):
    """Lightning calls ``strategy.process_dataloader`` for the train loader, and iterates over what it returns."""
    seen = []

    class Early(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            original = trainer.strategy.process_dataloader

            def process_dataloader(dataloader):
                seen.append(dataloader)
                return original(loader(12, 6) if dataloader is train else dataloader)

            trainer.strategy.process_dataloader = process_dataloader

    train, module = loader(32, 4), Recorder()
    fit(module, train, callbacks=[Early()], epochs=1, root=tmp_path)
    assert any(one is train for one in seen)
    assert module.sizes == [6, 6]


def test_setup_data_makes_the_train_loaders_and_no_others(tmp_path):
    """``fit_loop.setup_data`` is called on the instance, and train loaders alone are processed within it."""
    within, processed = [False], []

    class Early(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            setup_data, process = trainer.fit_loop.setup_data, trainer.strategy.process_dataloader

            def wrapped():
                within[0] = True
                setup_data()
                within[0] = False

            def process_dataloader(dataloader):
                processed.append((len(dataloader.dataset), within[0]))
                return process(dataloader)

            trainer.fit_loop.setup_data = wrapped
            trainer.strategy.process_dataloader = process_dataloader

    fit(Recorder(), loader(32, 4), loader(8, 8), callbacks=[Early()], epochs=1, root=tmp_path)
    assert sorted(set(processed)) == [(8, False), (32, True)]


def test_forgetting_the_combined_loader_makes_loaders_again(tmp_path):
    """With ``fit_loop._combined_loader`` None, the loaders that were made before are made again."""
    asked = []

    class Net(Recorder):
        def train_dataloader(self):
            asked.append(1)
            return loader(32, 4)

    class Early(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            trainer.fit_loop.setup_data()
            assert trainer.fit_loop._combined_loader is not None
            trainer.fit_loop._data_fetcher.teardown()
            assert trainer.fit_loop._data_fetcher.iterator is None
            trainer.fit_loop._combined_loader = None

    fit(Net(), None, callbacks=[Early()], epochs=1, root=tmp_path)
    assert len(asked) == 2


def test_four_counts_decide_where_the_epoch_ends(tmp_path):
    """The four counts end the epoch at the new length: last batch, validation and epoch end are in their places."""
    module, trainer = in_mid_epoch(lambda trainer: set_four_counts(trainer, 5), root=tmp_path)
    assert [batch.planned for batch in module.batches] == [8, 8, 5, 5, 5]
    assert [batch.last for batch in module.batches] == [False] * 4 + [True]
    assert trainer.fit_loop.epoch_progress.total.completed == 1


def test_each_count_is_read_where_it_is_set(tmp_path):
    """``max_batches`` is the Trainer's number of batches; the limits are those of this iterator and of the next one."""

    def change(trainer):
        fit_loop = trainer.fit_loop
        combined = fit_loop._combined_loader
        fit_loop.max_batches = 5
        assert trainer.num_training_batches == 5
        combined._iterator.limits = [6]
        assert len(combined) == 6
        combined.limits = [7]
        assert len(combined) == 6
        set_four_counts(trainer, 8)

    module, _ = in_mid_epoch(change, root=tmp_path)
    assert len(module.batches) == 8


def test_limits_hold_for_the_next_epoch(tmp_path):
    """A pass that begins takes its limits from ``CombinedLoader.limits``, and the fetcher its length from them."""

    def change(trainer):
        trainer.fit_loop._combined_loader.limits = [5]

    module, _ = in_mid_epoch(change, epochs=2, root=tmp_path)
    assert (len(module.sizes_in(0)), len(module.sizes_in(1))) == (8, 5)


def test_done_of_the_fetcher_is_the_last_batch(tmp_path):
    """``is_last_batch`` is the fetcher's ``done`` when the next batch was fetched: a smaller length makes it true."""

    def shorten(trainer):
        fetcher = trainer.fit_loop._data_fetcher
        fetcher.length = fetcher.fetched + 1

    module, _ = in_mid_epoch(shorten, root=tmp_path)
    assert [batch.last for batch in module.batches] == [False, False, True]


def test_validation_is_where_val_check_batch_divides(tmp_path):
    """Validation runs after the batch whose number ``trainer.val_check_batch`` divides, read after the batch's end."""

    class Points(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.val_check_batch = batch_idx + 1 if batch_idx + 1 in {3, 7} else batch_idx + 2

    module = Recorder()
    fit(module, loader(32, 4), loader(8, 8), callbacks=[Points()], epochs=1, val_check_interval=0.5, root=tmp_path)
    assert module.validations == [3, 7]


def test_validation_at_infinity_is_after_the_last_batch(tmp_path):
    """With ``trainer.val_check_batch`` infinite, the batch that is the last one decides."""

    def endless(trainer):
        trainer.val_check_batch = math.inf
        set_four_counts(trainer, 5)

    module, _ = in_mid_epoch(endless, root=tmp_path)
    assert module.validations == [5]


def test_time_based_interval_takes_the_attribute_away(tmp_path):
    """With a time-based interval ``trainer.val_check_interval`` is absent or no number, and no batch decides."""

    def look(trainer):
        assert not isinstance(getattr(trainer, "val_check_interval", None), (int, float))
        assert trainer.val_check_batch is None

    in_mid_epoch(look, val_check_interval=timedelta(days=1), root=tmp_path)


def test_a_batch_that_failed_can_be_begun_again(tmp_path):
    """C61: ``advance`` is called on the instance; counted back, it fetches another batch under the same number.

    What fails within ``automatic_optimization.run``, in the closure that ``_make_closure`` made, leaves behind it
    ``_current_fx_name`` and the batch that logging holds, and no more.
    """
    seen = []

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and not seen:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    class Early(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            loop = trainer.fit_loop.epoch_loop
            automatic = loop.automatic_optimization
            original, run, make = loop.advance, automatic.run, automatic._make_closure

            def advance(fetcher):
                try:
                    original(fetcher)
                except ZeroDivisionError:
                    batches = loop.batch_progress.current
                    seen.append((batches.ready, batches.started, batches.processed, batches.completed))
                    assert fetcher.fetched == 3
                    assert pl_module._current_fx_name == "training_step"
                    assert loop._results.batch is not None
                    pl_module._current_fx_name = None
                    loop._results.batch = loop._results.batch_size = None
                    for counts in (batches, loop.batch_progress.total):
                        counts.ready, counts.started = counts.ready - 1, counts.started - 1
                    step = automatic.optim_progress.optimizer.step
                    assert (step.current.ready, step.current.completed) == (3, 2)
                    step.current.ready = step.total.ready = 2
                    fetcher.fetched -= 1
                    original(fetcher)

            def watched(*args):
                seen_before = list(seen)
                try:
                    return run(*args)
                except ZeroDivisionError:
                    assert seen == seen_before == []
                    raise

            def make_closure(*args):
                made = make(*args)
                closures.append(made)

                class Stands:
                    consume_result = staticmethod(made.consume_result)

                    def __call__(self):
                        return made()

                return Stands()

            loop.advance, automatic.run, automatic._make_closure = advance, watched, make_closure

    closures = []
    module = Net()
    trainer = fit(module, loader(36, 4), callbacks=[Early()], epochs=1, limit_train_batches=8, root=tmp_path)
    assert seen == [(3, 3, 2, 2)]
    assert [batch.indices[0] for batch in module.batches] == [0, 4, 12, 16, 20, 24, 28, 32]
    assert [batch.last for batch in module.batches] == [False] * 7 + [True]
    assert len(closures) == 9
    assert trainer.global_step == trainer.fit_loop.epoch_loop.batch_progress.total.completed == 8


def test_fetcher_of_a_module_that_fetches_by_itself(tmp_path):
    """A ``training_step(dataloader_iter)`` is known by the class of ``fit_loop._data_fetcher``."""

    class TakesIterator(Recorder):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            assert isinstance(self.trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)
            return super().training_step(batch, batch_idx)

    module = TakesIterator()
    with pytest.warns(UserWarning, match="dataloader_iter"):
        fit(module, loader(32, 4), epochs=1, root=tmp_path)
    assert len(module.batches) == 8


def test_metrics_that_are_written_directly(tmp_path):
    """What is written into the connector's two dictionaries is in the Trainer's public metrics."""

    def write(trainer):
        trainer._logger_connector._callback_metrics["probe"] = torch.tensor(3.0)
        trainer._logger_connector._progress_bar_metrics["probe"] = 4
        assert trainer.callback_metrics["probe"] == 3.0
        assert trainer.progress_bar_metrics["probe"] == 4

    in_mid_epoch(write, root=tmp_path)


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_have_a_total_to_set(kind, tmp_path):
    """Both bars show the total that ``sinks.show_total`` sets, through public names."""

    def change(trainer):
        bar = trainer.progress_bar_callback
        if kind is TQDMProgressBar:
            bar.train_progress_bar.total = 6
        else:
            bar.progress.update(bar.train_progress_bar_id, total=6)
        assert bar.train_progress_bar.total == 6
        assert bar.is_enabled

    probe = InMidEpoch(change)
    fit(Recorder(), loader(32, 4), callbacks=[kind(), probe], enable_progress_bar=True, epochs=1, root=tmp_path)
    assert probe.calls == 1


def test_flattened_can_be_put_back():
    """A ``CombinedLoader`` takes other loaders in place of its own, and shows them in its structure."""
    one, other = loader(8, 4), loader(8, 2)
    combined = CombinedLoader({"a": one})
    combined.flattened = [other]
    assert combined.iterables == {"a": other}
    assert combined.flattened == [other]
