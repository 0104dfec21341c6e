# SPDX-License-Identifier: Apache-2.0
"""The states of random generators, global ones and others, as plain numbers and tensors for any checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

#: One that is not global.
Own: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


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


def held_by(owner: Any) -> dict[str, Own]:
    """Return the generators that an object has as attributes, by their names."""
    held = {"generator": getattr(owner, "generator", None), **getattr(owner, "__dict__", {})}
    return {
        name: one
        for name, one in held.items()
        if isinstance(one, Own) and not isinstance(one, random.SystemRandom)  # which has no state
    }


def states_of(held: Mapping[str, Own]) -> dict[str, Any]:
    """Return the states of generators that are not global, by name."""
    return {name: _state_of(one) for name, one in held.items()}


def set_states(held: Mapping[str, Own], states: Mapping[str, Any]) -> None:
    """Set generators to what :func:`states_of` returned; those whose names are not there take the rest in order.

    One whose state is of another kind stays as it is, and a state for which there is none does nothing: some samplers
    make a generator each time that they begin.
    """
    there = [(one, states[name]) for name, one in held.items() if name in states]
    others = [one for name, one in held.items() if name not in states]
    rest = [state for name, state in states.items() if name not in held]
    for one, state in [*there, *zip(others, rest, strict=False)]:
        _set_state(one, state)


def _state_of(generator: Own) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, _tensor(np.array(words, dtype=np.uint32)), gauss]
    return _plain(_of_numpy(generator))


def _set_state(generator: Own, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        if isinstance(state, Tensor):
            generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        if isinstance(state, list):
            version, words, gauss = state
            generator.setstate((version, tuple(_words(words).tolist()), gauss))
    elif isinstance(state, dict):
        now = _of_numpy(generator)
        if state.keys() != now.keys() or state["bit_generator"] != now["bit_generator"]:
            return
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = _like(state, now)
        else:
            generator.set_state(_like(state, now))


def _of_numpy(generator: np.random.Generator | np.random.RandomState) -> dict[str, Any]:
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    return dict(generator.get_state(legacy=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return [int(one) for one in value]  # unsigned numbers of up to 64 bits, of which torch knows little
    return value.item() if isinstance(value, np.generic) else value


def _like(value: Any, now: Any) -> Any:
    """Return a plain value as what NumPy has in its place."""
    if isinstance(now, dict):
        return {name: _like(value[name], one) for name, one in now.items()}
    return np.array(value, dtype=now.dtype) if isinstance(now, np.ndarray) else value


def _tensor(words: Any) -> Tensor:
    return torch.from_numpy(words.view(np.int32).copy())  # unsigned tensors cannot be pickled


def _words(tensor: Tensor) -> Any:
    return tensor.cpu().numpy().view(np.uint32)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _where(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # which has but one
