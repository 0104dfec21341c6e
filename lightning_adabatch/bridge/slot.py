# SPDX-License-Identifier: Apache-2.0
"""The train loaders' place in a Trainer: elastic loaders are put there, and the user's are given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_adabatch.bridge.patches import Patches
from lightning_adabatch.loader import ElasticLoader, Pass


class Slot:
    """Where a Trainer keeps its train loaders.

    Args:
        trainer: The Trainer.
        patches: Takes note of what is replaced.

    Attributes:
        loaders: The elastic loaders in use; none before Lightning made them, and where none were installed.
    """

    def __init__(self, trainer: pl.Trainer, patches: Patches) -> None:
        self.loaders: list[ElasticLoader] = []
        self._trainer = trainer
        self._patches = patches
        self._making_train_loaders = False
        self._made: list[ElasticLoader] = []  # while Lightning sets up
        self._originals: list[tuple[ElasticLoader, Any]] = []
        self._last_combined: Any = None

    @property
    def loader(self) -> ElasticLoader | None:
        """The first of the elastic loaders, whose size is the batch size; None if there is none."""
        return self.loaders[0] if self.loaders else None

    def install(self, replace: Callable[[Any, int], ElasticLoader], made: Callable[[], None]) -> None:
        """Have every train loader replaced, from now on until the patches are undone.

        Args:
            replace: Makes an elastic loader of a train loader that Lightning is about to use, or refuses it; the
                number says which of them it is.
            made: Called when Lightning has set up new train loaders.
        """
        self._wrap_process_dataloader(replace)
        self._wrap_setup_data(made)
        self._forget_early_loaders()

    def _wrap_process_dataloader(self, replace: Callable[[Any, int], ElasticLoader]) -> None:
        """Every train loader passes here, after the distributed sampler is in and before the first ``iter``."""
        strategy = self._trainer.strategy
        original = strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            processed = original(dataloader)
            if not self._making_train_loaders:
                return processed
            if isinstance(processed, ElasticLoader):  # a CombinedLoader of the user's that is used again
                elastic = processed
            else:
                elastic = replace(processed, len(self._made))
                self._originals.append((elastic, processed))
            elastic.nominal = True
            self._made.append(elastic)
            return elastic

        self._patches.put(strategy, "process_dataloader", process_dataloader)

    def _wrap_setup_data(self, made: Callable[[], None]) -> None:
        """Only this tells train loaders from others: ``trainer.training`` does not.

        While Lightning sets up, the loader reports the length at the initial size: an int
        ``val_check_interval`` or a float ``limit_train_batches`` is checked against it, and a grown size
        would raise late in the run. The true counts are set right after.
        """
        fit_loop = self._trainer.fit_loop
        original = fit_loop.setup_data

        def setup_data() -> None:
            self._making_train_loaders = bool(self._patches)  # not if somebody still calls this after the fit
            self._made = []
            for loader in self.loaders:  # one that is made anew from the same objects must find them as they were
                loader.kind.give_back()
            try:
                original()
            finally:
                self._making_train_loaders = False
            self._drop_replaced_loaders()
            if self._made:
                self.loaders = self._made
                self._last_combined = fit_loop._combined_loader
                self._begin()
                made()

        self._patches.put(fit_loop, "setup_data", setup_data)

    def _begin(self) -> None:
        """Have new loaders say their true length from now on.

        Of one without a length Lightning fetches a batch ahead, to know the last one. It would be of the size
        before, so this is switched off: the loader itself knows its last batch.
        """
        sized = all(loader.sized for loader in self.loaders)
        for loader in self.loaders:
            loader.nominal = False
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is not None and not sized:
            fetcher.prefetch_batches = 0  # type: ignore[attr-defined]
            iter(fetcher)

    def _drop_replaced_loaders(self) -> None:
        """End the workers of loaders that a reload replaced."""
        current = {id(loader) for loader in self.train_loaders()}
        for elastic, _ in self._originals:
            if id(elastic) not in current:
                elastic.close()
        self._originals = [pair for pair in self._originals if id(pair[0]) in current]

    def _forget_early_loaders(self) -> None:
        """Have loaders made again that somebody asked for before we were there, in another ``setup`` hook."""
        fit_loop = self._trainer.fit_loop
        if fit_loop._combined_loader is not None:
            if fit_loop._data_fetcher is not None:
                fit_loop._data_fetcher.teardown()
            fit_loop._combined_loader = None

    def train_loaders(self) -> list[Any]:
        """Return the loaders that the epoch runs over."""
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    @property
    def uses_dataloader_iter(self) -> bool:
        """Whether ``training_step`` takes the iterator and fetches by itself."""
        return isinstance(self._trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)

    @property
    def stateful(self) -> bool:
        """Whether all train loaders can be asked for their state."""
        return all(isinstance(loader, _Stateful) for loader in self.train_loaders())

    @property
    def mode(self) -> str:
        """How several loaders are joined."""
        mode: str = self._combined._mode
        return mode

    @property
    def _iterator(self) -> Any:
        return self._combined._iterator

    @property
    def _combined(self) -> Any:
        # Users set it to None at an epoch's end, to have the loaders made anew for the next one.
        combined = self._trainer.fit_loop._combined_loader
        return self._last_combined if combined is None else combined

    @property
    def live(self) -> Pass:
        """The pass over the first loader: users' code may have begun others, to look at a batch."""
        begun = self._iterator.iterators[0]
        if not isinstance(begun, Pass):
            raise MisconfigurationException(
                f"AdaptiveBatchSize does not support a {type(begun).__name__} over the train loader: somebody put "
                "another loader into the place of what the fit began with. What to do: return the new loader from "
                "train_dataloader(), and have it asked for by Trainer(reload_dataloaders_every_n_epochs=1)."
            )
        return begun

    @property
    def passes(self) -> list[Pass]:
        """The passes that the Trainer runs over, one for each loader."""
        return list(self._iterator.iterators)

    def runs_over(self, begun: Pass) -> bool:
        """Whether a pass is one of those."""
        combined = self._trainer.fit_loop._combined_loader
        iterator = None if combined is None else combined._iterator
        return iterator is not None and any(begun is live for live in iterator.iterators)

    @property
    def fetched(self) -> int:
        """Batches that were fetched in this epoch."""
        fetched: int = self._iterator._idx
        return fetched

    @property
    def wrapped(self) -> list[bool]:
        """Which loaders came to their end and were begun again, in this epoch."""
        return list(getattr(self._iterator, "_consumed", ())) or [False] * len(self.loaders)

    @wrapped.setter
    def wrapped(self, wrapped: list[bool]) -> None:
        if hasattr(self._iterator, "_consumed"):
            self._iterator._consumed = list(wrapped)

    def begin_pass_again(self) -> None:
        """Have the pass that Lightning holds made again."""
        fetcher = self._trainer.fit_loop._data_fetcher
        assert fetcher is not None  # for the type checker: setup_data made it
        iter(fetcher)

    def give_back(self) -> None:
        """Put the user's loaders back; safe to call twice."""
        originals = {id(elastic): original for elastic, original in self._originals}
        combined = self._combined
        if combined is not None:
            combined.flattened = [originals.get(id(loader), loader) for loader in combined.flattened]
        self.loaders = []
        self._last_combined = None
        # Last, for ending a worker that died raises.
        while self._originals:
            self._originals.pop()[0].give_back()
