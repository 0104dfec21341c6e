# SPDX-License-Identifier: Apache-2.0
"""Loss, gradient norm and learning rate in every precision and with every kind of gradient and optimizer.

Two oracles know nothing of the callback: a twin of the network in double precision, asked at the weights of each
batch; and a plain loop in torch over the same batches, with the learning rates worked out by hand.
"""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision
from models import Indexed, Listening, Recorder, Scripted, adapt, fit, loader, observe
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam

from lightning_adabatch import AdaptiveBatchSize, Constant

#: Asked for after each update, with a cap of 16: the learning rate is halved from the fourth update on.
SIZES, CAP = [8, 8, 16, 32, 32, 32], 16
FACTORS = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]


class Twinned(Recorder):
    """Notes for each batch what its loss and squared gradient norm are, by a twin in double precision."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.truth: list[tuple[float, float]] = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        twin = copy.deepcopy(self.net).double()
        for part in twin.modules():
            if isinstance(part, torch.nn.Embedding):
                part.sparse = False
        with torch.autocast("cpu", enabled=False):
            loss = self.loss_of(twin, x.double(), y, index)
        wanted = [p for p in twin.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        self.truth.append((loss.item(), sum(float(g.square().sum()) for g in grads if g is not None)))
        super().training_step(batch, batch_idx)
        return self.loss_of(self.net, x, y, index)

    def loss(self, x, y):
        return None  # loss_of stands in for it

    def loss_of(self, net, x, y, index):
        return cross_entropy(net(x), y)


class ByHand(Twinned):
    """Steps its optimizer itself."""

    def __init__(self, clip=None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip = clip

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clip is not None:
            self.clip_gradients(optimizer, self.clip, "norm")
        optimizer.step()


def listen(module, train=None, **kwargs):
    """Fit six updates; return the losses and squared norms that the policy was told."""
    policy = Listening(SIZES)
    ours = AdaptiveBatchSize(policy, max_batch_size=CAP)
    trainer = fit(module, train or loader(200, 8), callbacks=[ours], max_steps=6, **kwargs)
    assert module.sizes == [8, 8, 16, 16, 16, 16]
    assert ours.updates == 6
    assert [o.batch_size for o in policy.seen] == module.sizes
    return [(o.loss, o.grad_norm_sq) for o in policy.seen], trainer


def close(told, truth, rel):
    return all(one == pytest.approx(two, rel=rel) for one, two in zip(told, truth, strict=True))


def scaled():
    """Return what makes half precision with a gradient scaler on a CPU: Lightning's own flag does not."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4096.0))


@pytest.mark.parametrize(
    ("precision", "rel"), [("bf16-mixed", 0.05), ("bf16-true", 0.05), ("16", 0.01), ("64-true", 1e-6)]
)
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_precisions(manual, precision, rel, tmp_path):
    """C20: in every precision loss and norm are those of double precision at the same weights, to its accuracy."""
    module = ByHand() if manual else Twinned()
    flags = {"plugins": [scaled()]} if precision == "16" else {"precision": precision}
    told, _ = listen(module, root=tmp_path, **flags)
    assert close(told, module.truth, rel)
    assert [batch.lr for batch in module.batches] == [0.1 * factor for factor in FACTORS]


def test_own_clipping_comes_first(tmp_path):
    """Gradients that training_step itself clips before the step are measured as they step: clipped."""
    module = ByHand(clip=0.01)
    told, _ = listen(module, root=tmp_path)
    assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in module.truth], rel=1e-5)
    assert [norm for _, norm in told] == pytest.approx([0.01**2] * 6, rel=1e-3)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm, tmp_path):
    """C65: what is told is the gradient before clipping, by norm or by value; what is trained is the clipped one."""
    module = Twinned()
    clip = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    told, _ = listen(module, root=tmp_path, **clip)
    assert close(told, module.truth, 1e-5)
    clips = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}
    losses, _, net = by_hand(module, SGD, clips[algorithm])
    assert [loss for loss, _ in told] == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(module.net.weight, net.weight, atol=1e-6)


