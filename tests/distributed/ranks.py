# SPDX-License-Identifier: Apache-2.0
"""What every process of a distributed test does; ``test_*.py`` start two of them and read what they wrote.

python -m torch.distributed.run --standalone --nproc-per-node 2 ranks.py OUT SCENARIO...
"""

from __future__ import annotations

import atexit
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the helpers of all tests are

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Measuring, Recorder, Watch, adapt, loader, quiet
from settings_of_policies import SETTINGS
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchmetrics import MeanMetric

from lightning_adabatch import AdaptiveBatchSize, ExponentialDamp, GeoDamp, Policy, RadaDamp, Schedule

RANKS = 2


class Memory(Logger):
    """Keeps in memory what the first rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "memory"

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {name: value for name, value in metrics.items() if name.startswith("adabatch/")}))

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        pass


class Dropping(Recorder):
    """Draws at random in every step, on each rank for itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(momentum=0.9, **kwargs)
        self.drop = torch.nn.Dropout(0.4)

    def on_fit_start(self):
        torch.manual_seed(100 + self.trainer.global_rank)

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.net(self.drop(x)), y)


class RankDependent(Recorder):
    """Losses and gradients that would have each rank decide for itself."""

    def loss(self, x, y):
        return (1 + 9 * self.trainer.global_rank / (1 + len(self.batches))) * super().loss(x, y)


class NotANumber(Recorder):
    """The second rank has no loss at its third update."""

    def loss(self, x, y):
        bad = self.trainer.training and len(self.batches) == 3 and self.trainer.global_rank == 1
        return super().loss(x, y) * (torch.nan if bad else 1.0)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for parameter in self.parameters():  # the weights stay finite
            parameter.grad.nan_to_num_(0.0)


class Logs(Recorder):
    """Logs on the first rank alone, and a metric that all ranks compute together."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("alone", loss, rank_zero_only=True, on_step=True, on_epoch=False)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val_loss", self.loss(x, y), sync_dist=True)


class Fails(Recorder):
    """The second rank raises at its third batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise RuntimeError("boom on one rank")
        return super().training_step(batch, batch_idx)


class Full(Recorder):
    """The second rank has room for four samples."""

    def loss(self, x, y):
        if len(x) > 4 and self.trainer.global_rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().loss(x, y)


class Skips(Recorder):
    """The second rank skips its third batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 and self.trainer.global_rank == 1 else loss


class Sharded(Recorder):
    """Its weights are shards, each rank has one."""

    def configure_model(self):
        if not isinstance(self.net.weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class OfRank(IterableDataset):
    """A stream of which each rank has every second sample, and its workers their share of those."""

    def __init__(self, samples: int) -> None:
        self.data = Indexed(samples)

    def __len__(self) -> int:
        return len(self.data) // RANKS

    def __iter__(self):
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(torch.distributed.get_rank() + RANKS * part, len(self.data), RANKS * parts):
            yield self.data[index]


class Pairs(Recorder):
    """Takes the first loader's part of each batch, and notes the sizes of the second one's."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[int] = []

    def training_step(self, batch, batch_idx):
        self.seconds.append(len(batch["b"][0]))
        return super().training_step(batch["a"], batch_idx)


class Budgets:
    """Batches of which each rank has another number of samples, and only they say how many; the data is shared."""

    SIZES = ([3, 5, 2, 4, 6, 4, 3, 5], [7, 1, 4, 2, 5, 3, 6, 4])

    def __init__(self, sizes: Sequence[Sequence[int]] = SIZES) -> None:
        self.sizes = sizes

    def __iter__(self):
        rank = torch.distributed.get_rank()
        first = rank * sum(self.sizes[0])
        for size in self.sizes[rank]:
            yield list(range(first, first + size))
            first += size

    def __len__(self) -> int:
        return len(self.sizes[0])


class WithName(BatchSampler):
    """A batch sampler with an argument of its own."""

    def __init__(self, sampler, batch_size, drop_last, name="none"):
        super().__init__(sampler, batch_size, drop_last)
        self.name = name


