# SPDX-License-Identifier: Apache-2.0
"""A Trainer in two workers of Ray Train, on a Ray of its own: ``make test-ray`` installs Ray and runs this."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Recorder, Watch, loader, quiet

from lightning_adabatch import AdaptiveBatchSize, RadaDamp

pytest.importorskip("ray", reason="needs lightning-adabatch[ray]")
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # of Ray about itself
]

ROOT = Path(__file__).parents[2]
WORKERS = 2
SAMPLES = 52  # of which no worker needs one twice


@dataclass
class Outcome:
    """What one worker did."""

    rank: int
    strategy: str
    batches: list[tuple[int, list[int]]]  # epoch, samples
    decisions: list[int]  # the batch size after each update
    counts: tuple[Any, ...]
    weights: list[list[float]]

    @property
    def sizes(self) -> list[int]:
        return [len(indices) for _, indices in self.batches]


def train(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Train in one worker; return the fields of everybody's :class:`Outcome`."""
    pl.seed_everything(config["seed"], verbose=False)  # Lightning shuffles by it
    ours = AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=24)
    watch = Watch(ours)
    save = ModelCheckpoint(config["root"], "{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = quiet(
        [ours, watch, save],
        epochs=3,
        root=config["root"],
        enable_checkpointing=True,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
    )
    module = Recorder(lr=0.3)
    data = loader(SAMPLES, 4, shuffle=True)
    data.dataset.y = (data.dataset.x[:, 0] > 0).long()  # can be learned: the loss falls
    prepare_trainer(trainer).fit(module, data, ckpt_path=config.get("resume"))
    mine = {
        "rank": ray.train.get_context().get_world_rank(),
        "strategy": type(trainer.strategy).__name__,
        "batches": [(batch.epoch, batch.indices) for batch in module.batches],
        "decisions": watch.sizes,
        "counts": (ours.batch_size, ours.lr_factor, ours.updates, ours.samples, ours.epochs, trainer.global_step),
        "weights": module.net.weight.tolist(),  # Ray returns no tensors
    }
    everybody: list[Any] = [None] * WORKERS
    torch.distributed.all_gather_object(everybody, mine)
    return everybody


def run(root: Path, **config: Any) -> list[Outcome]:
    """Train in all workers; return what each of them did."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"root": str(root / "checkpoints"), "seed": 1, **config},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(root)),
    )
    return [Outcome(**fields) for fields in trainer.fit().return_value]


def test_example(tmp_path):
    """The example trains in two workers, with fewer updates than the constant batch size takes."""
    command = [sys.executable, "examples/ray_train.py", "--epochs", "1", "--max-batch-size", "256", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    updates, size = map(int, re.search(r"updates (\d+), batch size (\d+), accuracy 0\.\d+", done.stdout).groups())
    assert updates < 6000 / 64
    assert 64 < size <= 256


@pytest.fixture(scope="module")
def cluster():
    """Start a Ray whose workers find what this file uses."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # they cannot import it
    ray.init(
        "local",
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT / "tests")}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def uncut(cluster, tmp_path_factory):
    """Train from the beginning to the end; checkpoints are written on the way."""
    root = tmp_path_factory.mktemp("uncut")
    return root / "checkpoints", run(root)


def test_workers_agree(uncut):
    """Sizes, steps, decisions, counts and weights are the same in both workers, and the size changes."""
    _, (first, second) = uncut
    assert (first.rank, second.rank) == (0, 1)
    assert first.strategy == "RayDDPStrategy"
    assert first.sizes == second.sizes
    assert first.decisions == second.decisions
    assert first.counts == second.counts
    assert first.weights == second.weights
    assert len(set(first.decisions)) > 2
    assert first.counts[2] == len(first.batches)


def test_batches_have_the_size_decided(uncut):
    """The batch after a decision has exactly that size over both workers, but for the ends of epochs."""
    _, (first, _) = uncut
    epochs = [epoch for epoch, _ in first.batches] + [-1]
    for n, decided in enumerate(first.decisions[:-1], start=1):
        if epochs[n] == epochs[n + 1]:
            assert WORKERS * first.sizes[n] == decided


def test_every_sample_once(uncut):
    """Both workers together see each sample once per epoch."""
    _, outcomes = uncut
    for number in range(3):
        seen = Counter(i for o in outcomes for epoch, indices in o.batches if epoch == number for i in indices)
        assert seen == Counter(range(SAMPLES))


def test_resume(uncut, tmp_path):
    """A run that goes on from a checkpoint, written in the middle of an epoch, does what the uncut one did."""
    checkpoints, before = uncut
    done = 5
    assert before[0].batches[done - 1][0] == before[0].batches[done][0]  # in the middle of an epoch
    after = run(tmp_path, resume=str(checkpoints / f"step={done}.ckpt"), seed=77)
    for resumed, whole in zip(after, before, strict=True):
        assert resumed.batches == whole.batches[done:]
        assert resumed.decisions == whole.decisions[done:]
        assert resumed.counts == whole.counts
        assert resumed.weights == whole.weights
