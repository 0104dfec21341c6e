# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the package is met by a row of a table: here, in ``test_guards.py`` or in ``test_settings.py``.

The rows are run, and what they say is compared with every message that the source can raise.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import pytorch_lightning.demos.boring_classes
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceXLAStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, Streamed, adapt, fit, loader, quiet
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import lightning_adabatch
from lightning_adabatch import AdaDamp, AdaptiveBatchSize, GeoDamp, NormTest, RadaDamp, guards, loader_guards

SOURCE = Path(lightning_adabatch.__file__).parent
TESTS = Path(__file__).parents[1]


class Manual(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Rare(Recorder):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": 2}]


class Fused(Recorder):
    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1, fused=True)


class Hybrid(FSDPStrategy):
    """Stands for a strategy that needs two GPUs, as far as it is looked at."""

    def __init__(self) -> None:
        self.sharding_strategy = torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD


@dataclass(frozen=True)
class BadRequires(RadaDamp):
    """Asks in a list."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "requires", ["loss"])


# Set-ups --------------------------------------------------------------------------------------------------


def two_callbacks(root):
    trainer = quiet([adapt(4)], root=root)
    trainer.callbacks.append(adapt(8))
    trainer.fit(Recorder(), loader(8, 4))


def no_accumulation(root):
    trainer = quiet([adapt(4)], root=root)
    trainer.accumulate_grad_batches = 0
    trainer.fit(Recorder(), loader(8, 4))


def hybrid_sharding(root):
    trainer = quiet([adapt(4)], root=root)
    trainer._accelerator_connector.strategy = Hybrid()
    guards.check_trainer(trainer, AdaptiveBatchSize)


def one_tpu(root):
    trainer = quiet([adapt(4)], root=root)
    trainer._accelerator_connector.strategy = object.__new__(
        SingleDeviceXLAStrategy
    )  # none can be made without its package
    guards.check_trainer(trainer, AdaptiveBatchSize)


def another_package(root):
    trainer = pytorch_lightning.Trainer(default_root_dir=root, accelerator="cpu", logger=False, max_epochs=1)
    trainer.callbacks.append(adapt(4))
    trainer.fit(pytorch_lightning.demos.boring_classes.BoringModel())


def fused_under_a_scaler(root):
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit(Fused(), loader(8, 4), callbacks=[adapt(4)], plugins=[half], root=root)


def parts_by_hand(root):
    fit(Manual(), loader(8, 4), callbacks=[adapt(4, max_device_batch_size=4)], root=root)


def parts_and_frequency(root):
    fit(Rare(), loader(8, 4), callbacks=[adapt(4, max_device_batch_size=4)], root=root)


class Grouped:
    def __init__(self) -> None:
        self.batch_size = 4

    def __iter__(self):
        order = list(range(8))
        while order:
            group, order = order[: self.batch_size], order[self.batch_size :]
            yield group


class Settled(Grouped):
    """Makes its batches before it is asked for them."""

    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6, 7]])


class Ahead(Grouped):
    """Makes its batches when it is asked for the first one; the first ones are not full."""

    def __iter__(self):
        return iter([[0, 1, 2], [3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]])


class Single(Grouped):
    """Gives one sample at a time, whatever it is told."""

    def __init__(self) -> None:
        self.batch_size = 1

    def __iter__(self):
        return iter([[index] for index in range(8)])


class Short(DataLoader):
    """Says that it has fewer batches than it gives."""

    def __len__(self):
        return 2


class Words:
    """A loader of its own, of batches that do not say how large they are."""

    def __iter__(self):
        return iter([object(), object()])


def by_groups(root, **kwargs):
    fit(Recorder(), DataLoader(Indexed(8), batch_sampler=Grouped()), callbacks=[adapt(4, **kwargs)], root=root)


def parts_and_lbfgs(root):
    class Quasi(Recorder):
        def configure_optimizers(self):
            return LBFGS(self.parameters(), 0.1)

    fit(Quasi(), loader(8, 4), callbacks=[adapt(4, max_device_batch_size=4)], root=root)


def parts_of_a_static_graph(root):
    trainer = quiet([adapt(4)], root=root)
    trainer.strategy.connect(Recorder())
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)  # a whole one needs a process group
    torch.nn.Module.__init__(wrapped)
    wrapped.static_graph = True
    trainer.strategy.model = wrapped
    guards.check_parts(trainer)


def another_accumulation(root):
    class Accumulates(Recorder):
        def on_train_epoch_start(self):
            self.trainer.accumulate_grad_batches = 1 + self.current_epoch

    fit(Accumulates(), loader(8, 4), callbacks=[adapt(4)], root=root)


def scaled_steps_that_nobody_sees(root):
    class Wrapped(SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Module(Recorder):
        def configure_optimizers(self):
            optimizer = Wrapped(self.parameters(), 0.1)
            del Wrapped.step.hooked  # as if Optimizer.__init__ had not run
            return optimizer

    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit(Module(), loader(8, 4), callbacks=[adapt(4)], plugins=[half], root=root)


def no_learning_rate(root):
    class Without(Recorder):
        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), 0.1)
            optimizer.param_groups[0]["lr"] = None
            return optimizer

    fit(Without(), loader(8, 4), callbacks=[adapt(4, max_batch_size=8)], root=root)


def closure_again(root):
    class Twice(SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    class Module(Recorder):
        def configure_optimizers(self):
            return Twice(self.parameters(), 0.1)

    fit(Module(), loader(8, 4), callbacks=[adapt(4, max_device_batch_size=2)], root=root)


def cap_below_the_ranks(root):
    AdaptiveBatchSize(max_batch_size=1).settings.limits(8, 100, 100, ranks=2)


def ranks_that_differ(root):
    del root
    loader_guards.check_ranks([{"batch size": [4]}, {"batch size": [6]}])


def groups_that_do_not_follow(root):
    fit(Recorder(), DataLoader(Indexed(8), batch_sampler=Settled()), callbacks=[adapt(4, 8)], root=root)


def groups_made_ahead(root):
    fit(Recorder(), DataLoader(Indexed(16), batch_sampler=Ahead()), callbacks=[adapt(4, 8)], root=root)


def groups_of_single_samples(root):
    fit(Recorder(), DataLoader(Indexed(8), batch_sampler=Single()), callbacks=[adapt(1, 8)], root=root)


def length_of_its_own(root):
    fit(Recorder(), Short(Indexed(16), 4), callbacks=[adapt(4, 8)], root=root)


def groups_that_are_accumulated(root):
    train = DataLoader(Indexed(8), batch_sampler=Grouped())
    fit(Recorder(), train, callbacks=[adapt(8, 16)], accumulate_grad_batches=2, root=root)


def groups_that_are_carried(root):
    by_groups(root, tail="carry")


def groups_on_two_ranks(root):
    del root
    loader_guards.check_loader(DataLoader(Indexed(8), batch_sampler=Grouped()), adapt(4).settings, ranks=2)


def stream_that_is_carried(root):
    ours = adapt(4, tail="carry", max_batch_size=8)
    fit(Recorder(), DataLoader(Streamed(8), 4), callbacks=[ours], root=root)


def stream_in_epochs(root):
    ours = AdaptiveBatchSize(GeoDamp(2, 1), max_batch_size=8)
    fit(Recorder(), DataLoader(Streamed(8), 4), callbacks=[ours], root=root)


def batches_without_a_size(root):
    fit(Recorder(), Words(), callbacks=[adapt(4, adapt="lr")], root=root)


class OwnLoader(DataLoader):
    def __iter__(self):
        return super().__iter__()


def follows_variance(root, module=None, train=None, **kwargs):
    settings = kwargs.pop("settings", {})
    ours = AdaptiveBatchSize(NormTest(), **settings)
    fit(module or Recorder(), train or loader(8, 4), callbacks=[ours], root=root, **kwargs)


def variance_by_hand(root):
    follows_variance(root, Manual())


def variance_of_shards(root):
    ours = adapt(4).settings
    trainer = quiet(root=root)
    trainer.strategy.connect(Recorder())
    trainer._accelerator_connector.strategy = sharded_strategy(trainer)
    guards.check_variance(trainer, ours, 1)


def variance_of_whole_batches(root):
    follows_variance(root, settings={"adapt": "lr"})


def variance_of_several_loaders(root):
    follows_variance(root, train=[loader(8, 4), loader(8, 4)])


def variance_and_frequency(root):
    follows_variance(root, Rare())


def variance_of_single_samples(root):
    follows_variance(root, train=loader(8, 1))


def evaluates(root, module=None, train=None, **kwargs):
    ours = AdaptiveBatchSize(AdaDamp(), max_batch_size=8) if not kwargs else AdaptiveBatchSize(AdaDamp(), **kwargs)
    fit(module or Recorder(), loader(8, 4) if train is None else train, callbacks=[ours], root=root)


def evaluated_by_hand(root):
    evaluates(root, Manual())


def evaluated_shards(root):
    trainer = quiet(root=root)
    trainer.strategy.connect(Recorder())
    trainer._accelerator_connector.strategy = sharded_strategy(trainer)
    guards.check_evaluation(trainer, AdaptiveBatchSize(AdaDamp()).settings, [loader(8, 4)])


def sharded_strategy(trainer):
    strategy = object.__new__(FSDPStrategy)
    strategy._lightning_module = trainer.strategy._lightning_module
    return strategy


def evaluated_loaders(root):
    evaluates(root, train=[loader(8, 4), loader(8, 4)])


def evaluated_loader_of_its_own(root):
    evaluates(root, train=OwnLoader(Indexed(8), 4), adapt="lr")


def evaluated_batches(root):
    evaluates(root, train=DataLoader(Indexed(8), batch_size=None), adapt="lr")


def evaluated_stream(root):
    evaluates(root, train=DataLoader(Streamed(8), 4))


def empty(root):
    fit(Recorder(), loader(0, 4), callbacks=[adapt(4)], root=root)


def resume(root, before, after, *, steps=1):
    """Train with one callback, or none, up to an update, and go on with another."""
    trainer = fit(Recorder(), loader(16, 4), callbacks=before, epochs=-1, max_steps=steps, root=root)
    trainer.save_checkpoint(root / "cut.ckpt")
    quiet(after, root=root).fit(Recorder(), loader(16, 4), ckpt_path=root / "cut.ckpt")


def resume_without_our_state(root):
    resume(root, [], [adapt(4)])


def resume_with_another_policy(root):
    resume(root, [adapt(4)], [AdaptiveBatchSize(RadaDamp())])


def resume_in_mid_epoch_of_adapt_lr(root):
    resume(root, [adapt(4, adapt="lr")], [adapt(4)])


SETUPS: dict[Any, str] = {
    two_callbacks: "does not support two AdaptiveBatchSize callbacks in one Trainer. What to do: keep one of them.",
    no_accumulation: "Trainer(accumulate_grad_batches=0). What to do: set accumulate_grad_batches=1.",
    hybrid_sharding: "FSDPStrategy(sharding_strategy='HYBRID_SHARD'). What to do: set sharding_strategy='FULL_SHARD'",
    another_package: "does not support the Trainer of pytorch_lightning, another package than lightning with classes "
    "of its own. What to do: write 'import lightning.pytorch as pl' wherever pytorch_lightning is imported.",
    one_tpu: "does not support SingleDeviceXLAStrategy. What to do: train on one device, or with strategy='ddp'",
    fused_under_a_scaler: "gradients where nobody sees them. What to do: set fused=False in the optimizer, or use",
    parts_by_hand: "max_device_batch_size with manual optimization. What to do: remove max_device_batch_size.",
    parts_and_frequency: "a frequency other than 1 together with micro-batches. What to do: set frequency=1 in",
    parts_and_lbfgs: "LBFGS with updates of several micro-batches: it evaluates the last of them again, and the",
    parts_of_a_static_graph: "DDPStrategy(static_graph=True) with updates of several micro-batches. What to do: leave",
    another_accumulation: "trainer.accumulate_grad_batches=2, which was 1 when the fit began. What to do: give it to",
    scaled_steps_that_nobody_sees: "Wrapped, which did not run Optimizer.__init__, with a gradient scaler: whether it",
    no_learning_rate: "SGD without a learning rate of its own, which past max_batch_size would be lowered. What to do",
    closure_again: "evaluates its closure more than once per step (SAM, LBFGS) together with updates of several micro",
    cap_below_the_ranks: "max_batch_size=1 is below 2, the smallest multiple of multiple_of=1 * 2 ranks. Set max_",
    ranks_that_differ: "train loaders whose batch size is another one on each rank (4, 6): all ranks make the same",
    groups_that_do_not_follow: "the batch sampler Settled, whose batches stay as they are when its batch_size is set",
    groups_made_ahead: "the batch sampler Ahead, whose batches stay as they are when its batch_size is set",
    groups_of_single_samples: "the batch sampler Single, whose batches stay as they are when its batch_size is set",
    length_of_its_own: "Short, which overrides __len__: it cannot change the batch size of it. What to do: use a plain",
    groups_that_are_accumulated: "the batch sampler Grouped with accumulate_grad_batches: its batch_size need not be",
    groups_that_are_carried: "tail='carry' with the batch sampler Grouped, which says itself what becomes of the rest",
    groups_on_two_ranks: "the batch sampler Grouped on 2 ranks: only it knows how many batches of which size",
    stream_that_is_carried: "tail='carry' with the iterable data set Streamed",
    stream_in_epochs: "training data without a length in samples with GeoDamp(factor=2, delay=1), which counts",
    batches_without_a_size: "the train loader Words: neither it nor its batch, a object, says how many samples",
    variance_by_hand: "which follows the variance of gradients, with manual optimization. What to do: use a policy",
    variance_of_shards: "with FSDPStrategy: no rank sees the gradients of its own samples. What to do: use strategy=",
    variance_of_whole_batches: "and updates of one batch each, which is left whole. What to do: set Trainer",
    variance_of_several_loaders: "which follows the variance of gradients, with several train loaders. What to do: use",
    variance_and_frequency: "with a scheduler with a frequency other than 1. What to do: set frequency=1 in configure",
    variance_of_single_samples: "needs two samples per rank, and the initial batch size is 1. Set batch_size=2",
    evaluated_by_hand: "which measures full_loss on the training set, with manual optimization: its training_step",
    evaluated_shards: "on the training set, with FSDPStrategy. What to do: use strategy='ddp', or use a policy that",
    evaluated_loaders: "on the training set, with several train loaders. What to do: use a policy that does without",
    evaluated_loader_of_its_own: "with the train loader OwnLoader. What to do: use a plain DataLoader, or use a policy",
    evaluated_batches: "with DataLoader(batch_size=None). What to do: set a batch_size in the DataLoader, and let the",
    evaluated_stream: "with the iterable data set Streamed. What to do: use a map-style data set, or use a policy that",
    empty: "an empty Indexed: there is nothing to train on. What to do: give it samples.",
    resume_without_our_state: "a checkpoint that was written without it: batch size, averages and counts are not there",
    resume_with_another_policy: "What to do: resume with the policy that the checkpoint was written with, or load the",
    resume_in_mid_epoch_of_adapt_lr: "this checkpoint, written in the middle of an epoch with adapt='lr'. What to do:",
}


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.__name__)
def test_setup_is_refused(setup, tmp_path):
    """A set-up that cannot work is refused at the start of the fit, with what it is and what to do."""
    with pytest.raises(MisconfigurationException, match=re.escape(SETUPS[setup])):
        setup(tmp_path)


# Every message --------------------------------------------------------------------------------------------


def pattern(node: ast.expr) -> str:
    """Return a regular expression for what an expression of a message can be."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern(part) for part in node.values)
    return "(.*)"


