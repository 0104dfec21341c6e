# SPDX-License-Identifier: Apache-2.0
"""Where in the data a run goes on that another process began."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_adabatch import guards
from lightning_adabatch.bridge import Epoch, Slot, in_epoch
from lightning_adabatch.checkpoint import Snapshot
from lightning_adabatch.loader import ElasticLoader, for_ranks, known_length, lost
from lightning_adabatch.ranks import Ranks


class Places:
    """Has the passes over the data begin where a checkpoint says, on every rank alike.

    Args:
        slot: Where the loaders are.
        epoch: Where the epoch stands.
        ranks: That train together.

    Attributes:
        restored: The state of a checkpoint from which the run goes on, until training starts, or None.
        shuffle_seed: Of the run that was cut, or None.
        divided_anew: Whether the epoch that goes on is another one than that of the checkpoint: begun again, or divided
            over another number of ranks.
        fixed_start: Which batch of the epoch is the first one of the order, where a loader that is left alone began it
            anew in the middle of one.
    """

    def __init__(self, slot: Slot, epoch: Epoch, ranks: Ranks) -> None:
        self.restored: Snapshot | None = None
        self.shuffle_seed: int | None = None
        self.divided_anew = False
        self.fixed_start = 0
        self._slot = slot
        self._epoch = epoch
        self._ranks = ranks
        self._placed: ElasticLoader | None = None  # which first loader was told where to go on

    def find(self, restored: Snapshot) -> Callable[[], None]:
        """See that the passes stand where a checkpoint says.

        Returns:
            What is still to be done once the generators have the checkpoint's state.
        """
        if not self._slot.loaders:
            self._say_lost_place_of_a_fixed_loader(restored)
            return _nothing
        for one in self._slot.loaders:
            one.waits = False
        self._go_there(restored)
        loaders, own = self._slot.loaders, restored.of_rank(self._ranks.rank)
        places = [_of_loader(own, number).get("pass") for number in range(len(loaders))]
        # Workers have the sampler begin with the pass, and it draws from the generators.
        draws_now = any(
            place is not None and place["started"] is None and one.num_workers > 0
            for place, one in zip(places, loaders, strict=True)
        )

        def end() -> None:
            if draws_now:
                self._slot.begin_pass_again()
                if "joined" in own and in_epoch(restored.place):
                    self._epoch.go_on(own["joined"])
            for number, one in enumerate(loaders):
                one.place_at(None)
                one.carried = self._carried(one, restored, number)
                one.own_generators = _of_loader(own, number).get("own_generators", {})

        return end

    def _go_there(self, restored: Snapshot) -> None:
        """Begin every pass at its place, or all of them at their beginning if one rank cannot."""
        loaders, own = self._slot.loaders, restored.of_rank(self._ranks.rank)
        if self._placed is not loaders[0]:  # they were made before the checkpoint was read
            for number, one in enumerate(loaders):
                self.place(one, restored, number)
            self._slot.begin_pass_again()
        found = not any(one.lost_place for one in loaders) and len(loaders) == 1 + len(own.get("others", []))
        lost_order = self._ranks.smallest(int(found)) == 0
        self.divided_anew = lost_order or restored.ranks != self._ranks.count
        if lost_order:
            for number, one in enumerate(loaders):
                place = _of_loader(own, number).get("pass")
                data = _of_loader(own, number).get("data")
                one.place_at(None if place is None else lost(_without_missing(place, one, data)))
            self._slot.begin_pass_again()
            self._say_lost_place(restored)
        elif any(one.num_workers for one in loaders) and in_epoch(restored.place):
            rank_zero_info(
                "AdaptiveBatchSize: the epoch goes on exactly where it stood; only what worker processes draw at "
                "random is drawn anew."
            )

    def _say_lost_place(self, restored: Snapshot) -> None:
        first, ranks = self._slot.loaders[0], self._ranks.count
        on_ranks = "" if ranks == restored.ranks else f" on {ranks} rank(s), where there were {restored.ranks}"
        lacking = "" if restored.whole or first.tail != "carry" else ", but for those that other ranks carried"
        if first.max_batches is None:
            follows = f"the epoch begins again, with all of its samples{lacking}"
        else:  # so many batches are an epoch
            follows = "the epoch ends after as many batches as it had left, of an order that begins anew"
        rank_zero_warn(
            f"AdaptiveBatchSize: the order of the epoch in which the checkpoint was written cannot be made again with "
            f"{first.order_giver}{on_ranks}: {follows}. For an exact resume keep data, sampler, limit_train_batches, "
            "number of ranks and, for an iterable data set, num_workers, or use a checkpoint that was written at the "
            "end of an epoch."
        )

    def _say_lost_place_of_a_fixed_loader(self, restored: Snapshot) -> None:
        if in_epoch(restored.place) and not (restored.place["last"] or self._slot.stateful):
            self.fixed_start = restored.place["batches"]
            rank_zero_warn(
                "AdaptiveBatchSize(adapt='lr') leaves the DataLoader to you, and it cannot go on in the middle of "
                "an epoch: the epoch ends after as many batches as it had left, of an order that begins anew. "
                "Resume from a checkpoint that was written at the end of an epoch, or use a loader that has a "
                "state, such as torchdata's StatefulDataLoader."
            )

    def agree(self, loader: ElasticLoader) -> None:
        """Have all ranks take the number of samples that the one with the fewest has: a collective."""
        stated = loader.kind.hint()  # Lightning itself does not go on where only some ranks have one
        if self._ranks.count > 1 and stated is not None:
            loader.agree(self._ranks.smallest(stated))

    def place(self, loader: ElasticLoader, restored: Snapshot, number: int) -> None:
        """Have the next pass begin where a checkpoint says."""
        if number == 0:
            self._placed = loader
        rank, ranks = self._ranks.rank, self._ranks.count
        size, initial = restored.rule["batch_size"], restored.rule["initial_batch_size"]
        if number == 0:
            loader.resize(max(1, size // ranks))
        else:
            loader.resize_with(size, initial)
        if restored.device_limit is not None:
            loader.lower(restored.device_limit)
        own = _of_loader(restored.of_rank(rank), number)
        # Lightning takes it from the global seed of this process, now and when loaders are reloaded.
        loader.shuffle_seed = self.shuffle_seed = own.get("shuffle_seed")
        place = own.get("pass")
        loader.kind.tell_epoch(restored.place["epoch"], place)
        self.agree(loader)  # the length of a sampler may depend on its epoch
        if place is not None:
            place = _without_missing(place, loader, own.get("data"))
            if restored.place["last"] and "others" not in restored.of_rank(rank):
                place = {**place, "ended": True}
            if not restored.whole and rank > 0:  # it is the first rank's
                place = lost(place) if place["carried"] or place["order"] is None else {**place, "witnesses": None}
            samples = loader.epoch_samples
            total = 0 if samples == math.inf else int(samples) + len(place["carried"])
            loader.place_at(for_ranks(place, restored.ranks, ranks, loader.sampler, total))
        elif number > 0 and own.get("pass") is None and in_epoch(restored.place):
            return  # there was no such loader: the epoch begins again
        elif in_epoch(restored.place) and "pass" not in own:
            raise guards.refuse(
                "this checkpoint, written in the middle of an epoch with adapt='lr'",
                "resume with adapt='lr', or from a checkpoint that was written at the end of an epoch",
            )
        else:
            loader.carried = carried = self._carried(loader, restored, number)
            missing = len(self._all_carried(restored, number)) - len(carried)
            if missing:
                rank_zero_warn(
                    f"AdaptiveBatchSize: {missing} of the samples that the checkpoint had left for the next epoch "
                    f"(tail='carry') are not in the data any more, which has {known_length(loader.dataset)} samples "
                    "now: they are not trained. For an exact resume keep the data as it was."
                )

    def _carried(self, loader: ElasticLoader, restored: Snapshot, number: int) -> list[Any]:
        data = _of_loader(restored.of_rank(self._ranks.rank), number).get("data")
        return _still_there(self._all_carried(restored, number), loader, data)

    def _all_carried(self, restored: Snapshot, number: int) -> list[Any]:
        rank, ranks = self._ranks.rank, self._ranks.count
        if number == 0:
            return restored.carried(rank, ranks)
        return list(_of_loader(restored.of_rank(rank), number).get("carried", []))


def _of_loader(own: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return what a checkpoint has for one of the loaders."""
    others = own.get("others", [])
    if number == 0:
        return own
    return others[number - 1] if number <= len(others) else {}


def _still_there(carried: list[Any], loader: ElasticLoader, before: int | None) -> list[Any]:
    """Return the indices that the data has still, where it had ``before`` samples: a run may go on with fewer."""
    now = known_length(loader.dataset)
    if now is None or before is None or now >= before:
        return carried
    return [index for index in carried if not isinstance(index, int) or not now <= index < before]


def _without_missing(place: Mapping[str, Any], loader: ElasticLoader, before: int | None) -> dict[str, Any]:
    return {**place, "carried": _still_there(list(place["carried"]), loader, before)}


def _nothing() -> None:
    pass
