# SPDX-License-Identifier: Apache-2.0
"""Starts two real processes, once for all tests that read what they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from launching import RANKS, TORCHRUN, launch
from models import Recorder, adapt, loader, quiet
from ranks import SaveOnce, rada
from settings_of_policies import SETTINGS

READ = (
    "resume_carry",  # first, for it forks workers: the fewer threads there are by then, the better
    *("rank_dependent", "plain_sampler", "own_batch_sampler", "uneven", "uneven_dropped", "grow_and_shrink"),
    *("same_in_parts", "accumulated", "stream", "stream_with_workers", "two_loaders"),
    *("same_dwell_1", "same_dwell_5", "same_capped", "device_sizes", "too_small", "own_data", "logs", "not_a_number"),
    *("unlike", "fewer", "own_sizes", "own_sizes_observed", "on_its_own", "uneven_share"),
    *("stated_epochs", "stated_cap", "stated_points"),
    *(f"policy_{name}" for name in SETTINGS),
    *("variance", "variance_lr", "variance_own_sizes", "evaluated", "evaluated_together"),
    *("resume", "resume_weighted", "resume_sharded", "from_one", "halves", "save_two"),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Return the folder into which the ranks write; it has a checkpoint of a single process."""
    out = tmp_path_factory.mktemp("ranks")
    pl.seed_everything(1, verbose=False)
    trainer = quiet([rada(), SaveOnce(out / "one.ckpt", 4)], root=out)
    trainer.fit(Recorder(), loader(53, 8, shuffle=True))
    flags = {"val_check_interval": 0.5, "num_sanity_val_steps": 0, "epochs": 1, "root": out}
    quiet([adapt(8), SaveOnce(out / "half.ckpt", 3)], **flags).fit(Recorder(), loader(96, 8), loader(6, 3))
    done = launch(*TORCHRUN, str(RANKS), str(out), *READ, cwd=out)
    assert done.returncode == 0, done.output[-6000:]
    return out


@pytest.fixture(scope="session")
def both(folder):
    """Return a function that reads what both ranks saw in a scenario."""

    def read(name: str) -> list[Any]:
        return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]

    return read
