# SPDX-License-Identifier: Apache-2.0
"""Whatever is drawn, it either runs and keeps the invariants, or is refused before the first batch.

Drawn are the constructor's arguments, the Trainer's flags, the DataLoader, and how the module behaves. What each batch
has to be is worked out again here, from the dampings that the policy returned and the rules of the specification.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fuzzing import SLOW, never_hangs
from hypothesis import event, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, Sizes, loader, quiet
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_adabatch import (
    AdaptiveBatchSize,
    Constant,
    GeoDamp,
    GradNormDamp,
    Observation,
    Policy,
    Progress,
    RadaDamp,
    Schedule,
)
from lightning_adabatch.loader import ElasticLoader

LR = 0.1
REFUSALS = (TypeError, ValueError, MisconfigurationException)

# What is drawn ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script(Policy[None]):
    """Returns given dampings, the last one from then on, whatever they are."""

    dampings: list[Any]
    requires = frozenset()

    def damping(self, state: None, progress: Progress) -> float:
        return self.dampings[min(progress.updates, len(self.dampings) - 1)]


class Unmeasurable(Constant):
    """Asks for what nobody measures."""

    requires = frozenset({"loss", "accuracy"})


@dataclass(frozen=True)
class Noted(Policy[Any]):
    """Does what another policy does, and notes what was asked of it and what it answered."""

    inner: Policy[Any]
    calls: list[tuple[Progress, Any]] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "requires", self.inner.requires)

    def init(self) -> Any:
        return self.inner.init()

    def update(self, state: Any, observation: Observation) -> Any:
        self.seen.append(observation)
        return self.inner.update(state, observation)

    def damping(self, state: Any, progress: Progress) -> float:
        damping = self.inner.damping(state, progress)
        self.calls.append((progress, damping))
        return damping


class Order(Sampler):
    """Gives the indices that it was given."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


@dataclass
class Case:
    """One fit."""

    ours: dict[str, Any]
    flags: dict[str, Any]
    samples: int
    loader: dict[str, Any]
    validates: bool
    loss: str
    fails_from: int
    none_every: int
    scheduler: str
    reloads: bool
    trainer: Any = field(default=None, repr=False)

    @property
    def accumulate(self) -> int:
        return 1 if self.trainer is None else self.trainer.accumulate_grad_batches


JUNK = [None, True, False, 0, -1, 1.0, 2.5, math.nan, math.inf, -math.inf, "4", "none", [], {}, object(), 10**30, b"1"]

LEGAL: dict[str, list[Any]] = {
    "policy": [
        *[Sizes(sizes) for sizes in ([4, 8, 16], [8, 8, 3, 20, 5], [16, 16, 4], [1], [7, 5, 30, 30, 2, 9], [500])],
        Script([1.0, 0.3, 2.0, 1e-9, 5]),
        Script([1, math.nan, 3.0, 0.0, -2.0, math.inf, 1.5]),
        Script([math.inf, 10**400, True, 0.5]),
        GeoDamp(factor=2, delay=0.5),
        GeoDamp(factor=0.5, delay=0.3),
        Schedule({0: 4, 3: 12}),
        Schedule({0.5: 9, 1.5: 3}, unit="epochs"),
        Schedule({0: 8, 20: 24}, unit="samples"),
        Constant(),
        Constant(),
        RadaDamp(rho=0.5),
        RadaDamp(rho=0.0, grad_norm_weight=0, warmup=2),
        RadaDamp(rho=0.3, optimal_loss=-1.0),
        GradNormDamp(rho=0.2),
    ],
    "max_batch_size": [None, None, math.inf, 64, 64, 40, 16.0, 7, 2**62],
    "min_batch_size": [1, 1, 1, 1, 1, 1, 2, 4],
    "adapt": ["batch_size"] * 7 + ["lr"],
    "dwell": [1, 1, 1, 2, 3, 1000],
    "wait": [0, 0, 0, 1, 5],
    "multiple_of": [1, 1, 1, 1, 1, 1, 2, 4, 3],
    "max_device_batch_size": [None, None, None, None, 64, 8, 5, 1],
    "lr_scaling": ["none", "none", "linear", "sqrt"],
    "tail": [None, None, "keep", "carry", "drop"],
}

