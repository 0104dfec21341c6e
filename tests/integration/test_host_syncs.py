# SPDX-License-Identifier: Apache-2.0
"""What our hooks ask a device for: nothing between two decisions, and one copy for each (invariant 9)."""

from __future__ import annotations

from collections import Counter
from functools import wraps

import pytest
import torch
from models import Recorder, fit, loader
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_adabatch import AdaptiveBatchSize, Constant, GeoDamp, GradNormDamp, RadaDamp

#: What brings a tensor's values to the host, by the names that Python calls and by those that the dispatcher sees.
CALLS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero"}
KERNELS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero", "aten::is_nonzero"}


class Kernels(TorchDispatchMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in KERNELS:
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in CALLS:
            self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


# Those of every batch.
HOOKS = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
]


def watched(ours) -> tuple[Counter[str], list[int]]:
    """Count what the callback's hooks ask for from now on; return the counts, and their sum after each batch."""
    seen: Counter[str] = Counter()
    after: list[int] = []

    def watch(name, hook):
        @wraps(hook)
        def watching(*args, **kwargs):
            with Calls(seen), Kernels(seen):
                hook(*args, **kwargs)
            if name == "on_train_batch_end":
                after.append(seen.total())

        return watching

    for name in HOOKS:
        setattr(ours, name, watch(name, getattr(ours, name)))
    return seen, after


class Layers(Recorder):
    """Twenty parameters, one of them frozen, one of them sparse."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.more = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(9)]).to(dtype)
        self.more[0].weight.requires_grad_(requires_grad=False)
        self.words = torch.nn.Embedding(9, 4, sparse=True)

    def loss(self, x, y):
        dtype = self.more[1].weight.dtype
        return super().loss(self.more(x.to(dtype)).float() + self.words(y), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dwell", [1, 5, 100])
def test_one_copy_for_each_decision(dwell, dtype, tmp_path):
    """C64: of loss and norm nothing is looked at between decisions, whatever the parameters; a decision is one copy."""
    ours = AdaptiveBatchSize(RadaDamp(rho=0.5), dwell=dwell, max_batch_size=8)
    seen, after = watched(ours)
    fit(Layers(dtype), loader(80, 4), callbacks=[ours], epochs=-1, max_steps=20, root=tmp_path)
    copies = [now - before for before, now in zip([0, *after], after, strict=False)]
    assert copies == [int(update % dwell == 0) for update in range(1, 21)]
    assert set(seen) <= {"tolist"}
    assert ours.updates == 20


@pytest.mark.parametrize("policy", [Constant(), GeoDamp(2, 0.5)])
def test_rule_that_measures_nothing_looks_at_nothing(policy, tmp_path):
    """C64: without a measure there is no copy at all."""
    ours = AdaptiveBatchSize(policy)
    seen, after = watched(ours)
    fit(Layers(), loader(80, 4), callbacks=[ours], epochs=-1, max_steps=20, root=tmp_path)
    assert (seen, len(after)) == (Counter(), 20)


@pytest.mark.filterwarnings("ignore:AdaptiveBatchSize. no gradients were seen")
def test_what_is_counted_would_be_seen(tmp_path):
    """The count can fail: a hook that reads every parameter's norm is caught."""

    class Reads(AdaptiveBatchSize):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for parameter in pl_module.parameters():
                float(parameter.grad.norm())

    ours = Reads(GradNormDamp(), max_batch_size=4)
    seen, _ = watched(ours)
    fit(Recorder(), loader(8, 4), callbacks=[ours], epochs=1, root=tmp_path)
    assert seen["aten::_local_scalar_dense"] == 2 * 2
