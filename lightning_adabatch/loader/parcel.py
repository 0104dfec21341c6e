# SPDX-License-Identifier: Apache-2.0
"""Samples on their way from a worker to a collate function that runs after the cut.

A collate function of the user's can build anything, so its result cannot be cut: workers send samples, and
they are collated once it is known which of them make a batch. A list of tensors would cost one file
descriptor per tensor (and hang at the limit of the system); so a block travels as one flat tensor of bytes,
from which the samples are rebuilt as views.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_adabatch.loader.message import SMALL, by_value, is_plain

_ALIGN = 64  # bytes; any dtype may start there


class Parcel(NamedTuple):
    """A block of samples: the pickled stream and its out-of-band buffers, one after the other."""

    content: Tensor  # uint8, 1-d
    lengths: list[int]  # bytes of each part


class _ByValue(pickle.Pickler):
    """Pickles CPU tensors as plain buffers, each only with the elements that it shows."""

    def reducer_override(self, obj: Any) -> Any:
        return by_value(obj) if is_plain(obj) else NotImplemented


def pack(samples: list[Any]) -> Parcel:
    """Make one tensor of bytes of a block of samples; runs in a worker as its collate function."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    try:
        _ByValue(stream, protocol=5, buffer_callback=buffers.append).dump(samples)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"A sample of type {type(samples[0]).__name__} cannot be sent from a worker process: {error}. With a "
            "collate_fn of your own, samples are collated after the batch size is known, in the main process. "
            "Make the samples picklable, use the default collate function, or set num_workers=0."
        ) from error
    parts: list[memoryview] = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    lengths = [part.nbytes for part in parts]
    total = sum(map(_padded, lengths))
    content = torch.empty(total, dtype=torch.uint8) if total <= SMALL else _shared(total)
    room = content.numpy().data
    position = 0
    for part, length in zip(parts, lengths, strict=True):
        room[position : position + length] = part
        position += _padded(length)
    return Parcel(content, lengths)


def unpack(parcel: Parcel) -> list[Any]:
    """Return the samples; their tensors and arrays are views of the parcel."""
    content = parcel.content.numpy().data
    parts: list[memoryview] = []
    position = 0
    for length in parcel.lengths:
        parts.append(content[position : position + length])
        position += _padded(length)
    samples: list[Any] = pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # our own worker made it
    return samples


def _shared(length: int) -> Tensor:
    # As default_collate does in a worker: straight into shared memory, which saves a copy.
    storage = torch.UntypedStorage._new_shared(length)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _padded(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def collate_apart(collate_fn: Callable[[list[Any]], Any], samples: Sequence[Any], seed: int) -> Any:
    """Collate in the main process without a trace on its random state, the same for any number of workers."""
    with _forked_generators(seed):
        return collate_fn(list(samples))


@contextmanager
def _forked_generators(seed: int) -> Iterator[None]:
    python, array, tensor = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the generator that collate functions draw from
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        torch.random.set_rng_state(tensor)
