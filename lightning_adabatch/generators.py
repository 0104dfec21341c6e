# SPDX-License-Identifier: Apache-2.0
"""The state of the global random generators, as plain numbers and tensors that any checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of torch's, Python's and NumPy's global generators, and of a device's own.

    Args:
        device: One with a generator of its own, or None.
    """
    version, words, gauss = random.getstate()
    array: Any = np.random.get_state()  # noqa: NPY002  # the generator that data sets draw from
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, _tensor(np.array(words, dtype=np.uint32)), gauss],
        "numpy": [array[0], _tensor(array[1]), *array[2:]],
    }
    if device is not None and device.type != "cpu":
        state["device"] = _module(device).get_rng_state(*_where(device))
    return state


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to a state that :func:`capture` returned."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(_words(words).tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, _words(keys), *rest))  # noqa: NPY002
    own = state.get("device")
    # One that was written on another kind of device means nothing here.
    if own is not None and device is not None and device.type != "cpu":
        _module(device).set_rng_state(own.cpu(), *_where(device))


def _tensor(words: Any) -> Tensor:
    return torch.from_numpy(words.view(np.int32).copy())  # unsigned tensors cannot be pickled


def _words(tensor: Tensor) -> Any:
    return tensor.cpu().numpy().view(np.uint32)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _where(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # which has but one