FLAGS: dict[str, list[Any]] = {
    "max_epochs": [1, 3, 3, 4, -1, 0],
    "min_epochs": [1, 3],
    "max_steps": [12, 5, 1, 12, 7, 15, -1, 0, -2],
    "limit_train_batches": [3, 5, 8, 100, 1, 0.5, 0.7, 0.77, 1.0, 0.9, 5, 8, 0, 0.3, 1.5],
    "limit_val_batches": [1, 1.0, 2, 1, 1.0, 0],
    "overfit_batches": [2, 4, 3, 1, 5, 0.7, 0.0],
    "val_check_interval": [0.5, 1, 2, 0.25, 0.7, 0.34, 1.0, 3, 10, 1.5],
    "check_val_every_n_epoch": [1, 2, 1, 2, 3, None],
    "fast_dev_run": [3, 5, 1, True, False, -1],
    "accumulate_grad_batches": [2, 3, 1],
    "gradient_clip_val": [0.1, 1, 0.1, 0],
    "gradient_clip_algorithm": ["norm", "value"],
    "reload_dataloaders_every_n_epochs": [1, 2],
    "num_sanity_val_steps": [0, 1, -1],
    "barebones": [True],
    "detect_anomaly": [True],
    "precision": ["bf16-mixed", "32-true"],
    "use_distributed_sampler": [False],
}

