# SPDX-License-Identifier: Apache-2.0
"""The training data of a run: elastic loaders made for the user's, in agreement with all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_adabatch import guards
from lightning_adabatch.bridge import Bridge, in_epoch
from lightning_adabatch.checkpoint import Snapshot
from lightning_adabatch.controller import Controller
from lightning_adabatch.loader import ElasticLoader, for_ranks, lost
from lightning_adabatch.ranks import Ranks
from lightning_adabatch.settings import Settings


class TrainData:
    """Makes elastic loaders, and knows how many samples there are over all ranks.

    Args:
        settings: The callback's arguments.
        bridge: Of the Trainer.
        ranks: That train together.
        accumulate: The user's batches in one update at the start.

    Attributes:
        controller: From the start of training on; loaders of a reload go on with its size.
        restored: The state of a checkpoint from which the run goes on, until training starts, or None.
        lowered: The most samples of one part, since more did not fit into memory; None if all did.
    """

    def __init__(self, settings: Settings, bridge: Bridge, ranks: Ranks, accumulate: int) -> None:
        self.controller: Controller | None = None
        self.restored: Snapshot | None = None
        self.lowered: int | None = None
        self._settings = settings
        self._slot = bridge.slot
        self._counts = bridge.counts
        self._ranks = ranks
        self._accumulate = accumulate
        self._shuffle_seed: int | None = None  # of the run that was cut
        self._placed: ElasticLoader | None = None  # which loader was told where to go on
        if settings.adapt == "batch_size":
            self._slot.install(self._make_elastic, made=self._counts.loaders_made)

    def resize(self, batch_size: int) -> None:
        """Set the samples of the batches to come, over all ranks."""
        if self._slot.loader is not None:
            self._slot.loader.resize(batch_size // self._ranks.count)

    def look(self) -> tuple[int, int, int]:
        """Return B0, the number of training samples, and the samples of one epoch, over all ranks.

        Raises:
            MisconfigurationException: For a loader that is not supported.
        """
        ranks = self._ranks.count
        loaders = self._slot.train_loaders()
        if len(loaders) != 1:
            raise guards.refuse(f"{len(loaders)} train loaders yet", "train on one DataLoader")
        if self._slot.uses_dataloader_iter:
            raise guards.refuse("training_step(dataloader_iter)", "take batch and batch_idx in training_step instead")
        loader = loaders[0]
        if isinstance(loader, ElasticLoader):
            return loader.initial_batch_size * ranks, loader.available() * ranks, loader.epoch_samples * ranks
        if self._settings.adapt == "batch_size":
            raise guards.refuse(
                "a callback that replaces the train loader", "remove the callback that sets strategy.process_dataloader"
            )
        guards.check_fixed_loader(loader)
        sampler = loader.batch_sampler.sampler
        return loader.batch_sampler.batch_size * ranks, len(sampler) * ranks, len(sampler) * ranks

    def follow(self, controller: Controller) -> None:
        """Take over what changed since the last epoch: a reload, or a sampler whose length moves."""
        if self._slot.loader is not None:
            self._agree(self._slot.loader)
        _, training_samples, epoch_samples = self.look()
        if self._slot.loader is None:
            controller.training_samples = training_samples
        elif controller.limits.epoch_samples != epoch_samples:
            limits = dataclasses.replace(controller.limits, epoch_samples=epoch_samples)
            controller.move_to(limits, training_samples=training_samples)

    def trained(self, batch: Any, batch_idx: int) -> int:
        """Return the samples of the batch in hand, over all ranks."""
        return self._trained_here(batch, batch_idx) * self._ranks.count

    def find_place(self, restored: Snapshot) -> Callable[[], None]:
        """See that the pass over the data stands where a checkpoint says, on every rank alike.

        Returns:
            What is still to be done once the generators have the checkpoint's state.
        """
        loader = self._slot.loader
        if loader is None:
            if in_epoch(restored.place) and not (restored.place["last"] or self._slot.stateful):
                rank_zero_warn(
                    "AdaptiveBatchSize(adapt='lr') leaves the DataLoader to you, and it cannot go on in the middle of "
                    "an epoch: the epoch ends after as many batches as it had left, of an order that begins anew. "
                    "Resume from a checkpoint that was written at the end of an epoch, or use a loader that has a "
                    "state, such as torchdata's StatefulDataLoader."
                )
            return _nothing
        if self._placed is not loader:  # it was made before the checkpoint was read
            self._place(loader, restored)
            self._slot.begin_pass_again()
        if self._ranks.smallest(int(not loader.lost_place)) == 0:
            if not loader.lost_place:
                loader.place_at(lost(restored.of_rank(self._ranks.rank)["pass"]))
                self._slot.begin_pass_again()
            rank_zero_warn(
                f"AdaptiveBatchSize: the order of the epoch in which the checkpoint was written cannot be made again "
                f"with {type(loader.sampler).__name__} on {self._ranks.count} rank(s), where there were "
                f"{restored.ranks}: the epoch begins again, with all of its samples. For an exact resume keep data, "
                "sampler, limit_train_batches and number of ranks, or use a checkpoint that was written at the end of "
                "an epoch."
            )
        elif loader.num_workers and in_epoch(restored.place):
            rank_zero_info(
                "AdaptiveBatchSize: the epoch goes on exactly where it stood; only what worker processes draw at "
                "random is drawn anew."
            )
        own = restored.of_rank(self._ranks.rank)
        place = own.get("pass")
        draws_now = place is not None and place["started"] is None and loader.num_workers > 0

        def end() -> None:
            if draws_now:  # workers have the sampler begin with the pass, and it draws from the generators
                self._slot.begin_pass_again()
            loader.place_at(None)
            loader.carried = restored.carried(self._ranks.rank, self._ranks.count)
            loader.own_generators = own.get("own_generators", [])

        return end

    def _make_elastic(self, loader: Any) -> ElasticLoader:
        """Make the elastic loader for one of the user's; on a reload it goes on with the size in force."""
        guards.check_loader(loader)
        max_batches, max_samples = self._counts.limits_of(loader, self._initial_size(loader))
        elastic = ElasticLoader(
            loader,
            tail=self._settings.tail,
            max_batches=max_batches,
            max_samples=max_samples,
            accumulate=self._accumulate,
            device_limit=self._device_limit(loader),
        )
        self._agree(elastic)
        elastic.shuffle_seed = self._shuffle_seed
        ranks = self._ranks.count
        if self.controller is not None:
            limits = dataclasses.replace(self.controller.limits, epoch_samples=elastic.epoch_samples * ranks)
            self.controller.move_to(limits, training_samples=elastic.available() * ranks)
            elastic.resize(self.controller.decision.batch_size // ranks)
            before = self._slot.loader
            if before is not None and len(before.sampler) == len(elastic.sampler):
                elastic.carried = before.carried  # of the same data: a reload loses none of it
        elif self.restored is not None:
            self._place(elastic, self.restored)
        return elastic

    def _device_limit(self, loader: Any) -> int | None:
        given = self._settings.max_device_batch_size or (loader.batch_size if self._accumulate > 1 else None)
        return given if self.lowered is None else min(self.lowered, given or self.lowered)

    def _initial_size(self, loader: Any) -> int:
        """Return the samples of one of the first batches on one rank: the run's, not this loader's."""
        if self.controller is not None:
            initial = self.controller.limits.initial_batch_size
        elif self.restored is not None:
            initial = self.restored.rule["initial_batch_size"]
        else:
            return int(loader.batch_sampler.batch_size)
        return max(1, initial // self._ranks.count // self._accumulate)

    def _agree(self, elastic: ElasticLoader) -> None:
        """Have all ranks take the number of samples that the one with the fewest has: a collective."""
        if self._ranks.count > 1:
            elastic.agree(self._ranks.smallest(len(elastic.sampler)))

    def _place(self, loader: ElasticLoader, restored: Snapshot) -> None:
        """Have the next pass begin where a checkpoint says."""
        self._placed = loader
        rank, ranks = self._ranks.rank, self._ranks.count
        loader.resize(max(1, restored.rule["batch_size"] // ranks))
        if self.lowered is not None:
            loader.lower(self._device_limit(loader.loader) or self.lowered)
        own = restored.of_rank(rank)
        # Lightning takes it from the global seed of this process, now and when loaders are reloaded.
        loader.shuffle_seed = self._shuffle_seed = own.get("shuffle_seed")
        place = own.get("pass")
        if place is not None:
            if not restored.whole and rank > 0:  # it is the first rank's
                place = lost(place) if place["carried"] or place["order"] is None else {**place, "witnesses": None}
            total = loader.epoch_samples + len(place["carried"])
            loader.place_at(for_ranks(place, restored.ranks, ranks, loader.sampler, total))
        elif in_epoch(restored.place) and "pass" not in own:
            raise guards.refuse(
                "this checkpoint, written in the middle of an epoch with adapt='lr'",
                "resume with adapt='lr', or from a checkpoint that was written at the end of an epoch",
            )
        else:
            loader.carried = restored.carried(rank, ranks)

    def _trained_here(self, batch: Any, batch_idx: int) -> int:
        if self._slot.loader is not None:
            return self._slot.live.plan.last_size  # all parts together
        loader = self._slot.train_loaders()[0]
        if guards.own_iteration(loader):
            return int(extract_batch_size(batch))
        batch_sampler = loader.batch_sampler
        size: int = batch_sampler.batch_size
        return min(size, len(batch_sampler.sampler) - batch_idx * size)


def _nothing() -> None:
    pass
