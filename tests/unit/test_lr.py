# SPDX-License-Identifier: Apache-2.0
"""The factor on learning rates: multiplies whatever schedulers say, never compounds, and goes without a trace."""

import copy
import math
from itertools import cycle, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lightning_adabatch.lr import LRFactor, planned_steps
from lightning_adabatch.schedulers import SchedulerWatch

STEPS = 40

SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, 5, 0.5),
    "MultiStepLR": lambda o: MultiStepLR(o, [3, 4, 20], 0.5),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 0.8 if step % 3 else 1.1),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 15),
    "LinearLR": lambda o: LinearLR(o, 0.1, 1.0, 12),
    "ConstantLR": lambda o: ConstantLR(o, 0.25, 7),
    "PolynomialLR": lambda o: PolynomialLR(o, 30, 2.0),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.5, total_steps=STEPS + 1),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.5, 4),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 6, 2),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=2, factor=0.3, min_lr=0.004),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 5), CosineAnnealingLR(o, 10)], [6]),
    "ChainedScheduler": lambda o: ChainedScheduler([ConstantLR(o, 0.5, 8), ExponentialLR(o, 0.9)]),
}
ANY_SCHEDULER = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
FACTORS = [1.0, 0.5, 0.5, 0.3, 1.0, 0.1, 1e-12, 0.7, 1.0, 1.0, 3.0]