class Partly(Twinned):
    """The first layer is frozen, the second trains, the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), torch.nn.Linear(7, 7)])
        self.net[0].requires_grad_(requires_grad=False)

    def loss_of(self, net, x, y, index):
        return cross_entropy(net[1](net[0](x)), y)


def test_frozen_and_unused_parameters(tmp_path):
    """Parameters that are frozen, and parameters that got no gradient, add nothing to the norm and stay as they are."""
    module = Partly()
    before = copy.deepcopy(module.net)
    told, _ = listen(module, root=tmp_path)
    assert close(told, module.truth, 1e-5)
    assert torch.equal(module.net[0].weight, before[0].weight)
    assert torch.equal(module.net[2].weight, before[2].weight)
    assert not torch.equal(module.net[1].weight, before[1].weight)


class Sparse(Twinned):
    """An embedding with sparse gradients of five tokens: every batch of eight has some of them twice."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = torch.nn.Embedding(5, 2, sparse=True)

    def loss_of(self, net, x, y, index):
        return cross_entropy(net(index % 5), y)

    def on_after_backward(self):
        assert self.net.weight.grad.is_sparse
        assert self.net.weight.grad._nnz() == self.batches[-1].size  # one entry for each sample: nothing is summed yet

    def configure_optimizers(self):
        return self.make(self.parameters(), self.lr)


@pytest.mark.parametrize("make", [SGD, SparseAdam])
def test_sparse_gradients(make, tmp_path):
    """The norm of sparse gradients is that of dense ones: entries for the same row count as their sum."""
    module = Sparse(make)
    told, _ = listen(module, root=tmp_path)
    assert close(told, module.truth, 1e-5)
    assert [batch.lr for batch in module.batches] == [0.1 * factor for factor in FACTORS]


# Optimizers -----------------------------------------------------------------------------------------------


