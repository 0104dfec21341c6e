# SPDX-License-Identifier: Apache-2.0
"""What a policy has measured on the training set right before a decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_adabatch.bridge import TrainingLoss, aside, indices_of, to_device
from lightning_adabatch.diversity import SampleGradients
from lightning_adabatch.ranks import Ranks
from lightning_adabatch.subset import chunks, subset

_HALVES = (torch.float16, torch.bfloat16)

#: Times what is trained at once: without gradients, and activations to compute them from, this takes less memory.
_MORE = 4


class Evaluation:
    """Measures the training set as it is now, and leaves everything as it was.

    Samples are fetched in this process, without workers, in an order of their own.

    Args:
        trainer: The Trainer.
        ranks: That train together; each evaluates its share.
        fraction: Of the training set that is measured, in (0, 1].
        data: Returns the user's train loader, the samples that are trained at once, and the most samples that there
            are (over all ranks) if the Trainer overfits some.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ranks: Ranks,
        fraction: float,
        data: Callable[[], tuple[DataLoader[Any], int, int | None]],
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._fraction = fraction
        self._data = data
        self._known: dict[frozenset[str], Mapping[str, float]] = {}
        self._said = False

    def measure(self, names: frozenset[str]) -> Mapping[str, float]:
        """Return what is asked for by name, and as ``"evaluated"`` the samples that it took: collectives.

        What was measured is known until :meth:`forget`: a checkpoint may have asked before.
        """
        if names not in self._known:
            try:
                with aside(self._trainer) as renew:
                    self._known[names] = self._measure(names, renew)
            except Exception as error:
                _explain(error)
                raise
        return self._known[names]

    def recall(self, names: frozenset[str]) -> Mapping[str, float]:
        """Return what is known of it already, and what is not a number for the rest: asks nobody."""
        return self._known.get(names, dict.fromkeys(names, math.nan))

    def forget(self) -> None:
        """Measure anew when asked again."""
        self._known = {}

    def _measure(self, names: frozenset[str], renew: Callable[[], None]) -> Mapping[str, float]:
        found: dict[str, float] = {"evaluated": 0}
        if "full_loss" in names:
            found["full_loss"], samples = self._loss()
            found["evaluated"] += samples
        if "gradient_diversity" in names:
            found["gradient_diversity"], samples = self._diversity(renew)
            found["evaluated"] += samples
        return found

    def _loss(self) -> tuple[float, int]:
        """Return the mean loss, and the samples that it was measured on."""
        loader, trained, most = self._data()
        size = _MORE * trained
        own, spare = self._share(loader, most)
        # As many batches on every rank, for steps in which ranks speak to each other.
        number = -self._ranks.smallest(-math.ceil(len(own) / size))
        loss = TrainingLoss(self._trainer)
        weights: list[int] = []
        losses: list[Tensor] = []
        parts = list(chunks(own, size, number, spare))
        batches = self._batches(loader, [part.indices for part in parts])
        with torch.no_grad():
            for batch_idx, (part, batch) in enumerate(zip(parts, batches, strict=True)):
                value = loss(batch, batch_idx)
                if value is not None and part.counts:
                    losses.append(value.float() if value.dtype in _HALVES else value.clone())
                    weights.append(len(part.indices))
        values = torch.stack(losses).tolist() if losses else []
        total = math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
        own_sums = torch.tensor([total, sum(weights), len(own)], dtype=torch.float64)
        total, counted, evaluated = self._over_ranks(own_sums).tolist()
        return total / counted if counted else math.nan, round(evaluated)

    def _diversity(self, renew: Callable[[], None]) -> tuple[float, int]:
        """Return the gradient diversity, and the samples that it was measured on."""
        loader, trained, most = self._data()
        own, spare = self._share(loader, most)
        padded = own + [spare] * (-self._ranks.smallest(-len(own)) - len(own))  # as many on every rank here too
        gradients = SampleGradients(TrainingLoss(self._trainer), self._say, renew)
        batches = self._batches(loader, [[index] for index in padded])
        start = 0
        while together := list(islice(batches, min(trained, gradients.most))):
            gradients.add(together, counted=max(0, len(own) - start))
            start += len(together)
        sums = self._over_ranks(gradients.sums())
        evaluated = round(self._over_ranks(torch.tensor([len(own)])).item())
        number, squares = sums[:2].tolist()
        if not number:
            return math.nan, evaluated
        mean_sq = float((sums[2:] / number).square().sum())
        return (squares / number / mean_sq if mean_sq else math.inf), evaluated

    def _share(self, loader: DataLoader[Any], most: int | None) -> tuple[list[int], int]:
        """Return the indices that this rank evaluates, and any one."""
        indices, shared = indices_of(loader)
        indices = subset(indices if most is None else indices[:most], self._fraction)
        return indices[self._ranks.rank :: self._ranks.count] if shared else indices, indices[0]

    def _batches(self, loader: DataLoader[Any], indices: list[list[int]]) -> Iterator[Any]:
        fresh: Any = DataLoader(loader.dataset, batch_sampler=indices, collate_fn=loader.collate_fn)
        return (to_device(self._trainer, batch) for batch in fresh)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """Return the sums over all ranks."""
        return self._ranks.mean(sums) * self._ranks.count if self._ranks.several else sums

    def _say(self, message: str) -> None:
        if not self._said:
            self._said = True
            rank_zero_warn(message)


def _explain(error: Exception) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(
            "AdaptiveBatchSize evaluated training_step for the policy when this was raised: with the module in "
            "evaluation mode, and for the first decision before the module's own on_train_start and "
            "on_train_epoch_start. What to do: let training_step return its loss in evaluation mode too, set what it "
            "needs in setup() or on_fit_start(), or use a policy that evaluates nothing, such as RadaDamp()."
        )
