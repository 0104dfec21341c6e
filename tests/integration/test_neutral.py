# SPDX-License-Identifier: Apache-2.0
"""``Constant()`` with default arguments changes nothing at all (invariant 7)."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_adabatch import AdaptiveBatchSize, Constant


class Augmented(Dataset):
    """Samples with random noise from every generator that a data set may draw from."""

    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        noise = torch.randn(6) + random.random() + float(np.random.rand())  # noqa: NPY002
        return self.x[index] + 0.1 * noise, index % 3, index


class Net(pl.LightningModule):
    """Dropout, metrics at every step and epoch, and a scheduler: whatever could drift."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
        self.order: list[list[int]] = []
        self.logged: list[dict[str, float]] = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.order.append(index.tolist())
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args):
        metrics = self.trainer.callback_metrics
        self.logged.append({name: float(value) for name, value in metrics.items() if "adabatch" not in name})

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val", torch.nn.functional.cross_entropy(self.net(x), y))
        self.order.append([-1 - len(self.order)])  # where validation falls

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def tuples(samples):
    """Collate as a user's function does."""
    return tuple(torch.stack([torch.as_tensor(sample[field]) for sample in samples]) for field in range(3))


def train(
    tmp_path, callbacks, *, seed: int = 5, interval: float = 1.0, reload: int = 0, samples: int = 101, **loader_kwargs
):
    """Fit three epochs and return the module and the random state at the end."""
    pl.seed_everything(seed, workers=True, verbose=False)
    module = Net()
    loader = DataLoader(Augmented(samples), batch_size=8, shuffle=True, **loader_kwargs)
    validation = DataLoader(Augmented(16), batch_size=8)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=interval,
        reload_dataloaders_every_n_epochs=reload,
        callbacks=callbacks,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader, validation)
    return module, torch.get_rng_state()


@pytest.mark.parametrize(
    "loader_kwargs",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "drop_last": True},
    ],
    ids=["0 workers", "2 workers", "2 persistent workers, drop_last"],
)
@pytest.mark.parametrize("interval", [1.0, 0.3])
def test_constant_is_bitwise_no_callback(loader_kwargs, interval, tmp_path):
    """Weights, batch order, validation points, logged values and random state are those without the callback."""
    plain, plain_state = train(tmp_path, [], interval=interval, **loader_kwargs)
    ours, our_state = train(tmp_path, [AdaptiveBatchSize(Constant())], interval=interval, **loader_kwargs)
    assert ours.order == plain.order
    assert ours.logged == plain.logged
    assert torch.equal(our_state, plain_state)
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.parametrize("own", [{}, {"collate_fn": tuples}], ids=["default collate", "own collate"])
@pytest.mark.parametrize("persistent", [True, False])
def test_constant_is_bitwise_no_callback_over_reloads(persistent, own, tmp_path):
    """Lightning asks for the loader again, and gets the same object: persistent workers go on, as they do without."""
    kwargs = {"reload": 1, "num_workers": 2, "persistent_workers": persistent, **own}
    plain, plain_state = train(tmp_path, [], **kwargs)
    ours, our_state = train(tmp_path, [AdaptiveBatchSize(Constant())], **kwargs)
    assert ours.order == plain.order
    assert ours.logged == plain.logged
    assert torch.equal(our_state, plain_state)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("samples", [5, 8])
def test_data_of_less_than_a_batch(samples, workers, tmp_path):
    """A sampler that is asked for a batch, and has less, draws from its generator once more at its end."""
    runs = []
    for callbacks in ([], [AdaptiveBatchSize(Constant())]):
        generator = torch.Generator().manual_seed(3)
        runs.append(train(tmp_path, callbacks, samples=samples, generator=generator, num_workers=workers)[0].order)
    assert runs[0] == runs[1]


def test_another_seed_is_another_run(tmp_path):
    """The comparison can fail: another seed gives other weights and another order."""
    one, _ = train(tmp_path, [], num_workers=0)
    other, _ = train(tmp_path, [], seed=6, num_workers=0)
    assert one.order != other.order
    assert not torch.equal(one.net[0].weight, other.net[0].weight)