def by_hand(module, make, clip=None):
    """Train a fresh network in a plain loop on the batches of a module; return losses, squared norms, network."""
    data, net, losses, norms = Indexed(200), Recorder().net, [], []
    optimizer = make(net.parameters(), 0.1)
    for batch, factor in zip(module.batches, FACTORS, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * factor
        evaluated = []

        def closure(batch=batch, evaluated=evaluated):
            optimizer.zero_grad()
            loss = cross_entropy(net(data.x[batch.indices]), data.y[batch.indices])
            loss.backward()
            evaluated.append((loss.item(), sum(float(p.grad.square().sum()) for p in net.parameters())))
            if clip is not None:
                clip(net.parameters(), 0.02)
            return loss

        optimizer.step(closure)
        losses.append(evaluated[0][0])
        norms.append(evaluated[0][1])
    return losses, norms, net


def two_groups(parameters, lr):
    first, second = parameters
    return Adam([{"params": [first]}, {"params": [second]}], lr)


def plain(kind, **settings):
    return lambda parameters, lr: kind(parameters, lr, **settings)


def with_tensor(make):
    return lambda parameters, lr: make(parameters, torch.tensor(lr))


# What the module uses, and a plain one that does the same with a number as its learning rate.
OPTIMIZERS = {
    "SGD with momentum": (plain(SGD, momentum=0.9),) * 2,
    "SGD fused": (plain(SGD, momentum=0.9, fused=True), plain(SGD, momentum=0.9)),
    "Adam fused": (plain(Adam, fused=True), plain(Adam)),
    "AdamW foreach": (plain(AdamW, foreach=True), plain(AdamW, foreach=False)),
    "Adagrad": (plain(Adagrad),) * 2,
    "RMSprop": (plain(RMSprop),) * 2,
    "LBFGS": (plain(LBFGS, max_iter=3),) * 2,
    "SGD, tensor": (with_tensor(plain(SGD)), plain(SGD)),
    "Adam, tensor": (with_tensor(plain(Adam, foreach=False)), plain(Adam)),
    "Adam fused, tensor": (with_tensor(plain(Adam, fused=True)), plain(Adam)),
    "two groups, one tensor": (with_tensor(two_groups), two_groups),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_a_plain_loop(name, tmp_path):
    """Fused, foreach, with closures that are called again, with tensors as rates: a plain loop does the same."""
    make, plainly = OPTIMIZERS[name]

    class Net(Recorder):
        def configure_optimizers(self):
            optimizer = make(self.parameters(), self.lr)
            self.rates = [group["lr"] for group in optimizer.param_groups]
            return optimizer

        def training_step(self, batch, batch_idx):
            again = bool(self.batches) and self.batches[-1].indices == batch[2].tolist()
            loss = super().training_step(batch, batch_idx)
            if again:  # a closure that is called again belongs to the same update
                self.batches.pop()
            return loss

    module = Net()
    told, trainer = listen(module, root=tmp_path)
    losses, norms, net = by_hand(module, plainly)
    assert close(told, list(zip(losses, norms, strict=True)), 1e-4)
    assert torch.allclose(module.net.weight, net.weight, atol=1e-5)
    groups = trainer.optimizers[0].param_groups
    assert [float(group["lr"]) for group in groups] == [pytest.approx(0.1)] * len(groups)
    if isinstance(module.rates[0], torch.Tensor):
        assert all(group["lr"] is rate for group, rate in zip(groups, module.rates, strict=True))


class Unfreezes(BaseFinetuning):
    """Lets the first layer train from the second epoch on, as a parameter group of its own."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.below)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.below, optimizer, lr=0.3, initial_denom_lr=1.0)


class Deep(Recorder):
    """Two layers, of which the optimizer gets one; notes the rates and the norm of each step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.below = torch.nn.Linear(4, 4)
        self.steps: list[tuple[list[float], float]] = []

    def loss(self, x, y):
        return cross_entropy(self.net(self.below(x)), y)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        groups = optimizer.param_groups
        norm = sum(float(p.grad.square().sum()) for group in groups for p in group["params"])
        self.steps.append(([group["lr"] for group in groups], norm))

    def configure_optimizers(self):
        return SGD(self.net.parameters(), self.lr)


def test_group_that_is_added_in_mid_run(tmp_path):
    """A parameter group that a BaseFinetuning adds is measured, has the factor, and its own rate back in the end."""
    module, policy = Deep(), Listening([8, 16])
    ours = AdaptiveBatchSize(policy, max_batch_size=8)
    trainer = fit(module, loader(24, 8), callbacks=[ours, Unfreezes()], root=tmp_path)
    assert [rates for rates, _ in module.steps] == [[0.1], *[[0.05]] * 2, *[[0.05, 0.15]] * 3]
    assert [o.grad_norm_sq for o in policy.seen] == pytest.approx([norm for _, norm in module.steps], rel=1e-5)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.3]


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"])
def test_optimizers_that_are_replaced(hook, tmp_path):
    """Optimizers made anew in mid-run are followed: their steps count, their rates have the factor and lose it."""
    replaced = []

    class Net(Deep):
        def anew(self, *args):
            if self.current_epoch == 1 and not replaced:
                replaced.extend(self.trainer.optimizers)
                self.trainer.strategy.setup_optimizers(self.trainer)

    setattr(Net, hook, Net.anew)
    module, ours = Net(), adapt(8, 16, 16, 16, 32, max_batch_size=8)
    trainer = fit(module, loader(24, 8), callbacks=[ours], epochs=3, root=tmp_path)
    assert ours.updates == len(module.batches) == 9
    assert [rates for rates, _ in module.steps] == [[0.1], *[[0.05]] * 3, *[[0.025]] * 5]
    assert trainer.optimizers[0] is not replaced[0]
    for optimizer in (*trainer.optimizers, *replaced):
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert not optimizer._optimizer_step_post_hooks


def test_halves_of_many_parts_add_up(tmp_path):
    """In bf16-true the loss of an update of 512 parts is their mean: 1, where a sum of such halves ends at 1/2."""
    module = Scripted([1.0])
    ours = {"max_device_batch_size": 1, "min_batch_size": 512}
    ours, _ = observe(module, loader(512, 512), Listening([512]), ours=ours, precision="bf16-true", root=tmp_path)
    assert (ours.updates, len(module.batches)) == (1, 512)
    assert ours._controller.latest.loss == 1.0


@pytest.mark.parametrize("fused", [True, None])
def test_constant_is_neutral_with_tensors_as_rates(fused, tmp_path):
    """Invariant 7: with a tensor as the learning rate and a fused optimizer the weights are bitwise the plain run's."""

    class Net(Recorder):
        def configure_optimizers(self):
            return Adam(self.parameters(), torch.tensor(0.1), fused=fused)

    modules = [Net(), Net()]
    fit(modules[0], loader(40, 8), root=tmp_path)
    fit(modules[1], loader(40, 8), callbacks=[AdaptiveBatchSize(Constant())], root=tmp_path)
    assert torch.equal(modules[0].net.weight, modules[1].net.weight)