def messages_of(path: Path) -> Iterator[tuple[int, str]]:
    """Return line and pattern of everything that a file refuses."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "refuse":
            what, remedy = (pattern(argument) for argument in node.args)
            yield node.lineno, rf"AdaptiveBatchSize does not support {what}\. What to do: {remedy}\."
        elif path.name == "settings.py" and name in {"MisconfigurationException", "ValueError"}:
            yield node.lineno, pattern(node.args[0])


def said(*, root: Path) -> list[str]:
    """Run every row of every table, and return what was said."""
    rows = runpy.run_path(str(TESTS / "integration" / "test_guards.py"))
    arguments = runpy.run_path(str(TESTS / "unit" / "test_settings.py"))
    refused = rows["refused"]
    heard = []
    for make, match in rows["LOADERS"].values():
        heard.append(refused(match, train=make(), root=root))
    for make, settings, flags, match in rows["SEVERAL"].values():
        ours = AdaptiveBatchSize(GeoDamp(2, 9), **settings)
        heard.append(refused(match, train=make(), ours=ours, root=root, **flags))
    for name, make in rows["CALLBACKS"].items():
        module = type("Net", (Recorder,), {"batch_size": 4, "train_dataloader": lambda _: loader(8, 4)})
        heard.append(refused(name, module=module(), callbacks=[make()], root=root))
    for kind, match in rows["MODULES"].values():
        heard.append(refused(match, module=kind(), train=loader(8, 4), root=root))
    for settings, match in rows["BOUNDS"].values():
        heard.append(refused(match, train=loader(8, 4), ours=AdaptiveBatchSize(**settings), root=root))
    for setup in SETUPS:
        with pytest.raises(MisconfigurationException) as caught:
            setup(root)
        heard.append(str(caught.value))
    for settings in [*(settings for settings, _ in arguments["REFUSED"]), {"policy": BadRequires()}]:
        with pytest.raises(ValueError, match=r"\.") as wrong:
            AdaptiveBatchSize(**settings)
        heard.append(str(wrong.value))
    return heard


@pytest.mark.filterwarnings("ignore")
def test_every_refusal_is_met(tmp_path):
    """Whatever the source refuses, with each of its messages, is refused to some row of a table."""
    heard = said(root=tmp_path)
    unmet, count = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for line, expected in messages_of(path):
            count += 1
            if not any(re.fullmatch(expected, message, re.DOTALL) for message in heard):
                unmet.append(f"{path.name}:{line}: {expected}")
    assert unmet == []
    assert count >= 30
    assert all(re.search(r"What to do: |Set |Change |must be |Raise |Remove |Take ", message) for message in heard)
