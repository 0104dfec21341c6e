# SPDX-License-Identifier: Apache-2.0
"""Whatever kind of data is drawn, with whatever flags: a run that keeps the invariants, or a refusal before it begins.

``test_fuzz.py`` draws arguments and flags for ordinary loaders; here streams, samplers without a length, batch
samplers, several loaders and loaders of other kinds are drawn.
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
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, Sizes, Stated, Streamed, loader, quiet
from torch.utils.data import DataLoader, Sampler

from lightning_adabatch import AdaptiveBatchSize, Constant, GeoDamp, Policy, RadaDamp, Schedule
from lightning_adabatch.loader import ElasticLoader


class Unsized(Sampler):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(torch.randperm(self.samples).tolist())


class Grouped:
    """Groups of the size that it has when each is asked for."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def __iter__(self):
        order = list(range(self.samples))
        while order:
            group, order = order[: self.batch_size], order[self.batch_size :]
            yield group


class SizedGroups(Grouped):
    def __len__(self) -> int:
        return int(-(-self.samples // self.batch_size))


class Batches:
    """No DataLoader."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.loader = loader(samples, batch_size)

    def __iter__(self):
        return iter(self.loader)


@dataclass
class Case:
    """One fit."""

    kind: str
    samples: int
    batch_size: int
    drop_last: bool
    workers: int
    ours: dict[str, Any]
    flags: dict[str, Any]
    validates: bool
    second: int = 0  # samples of a second loader
    trainer: Any = field(default=None, repr=False)

    def data(self) -> Any:
        """Return new loaders."""
        n, size = self.samples, self.batch_size
        more = {"num_workers": self.workers}
        plain = {**more, "drop_last": self.drop_last}
        groups = [list(range(i, min(i + 4, n))) for i in range(0, n, 4)]
        single = {
            "stream": lambda: DataLoader(Streamed(n), size, **plain),
            "stated": lambda: DataLoader(Stated(n, n), size, **plain),
            "stated wrongly": lambda: DataLoader(Stated(n, max(1, n // 3)), size, **plain),
            "unsized": lambda: loader(n, size, sampler=Unsized(n), **plain),
            "groups": lambda: DataLoader(Indexed(n), batch_sampler=Grouped(n, size), **more),
            "sized groups": lambda: DataLoader(Indexed(n), batch_sampler=SizedGroups(n, size), **more),
            "list of batches": lambda: DataLoader(Indexed(n), batch_sampler=groups),
            "no loader": lambda: Batches(n, size),
        }
        if self.kind in single:
            return single[self.kind]()
        pair = {"a": loader(n, size, **plain), "b": loader(self.second, size + 1, shuffle=True, **plain)}
        return pair if self.kind == "dict" else CombinedLoader(pair, self.kind)


MODES = ["dict", "min_size", "max_size_cycle", "max_size", "sequential"]
KINDS = ["stream", "stated", "stated wrongly", "unsized", "groups", "sized groups", "list of batches", "no loader"]
POLICIES = [
    *[Sizes(sizes) for sizes in ([4, 8, 16], [8, 8, 3, 20, 5], [16, 4], [7, 5, 30, 30, 2, 9], [500])],
    GeoDamp(factor=2, delay=0.5),
    Schedule({0: 8, 20: 24}, unit="samples"),
    Constant(),
    RadaDamp(rho=0.5),
]
OURS = {
    "policy": POLICIES,
    "max_batch_size": [64, 64, 40, math.inf, None],
    "adapt": ["batch_size"] * 5 + ["lr"],
    "dwell": [1, 1, 2],
    "wait": [0, 0, 3],
    "max_device_batch_size": [None, None, None, 5],
    "tail": [None, None, None, "keep", "drop", "carry"],
}
FLAGS = {
    "max_epochs": [1, 2, 3],
    "max_steps": [7, 12],
    "limit_train_batches": [3, 6, 1.0, 0.5],
    "overfit_batches": [2],
    "val_check_interval": [2, 3, 50, 1.0, 0.5],
    "check_val_every_n_epoch": [2, None],
    "accumulate_grad_batches": [2],
    "reload_dataloaders_every_n_epochs": [1],
    "fast_dev_run": [True, 3],
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A fit."""
    kind = draw(st.sampled_from([*KINDS, *KINDS, *MODES]))
    ours = {name: draw(st.sampled_from(values)) for name, values in OURS.items()}
    if ours["adapt"] == "lr":
        ours = {name: ours[name] for name in ("policy", "adapt", "dwell", "wait")}
    chosen = draw(st.lists(st.sampled_from(sorted(FLAGS)), max_size=2, unique=True))
    flags = {"max_epochs": 2, **{name: draw(st.sampled_from(FLAGS[name])) for name in chosen}}
    workers = draw(st.sampled_from([0] * 11 + [2]))
    sizes = draw(st.integers(1, 60)), draw(st.sampled_from([4, 8, 3, 1])), draw(st.integers(1, 40))
    samples, batch_size, second = sizes
    return Case(kind, samples, batch_size, draw(st.booleans()), workers, ours, flags, draw(st.booleans()), second)


class Module(Recorder):
    """Records the first loader's part of each batch, and that validation comes."""

    def training_step(self, batch, batch_idx):
        first = batch["a"] if isinstance(batch, dict) else batch
        assert len(self.batches) < 1000, "it does not end"
        if first is None:  # of a loader that has ended
            return self.net.weight.sum() * 0.0
        return super().training_step(first, batch_idx)


def run(case: Case, root: Any, callbacks: list[Any]) -> tuple[Module, Any, Any, Exception | None]:
    """Fit; return the module, the Trainer, the data, and what was raised."""
    torch.manual_seed(7)
    module, trainer, train = Module(), None, case.data()
    try:
        with never_hangs(60):
            trainer = quiet(callbacks, root=root, **case.flags)
            trainer.fit(module, train, loader(8, 4) if case.validates else None)
    except (Exception, SystemExit) as error:
        if isinstance(error, AssertionError):
            raise
        return module, trainer, train, error
    return module, trainer, train, None


def check_run(case: Case, ours: AdaptiveBatchSize, module: Module, trainer: Any) -> None:
    """Check what must hold of every run, whatever its data."""
    batches = module.batches
    assert ours.samples == sum(module.sizes)
    assert ours.updates == trainer.global_step
    if ours.settings.adapt == "lr":
        return
    several = case.kind in MODES
    cap = ours.max_batch_size
    if cap is not None:
        assert max(module.sizes) <= cap + 1
    if case.ours["max_device_batch_size"]:
        assert max(module.sizes) <= case.ours["max_device_batch_size"]
    ended = {batch.epoch for batch in batches if batch.last}
    if not several:
        assert sum(batch.last for batch in batches) == len(ended)
        for epoch in ended:  # the last one is the last one, and its count is right then
            last = [batch for batch in batches if batch.epoch == epoch]
            assert last[-1].last
            assert last[-1].planned == len(last)
    limited = {"limit_train_batches", "overfit_batches", "fast_dev_run"} & set(case.flags)
    drops = case.drop_last and "groups" not in case.kind
    tail = case.ours["tail"] or ("drop" if drops else "keep")
    if not limited and not several and tail != "carry":  # what is carried comes once more in the next epoch
        for epoch in ended:
            seen = module.seen_in(epoch)
            assert max(seen.values()) == 1
            if tail == "keep":
                assert len(seen) == case.samples
    check_validations(case, module, trainer, ended)


def check_validations(case: Case, module: Module, trainer: Any, ended: set[int]) -> None:
    """Each epoch that came to its end validated, at its end where nothing else is asked for."""
    if not case.validates or trainer.check_val_every_n_epoch != 1 or case.kind in MODES:
        return
    for epoch in ended:
        numbers = [number for number, batch in enumerate(module.batches, 1) if batch.epoch == epoch]
        points = [point for point in module.validations if numbers[0] <= point <= numbers[-1]]
        interval = trainer.val_check_interval
        if isinstance(interval, int) and interval <= len(numbers):
            assert points == [numbers[0] - 1 + interval * k for k in range(1, len(numbers) // interval + 1)]
        elif interval in {1.0, 50}:
            assert points == [numbers[-1]]
        else:
            assert points


def check_given_back(case: Case, trainer: Any, train: Any) -> None:
    """Loaders, and the size of a batch sampler, are the user's again."""
    combined = trainer.fit_loop._combined_loader
    assert combined is None or not any(isinstance(one, ElasticLoader) for one in combined.flattened)
    if "groups" in case.kind:
        assert train.batch_sampler.batch_size == case.batch_size
    for owner, name in ((trainer.strategy, "process_dataloader"), (trainer.fit_loop, "setup_data")):
        assert name not in vars(owner)


def check(case: Case, root: Any) -> str:
    """Run one case, see the promise kept, and return how it ended."""
    ours = AdaptiveBatchSize(**case.ours)
    module, trainer, train, error = run(case, root, [ours])
    if trainer is not None:
        check_given_back(case, trainer, train)
    if error is None:
        if module.batches:
            check_run(case, ours, module, trainer)
        return "trained" if module.batches else "nothing to train"
    if isinstance(error, MisconfigurationException) and "AdaptiveBatchSize" in str(error):
        assert module.batches == []
        assert "What to do: " in str(error) or "Change batch_size" in str(error)
        return "refused"
    _, _, _, expected = run(case, root, [])
    # Where a plain run would have an epoch without a batch, it trains nothing, and ours has one batch to take a share of.
    empty = case.drop_last and isinstance(error, MisconfigurationException) and expected is None
    assert empty or type(expected) is type(error), (error, expected)
    assert module.batches == []
    return "Lightning raises"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fits(tmp_path):
    """Every kind of data trains with the invariants kept, or is refused before the first batch."""
    ended: Counter[str] = Counter()
    trained: Counter[str] = Counter()

    @settings(max_examples=300, suppress_health_check=SLOW)
    @given(cases())
    def fuzz(case):
        how = check(case, tmp_path)
        event(how)
        ended[how] += 1
        trained[case.kind] += how == "trained"

    fuzz()
    assert ended["trained"] >= sum(ended.values()) / 3, ended
    never = {"sequential"}
    assert {kind for kind in [*KINDS, *MODES] if not trained[kind]} <= never | {"list of batches", "no loader"}, trained


def test_policies_are_policies():
    """What is drawn is what the callback takes."""
    assert all(isinstance(policy, Policy) for policy in POLICIES)