def seen(module: Recorder, ours: AdaptiveBatchSize, watch: Watch, trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a fit came to on this rank."""
    first = trainer.train_dataloader
    sampler = getattr((first["a"] if isinstance(first, dict) else first).batch_sampler, "sampler", None)
    weight = module.net.weight.detach()
    return {
        "batches": [asdict(batch) for batch in module.batches],
        "decisions": watch.sizes,
        "updates": watch.updates,
        "observations": [None if row is None else asdict(row) for row in watch.observations],
        "counts": [ours.batch_size, ours.lr_factor, ours.updates, ours.samples, ours.epochs, trainer.global_step],
        "weights": (weight.full_tensor() if isinstance(weight, DTensor) else weight).tolist(),
        "validations": module.validations,
        "sampler": [type(sampler).__name__, getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)],
        "sampler_epoch": getattr(sampler, "epoch", None),
        "rank": trainer.global_rank,
    }


def train(module, train_loader, ours, *, extra=(), strategy="ddp", ckpt=None, validation=None, **kwargs):
    """Fit on all ranks; return what this one saw, with the warnings of ours."""
    watch = Watch(ours)
    settings = {"devices": RANKS, "strategy": strategy, "epochs": 2, **kwargs}
    trainer = quiet([ours, watch, *extra], **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train_loader, validation, ckpt_path=ckpt)
    result = seen(module, ours, watch, trainer)
    result["warnings"] = [str(w.message) for w in caught if "AdaptiveBatchSize" in str(w.message)]
    return result


def rada(**kwargs: Any) -> AdaptiveBatchSize:
    """Return the callback with a rule that moves within a few updates."""
    return AdaptiveBatchSize(RadaDamp(rho=0.5), **{"max_batch_size": 24, **kwargs})


def save_at(out: Path, name: str, step: int) -> ModelCheckpoint:
    """Return what writes one checkpoint in mid-epoch."""
    return ModelCheckpoint(out, name, every_n_train_steps=step, save_top_k=1, enable_version_counter=False)


class SaveOnce(pl.Callback):
    """Writes a checkpoint after so many batches."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.left = path, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)


class SaveLast(pl.Callback):
    """Writes a checkpoint after the last batch of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0 and trainer.is_last_batch:
            trainer.save_checkpoint(self.path)


def learnable(samples: int) -> Indexed:
    """Return data on which the loss falls at once."""
    data = Indexed(samples)
    data.y = (data.x[:, 0] > 0).long()
    return data


def uneven(out: Path, *, drop_last: bool) -> dict[str, Any]:
    ours = adapt(8, 8, 32, 32, 12, 9, 32, max_batch_size=32)
    return train(Recorder(), loader(67, 4, shuffle=True, drop_last=drop_last), ours, root=out)


def same(out: Path, **kwargs: Any) -> dict[str, Any]:
    return train(Recorder(lr=0.5), loader(64, 4), rada(**kwargs), root=out)


def resumed(out: Path, make: Callable[..., dict[str, Any]], batches: int = 5) -> dict[str, Any]:
    """Return an uncut run and one that goes on from its checkpoint, with other seeds and objects."""
    path = out / "mid.ckpt"
    torch.manual_seed(1)
    whole = make(extra=[SaveOnce(path, batches)])
    torch.manual_seed(2)
    return {"whole": whole, "rest": make(ckpt=path)}


def weighted(out: Path, **kwargs: Any) -> dict[str, Any]:
    """Lightning puts the sampler, with a generator of its own, into a distributed one."""
    sampler = WeightedRandomSampler(torch.linspace(1, 2, 53), 53, generator=torch.Generator().manual_seed(1))
    return train(Recorder(), loader(53, 4, sampler=sampler), rada(), root=out, epochs=3, **kwargs)


def sharded(out: Path, **kwargs: Any) -> dict[str, Any]:
    strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    ours = rada(max_batch_size=8)
    train_loader = DataLoader(learnable(64), 4)
    return train(Sharded(lr=0.1, momentum=0.9), train_loader, ours, strategy=strategy, root=out, **kwargs)


def own_data(out: Path) -> dict[str, Any]:
    samples = 50 if torch.distributed.get_rank() == 0 else 46
    ours = adapt(8, 8, 16, 6, 20, max_batch_size=32)
    return train(Recorder(), loader(samples, 4), ours, use_distributed_sampler=False, root=out, validation=loader(6, 3))


def device_sizes(out: Path) -> dict[str, Any]:
    memory = Memory()
    ours = adapt(8, 9, 12, 4, max_batch_size=13)
    result = train(Recorder(), loader(64, 4), ours, logger=memory, log_every_n_steps=1, epochs=1, root=out)
    return {**result, "logged": memory.rows}


def too_small(out: Path) -> dict[str, Any]:
    try:
        train(Recorder(), loader(64, 1), adapt(2, max_batch_size=1), root=out)
    except MisconfigurationException as error:
        return {"message": str(error)}
    return {"message": None}


def unlike(out: Path) -> dict[str, Any]:
    """Have loaders that differ on the two ranks."""
    rank = torch.distributed.get_rank()
    halved = AdaptiveBatchSize(GeoDamp(2, 1), adapt="lr")
    tries = {
        "size": (loader(40 + 20 * rank, 4 + 2 * rank), adapt(8, max_batch_size=16)),
        "tail": (loader(42, 4, drop_last=rank == 1), adapt(8, max_batch_size=16)),
        "size, lr": (loader(40 + 20 * rank, 4 + 2 * rank), halved),
    }
    messages = {}
    for name, (train_loader, ours) in tries.items():
        with pytest.raises(MisconfigurationException) as error:
            train(Recorder(), train_loader, ours, use_distributed_sampler=False, root=out)
        messages[name] = str(error.value)
    return messages


class Shares(OfRank):
    """The same stream, which says how many samples it has for the rank that asks."""

    def __len__(self) -> int:
        return len(range(torch.distributed.get_rank(), len(self.data), RANKS))


def uneven_share(out: Path) -> dict[str, Any]:
    """Own samplers of 31 and 25 samples, of which an epoch has a share."""
    train_loader = loader(31 - 6 * torch.distributed.get_rank(), 4, shuffle=True)
    flags = {"use_distributed_sampler": False, "limit_train_batches": 0.5}
    return train(Recorder(), train_loader, adapt(8, 8, 12, max_batch_size=16), root=out, **flags)


def fewer(out: Path) -> dict[str, Any]:
    """The learning rate alone, on 40 and 37 samples, in ten batches each."""
    ours = AdaptiveBatchSize(GeoDamp(2, 0.31), adapt="lr")
    train_loader = loader(40 - 3 * torch.distributed.get_rank(), 4)
    return train(Recorder(), train_loader, ours, use_distributed_sampler=False, root=out)


def own_sizes(out: Path, policy: Policy, **kwargs: Any) -> dict[str, Any]:
    """The learning rate alone, on batches of other sizes on each rank."""
    ours, memory = AdaptiveBatchSize(policy, adapt="lr", **kwargs), Memory()
    train_loader = DataLoader(learnable(64), batch_sampler=Budgets())
    flags = {"use_distributed_sampler": False, "logger": memory, "log_every_n_steps": 1}
    return {**train(Recorder(lr=0.5), train_loader, ours, root=out, **flags), "logged": memory.rows}


def halves(out: Path) -> dict[str, Any]:
    """Go on from a checkpoint of one process, and validate at half the data."""
    flags = {"validation": loader(6, 3), "val_check_interval": 0.5, "num_sanity_val_steps": 0}
    order = DistributedSampler(range(96), RANKS, torch.distributed.get_rank(), shuffle=False)
    return train(Recorder(), loader(96, 4, sampler=order), adapt(8), ckpt=out / "half.ckpt", root=out, **flags)


def on_its_own(out: Path) -> dict[str, Any]:
    """The first process trains on one device, as the others do not, in a process group that is there already."""
    if torch.distributed.get_rank():
        return {"updates": None}
    ours = rada()
    quiet([ours], devices=1, strategy=SingleDeviceStrategy(torch.device("cpu")), root=out).fit(
        Recorder(), loader(64, 4)
    )
    return {"updates": ours.updates, "samples": ours.samples}


def stated(out: Path, policy: Policy) -> dict[str, Any]:
    """Streams of 41 and 40 samples, of which each gives ten batches."""
    ours = AdaptiveBatchSize(policy)
    return train(Recorder(), DataLoader(Shares(81), 4, drop_last=True), ours, epochs=3, root=out)


def own_batch_sampler(out: Path) -> dict[str, Any]:
    data = Indexed(64)
    batches = WithName(SequentialSampler(data), 4, drop_last=False, name="mine")
    return train(Recorder(), DataLoader(data, batch_sampler=batches), adapt(8, 8, 16, max_batch_size=16), root=out)


def stream(out: Path, **kwargs: Any) -> dict[str, Any]:
    ours = adapt(8, 8, 20, 12, 4, 16, max_batch_size=32)
    return train(Recorder(), DataLoader(OfRank(64), 4, **kwargs), ours, root=out, validation=loader(6, 3))


def two_loaders(out: Path) -> dict[str, Any]:
    module, ours = Pairs(), adapt(8, 8, 16, 6, max_batch_size=16)
    result = train(module, {"a": loader(64, 4), "b": loader(40, 3)}, ours, root=out, validation=loader(6, 3))
    return {**result, "seconds": module.seconds}


def mid_epoch(out: Path, name: str) -> dict[str, Any]:
    """Go on from a checkpoint that another number of processes wrote."""
    return train(Recorder(), loader(53, 4, shuffle=True), rada(), ckpt=out / name, root=out)


class Together(Recorder):
    """Its ranks speak to each other in every step."""

    def loss(self, x, y):
        torch.distributed.all_reduce(torch.ones(()))
        return super().loss(x, y)


def measured(
    out: Path,
    *requires: str,
    samples: int = 64,
    adapt: Any = "batch_size",
    kind: Any = Recorder,
    batches: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train with weights that stay, and note what was measured."""
    policy = Measuring([8, 8, 12, 16], requires=frozenset(requires))
    ours = AdaptiveBatchSize(policy, None if adapt == "lr" else 16, adapt=adapt)
    of_a_loader = {"batch_size": 4, "shuffle": True} if batches is None else {"batch_sampler": batches}
    train_loader = DataLoader(learnable(samples), **of_a_loader)
    result = train(kind(lr=0.0), train_loader, ours, root=out, **kwargs)
    rows = [asdict(row) for row in policy.seen]
    return {**result, "rows": rows, "measured": policy.measured, "evaluated": ours._controller.evaluated}


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    "rank_dependent": lambda out: train(RankDependent(), loader(96, 4, shuffle=True), rada(dwell=2), root=out),
    "plain_sampler": lambda out: train(Recorder(), loader(64, 4), adapt(8, 8, 16, max_batch_size=16), root=out),
    "own_batch_sampler": own_batch_sampler,
    "uneven": lambda out: uneven(out, drop_last=False),
    "uneven_dropped": lambda out: uneven(out, drop_last=True),
    "grow_and_shrink": lambda out: train(
        Recorder(), loader(68, 2), adapt(4, 16, 16, 6, 4, 16, max_batch_size=16), root=out, validation=loader(6, 3)
    ),
    "same_dwell_1": same,
    "same_dwell_5": lambda out: same(out, dwell=5),
    "same_capped": lambda out: same(out, max_batch_size=8),
    "same_in_parts": lambda out: train(
        Recorder(lr=0.5), loader(64, 4), rada(max_device_batch_size=3, max_batch_size=20), root=out
    ),
    "accumulated": lambda out: train(
        Recorder(lr=0.5), loader(68, 4), adapt(16, 16, 28, 10), accumulate_grad_batches=2, root=out
    ),
    "device_sizes": device_sizes,
    "too_small": too_small,
    "own_data": own_data,
    "unlike": unlike,
    "fewer": fewer,
    "own_sizes": lambda out: own_sizes(out, GeoDamp(2, 0.31)),
    "own_sizes_observed": lambda out: own_sizes(out, RadaDamp(rho=0.5), dwell=3),
    "on_its_own": on_its_own,
    "uneven_share": uneven_share,
    "stated_epochs": lambda out: stated(out, GeoDamp(2, 1)),
    "stated_cap": lambda out: stated(out, ExponentialDamp(1.5)),
    "stated_points": lambda out: stated(out, Schedule({0: 8, 0.9: 12, 1.7: 16}, unit="epochs")),
    "logs": lambda out: train(
        Logs(), loader(64, 4), rada(), logger=Memory(), log_every_n_steps=2, root=out, validation=loader(10, 5)
    ),
    "not_a_number": lambda out: train(NotANumber(), loader(64, 4, shuffle=True), rada(), root=out),
    "resume": lambda out: resumed(
        out / "ddp", lambda **kw: train(Dropping(), loader(53, 4, shuffle=True), rada(dwell=3), root=out, **kw)
    ),
    "resume_carry": lambda out: resumed(
        out / "carry",
        lambda **kw: train(
            Dropping(), loader(53, 4, shuffle=True, num_workers=1), rada(tail="carry"), root=out, epochs=3, **kw
        ),
    ),
    "resume_weighted": lambda out: resumed(out / "weighted", lambda **kw: weighted(out, **kw), batches=9),
    "resume_sharded": lambda out: resumed(out / "fsdp2", lambda **kw: sharded(out, **kw)),
    **{
        f"policy_{name}": lambda out, policy=policy: train(
            Recorder(lr=0.5), DataLoader(learnable(50), 4), AdaptiveBatchSize(policy, max_batch_size=12), root=out
        )
        for name, policy in SETTINGS.items()
    },
    "variance": lambda out: measured(out, "grad_variance", "grad_norm_sq"),
    "variance_lr": lambda out: measured(
        out, "grad_variance", "grad_norm_sq", adapt="lr", accumulate_grad_batches=2, epochs=2
    ),
    "variance_own_sizes": lambda out: measured(
        out,
        *("loss", "grad_variance", "grad_norm_sq"),
        adapt="lr",
        accumulate_grad_batches=2,
        epochs=2,
        batches=Budgets(),
        use_distributed_sampler=False,
    ),
    "evaluated_together": lambda out: measured(
        out, "full_loss", "gradient_diversity", samples=51, kind=Together, epochs=1
    ),
    "evaluated": lambda out: measured(out, "full_loss", "gradient_diversity", samples=51, epochs=1),
    "halves": halves,
    "from_one": lambda out: mid_epoch(out, "one.ckpt"),
    "save_two": lambda out: train(
        Recorder(),
        loader(53, 4, shuffle=True),
        rada(),
        extra=[SaveOnce(out / "two.ckpt", 4), SaveLast(out / "last.ckpt")],
        root=out,
    ),
    "stream": stream,
    "stream_with_workers": lambda out: stream(out, num_workers=1),
    "two_loaders": two_loaders,
    "fails": lambda out: train(Fails(), loader(64, 4), rada(), root=out),
    "full": lambda out: train(Full(), loader(64, 4), adapt(8, 8, 16, max_batch_size=16), root=out),
    "skips": lambda out: train(Skips(), loader(64, 4), rada(), root=out),
}


class Tells(pl.Callback):
    """Writes down the batches where they happen: ``ddp_spawn`` brings nothing else back."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_end(self, trainer, pl_module):
        # Lightning leaves gloo's group as it is, and a process that ends with it may abort.
        atexit.register(torch.distributed.destroy_process_group)
        (self.out / f"spawned.{trainer.global_rank}.json").write_text(json.dumps(pl_module.sizes))


def main(out: Path, names: list[str]) -> None:
    """Run scenarios one after the other."""
    for name in names:
        if name == "spawn":
            ours = adapt(8, 8, 16, max_batch_size=16)
            trainer = quiet([ours, Tells(out)], devices=RANKS, strategy="ddp_spawn", epochs=1, root=out)
            trainer.fit(Recorder(), loader(64, 4))
            continue
        if not torch.distributed.is_initialized() and name in {"own_data", "on_its_own", "halves"}:
            raise RuntimeError(f"{name} needs the process group of a scenario before it")
        pl.seed_everything(1, verbose=False)
        result = SCENARIOS[name](out)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        (out / f"{name}.{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