def parameter():
    """Return a parameter with a gradient."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 0.1)
    return weight


def optimizer(*, tensor=False):
    """Return an optimizer of two groups with learning rates 0.1 and 0.02."""

    def rate(value):
        return torch.tensor(value, dtype=torch.float64) if tensor else value

    groups = [{"params": [parameter()], "lr": rate(0.1)}, {"params": [parameter()], "lr": rate(0.02)}]
    return SGD(groups, lr=0.1, momentum=0.9)


def rates(*optimizers):
    """Return the learning rates that the groups show."""
    return [float(group["lr"]) for opt in optimizers for group in opt.param_groups]


def advance(opt, scheduler):
    """Take a step of both; the loss that a plateau scheduler sees does not improve."""
    opt.step()
    scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


def close(left, right):
    """Whether two lists of learning rates are equal to 1e-8, relative."""
    return all(math.isclose(a, b, rel_tol=1e-8, abs_tol=0.0) for a, b in zip(left, right, strict=True))


def takes_tensors(make):
    """Whether a scheduler of torch's does with tensors, in place, what it does with numbers: not so in old releases.

    With torch 2.6 ReduceLROnPlateau puts numbers in their place, and SequentialLR ends at 0.
    """
    alone, plain = optimizer(tensor=True), optimizer()
    objects = [group["lr"] for group in alone.param_groups]
    schedulers = make(alone), make(plain)
    for _ in range(STEPS):
        advance(alone, schedulers[0])
        advance(plain, schedulers[1])
    kept = all(group["lr"] is lr for group, lr in zip(alone.param_groups, objects, strict=True))
    return kept and close(rates(alone), rates(plain))


def assert_is_a_multiple_of_the_plain_run(make, factors, *, tensor):
    """Run with and without the factor, and compare the learning rates at each step."""
    if tensor and not takes_tensors(make):
        return
    plain, used = optimizer(), optimizer(tensor=tensor)
    plain_scheduler, scheduler = make(plain), make(used)
    objects = [group["lr"] for group in used.param_groups]
    factor = LRFactor([used])
    factor.guard(scheduler)
    for value in islice(cycle(factors), STEPS):
        factor.set(value)
        factor.refresh()
        assert close(rates(used), [rate * value for rate in rates(plain)])
        assert math.isclose(factor.base, rates(plain)[0], rel_tol=1e-8)
        advance(plain, plain_scheduler)
        advance(used, scheduler)
    assert close(rates(used), [rate * factor.factor for rate in rates(plain)])
    factor.release()
    assert close(rates(used), rates(plain))
    if tensor:
        assert all(group["lr"] is lr for group, lr in zip(used.param_groups, objects, strict=True))
    advance(plain, plain_scheduler)
    advance(used, scheduler)
    assert close(rates(used), rates(plain))


@ANY_SCHEDULER
def test_learning_rate_is_that_of_the_plain_run_times_the_factor(make):
    """Under any scheduler each step's learning rate is the plain run's times the factor of that step."""
    assert_is_a_multiple_of_the_plain_run(make, FACTORS, tensor=False)


@pytest.mark.parametrize("name", ["StepLR", "LambdaLR", "CosineAnnealingLR", "ReduceLROnPlateau", "SequentialLR"])
def test_tensor_learning_rates_change_in_place(name):
    """A learning rate that is a tensor stays the same object, with the same values as a number would have."""
    assert_is_a_multiple_of_the_plain_run(SCHEDULERS[name], FACTORS, tensor=True)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULERS)),
    st.lists(st.just(1.0) | st.floats(1e-9, 10.0), min_size=1, max_size=12),
    st.booleans(),
)
def test_any_factors_under_any_scheduler(name, factors, tensor):
    """No sequence of factors leaves anything behind in the learning rates of a later step."""
    assert_is_a_multiple_of_the_plain_run(SCHEDULERS[name], factors, tensor=tensor)


@pytest.mark.parametrize("name", ["StepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR", "ReduceLROnPlateau"])
def test_a_constant_factor_does_not_compound(name):
    """After 40 steps at factor 0.5 the learning rate is half the plain one, not 0.5⁴⁰ of it; at factor 1 it is back."""
    plain, used = optimizer(), optimizer()
    schedulers = SCHEDULERS[name](plain), SCHEDULERS[name](used)
    factor = LRFactor([used])
    factor.guard(schedulers[1])
    for _ in range(STEPS):
        factor.set(0.5)
        advance(plain, schedulers[0])
        advance(used, schedulers[1])
    assert rates(used) == [rate * 0.5 for rate in rates(plain)]
    factor.set(1.0)
    assert rates(used) == rates(plain)


def test_without_a_scheduler():
    """The factor is on all groups of all optimizers, and 1 brings the base back, bit for bit."""
    first, second = optimizer(), Adam([parameter()], lr=0.3)
    factor = LRFactor([first, second])
    for value in (0.1, 1 / 3, 0.7):
        factor.set(value)
        assert rates(first, second) == [0.1 * value, 0.02 * value, 0.3 * value]
        assert factor.base == 0.1
    factor.set(1.0)
    assert rates(first, second) == [0.1, 0.02, 0.3]


@pytest.mark.parametrize("was", [None, 0.5])
def test_a_factor_of_one_writes_nothing(was):
    """As long as the factor is 1, also after it was another, the learning rates are not touched at all."""
    opt = optimizer(tensor=True)
    factor = LRFactor([opt])
    if was is not None:
        factor.set(was)
        factor.set(1.0)
    versions = [group["lr"]._version for group in opt.param_groups]
    factor.set(1.0)
    factor.refresh()
    with factor.off():
        pass
    factor.release()
    assert [group["lr"]._version for group in opt.param_groups] == versions


def test_value_of_a_tensor_learning_rate_is_never_looked_at():
    """Nothing but ``base`` asks a device for a learning rate: a tensor that has no value will do."""
    opt = optimizer()
    nothing = torch.zeros((), device="meta")
    opt.param_groups[0]["lr"] = nothing
    factor = LRFactor([opt])
    factor.set(0.5)
    factor.refresh()
    with factor.off():
        factor.bases(opt)
    factor.release()
    assert opt.param_groups[0]["lr"] is nothing
    assert opt.param_groups[1]["lr"] == 0.02
    with pytest.raises(RuntimeError, match="meta tensor"):
        _ = factor.base


@pytest.mark.parametrize("tensor", [False, True])
def test_an_assigned_learning_rate_is_the_new_base(tensor):
    """What is assigned while the factor is on is multiplied from then on, and given back in the end."""
    opt = optimizer(tensor=tensor)
    factor = LRFactor([opt])
    factor.set(0.5)
    if tensor:
        opt.param_groups[0]["lr"].fill_(0.8)
    else:
        opt.param_groups[0]["lr"] = 0.8
    assert factor.base == 0.8
    factor.refresh()
    assert rates(opt) == [0.4, 0.01]
    factor.refresh()
    assert rates(opt) == [0.4, 0.01]
    factor.set(0.25)
    assert rates(opt) == [0.2, 0.02 * 0.25]
    factor.release()
    assert rates(opt) == [0.8, 0.02]


def test_a_tensor_that_is_replaced_is_the_new_base():
    """Another tensor put in a group's place counts as assigned, even when it shows the same value and was as busy."""
    opt = optimizer(tensor=True)
    factor = LRFactor([opt])
    factor.set(0.5)
    shown = opt.param_groups[0]["lr"]
    opt.param_groups[0]["lr"] = shown.clone()
    while opt.param_groups[0]["lr"]._version < shown._version:
        opt.param_groups[0]["lr"] += 0.0
    factor.refresh()
    assert rates(opt) == [0.1 * 0.5 * 0.5, 0.02 * 0.5]
    assert factor.base == 0.1 * 0.5


