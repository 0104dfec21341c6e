# SPDX-License-Identifier: Apache-2.0
"""What the tests of the libraries of data sets and loaders have in common."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from models import Indexed, Recorder, Watch, adapt, fit

SAMPLES = 60
SCRIPT = [4, 9, 3, 16, 16, 5, 8]  # up and down in the middle of the first epoch
SIZES = [4, 9, 3, 16, 16, 5, 7, *[8] * 7, 4]  # of two epochs
ENDS = [7, 15]  # updates at which an epoch, and its validation, comes

DATA = Indexed(SAMPLES)


def check(module: Recorder, train: Any, validation: Any, root: Any, **kwargs: Any) -> Watch:
    """Two epochs with the script of sizes: every batch has its size, every sample comes once, all is validated."""
    ours = adapt(*SCRIPT, max_batch_size=64, **kwargs)
    watch = Watch(ours)
    fit(module, train, validation, callbacks=[ours, watch], root=root, num_sanity_val_steps=0)
    assert module.sizes == SIZES
    decided = [SCRIPT[0], *watch.sizes[:-1]]  # before each update
    for number, (size, wanted) in enumerate(zip(module.sizes, decided, strict=True), 1):
        assert size == wanted or number in ENDS
    for epoch in range(2):
        assert module.seen_in(epoch) == Counter(range(SAMPLES))
    assert module.validations == ENDS
    assert [number for number, batch in enumerate(module.batches, 1) if batch.last] == ENDS
    assert module.validation_sizes == [8, 8, 4] * 2
    assert (ours.updates, ours.samples) == (len(SIZES), 2 * SAMPLES)
    assert ours.epochs == 2.0 or math.isnan(ours.epochs)
    return watch


def assert_same_training(one: Recorder, other: Recorder) -> None:
    """Both had the same batches in the same order, and ended with the same weights, bit for bit."""
    assert [(batch.epoch, batch.indices) for batch in one.batches] == [
        (batch.epoch, batch.indices) for batch in other.batches
    ]
    assert one.validations == other.validations
    states = one.state_dict(), other.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
