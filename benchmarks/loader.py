# SPDX-License-Identifier: Apache-2.0
"""Throughput of the elastic loader against a ``DataLoader``: ``python benchmarks/loader.py [--quick]``."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from timing import Row, header, interleaved
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_adabatch.loader import ElasticLoader

SMALL, LARGE = (1, 28, 28), (3, 64, 64)
SIZE = 128


class Images(Dataset[tuple[Tensor, int]]):
    """uint8 images that become floats when they are fetched, as they would be by torchvision's transforms."""

    def __init__(self, samples: int, shape: tuple[int, ...]) -> None:
        self.images = torch.randint(0, 256, (samples, *shape), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (self.images[index].float() / 255 - 0.13) / 0.31, index % 10


def own_collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Do what a user's function typically does."""
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}


def seconds(batches: Iterator[Any], count: int) -> float:
    """Take so many batches."""
    start = time.perf_counter()
    for _ in itertools.islice(batches, count):
        pass
    return time.perf_counter() - start


def plain(data: Images, size: int, workers: int, collate: Any = None) -> DataLoader[Any]:
    """Return the loader to compare with, and to build the elastic one from."""
    return DataLoader(data, size, num_workers=workers, persistent_workers=workers > 0, collate_fn=collate)


def constant(data: Images, workers: int, repetitions: int, collate: Any = None) -> tuple[float, float, float]:
    """Compare whole epochs at one size; samples per second."""
    theirs, ours = plain(data, SIZE, workers, collate), ElasticLoader(plain(data, SIZE, workers, collate))
    count = len(theirs)
    seconds(iter(theirs), count), seconds(iter(ours), count)  # start the workers
    result = interleaved(
        lambda: len(data) / seconds(iter(theirs), count), lambda: len(data) / seconds(iter(ours), count), repetitions
    )
    ours.close()
    return result


def growing(data: Images, workers: int, repetitions: int) -> tuple[float, float, float]:
    """Compare a size that grows by one at every batch with a loader at the mean size."""
    start = SIZE // 2
    sizes = list(
        itertools.takewhile(lambda size: (size - start + 1) * (start + size) // 2 <= len(data), itertools.count(start))
    )
    mean = round(sum(sizes) / len(sizes))
    theirs, ours = plain(data, mean, workers), ElasticLoader(plain(data, start, workers))

    def grow() -> Iterator[Any]:
        ours.resize(start)
        for size, batch in zip(sizes, ours, strict=False):
            ours.resize(size + 1)
            yield batch

    seconds(iter(theirs), len(sizes)), seconds(grow(), len(sizes))
    result = interleaved(
        lambda: mean * len(sizes) / seconds(iter(theirs), len(sizes)),
        lambda: sum(sizes) / seconds(grow(), len(sizes)),
        repetitions,
    )
    ours.close()
    return result


def change(data: Images, repetitions: int) -> tuple[float, float, float]:
    """Compare a change of size in a running epoch with building a new DataLoader, until its first batch is there.

    Both start from workers that have had time to fill their queues.
    """
    ours = ElasticLoader(plain(data, SIZE, 2))

    def rebuild() -> float:
        start = time.perf_counter()
        batches = iter(plain(data, SIZE + 7, 2))
        next(batches)
        return time.perf_counter() - start

    def resize() -> float:
        ours.resize(SIZE)
        batches = iter(ours)
        seconds(batches, 4)
        time.sleep(0.2)  # a training step's worth of time, for the queues to fill
        ours.resize(SIZE + 7)
        start = time.perf_counter()
        next(batches)
        return time.perf_counter() - start

    result = interleaved(rebuild, resize, repetitions)
    ours.close()
    return result


def memory(data: Images) -> tuple[float, str]:
    """Return the samples that the loader holds beyond the batch in hand, in batches: at most one block."""
    ours = ElasticLoader(plain(data, SIZE, 2))
    batches: Any = iter(ours)
    held = []
    for size, _ in zip(itertools.chain([SIZE] * 3, itertools.count(SIZE)), batches, strict=False):
        rest = next(iter(batches.supply.stream._pieces), None)  # the one block that is kept
        held.append(0 if rest is None else rest.length)
        ours.resize(size + 1)
    ours.close()
    return max(held) / SIZE, f"at most {max(held)} samples kept beside a batch of {SIZE} and more"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # loading is what is measured: one core for the consumer, the rest for the workers
    repetitions = 3 if quick else 15
    sets = {shape: Images((1_500 if quick else most), shape) for shape, most in ((SMALL, 20_000), (LARGE, 8_000))}
    print(header())
    for shape, data in sets.items():
        name = "x".join(map(str, shape))
        for workers in (0,) if quick else (0, 1, 2):
            ratio, theirs, ours = constant(data, workers, repetitions)
            rates = f"{theirs:,.0f} -> {ours:,.0f} samples/s"
            print(
                Row(f"throughput, {name}, {workers} workers, constant size", ratio, 0.98, at_least=True, detail=rates)
            )
            ratio, theirs, ours = growing(data, workers, repetitions)
            rates = f"{theirs:,.0f} -> {ours:,.0f} samples/s"
            print(
                Row(f"throughput, {name}, {workers} workers, +1 every batch", ratio, 0.90, at_least=True, detail=rates)
            )
        ratio, theirs, ours = constant(data, 2, repetitions, own_collate)
        rates = f"{theirs:,.0f} -> {ours:,.0f} samples/s"
        print(Row(f"throughput, {name}, 2 workers, own collate function", ratio, 0.70, at_least=True, detail=rates))
    ratio, theirs, ours = change(sets[SMALL], repetitions)
    times = f"{1000 * theirs:.1f} -> {1000 * ours:.2f} ms"
    print(Row("a change of size, 2 workers, until the first batch of it", ratio, 0.02, at_least=False, detail=times))
    batches, detail = memory(sets[SMALL])
    print(Row("memory held by the loader, in batches", batches, 2.0, at_least=False, detail=detail))


if __name__ == "__main__":
    main()
