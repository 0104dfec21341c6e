# SPDX-License-Identifier: Apache-2.0
"""C54: the total of a progress bar follows the batches that there are."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from models import Recorder, adapt, fit, loader

SCRIPTS = {"growth": (4, [4, 4, 4, 4, 16]), "shrink": (16, [16, 16, 4])}


class WatchedTQDM(TQDMProgressBar):
    """Notes n and total whenever the bar is drawn, and at each epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []
        self.shown: list[str] = []

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.drawn.append((self.train_progress_bar.n, self.train_progress_bar.total))
        self.shown.append(self.train_progress_bar.postfix)

    def on_train_epoch_end(self, *args):
        super().on_train_epoch_end(*args)
        self.ends.append((self.train_progress_bar.n, self.train_progress_bar.total))


class WatchedRich(RichProgressBar):
    """The same for rich."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, float]] = []
        self.ends: list[tuple[float, float]] = []
        self.shown: list[str] = []

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        task = self.train_progress_bar
        self.drawn.append((task.completed, task.total))
        column = self._metric_component
        self.shown.append(", ".join(f"{name}={value}" for name, value in column._metrics.items()))

    def on_train_epoch_end(self, *args):
        super().on_train_epoch_end(*args)
        self.ends.append((self.train_progress_bar.completed, self.train_progress_bar.total))


@pytest.mark.parametrize("kind", [WatchedTQDM, WatchedRich])
@pytest.mark.parametrize("first", [True, False], ids=["bar first", "callback first"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_total_follows(kind, first, script, tmp_path):
    """At each epoch's end n == total == batches trained, and n is never above the total."""
    initial, sizes = SCRIPTS[script]
    module, bar, ours = Recorder(), kind(), adapt(*sizes)
    callbacks = [bar, ours] if first else [ours, bar]
    fit(module, loader(64, initial), loader(8, 8), callbacks=callbacks, enable_progress_bar=True, root=tmp_path)
    trained = [len(module.sizes_in(epoch)) for epoch in range(2)]
    assert bar.ends == [(count, count) for count in trained]
    assert all(n <= total for n, total in bar.drawn)
    # A bar that is drawn before our batch end shows the size of the update before.
    late = 1 if first else 0
    sizes = [f"batch_size={size}" for size in module.sizes]
    assert all(size in text for size, text in zip(sizes, bar.shown[late:], strict=False))


@pytest.mark.parametrize("kind", [WatchedTQDM, WatchedRich])
def test_count_that_is_known_before_the_bar(kind, tmp_path):
    """tail="keep" adds a batch to a loader with drop_last before there is a bar, and the bar asks for the total."""
    module, bar = Recorder(), kind()
    fit(
        module,
        loader(22, 4, drop_last=True),
        callbacks=[bar, adapt(4, tail="keep")],
        enable_progress_bar=True,
        root=tmp_path,
    )
    assert module.sizes_in(0) == [4, 4, 4, 4, 4, 2]
    assert bar.ends == [(6, 6), (6, 6)]


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_bar_that_is_switched_off(kind, tmp_path):
    """A bar with refresh_rate=0 draws nothing and does not disturb the run."""
    module = Recorder()
    callbacks = [kind(refresh_rate=0), adapt(4, 8)]
    fit(module, loader(20, 4), callbacks=callbacks, enable_progress_bar=True, epochs=1, root=tmp_path)
    assert module.sizes == [4, 8, 8]
