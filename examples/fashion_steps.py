# SPDX-License-Identifier: Apache-2.0
"""What a training step of the paper's network takes, by batch size."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fashion import PaperNet

ROUNDS = 5  # over all sizes: what disturbs for a while hits a few steps of each size, and the median drops them


@dataclass(frozen=True)
class StepTime:
    """The median time of a training step."""

    batch_size: int
    seconds: float
    repeats: int = 1
    hardware: str = ""


def step_seconds(times: Sequence[StepTime], size: int) -> float:
    """Return the time of a step of so many images, from measured ones by rising batch size."""
    if size <= times[-1].batch_size:
        sizes, seconds = np.log([(one.batch_size, one.seconds) for one in times]).T
        return float(np.exp(np.interp(np.log(size), sizes, seconds)))
    # A large step keeps the hardware busy, and time then grows with work. From one point alone: in proportion.
    before, last = (StepTime(0, 0.0), *times)[-2:]
    slope = (last.seconds - before.seconds) / (last.batch_size - before.batch_size)
    return last.seconds + slope * (size - last.batch_size)


def measure(sizes: Iterable[int], repeats: int, accelerator: str) -> list[StepTime]:
    """Time training steps of the paper's network on one thread."""
    torch.set_num_threads(1)
    module = PaperNet().to(accelerator)
    optimizer = module.configure_optimizers()
    # A device works on while Python goes on: without waiting for it, the clock would see the launches only.
    wait = torch.cuda.synchronize if accelerator == "cuda" else lambda: None
    seconds: dict[int, list[float]] = {size: [] for size in sorted(sizes)}
    for size, taken in list(seconds.items()) * ROUNDS:
        images = torch.randn(size, 1, 28, 28, device=accelerator).to(memory_format=torch.channels_last)
        labels = torch.randint(10, (size,), device=accelerator)
        for repeat in range(1 + math.ceil(repeats / ROUNDS)):
            wait()
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module.net(images), labels).backward()
            optimizer.step()
            wait()
            if repeat:  # the first step of a size allocates memory
                taken.append(time.perf_counter() - start)
    cpus = Path("/proc/cpuinfo")  # of Linux, where Python itself knows the architecture only
    model = cpus.read_text().partition("model name")[2].partition("\n")[0].strip("\t: ") if cpus.exists() else ""
    hardware = torch.cuda.get_device_name() if accelerator == "cuda" else model or platform.machine()
    hardware += f", 1 thread, torch {torch.__version__}"
    return [StepTime(size, statistics.median(taken), len(taken), hardware) for size, taken in seconds.items()]
