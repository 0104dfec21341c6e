# SPDX-License-Identifier: Apache-2.0
"""The page of set-ups: each row has a verdict and a test that is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "setups.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| set-up ")
]

#: What section 10 of the specification names; each is to be found in some row.
NAMED = [
    *("map-style", "`IterableDataset`", "sampler without a length", "own `collate_fn`", "own `batch_sampler`"),
    *("`DataLoader(batch_size=None)`", "overrides `__iter__`", "dict or list", "`Trainer(accumulate_grad_batches=k)`"),
    *("manual optimization, several optimizers", "fp16", "clipping", "fused optimizer under a scaler", "DDP"),
    *("`ddp_spawn`", "`torchrun`", "Ray Train", "`use_distributed_sampler=False`", "FSDP2", "`ModelParallelStrategy`"),
    *("`StochasticWeightAveraging`", "`WeightAveraging`", "`BackboneFinetuning`", "DeepSpeed", "XLA"),
    *("`GradientAccumulationScheduler`", "`training_step(dataloader_iter)`", "two `AdaptiveBatchSize`", "`frequency`"),
    *("`reload_dataloaders_every_n_epochs`", "second `fit`", "`fast_dev_run`", "`overfit_batches`"),
    *("`limit_train_batches`", "`max_steps`", "`max_time`", "tuner", "`BatchSizeFinder`", "`OneCycleLR`"),
    *("larger than an epoch that has become short", "`torch.compile`", "out of memory"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_row(row):
    """A row says what happens, and the test that shows it exists."""
    setup, verdict, _, shown = row
    assert setup
    assert verdict in {"supported", "refused"}
    path, _, name = shown.strip("`").partition("::")
    functions = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions


@pytest.mark.parametrize("named", NAMED)
def test_every_set_up_has_a_row(named):
    """Every set-up of the specification has its row."""
    assert any(named in row[0] for row in ROWS)
