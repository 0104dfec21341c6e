# SPDX-License-Identifier: Apache-2.0
"""Starts real processes, and ends all of them if they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import models
import pytest

RANKS = Path(__file__).with_name("ranks.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LONGEST = 240.0  # seconds; a hang is a failure
GRACE = 10.0  # seconds between asking to end and ending


class Done(NamedTuple):
    """How a launch ended."""

    returncode: int
    output: str


def launch(*command: str, cwd: Path, longest: float = LONGEST) -> Done:
    """Run a command to its end; if it takes too long, end all that it started and fail with the output."""
    paths = [str(Path(models.__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    log = cwd / "output.txt"  # not a pipe: what a process that is left over holds open would be waited for
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            process.wait(longest)
        except subprocess.TimeoutExpired:
            end(process)
            pytest.fail(f"took more than {longest} s: {' '.join(command)}\n{log.read_text(errors='replace')[-6000:]}")
    return Done(process.returncode, log.read_text(errors="replace"))


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants, which torchrun puts into sessions of their own."""
    everybody = [process.pid, *descendants(process.pid)]
    for what, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        for pid in everybody:
            with suppress(ProcessLookupError):
                os.kill(pid, what)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found += [child, *descendants(child)]
    return found
