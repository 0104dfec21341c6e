# SPDX-License-Identifier: Apache-2.0
"""A training that is killed at any moment and started again ends as the one that was never killed (invariant 5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from resuming import same

SAMPLES, EPOCHS, KILLS = 200, 4, 40  # the first two as in kill_script.py


def diary(folder: Path) -> list[list]:
    """Return what was written for every update, in the order of writing."""
    return [json.loads(line) for line in (folder / "diary.jsonl").read_text().splitlines()]


def surviving(lines: list[list]) -> list[list]:
    """Return the history that counts: of each update what was written last."""
    last = {line[0]: line for line in lines}
    return [last[update] for update in sorted(last)]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_training_survives_kills_at_any_moment(tmp_path):
    """Killed 40 times with SIGKILL: the weights are bitwise those of the run that was not, and no sample is lost."""
    script = Path(__file__).with_name("kill_script.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), str(tmp_path), str(KILLS), "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kills"] >= KILLS
    assert max(told["each"]) >= 20  # of one and the same run

    uncut = diary(tmp_path / "uncut")
    assert [line[0] for line in uncut] == list(range(1, len(uncut) + 1))
    assert len({len(line[2]) for line in uncut}) > 3  # sizes moved
    weights = torch.load(tmp_path / "uncut" / "final.pt", weights_only=True)
    for name in told["folders"]:
        lines = diary(tmp_path / name)
        history = surviving(lines)
        for epoch in range(EPOCHS):
            seen = Counter(index for line in history if line[1] == epoch for index in line[2])
            assert seen == Counter(range(SAMPLES)), f"{name}, epoch {epoch}"
        assert history == uncut
        assert same(torch.load(tmp_path / name / "final.pt", weights_only=True), weights)
    # Control: kills did cost updates, which were made again.
    assert sum(len(diary(tmp_path / name)) - len(uncut) for name in told["folders"]) > KILLS // 2
