# SPDX-License-Identifier: Apache-2.0
"""The state of the global generators: read, stored as plain data, and set again."""

from __future__ import annotations

import io
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_adabatch import generators


def draw():
    """Draw from every generator, in all the ways that touch its state."""
    return [
        *torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0.0, 1.0),
        random.getrandbits(40),
        *np.random.random(2).tolist(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
    ]


def move_on(torch_draws=0, python_draws=0, numpy_draws=0):
    """Draw from each generator some times."""
    torch.rand(torch_draws)
    for _ in range(python_draws):
        random.random()
    np.random.random(numpy_draws)  # noqa: NPY002


def seed(value):
    """Seed all three."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002


def through_a_file(state):
    """Return what another process reads of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_pickle(state):
    """Return what a process reads that was sent a state."""
    return pickle.loads(pickle.dumps(state))


#: Those that are not global, from a seed, and what draws from them.
OWN = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda one: torch.rand(3, generator=one).tolist()),
    "random": (random.Random, lambda one: [one.gauss(0.0, 1.0), one.random(), one.getrandbits(70)]),
    "RandomState": (np.random.RandomState, lambda one: [one.randn(), *one.random(2).tolist()]),
    **{
        kind: (
            lambda seed, kind=kind: np.random.Generator(getattr(np.random, kind)(seed)),
            lambda one: [*one.random(3).tolist(), *one.integers(0, 9, 3, dtype=np.uint32).tolist()],
        )
        for kind in ("PCG64", "MT19937", "Philox", "SFC64")
    },
}


class Holder:
    """Has one generator under its usual name and others beside it."""

    def __init__(self, **held):
        vars(self).update(held)


WAYS = [pytest.param(lambda state: state, id="as it is"), through_a_file, through_pickle]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_drawn_after_restore_is_what_was_drawn_after_capture(way):
    """Whatever was drawn and seeded in between, all three generators go on from the state that was captured."""
    seed(3)
    move_on(1, 2, 3)
    state = way(generators.capture())
    drawn = draw()
    seed(4)
    assert draw() != drawn
    generators.restore(state)
    assert draw() == drawn


@given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(0, 700)] * 3))
def test_any_position_is_kept(value, draws):
    """Any seed and any position, past the end of a generator's array of 624 words too."""
    was = generators.capture()
    seed(value)
    move_on(*draws)
    state = through_pickle(generators.capture())
    drawn = draw()
    generators.restore(was)
    generators.restore(state)
    assert draw() == drawn


@pytest.mark.parametrize("way", WAYS)
def test_the_second_half_of_a_pair_is_kept(way):
    """Normal numbers are made in pairs: the one that waits comes after the restore, in Python and in NumPy."""
    seed(3)
    random.gauss(0.0, 1.0)
    np.random.randn()  # noqa: NPY002
    state = way(generators.capture())
    waiting = random.gauss(0.0, 1.0), np.random.randn()  # noqa: NPY002
    seed(4)
    generators.restore(state)
    assert (random.gauss(0.0, 1.0), np.random.randn()) == waiting  # noqa: NPY002


def test_no_pair_is_invented():
    """Where no half waits, none does after the restore, though one did before."""
    seed(3)
    state = generators.capture()
    pairs = [(random.gauss(0.0, 1.0), np.random.randn()) for _ in range(2)]  # noqa: NPY002
    seed(4)
    random.gauss(0.0, 1.0)
    np.random.randn()  # noqa: NPY002
    generators.restore(state)
    assert [(random.gauss(0.0, 1.0), np.random.randn()) for _ in range(2)] == pairs  # noqa: NPY002


def test_capture_draws_nothing():
    """Reading the state leaves the generators as they are."""
    seed(3)
    expected = draw()
    seed(3)
    generators.capture()
    assert draw() == expected


def test_a_state_does_not_move_with_the_generators():
    """What was captured stays what it was while the generators go on, and when it is restored."""
    seed(3)
    state = generators.capture()
    copy = through_pickle(state)
    draw()
    generators.restore(state)
    draw()
    assert state["numpy"][0] == copy["numpy"][0] == "MT19937"
    assert torch.equal(state["torch"], copy["torch"])
    assert torch.equal(state["python"][1], copy["python"][1])
    assert torch.equal(state["numpy"][1], copy["numpy"][1])


@pytest.mark.parametrize("store", [torch.save, pickle.dump])
def test_a_state_is_small(store):
    """A state takes less than 20 KB in a file: a checkpoint has one for each rank and each pass."""
    file = io.BytesIO()
    store(generators.capture(), file)
    assert len(file.getvalue()) < 20_000


def test_a_cpu_has_no_generator_of_its_own():
    """For a run on the CPU the state is that of the three global generators, and restores as such."""
    seed(3)
    state = generators.capture(torch.device("cpu"))
    assert state.keys() == {"torch", "python", "numpy"}
    drawn = draw()
    generators.restore(state, torch.device("cpu"))
    assert draw() == drawn


def test_the_state_of_another_kind_of_device_is_left_alone():
    """A checkpoint of a run on a GPU restores on the CPU; what its device drew means nothing there."""
    seed(3)
    state = {**generators.capture(), "device": torch.zeros(16, dtype=torch.uint8)}
    drawn = draw()
    for device in (None, torch.device("cpu")):
        generators.restore(state, device)
        assert draw() == drawn


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_generator_of_a_gpu_is_kept():
    """What a GPU draws after the restore is what it drew after the capture."""
    device = torch.device("cuda", 0)
    state = through_a_file(generators.capture(device))
    drawn = torch.rand(4, device=device)
    generators.restore(state, device)
    assert torch.equal(torch.rand(4, device=device), drawn)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OWN)
def test_own_generators_come_back(kind, way):
    """A generator that is held by an object goes on where another one stood, in the middle of its buffers too."""
    make, draw_from = OWN[kind]
    first = generators.held_by(Holder(rng=make(1)))
    draw_from(first["rng"])
    state = way(generators.states_of(first))
    expected = draw_from(first["rng"]) + draw_from(first["rng"])
    second = generators.held_by(Holder(rng=make(2)))
    generators.set_states(second, state)
    assert draw_from(second["rng"]) + draw_from(second["rng"]) == expected


@pytest.mark.parametrize("kind", OWN)
def test_a_state_of_another_kind_is_left_alone(kind):
    """Nothing raises, and the generator draws what it would have drawn."""
    make, draw_from = OWN[kind]
    for other, (make_other, _) in OWN.items():
        if other != kind:
            held = generators.held_by(Holder(rng=make(3)))
            generators.set_states(held, generators.states_of({"rng": make_other(4)}))
            assert draw_from(held["rng"]) == draw_from(make(3)), other


def test_generators_are_known_by_name():
    """Names that are there take what is theirs, and the others the rest: a sampler may be inside of another one now."""
    held = generators.held_by(Holder(generator=random.Random(1), b=random.Random(2), c=random.SystemRandom(), d=5))
    assert list(held) == ["generator", "b"]
    states = generators.states_of({"b": random.Random(20), "elsewhere": random.Random(10), "gone": random.Random(30)})
    generators.set_states(held, states)
    assert held["b"].random() == random.Random(20).random()
    assert held["generator"].random() == random.Random(10).random()
