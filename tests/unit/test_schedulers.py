# SPDX-License-Identifier: Apache-2.0
"""Schedulers are known from the moment that they are made, while somebody watches, and torch is left as it was."""

from contextlib import contextmanager

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as schedules

from lightning_adabatch.schedulers import SchedulerWatch

KINDS = (
    schedules.LRScheduler,
    schedules.ReduceLROnPlateau,
    schedules.SequentialLR,
    schedules.ChainedScheduler,
)
MADE = {
    "StepLR": lambda o: [schedules.StepLR(o, 2)],
    "OneCycleLR": lambda o: [schedules.OneCycleLR(o, 0.1, 10)],
    "CyclicLR": lambda o: [schedules.CyclicLR(o, 0.1, 0.2, cycle_momentum=False)],
    "ReduceLROnPlateau": lambda o: [schedules.ReduceLROnPlateau(o)],
    "Own": lambda o: [Own(o)],
}


class Own(schedules.LRScheduler):
    """Of the user's."""

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def optimizer():
    """Return an optimizer of one group."""
    return SGD([torch.nn.Parameter(torch.ones(2))], 0.1)


@contextmanager
def entered(events):
    """Note when it is entered and left."""
    events.append("in")
    yield
    events.append("out")


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_told(name):
    """Once for each scheduler, after it was made in the context that was given."""
    events = []
    watch = SchedulerWatch(lambda: entered(events), events.append)
    watch.begin()
    made = MADE[name](optimizer())
    watch.end()
    assert events == ["in", "out", *made]
    MADE[name](optimizer())
    assert len(events) == 3


def test_what_is_made_of_others():
    """The parts, and the whole."""
    told = []
    watch = SchedulerWatch(lambda: entered([]), told.append)
    watch.begin()
    one = optimizer()
    parts = [schedules.ConstantLR(one), schedules.StepLR(one, 2)]
    whole = schedules.SequentialLR(one, parts, [3])
    chained = schedules.ChainedScheduler([schedules.StepLR(one, 3)])
    watch.end()
    assert told == [*parts, whole, chained._schedulers[0], chained]


def test_torch_is_left_as_it_was():
    """Also when several watch, in whichever order they end, and when a constructor raises."""
    before = [vars(kind)["__init__"] for kind in KINDS]
    one, two = (SchedulerWatch(lambda: entered([]), lambda scheduler: None) for _ in range(2))
    one.begin()
    two.begin()
    assert [vars(kind)["__init__"] for kind in KINDS] != before
    with pytest.raises(TypeError, match="not an Optimizer"):
        schedules.StepLR("no optimizer", 2)
    one.end()
    one.end()
    assert [vars(kind)["__init__"] for kind in KINDS] != before
    two.end()
    assert [vars(kind)["__init__"] for kind in KINDS] == before
