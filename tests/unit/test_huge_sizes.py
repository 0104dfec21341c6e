# SPDX-License-Identifier: Apache-2.0
"""Sizes without a cap, far beyond what a stream has."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_adabatch.loader import ElasticLoader


class Numbers(IterableDataset):
    """A stream that does not say how long it is."""

    def __iter__(self):
        return iter(range(70_000))


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_is_its_own_limit(workers):
    """A size of 1e12 is the rest of the stream, and no list of as many places is made for it."""
    loader = ElasticLoader(DataLoader(Numbers(), batch_size=4, num_workers=workers))
    batches = iter(loader)
    found = [next(batches).tolist()]
    loader.resize(10**12)
    found += [batch.tolist() for batch in batches]
    assert [len(batch) for batch in found] == [4, 69_996]
    assert [number for batch in found for number in batch] == list(range(70_000))
