# SPDX-License-Identifier: Apache-2.0
"""Sums over the gradients of single samples, by one backward pass for each as the oracle."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_adabatch.diversity import SampleGradients


class Loss(nn.Module):
    """A network of two layers, and what is registered beside it."""

    def __init__(self, more=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        if more is not None:
            more(self)

    def forward(self, batch):
        """Return the mean loss."""
        x, y = batch
        return (self.net(x).mean(1) - y).square().mean()


def twice(module):
    """Register a layer under a second name, and normalization too."""
    module.head = module.net[2]
    module.net.append(nn.BatchNorm1d(4).eval())
    module.norm = module.net[3]


def tied(module):
    """Share a weight between two layers."""
    module.net.append(nn.Linear(4, 4))
    module.net[3].weight = module.net[2].weight


def frozen(module):
    """Leave a layer as it is."""
    module.net[0].requires_grad_(False)


KINDS = {"plain": None, "twice": twice, "listed": lambda m: setattr(m, "all", nn.ModuleList([m.net])), "tied": tied}
KINDS["frozen"] = frozen


def samples(number):
    """Return batches of one sample each."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 3, generator=generator), torch.randn(1, generator=generator)) for _ in range(number)]


def oracle(module, batches):
    """Return number, sum of the squared norms and sum of the gradients, by backward passes."""
    wanted = [p for p in module.parameters() if p.requires_grad]
    total, squares = [torch.zeros_like(p) for p in wanted], 0.0
    for batch in batches:
        module.zero_grad()
        module(batch).backward()
        squares += sum(float(p.grad.square().sum()) for p in wanted)
        total = [one + p.grad for one, p in zip(total, wanted, strict=True)]
    module.zero_grad()
    return torch.cat([torch.tensor([len(batches), squares]), *(one.flatten() for one in total)])


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("name", KINDS)
def test_sums_are_those_of_single_backward_passes(name, at_once):
    """Whatever is registered under several names or shared; and the module is what it was."""
    module, batches, said = Loss(KINDS[name]), samples(5), []
    before = {key: (tensor, tensor.clone()) for key, tensor in module.state_dict(keep_vars=True).items()}
    gradients = SampleGradients(module, said.append)
    for group in [batches[:3], batches[3:]] if at_once else [[batch] for batch in batches]:
        gradients.add(group)
    assert torch.allclose(gradients.sums().float(), oracle(module, batches), rtol=1e-5, atol=1e-6)
    assert said == []
    after = module.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[key] is tensor and torch.equal(tensor, copy) for key, (tensor, copy) in before.items())


class Checkpointed(Loss):
    """Computes a layer once more in the backward pass."""

    reentrant = True

    def forward(self, batch):
        """Return the mean loss."""
        x, y = batch
        hidden = checkpoint(self.net, x.requires_grad_(), use_reentrant=self.reentrant)
        return (hidden.mean(1) - y).square().mean()


def test_a_checkpoint_that_hides_its_gradients_is_refused():
    """torch.autograd.grad says that there are none; with use_reentrant=False it finds them."""
    module, batches = Checkpointed(), samples(3)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        SampleGradients(module, lambda message: None).add(batches)
    module.reentrant = False
    gradients = SampleGradients(module, lambda message: None)
    gradients.add(batches)
    assert torch.allclose(gradients.sums().float(), oracle(module, batches), rtol=1e-5, atol=1e-6)


class Full(Loss):
    """Has no room for the first two tries."""

    tries = 0

    def forward(self, batch):
        """Return the mean loss."""
        self.tries += 1
        if self.tries <= 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(batch)


def test_memory_that_is_used_up_by_the_sums(monkeypatch):
    """Half of them may be there by then: that is no case for another try."""

    def vector_norm(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    gradients = SampleGradients(Loss(), print)
    monkeypatch.setattr(torch.linalg, "vector_norm", vector_norm)
    with pytest.raises(torch.OutOfMemoryError):
        gradients.add(samples(4))


@pytest.mark.parametrize("counted", [9, 4, 0])
def test_samples_that_do_not_fit_together_are_taken_in_halves(counted):
    """Nobody is told that torch.func were to blame, and no more are tried at once from then on."""
    module, batches, said = Full(), samples(9), []
    gradients = SampleGradients(module, said.append)
    gradients.add(batches, counted)
    expected = oracle(Loss(), batches[:counted])
    assert torch.allclose(gradients.sums().float(), expected, rtol=1e-5, atol=1e-6)
    assert gradients.most == 2  # 9, 4 and then 2
    assert said == []
