# SPDX-License-Identifier: Apache-2.0
"""What a worker sends, with small tensors by value.

A tensor that comes from a worker is a file descriptor, which the main process asks the worker for through a
socket. That takes about a millisecond, however few bytes the tensor has, and longer while the worker is busy; a
batch of images and labels is two of them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

#: Bytes up to which a tensor is small: the size of a pipe on Linux. Through one, larger ones took longer than by
#: descriptor, when their batches were measured.
SMALL = 1 << 16

_NUMPY_KNOWS = frozenset({torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64})


class Message:
    """Something that travels from one process to another, and arrives as itself.

    It is pickled here and now, in the worker's main thread: what cannot be pickled is then an error of the worker's,
    which the main process raises, and the thread that feeds the queue has no Python to run.

    Args:
        content: Of anything that a worker may send.
    """

    def __init__(self, content: Any) -> None:
        stream = io.BytesIO()
        _SmallByValue(stream, pickle.HIGHEST_PROTOCOL).dump(content)
        self._stream = stream.getvalue()

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._stream,)


class Sent:
    """A collate function whose results travel as messages."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Message:
        """Return the message of a batch."""
        return Message(self._collate(samples))


class _SmallByValue(ForkingPickler):
    """Pickles large tensors as torch does between processes."""

    def reducer_override(self, obj: Any) -> Any:
        return by_value(obj) if is_plain(obj) and obj.nbytes <= SMALL else NotImplemented


def is_plain(obj: Any) -> bool:
    """Whether something is a tensor of which shape, dtype and elements are all that there is to say."""
    return (
        type(obj) is Tensor
        and obj.layout is torch.strided
        and obj.device.type == "cpu"
        and not (obj.requires_grad or obj.is_quantized or obj.is_nested or obj.is_conj() or obj.is_neg())
    )


def by_value(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return how to make a plain tensor of a buffer with only the elements that it shows, for a pickler."""
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    # numpy does not know every dtype (bfloat16), but bytes it does.
    raw: Any = flat.numpy() if tensor.dtype in _NUMPY_KNOWS else flat.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(raw), tensor.dtype, tensor.shape)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:  # there is no buffer to look into
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
