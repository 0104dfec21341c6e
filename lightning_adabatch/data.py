# SPDX-License-Identifier: Apache-2.0
"""The training data of a run: elastic loaders made for the user's, in agreement with all ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_adabatch import guards, loader_guards
from lightning_adabatch.bridge import Bridge
from lightning_adabatch.controller import Controller
from lightning_adabatch.fixed import FixedData
from lightning_adabatch.loader import ElasticLoader, kind_of
from lightning_adabatch.places import Places
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
        places: Where a checkpoint says that the run goes on.
        lowered: The most samples of one part, since more did not fit into memory; None if all did.
    """

    def __init__(self, settings: Settings, bridge: Bridge, ranks: Ranks, accumulate: int) -> None:
        self.controller: Controller | None = None
        self.lowered: int | None = None
        self._settings = settings
        self._slot = bridge.slot
        self._epoch = bridge.epoch
        self._counts = bridge.counts
        self._ranks = ranks
        self._accumulate = accumulate
        self._said_size_stays = False
        self._fixed = FixedData(self._slot.train_loaders, ranks)  # for adapt="lr"
        self.places = Places(self._slot, self._epoch, ranks)
        if settings.adapt == "batch_size":
            self._slot.install(self._make_elastic, made=self._counts.loaders_made)

    def resize(self, batch_size: int) -> None:
        """Set the samples of the batches to come, over all ranks."""
        loaders = self._slot.loaders
        for number, loader in enumerate(loaders):
            if number == 0:
                loader.resize(batch_size // self._ranks.count)
            else:  # in proportion to the first one
                initial = loaders[0].initial_batch_size * self._ranks.count
                loader.resize_with(batch_size, initial)

    def look(self) -> tuple[int | None, int | None, int | float]:
        """Return B0, the number of training samples, and the samples of one epoch, over all ranks.

        The first two are None where nobody knows them, the last one is ``math.inf``.

        Raises:
            MisconfigurationException: For a loader that is not supported.
        """
        ranks = self._ranks.count
        if self._slot.uses_dataloader_iter:
            raise guards.refuse("training_step(dataloader_iter)", "take batch and batch_idx in training_step instead")
        found = self._slot.train_loaders()
        if self._settings.adapt == "lr":
            initial = self._fixed.look()
            loader_guards.check_length(self._settings, self._fixed.training_samples)
            return initial and initial * self._accumulate, self._fixed.training_samples, math.inf
        loader_guards.check_ranks(self._ranks.gather(self._facts()))
        if not all(isinstance(loader, ElasticLoader) for loader in found):
            raise guards.refuse(
                "a callback that replaces the train loader", "remove the callback that sets strategy.process_dataloader"
            )
        loader = self._slot.loaders[0]
        share = self._counts.limits_share
        loader_guards.check_together(
            self._slot.loaders, self._slot.mode, self._settings, accumulate=self._accumulate, share=share
        )
        hint, epoch_samples = self._samples(loader)
        loader_guards.check_length(self._settings, hint)
        return loader.initial_batch_size * ranks, hint, epoch_samples

    def _samples(self, loader: ElasticLoader) -> tuple[int | None, int | float]:
        """Return the training samples, None where nobody knows, and those of one epoch, over all ranks."""
        hint = loader.hint
        return None if hint is None else hint * self._ranks.count, loader.largest * self._ranks.count

    def _facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, for else their batches and decisions would not be."""
        sizes = [one.own_batch_size for one in self._slot.loaders]
        drops = [one.tail == "drop" for one in self._slot.loaders]
        return {"batch size": sizes, "drop_last": drops}

    @property
    def own_loaders(self) -> list[Any]:
        """The user's train loaders, after Lightning put in what the ranks need."""
        found = self._slot.train_loaders()
        return [one.loader if isinstance(one, ElasticLoader) else one for one in found]

    @property
    def keeps_tails(self) -> bool:
        """Whether small last batches are trained, though nobody asked for it and they could be carried."""
        loaders = self._slot.loaders
        return self._settings.tail is None and [(one.tail, one.kind.can_carry) for one in loaders] == [("keep", True)]

    def to_evaluate(self) -> tuple[Any, int, int | None]:
        """Return the user's loader, the samples trained at once, and, over all ranks, those that are overfitted.

        The last one is None where all are trained on.
        """
        loader = self.own_loaders[0]
        kind = kind_of(loader)
        overfitted = self._counts.overfitted(kind, kind.own_batch_size)
        trained = self._slot.loaders[0].device_size if self._slot.loaders else kind.own_batch_size
        return loader, trained, overfitted and self._ranks.smallest(overfitted) * self._ranks.count

    def follow(self, controller: Controller) -> None:
        """Take over what changed since the last epoch: a reload, or a sampler whose length moves."""
        for loader in self._slot.loaders:
            self.places.agree(loader)
        if self._slot.loader is None:
            self.places.fixed_start = 0
            return
        training_samples, epoch_samples = self._samples(self._slot.loader)
        controller.count_by(training_samples)
        if controller.limits.epoch_samples != epoch_samples:
            limits = dataclasses.replace(controller.limits, epoch_samples=epoch_samples)
            controller.move_to(limits, training_samples)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Take a batch in hand."""
        if self._slot.loaders:
            return
        place = batch_idx - self.places.fixed_start
        if place == 0 and self.controller is not None:  # hooks that came after ours may have changed the data
            self.look()
            self.controller.count_by(self.training_samples)
        self._fixed.begin_batch(batch, place)

    def trained(self, batch: Any) -> int:
        """Return the samples of the batch in hand, over all ranks."""
        if self._slot.loaders:
            return self._epoch.trained * self._ranks.count
        return 0 if batch is None else self._fixed.samples

    @property
    def training_samples(self) -> int | None:
        """Of loaders that are left alone, over all ranks; None where nobody knows."""
        return self._fixed.training_samples

    @property
    def effective(self) -> float:
        """The samples whose plain mean has as much noise as the batch in hand, of loaders that are left alone."""
        return self._fixed.effective

    @property
    def balance(self) -> float:
        """What makes the mean over samples of the mean over the ranks' losses: 1 where all have as many."""
        return self._fixed.balance

    def _make_elastic(self, loader: Any, number: int) -> ElasticLoader:
        """Make the elastic loader for one of the user's; on a reload it goes on with the size in force."""
        loader_guards.check_loader(loader, self._settings, self._ranks.count)
        kind = kind_of(loader)
        own = kind.own_batch_size
        size = self._initial_size(own) if number == 0 else own
        max_batches, max_samples = self._counts.limits_of(kind, size)
        if max_samples is not None:  # a share of data that may have another length on each rank: a collective
            max_samples = self._ranks.smallest(max_samples)
        before = self._slot.loaders[number] if number < len(self._slot.loaders) else None
        goes_on = before is not None and before.loader is loader and loader.persistent_workers
        elastic = ElasticLoader(
            loader,
            tail=self._settings.tail,
            max_batches=max_batches,
            max_samples=max_samples,
            accumulate=self._accumulate,
            device_limit=self._settings.max_device_batch_size or (own if self._accumulate > 1 else None),
            least_parts=2 if self._settings.follows_variance else 1,
            before=before if goes_on else None,
        )
        if self.lowered is not None:
            elastic.lower(self.lowered)
        self.places.agree(elastic)
        elastic.shuffle_seed = self.places.shuffle_seed
        ranks = self._ranks.count
        if self.controller is not None:
            if number == 0:
                hint = elastic.hint
                limits = dataclasses.replace(self.controller.limits, epoch_samples=elastic.largest * ranks)
                self.controller.move_to(limits, training_samples=None if hint is None else hint * ranks)
                elastic.resize(self.controller.decision.batch_size // ranks)
            else:
                elastic.resize_with(self.controller.decision.batch_size, self.controller.limits.initial_batch_size)
            if before is not None and before.own_batch_size != own and number == 0:
                of_an_update = self._ranks.count * self._accumulate
                self._say_size_stays(before.own_batch_size * of_an_update, own * of_an_update)
            if before is not None and before.kind.samples() == kind.samples() is not None:
                elastic.carried = before.carried  # of the same data: a reload loses none of it
        elif self.places.restored is not None:
            self.places.place(elastic, self.places.restored, number)
            elastic.waits = True
        return elastic

    def _say_size_stays(self, before: int, now: int) -> None:
        if self._said_size_stays:
            return
        self._said_size_stays = True
        rank_zero_warn(
            f"AdaptiveBatchSize: the reloaded train loader makes for {now} samples in an update, where it was {before} "
            "and the size in force stays: it is for the policy to say. For sizes that you know ahead use a policy such "
            f"as Schedule({{0: {before}, 1: {now}}}, unit='epochs')."
        )

    def _initial_size(self, own: int) -> int:
        """Return the samples of one of the first batches on one rank: the run's, not this loader's."""
        if self.controller is not None:
            initial = self.controller.limits.initial_batch_size
        elif self.places.restored is not None:
            initial = self.places.restored.rule["initial_batch_size"]
        else:
            return own
        return max(1, initial // self._ranks.count // self._accumulate)
