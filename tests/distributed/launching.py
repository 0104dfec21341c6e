# SPDX-License-Identifier: Apache-2.0
"""Starts real processes, and ends them if they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("ranks.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LONGEST = 240  # seconds; a hang is a failure


def launch(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; if it hangs, end all that it started."""
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            pytest.fail(f"hangs: {command}\n{out[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out)