def test_a_learning_rate_assigned_while_the_factor_is_off_is_the_new_base():
    """Inside ``off`` the base is shown and can be changed; afterwards the factor is on again, after an error too."""
    opt = optimizer()
    factor = LRFactor([opt])
    factor.set(0.5)

    def assign():
        with factor.off():
            assert rates(opt) == [0.1, 0.02]
            opt.param_groups[1]["lr"] = 0.6
            raise LookupError("in between")

    with pytest.raises(LookupError, match="in between"):
        assign()
    assert rates(opt) == [0.05, 0.3]
    assert factor.factor == 0.5


def test_groups_added_later():
    """A group that is added while the factor is on gets it at the next refresh, and its own rate back in the end."""
    opt = optimizer()
    factor = LRFactor([opt])
    factor.set(0.5)
    opt.add_param_group({"params": [parameter()], "lr": 0.4})
    assert rates(opt) == [0.05, 0.01, 0.4]
    factor.refresh()
    assert rates(opt) == [0.05, 0.01, 0.2]
    assert factor.bases(opt) == [0.1, 0.02, 0.4]
    factor.release()
    assert rates(opt) == [0.1, 0.02, 0.4]


def test_a_loaded_state_is_the_new_base():
    """Learning rates that come with an optimizer's loaded state are multiplied like assigned ones."""
    opt = optimizer()
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 0.9
    factor = LRFactor([opt])
    factor.set(0.5)
    opt.load_state_dict(state)
    factor.refresh()
    assert rates(opt) == [0.45, 0.01]


@pytest.mark.parametrize("value", [1.0, 0.5])
def test_bases_for_a_checkpoint_are_copies(value):
    """The learning rates for a checkpoint are without the factor, and writing to them changes nothing."""
    opt = optimizer(tensor=True)
    factor = LRFactor([Adam([parameter()], lr=7.0), opt])
    factor.set(value)
    bases = factor.bases(opt)
    assert [base.item() for base in bases] == [0.1, 0.02]
    for base in bases:
        base.zero_()
    assert rates(opt) == [0.1 * value, 0.02 * value]
    factor.release()
    assert rates(opt) == [0.1, 0.02]


@ANY_SCHEDULER
def test_scheduler_is_given_back(make):
    """A guarded scheduler is of its own class still, has the same state, and gets its very class back."""
    plain, opt = optimizer(), optimizer()
    plain_scheduler, scheduler = make(plain), make(opt)
    original, keys = type(scheduler), list(vars(scheduler))
    factor = LRFactor([opt])
    factor.guard(scheduler)
    factor.guard(scheduler)
    factor.set(0.5)
    assert type(scheduler).__bases__ == (original,)
    assert (type(scheduler).__name__, type(scheduler).__module__) == (original.__name__, original.__module__)
    advance(plain, plain_scheduler)
    advance(opt, scheduler)
    assert list(vars(scheduler)) == keys
    assert repr(scheduler.state_dict()) == repr(plain_scheduler.state_dict())
    factor.release()
    assert type(scheduler) is original
    assert "step" not in vars(scheduler)
    factor.release()
    assert rates(opt) == rates(plain)


class Halving(LRScheduler):
    """A scheduler of the user's with a step of its own."""

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, *, times=1):
        super().step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5**times
        return "stepped"


def test_scheduler_of_the_users():
    """A scheduler with a ``step`` of its own is called as before: its arguments arrive, its result comes back."""
    opt = optimizer()
    scheduler = Halving(opt)
    start = rates(opt)  # its own constructor steps once
    factor = LRFactor([opt])
    factor.guard(scheduler)
    factor.set(0.1)
    opt.step()
    assert scheduler.step(times=2) == "stepped"
    assert rates(opt) == [rate * 0.25 * 0.1 for rate in start]


def test_scheduler_that_raises_leaves_the_factor_on():
    """When a step raises, the factor is back on the groups."""

    def rate(step):
        if step > 2:
            raise ValueError("no further")
        return 1 / (1 + step)

    opt = optimizer()
    scheduler = LambdaLR(opt, rate)
    factor = LRFactor([opt])
    factor.guard(scheduler)
    factor.set(0.5)
    for _ in range(2):
        advance(opt, scheduler)
    before = rates(opt)
    with pytest.raises(ValueError, match="no further"):
        scheduler.step()
    assert rates(opt) == before
    factor.release()
    assert rates(opt) == [rate / 0.5 for rate in before]


