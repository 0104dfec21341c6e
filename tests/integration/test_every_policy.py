# SPDX-License-Identifier: Apache-2.0
"""What every policy can: train, past the cap too, move the LR alone, go on from a checkpoint, and come from YAML."""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from models import Recorder, fit, loader
from resuming import Cut, Learner, Setup, assert_goes_on, resume, run, train_loader
from settings_of_policies import IN_PARTS, SETTINGS

from lightning_adabatch import AdaptiveBatchSize, Policy, policies

every_policy = pytest.mark.parametrize("name", SETTINGS)
CUTS = [Cut("train_batch_end", 0, 5), Cut("train_batch_end", 1, 3, "before"), Cut("train_epoch_end", 0)]


def plan(name: str, **kwargs) -> Setup:
    """Return the training of a policy, with a cap that most of them pass."""
    return Setup(lambda: AdaptiveBatchSize(SETTINGS[name], **{"max_batch_size": 12, **kwargs}))


def test_table_is_complete():
    """A new policy is a new row of the table."""
    public = {value for value in vars(policies).values() if isinstance(value, type) and issubclass(value, Policy)}
    assert {type(policy) for policy in SETTINGS.values()} == public - {Policy}


@every_policy
def test_trains(name, tmp_path):
    """Sizes are the decisions, which move and stay below the cap; past it the LR falls instead."""
    outcome = run(plan(name), tmp_path)
    sizes, decided, parts = [], [outcome.steps[0].size], []
    for step in outcome.steps:
        parts.append(step.size)
        if step.decision[2] == len(sizes) + 1:  # updates
            assert sum(parts) == decided[-1] or step.progress[2] or not sizes  # the epoch's last batch
            rest = step.progress[2] and sum(parts) < 4  # what is left of an epoch is not divided into single samples
            assert len(parts) == (2 if name in IN_PARTS and not rest else 1)
            sizes.append(sum(parts))
            decided.append(step.decision[0])
            parts.clear()
    decided.pop(0)
    assert max(sizes) <= 13  # a single leftover sample joins
    assert (len(set(decided)) == 1) == (name == "Constant")


@every_policy
def test_moves_the_rate_alone(name, tmp_path):
    """With ``adapt="lr"`` the batches are the loader's own, and the LR takes the damping."""
    trainer = {"accumulate_grad_batches": 2} if name in IN_PARTS else {}
    setup = Setup(lambda: AdaptiveBatchSize(SETTINGS[name], adapt="lr"), trainer=trainer)
    outcome = run(setup, tmp_path)
    assert {step.size for step in outcome.steps} == {4, 2}
    rates = {step.lr for step in outcome.steps}
    assert max(rates) == 0.1
    assert (len(rates) == 1) == (name == "Constant")


@every_policy
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_goes_on_from_a_checkpoint(name, cut, tmp_path):
    """C11: decisions, weights and generators after a cut are those of the run that was not cut."""
    uncut = run(plan(name, dwell=3), tmp_path, [cut])
    assert_goes_on(uncut, resume(plan(name, dwell=3), tmp_path / f"{cut}.ckpt", tmp_path), uncut.marks[cut])


def in_yaml(value):
    """Return an argument as a configuration file has it: rules by class path, the rest as it is."""
    if not isinstance(value, Policy):
        return value
    arguments = {field.name: in_yaml(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"class_path": f"lightning_adabatch.{type(value).__name__}", "init_args": arguments}


@every_policy
def test_comes_from_yaml(name, tmp_path, monkeypatch):
    """C34: a configuration file with the policy's arguments gives the same policy, and trains."""
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    policy = SETTINGS[name]
    callback = {"class_path": "lightning_adabatch.AdaptiveBatchSize", "init_args": {"policy": in_yaml(policy)}}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = {"accelerator": "cpu", "max_epochs": 1, "callbacks": [callback], "default_root_dir": str(tmp_path)}
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 0, "trainer": {**trainer, **quiet}}), encoding="utf-8")

    class Module(Learner):
        def __init__(self) -> None:
            super().__init__()

        def train_dataloader(self):
            return train_loader()

    cli = LightningCLI(Module, args=["fit", f"--config={path}"], save_config_callback=None)
    ours = next(callback for callback in cli.trainer.callbacks if isinstance(callback, AdaptiveBatchSize))
    assert ours.policy == policy
    assert ours.updates == cli.trainer.global_step > 0
    assert (len(cli.model.steps) > ours.updates) == (name in IN_PARTS)


@dataclasses.dataclass(frozen=True)
class Inner:
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()


@dataclasses.dataclass(frozen=True)
class Remembers(Policy):
    """A rule of the user's own, with a state of any kind."""

    first: object = None

    def init(self):
        return self.first

    def damping(self, state, progress):
        return 1.0


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        (np.zeros(2), "numpy.ndarray"),
        ({"a": [1, (2.0, np.ones(1))]}, "numpy.ndarray"),
        (Outer(), "Inner"),
        (deque([1]), "collections.deque"),
        (torch.zeros(2), None),
        (Inner(), None),
        ({"a": [1, (2.0, "b", None)], "t": torch.ones(1)}, None),
        (np.float64(1.0), None),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_a_state_that_no_checkpoint_brings_back_is_named(state, lost, tmp_path):
    """When the fit begins, and not when a run that took days is to go on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Recorder(), loader(8, 4), callbacks=[AdaptiveBatchSize(Remembers(state))], epochs=1, root=tmp_path)
    said = [str(one.message) for one in caught if "which a checkpoint does not bring back" in str(one.message)]
    assert [lost in message for message in said] == ([] if lost is None else [True])