#: Flags that act on each other.
TOGETHER: list[list[str]] = [
    *[[]] * 4,
    ["limit_train_batches", "val_check_interval"],
    ["overfit_batches", "val_check_interval"],
    ["accumulate_grad_batches", "limit_train_batches", "max_steps"],
    ["reload_dataloaders_every_n_epochs", "max_epochs", "check_val_every_n_epoch", "val_check_interval"],
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A fit, of which most are legal."""
    ours = {name: draw(st.sampled_from(values)) for name, values in LEGAL.items()}
    if ours["adapt"] == "lr" and draw(st.integers(0, 3)):
        ours = {name: ours[name] for name in ("policy", "adapt", "dwell", "wait")}
    if draw(st.integers(0, 23)) == 23:
        ours[draw(st.sampled_from(sorted(LEGAL)))] = draw(st.sampled_from(JUNK))
    chosen = draw(st.lists(st.sampled_from(sorted(FLAGS)), max_size=4, unique=True)) + draw(st.sampled_from(TOGETHER))
    flags: dict[str, Any] = {"max_epochs": 2, **{name: draw(st.sampled_from(FLAGS[name])) for name in chosen}}
    if flags["max_epochs"] == -1 and flags.get("max_steps", -1) == -1:
        flags["max_steps"] = 9  # or it would never end
    samples = draw(st.integers(0, 60) | st.integers(8, 60))
    own: dict[str, Any] = {"batch_size": draw(st.sampled_from([4, 8, 8, 6, 3, 2, 1, 12, 64, 4, 8, 12]))}
    own["drop_last"] = draw(st.booleans())
    order = draw(
        st.sampled_from(["in order", "in order", "shuffle", "shuffle", "subset", "repeats", "batch_size=None"])
    )
    if order == "shuffle":
        own["shuffle"] = True
    elif order == "subset":
        own["sampler"] = Order([*range(0, samples, 2)])
    elif order == "repeats":
        own["sampler"] = Order([i // 2 for i in range(2 * samples)])
    elif order == "batch_size=None" and draw(st.booleans()):
        own = {"batch_size": None}
    return Case(
        ours,
        flags,
        samples,
        own,
        validates=draw(st.sampled_from([True, True, True, False])),
        loss=draw(st.sampled_from(["normal"] * 4 + ["nan", "nan gradient", "negative", "zero", "huge"])),
        fails_from=draw(st.integers(1, 8)),
        none_every=draw(st.sampled_from([0, 0, 0, 0, 2, 3, 1])),
        scheduler=draw(st.sampled_from(["none"] * 4 + ["epoch", "step", "one cycle", "plateau"])),
        reloads=draw(st.booleans()),
    )


class Module(Recorder):
    """A linear model whose losses, skipped batches and schedulers are as drawn."""

    def __init__(self, case: Case) -> None:
        super().__init__(lr=LR)
        self.case = case
        self.skips: list[bool] = []  # of each batch, whether training_step returned None

    def train_dataloader(self):
        return DataLoader(Indexed(self.case.samples), **self.case.loader)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        assert len(self.batches) < 1500, "it does not end"
        every = self.case.none_every
        self.skips.append(every > 0 and len(self.batches) % every == 0)
        return None if self.skips[-1] else loss

    def loss(self, x, y):
        loss = super().loss(x, y)
        if not self.training or len(self.batches) < self.case.fails_from:
            return loss
        return {
            "normal": loss,
            "nan": loss * math.nan,
            "nan gradient": loss + torch.sqrt(self.net.weight.sum() * 0.0),
            "negative": loss - 5.0,
            "zero": loss * 0.0,
            "huge": loss * 1e30,
        }[self.case.loss]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        made = {
            "none": lambda: None,
            "epoch": lambda: {"scheduler": StepLR(optimizer, 1, 0.5)},
            "step": lambda: {"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"},
            "one cycle": lambda: {"scheduler": OneCycleLR(optimizer, LR, total_steps=9), "interval": "step"},
            "plateau": lambda: {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"},
        }[self.case.scheduler]()
        return optimizer if made is None else {"optimizer": optimizer, "lr_scheduler": made}


# What happens -----------------------------------------------------------------------------------------


def run(case: Case, root: Any, callbacks: list[Any]) -> tuple[Module, Any, Any, Exception | None]:
    """Fit; return the module, the Trainer, the loader that was passed, and what was raised."""
    torch.manual_seed(7)
    module, trainer, train = Module(case), None, None
    try:
        if not case.reloads:
            train = module.train_dataloader()
        validation = loader(10, 4) if case.validates else None
        with never_hangs():
            trainer = quiet(callbacks, root=root, **case.flags)
            trainer.fit(module, train, validation)
    except (Exception, SystemExit) as error:  # what may be raised is for the caller to judge
        if isinstance(error, AssertionError):
            raise
        return module, trainer, train, error
    return module, trainer, train, None


def legal(name: str, value: Any) -> bool:
    """Whether the specification allows this argument, by itself."""
    number = isinstance(value, int) and not isinstance(value, bool)
    match name:
        case "policy":
            return value is None or (isinstance(value, Policy) and value.requires <= {"loss", "grad_norm_sq"})
        case "max_batch_size":
            whole = number or (isinstance(value, float) and (value == math.inf or value.is_integer()))
            return value is None or (whole and value >= 1)
        case "max_device_batch_size":
            return value is None or (number and value >= 1)
        case "wait":
            return number and value >= 0
        case "min_batch_size" | "dwell" | "multiple_of":
            return number and value >= 1
    choices = {
        "adapt": ("batch_size", "lr"),
        "lr_scaling": ("none", "linear", "sqrt"),
        "tail": (None, "keep", "carry", "drop"),
    }
    return isinstance(value, (str, type(None))) and value in choices[name]


def allowed(ours: dict[str, Any]) -> bool:
    """Whether these arguments are to be accepted."""
    if not all(legal(name, value) for name, value in ours.items()):
        return False
    if ours.get("max_batch_size") is not None and ours["max_batch_size"] < ours.get("min_batch_size", 1):
        return False
    without = {"max_batch_size": None, "min_batch_size": 1, "multiple_of": 1, "max_device_batch_size": None}
    without |= {"lr_scaling": "none", "tail": None}
    return ours.get("adapt") != "lr" or all(ours.get(name, value) == value for name, value in without.items())


def construct(ours: dict[str, Any]) -> AdaptiveBatchSize | None:
    """Return the callback, or None where its arguments are refused with a ValueError, as they must be."""
    if allowed(ours):
        return AdaptiveBatchSize(**ours)
    with pytest.raises(ValueError, match=r".+"):
        AdaptiveBatchSize(**ours)
    return None


# What has to happen -----------------------------------------------------------------------------------


@dataclass
class Due:
    """A batch, or one part of one, that has to come."""

    epoch: int
    size: int
    last: bool  # of the epoch
    factor: float
    update: int  # which update it is a part of, over the whole run


class Oracle:
    """What sections 4 and 6.3 make of the dampings that a policy returned."""

    def __init__(self, case: Case, trainer: Any, calls: list[tuple[Progress, Any]]) -> None:
        ours, own = case.ours, case.loader
        self.case, self.trainer, self.calls = case, trainer, calls
        self.own = own["batch_size"]
        self.initial = self.own * trainer.accumulate_grad_batches
        self.multiple = ours.get("multiple_of", 1)
        sampler = own.get("sampler")
        overfit = trainer.overfit_batches
        # Lightning overfits on the data in their order.
        self.data = case.samples if sampler is None or overfit else len(sampler)
        limit = trainer.limit_train_batches
        batches = self.data // self.own if own["drop_last"] else -(-self.data // self.own)
        self.batches = self.epoch = math.inf
        if isinstance(limit, float) and limit != 1.0:
            self.epoch = int(batches * limit) * self.own
        elif isinstance(limit, int) and overfit:
            self.epoch = limit * self.own
        elif isinstance(limit, int):
            self.batches = limit
        self.epoch = min(self.epoch, self.data)
        most = ours.get("max_batch_size")
        most = max(self.initial, self.data) if most is None else most
        self.cap = most if most == math.inf else int(most) // self.multiple * self.multiple
        self.floor = -(-ours.get("min_batch_size", 1) // self.multiple) * self.multiple
        self.tail = ours.get("tail") or ("drop" if own["drop_last"] else "keep")
        self.part = ours.get("max_device_batch_size") or (self.own if trainer.accumulate_grad_batches > 1 else None)

    @property
    def bounds_hold(self) -> bool:
        return self.initial % self.multiple == 0 and self.floor <= self.initial <= self.cap

    def decision(self, damping: float) -> tuple[int, float] | None:
        """Section 4: the batch size and the LR factor."""
        if not damping > 0:
            return None
        wanted = max(1, math.ceil(round(self.initial * min(damping, 1e12), 6)))
        if self.case.ours.get("adapt") == "lr":
            return self.initial, min(1.0, self.initial / wanted)
        rounded = -(-wanted // self.multiple) * self.multiple
        size = min(max(rounded, self.floor), self.cap)
        factor = self.cap / wanted if wanted > self.cap else 1.0
        if size > self.epoch:
            size = self.epoch // self.multiple * self.multiple or self.epoch
        growth = size / self.initial
        return size, factor * {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[self.case.ours["lr_scaling"]]

    def in_force(self) -> list[tuple[int, float]]:
        """The decision in force before each update."""
        answers = {progress.updates: damping for progress, damping in self.calls}
        now = self.decision(1.0)
        decisions = []
        for update in range(1501):
            now = (self.decision(answers[update]) if update in answers else None) or now
            decisions.append(now)
        return decisions

    def plan(self, skips: list[bool]) -> list[Due]:
        """All batches of the run; ``skips`` says which of them make no update."""
        decisions, due = self.in_force(), []
        epoch = carried = steps = updates = 0
        while epoch != self.trainer.max_epochs and steps != self.trainer.max_steps:
            left, handed, before = self.epoch + carried, 0, 0
            over = left == 0 or self.batches == 0
            while not over and steps != self.trainer.max_steps:
                size, factor = decisions[updates]
                if self.tail == "keep":
                    size = min(size, left)
                    if left - size == 1 and 1 < size != self.initial and handed + 1 != self.batches:
                        size += 1
                elif size > left:
                    size = before
                parts = 1 if self.part is None else -(-size // self.part)
                if parts > self.batches - handed:
                    parts = self.batches - handed
                    size = min(size, parts * self.part)
                left, before, handed, steps = left - size, size, handed + parts, steps + 1
                over = handed == self.batches or (left == 0 if self.tail == "keep" else left < size)
                rest = size
                for part in range(parts, 0, -1):
                    some = -(-rest // part)
                    rest -= some
                    due.append(Due(epoch, some, over and part == 1, factor, steps))
                updates += not (self.part is None and len(due) <= len(skips) and skips[len(due) - 1])
            epoch += 1
            reload = self.trainer.reload_dataloaders_every_n_epochs
            # The indices of one loader mean nothing to the next.
            kept = self.tail == "carry" and handed != self.batches and not (reload and epoch % reload == 0)
            carried = left if kept else 0
        return due

    def validates_in(self, epoch: int) -> bool:
        every = self.trainer.check_val_every_n_epoch
        return every is None or (epoch + 1) % every == 0

    def validations(self, due: list[Due]) -> list[int] | None:
        """After which batches validation has to come; None where only that each epoch has one is said."""
        interval = self.trainer.val_check_interval
        points, lengths = [], Counter(batch.epoch for batch in due)
        if isinstance(interval, float) and interval != 1.0:
            return None
        index = 0
        for number, batch in enumerate(due, 1):
            index = index + 1 if number > 1 and due[number - 2].epoch == batch.epoch else 1
            if isinstance(interval, float):
                comes = batch.last
            elif self.trainer.check_val_every_n_epoch is None:
                comes = number % interval == 0
            else:
                comes = index % interval == 0 or (batch.last and lengths[batch.epoch] < interval)
            if comes and self.validates_in(batch.epoch):
                points.append(number)
        return points


def check_decisions(case: Case, note: Noted, oracle: Oracle, updates: int, module: Module) -> None:
    """Decisions come when they are due, once each, and the policy is told where it stands."""
    dwell, wait = case.ours["dwell"], case.ours["wait"]
    due = [k for k in range(updates + 1) if k % dwell == 0 and k >= wait]
    made = [progress.updates for progress, _ in note.calls]
    if not note.requires:
        assert made == due
    elif case.loss in ("normal", "negative", "zero"):  # all that is measured is finite
        assert made == [k for k in due if k > 0]
        assert len(note.seen) == max(made, default=0)
    else:
        assert made == [k for k in due if made and k >= made[0]]
    for progress, _ in note.calls:
        assert progress.initial_batch_size == oracle.initial
        assert progress.epochs == progress.samples / oracle.data
    for observation in note.seen:
        assert all(math.isfinite(value or 0.0) for value in (observation.loss, observation.grad_norm_sq))


def check_run(case: Case, ours: AdaptiveBatchSize, note: Noted, module: Module, trainer: Any) -> str:
    """Check the invariants of a run that came to its end."""
    oracle = Oracle(case, trainer, note.calls)
    batches, sizes = module.batches, module.sizes
    mixed = oracle.part is not None and any(module.skips)  # parts of which some have no loss
    assert ours.samples == sum(sizes)
    assert ours.epochs == ours.samples / oracle.data
    if case.ours.get("adapt") != "lr":
        due = oracle.plan(module.skips) if not mixed else None
        assert max(sizes) <= oracle.cap + 1
        if oracle.part is not None:
            assert max(sizes) <= oracle.part
        if due is not None:
            assert sizes == [batch.size for batch in due]
            assert [batch.epoch for batch in batches] == [batch.epoch for batch in due]
            assert [batch.last for batch in batches] == [batch.last for batch in due]
            assert all(batch.planned == module.sizes_in(batch.epoch).__len__() for batch in batches if batch.last)
            if oracle.part is None:
                assert ours.updates == module.skips.count(False)
            else:
                assert ours.updates == due[-1].update == trainer.global_step
            check_validations(case, oracle, module, due)
            if case.scheduler == "none":
                rates = [LR * batch.factor for batch in due]
                assert all(
                    math.isclose(batch.lr, rate, rel_tol=1e-9) for batch, rate in zip(batches, rates, strict=True)
                )
        if oracle.tail == "keep" and isinstance(limit := trainer.limit_train_batches, float) and limit == 1.0:
            indices = case.loader["sampler"].order if "sampler" in case.loader and not trainer.overfit_batches else None
            expected = Counter(range(case.samples) if indices is None else indices)
            for epoch in {batch.epoch for batch in batches if batch.last}:
                assert module.seen_in(epoch) == expected
    else:
        decisions = oracle.in_force()
        made, windows = 0, trainer.accumulate_grad_batches > 1
        assert ours.updates == (trainer.global_step if windows else module.skips.count(False))
        for batch, skipped in () if windows else zip(batches, module.skips, strict=True):
            if case.scheduler == "none":
                assert math.isclose(batch.lr, LR * decisions[made][1], rel_tol=1e-9)
            made += not skipped
    check_decisions(case, note, oracle, ours.updates, module)
    return "trained"


def check_validations(case: Case, oracle: Oracle, module: Module, due: list[Due]) -> None:
    """Validation comes where it has to."""
    if not case.validates or oracle.trainer.limit_val_batches == 0:
        assert module.validations == []
        return
    points = oracle.validations(due)
    if points is not None:
        assert module.validations == points
        return
    for epoch in {batch.epoch for batch in due if batch.last}:
        numbers = [number for number, batch in enumerate(due, 1) if batch.epoch == epoch]
        count = sum(numbers[0] <= point <= numbers[-1] for point in module.validations)
        assert (count > 0) == oracle.validates_in(epoch)


def check_against_plain(case: Case, root: Any, module: Module, trainer: Any, note: Noted) -> None:
    """Where neither size nor learning rate moved, it is the run of plain Lightning, bit for bit."""
    oracle = Oracle(case, trainer, note.calls)
    lr_moves_alone = case.ours.get("adapt") == "lr"
    own_tail = "drop" if case.loader["drop_last"] else "keep"
    moved = {oracle.decision(damping) or (oracle.initial, 1.0) for _, damping in note.calls} - {(oracle.initial, 1.0)}
    if not lr_moves_alone and (
        moved or oracle.part is not None or oracle.tail != own_tail or oracle.initial > oracle.epoch
    ):
        return
    plain, _, _, error = run(case, root, [])
    if error is not None:
        return

    def what(batch):
        return batch.epoch, batch.indices, batch.planned, batch.last, None if moved else batch.lr

    assert [what(batch) for batch in module.batches] == [what(batch) for batch in plain.batches]
    assert module.validations == plain.validations
    if not moved:
        assert torch.equal(torch.nan_to_num(module.net.weight), torch.nan_to_num(plain.net.weight))
    event("the run of plain Lightning")


def check_given_back(case: Case, trainer: Any, train: Any) -> None:
    """The loader, the schedulers and the learning rate are the user's again (invariant 8)."""
    if train is not None:
        kept = (train.batch_size, train.drop_last, len(train.dataset))
        assert kept == (case.loader["batch_size"], case.loader.get("drop_last", False), case.samples)
        assert type(train.batch_sampler) in (BatchSampler, type(None))
    made = trainer.fit_loop._combined_loader
    assert made is None or not any(isinstance(one, ElasticLoader) for one in made.flattened)
    for owner, name in ((trainer.strategy, "process_dataloader"), (trainer.fit_loop, "setup_data")):
        assert name not in vars(owner)
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_post_hooks
        if case.scheduler == "none":
            assert [group["lr"] for group in optimizer.param_groups] == [LR]
    for config in trainer.lr_scheduler_configs:
        assert type(config.scheduler) in (StepLR, OneCycleLR, ReduceLROnPlateau)
        last = config.scheduler.get_last_lr()
        assert case.scheduler == "plateau" or [g["lr"] for g in config.scheduler.optimizer.param_groups] == last


def refused_by_us(case: Case, trainer: Any) -> bool:
    """Whether this set-up has to be refused at the start of the fit, if training starts at all."""
    if case.ours.get("adapt") == "lr":
        return False
    if case.loader["batch_size"] is None:
        return True
    if case.samples == 0:
        return True
    return not Oracle(case, trainer, []).bounds_hold


def check(case: Case, root: Any) -> str:
    """Run one case, see the promise kept, and return how it ended."""
    ours = dict(case.ours)
    if construct(ours) is None:
        return "arguments refused"
    note = Noted(ours.get("policy") or RadaDamp())
    callback = AdaptiveBatchSize(**{**ours, "policy": note})
    module, trainer, train, error = run(case, root, [callback])
    if trainer is not None:
        check_given_back(case, trainer, train)
    if error is None:
        if callback.batch_size is None:
            assert module.batches == []
            return "nothing to train"
        assert module.batches
        assert not refused_by_us(case, trainer)
        check_run(case, callback, note, module, trainer)
        check_against_plain(case, root, module, trainer, note)
        return "trained"
    if isinstance(error, MisconfigurationException) and "AdaptiveBatchSize" in str(error):
        assert module.batches == []
        assert refused_by_us(case, trainer)
        return "set-up refused"
    if "nan values" in str(error) and case.flags.get("detect_anomaly"):
        return "Lightning raises"  # later than in the plain run, if that has fewer updates
    plain, _, _, expected = run(case, root, [])
    if expected is None and plain.batches == [] and case.loader.get("drop_last"):
        case.loader["drop_last"] = False  # the plain run skips an epoch that would be empty, and ours is not
        _, _, _, expected = run(case, root, [])
    assert type(expected) is type(error), (error, expected)
    return "Lightning raises"


@pytest.mark.filterwarnings("ignore")
def test_arguments():
    """Section 8: arguments are accepted, or refused with a ValueError and nothing else; never changed in silence."""
    policies = [RadaDamp, Unmeasurable(), "RadaDamp", Schedule({0: 3}), lambda: 1.0]
    arguments = st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from(values) | st.sampled_from([*values, *JUNK, *(policies if name == "policy" else [])])
            for name, values in LEGAL.items()
        },
    )
    ended: Counter[bool] = Counter()

    @settings(max_examples=200, suppress_health_check=SLOW)
    @given(arguments)
    def fuzz(ours):
        ended[construct(ours) is None] += 1

    fuzz()
    assert min(ended[True], ended[False]) > 40


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fits(tmp_path):
    """Every fit keeps the invariants to its end, or is refused before its first batch; a third of them train."""
    ended: Counter[str] = Counter()

    @settings(max_examples=300, suppress_health_check=SLOW)
    @given(cases())
    def fuzz(case):
        how = check(case, tmp_path)
        event(how)
        ended[how] += 1

    fuzz()
    assert ended["trained"] >= sum(ended.values()) / 3, ended


FOUND = {
    "overfitting in smaller batches": {"policy": Sizes([8, 4]), "overfit_batches": 4},
    "overfitting in parts": {"policy": Constant(), "max_device_batch_size": 4, "overfit_batches": 3},
    "a limited epoch that got shorter": {
        "policy": Sizes([8, 52]),
        "limit_train_batches": 6,
        "val_check_interval": 0.5,
    },
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("ignore")
def test_found(name, tmp_path):
    """Faults that drawing found, or that are too rare to be drawn, each by itself."""
    ours = {arg: values[0] for arg, values in LEGAL.items()} | {"min_batch_size": 1, "adapt": "batch_size"}
    ours |= {arg: value for arg, value in FOUND[name].items() if arg in LEGAL}
    flags = {"max_epochs": 2} | {flag: value for flag, value in FOUND[name].items() if flag in FLAGS}
    own = {"batch_size": 8, "drop_last": False}
    case = Case(ours, flags, 60, own, True, "normal", 3, 0, "none", reloads=False)
    assert check(case, tmp_path) == "trained"