def test_one_cycle_is_held_at_its_end():
    """C19: past the steps that it was planned for, ``OneCycleLR`` keeps its final LR instead of raising."""
    opt, plain = optimizer(), optimizer()
    factor = LRFactor([opt])
    held, last = (OneCycleLR(one, 0.5, total_steps=4) for one in (opt, plain))
    factor.guard(held)
    for _ in range(3):
        advance(plain, last)
    for _ in range(9):
        advance(opt, held)
    assert rates(opt) == rates(plain)
    advance(plain, last)
    assert rates(opt) < rates(plain)
    with pytest.raises(ValueError, match="Tried to step"):
        advance(plain, last)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda o: OneCycleLR(o, 0.5, total_steps=4), 4),
        (lambda o: CosineAnnealingLR(o, 7), 7),
        (lambda o: PolynomialLR(o, 9), 9),
        (lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 5)], [2]), 7),
        (lambda o: SequentialLR(o, [CosineAnnealingLR(o, 5), StepLR(o, 3)], [4]), 4),  # and then for ever
        (lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), StepLR(o, 3)], [2]), None),
        (lambda o: SequentialLR(o, [LinearLR(o, 0.1), LambdaLR(o, lambda k: 1 / (1 + k))], [2]), math.inf),
        (lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 5), PolynomialLR(o, 4)]), 5),
        (lambda o: LinearLR(o, 1.0, 0.1, total_iters=6), 6),
        (lambda o: SequentialLR(o, [CosineAnnealingLR(o, 5)], []), 5),
        (lambda o: LambdaLR(o, lambda k: 1 - k / 9), math.inf),
        (lambda o: StepLR(o, 3), None),
        (lambda o: LinearLR(o, 0.1, total_iters=2), None),  # a warm-up
    ],
)
def test_planned_steps(make, steps):
    """Schedules that are planned in steps are known, also as parts of others."""
    assert planned_steps(make(optimizer())) == steps


def test_a_rate_that_is_assigned_counts_also_if_it_is_what_was_shown():
    """A schedule of the user's that falls as the factor does: both count."""
    opt = optimizer()
    factor = LRFactor([opt])
    factor.set(0.5)
    shown = opt.param_groups[0]["lr"]
    opt.param_groups[0]["lr"] = shown  # put back what was read
    factor.refresh()
    assert opt.param_groups[0]["lr"] == shown
    opt.param_groups[0]["lr"] = float(str(shown))  # another number, which is equal
    factor.refresh()
    assert opt.param_groups[0]["lr"] == 0.5 * shown
    factor.release()
    assert opt.param_groups[0]["lr"] == shown


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_state_that_was_written_down_holds_the_base(tensor, tmp_path):
    """A user's own snapshot of the optimizer, taken under one factor and loaded under another: none compounds."""
    opt = optimizer(tensor=tensor)
    base = [float(group["lr"]) for group in opt.param_groups]
    factor = LRFactor([opt])
    factor.set(0.5)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    assert rates(opt) == [lr * 0.5 for lr in base]
    for now in (0.5, 0.25, 2.0, 1.0):
        factor.set(now)
        taken = copy.deepcopy(opt.state_dict())
        assert [float(group["lr"]) for group in taken["param_groups"]] == base
        assert rates(opt) == [lr * now for lr in base]
        for state in (taken, torch.load(tmp_path / "state.pt")):
            opt.load_state_dict(state)
            factor.refresh()
            assert rates(opt) == [lr * now for lr in base]
    factor.release()
    assert rates(opt) == base
    assert not opt._optimizer_state_dict_post_hooks


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("earlier", [False, True], ids=["first", "second"])
@ANY_SCHEDULER
def test_a_scheduler_that_is_made_while_the_factor_is_on(make, earlier, tensor):
    """It reads its first learning rates off the groups, and must not take the factor for a part of them."""
    if tensor and not takes_tensors(make):
        pytest.skip("this release of torch does something else with tensors")
    plain, used = optimizer(), optimizer(tensor=tensor)
    if earlier:  # which says what later ones begin with
        StepLR(plain, 100), StepLR(used, 100)
    factor = LRFactor([used])
    factor.set(0.25)
    plain_scheduler = make(plain)
    watch = SchedulerWatch(factor.off, factor.guard)
    watch.begin()
    scheduler = make(used)
    watch.end()
    for value in (0.25, 0.25, 0.5, 2.0, 1.0, 0.25):
        factor.set(value)
        assert close(rates(used), [rate * value for rate in rates(plain)])
        advance(plain, plain_scheduler)
        advance(used, scheduler)
    factor.release()
    assert close(rates(used), rates(plain))
