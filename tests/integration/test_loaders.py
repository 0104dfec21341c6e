# SPDX-License-Identifier: Apache-2.0
"""Where loaders come from, what is asked of them while they train, and the loaders that are not ours."""

from __future__ import annotations

import multiprocessing
import warnings

import lightning.pytorch as pl
import pytest
import torch
from models import Indexed, Recorder, adapt, fit, loader
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize, Constant, GeoDamp


def test_validation_loaders_that_are_made_late(tmp_path):
    """C38: validation loaders made after the train loader, and made again every epoch, stay DataLoaders."""

    class Net(Recorder):
        def val_dataloader(self):
            return loader(50, 10)

        def validation_step(self, batch, batch_idx):
            assert type(self.trainer.val_dataloaders) is DataLoader
            super().validation_step(batch, batch_idx)

    module = Net()
    flags = {"num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": 1}
    fit(module, loader(40, 4), callbacks=[adapt(4, 8, 16)], epochs=3, root=tmp_path, **flags)
    assert module.validation_sizes == [10] * (3 * 5)
    assert module.sizes_in(2) == [16, 16, 8]


def test_reload_with_other_data(tmp_path):
    """A reload may bring more or fewer samples: no batch is larger than its epoch, and each is one epoch."""
    lengths = [64, 16, 100]

    class Net(Recorder):
        def train_dataloader(self):
            return loader(lengths[self.current_epoch], 4)

    module, ours = Net(), adapt(4, 32)
    fit(module, None, callbacks=[ours], epochs=3, reload_dataloaders_every_n_epochs=1, root=tmp_path)
    assert [module.sizes_in(epoch) for epoch in range(3)] == [[4, 32, 28], [16], [32, 32, 32, 4]]
    assert ours.samples == 64 + 16 + 100
    assert ours.epochs == 3.0


def test_size_is_kept_over_a_reload(tmp_path):
    """C39: with a new loader every epoch the size goes on, and each is asked for once."""
    asked = []

    class Net(Recorder):
        def train_dataloader(self):
            asked.append(1)
            return loader(64, 4)

        def val_dataloader(self):
            return loader(8, 8)

    module = Net()
    fit(module, None, callbacks=[adapt(4, 16)], epochs=3, reload_dataloaders_every_n_epochs=1, root=tmp_path)
    assert [module.sizes_in(epoch)[0] for epoch in range(3)] == [4, 16, 16]
    assert len(asked) == 3
    assert len(module.validations) == 3


@pytest.mark.parametrize("lengths", [(40, 80, 120), (120, 60, 20)], ids=["grows", "shrinks"])
def test_epochs_of_reloaded_data_of_other_lengths(lengths, tmp_path):
    """A curriculum: epochs are whole numbers at each epoch's end, and a rule in epochs moves there."""

    class Curriculum(Recorder):
        def train_dataloader(self):
            return loader(lengths[self.trainer.current_epoch], 5)

        def on_train_batch_start(self, batch, batch_idx):
            counted.append((self.trainer.current_epoch, ours.epochs))

    counted: list = []
    module, ours = Curriculum(), AdaptiveBatchSize(GeoDamp(2, 1), max_batch_size=64)
    fit(module, None, callbacks=[ours], epochs=3, reload_dataloaders_every_n_epochs=1, root=tmp_path)
    assert [epoch for epoch, _ in counted] == [int(epochs) for _, epochs in counted]
    assert [epochs for _, epochs in counted] == sorted(epochs for _, epochs in counted)
    assert ours.epochs == 3.0
    for epoch, size in enumerate((5, 10, 20)):
        found = [len(batch.indices) for batch in module.batches if batch.epoch == epoch]
        assert set(found) == {size}


def test_another_size_of_a_reloaded_loader(tmp_path):
    """A loader with another batch size on each reload, as schedules are made by hand: the policy's word stands."""

    class Net(Recorder):
        def train_dataloader(self):
            return loader(64, 4 + self.current_epoch)

    module = Net()
    with pytest.warns(
        UserWarning, match=r"makes for 5 samples in an update, where it was 4 and .*Schedule\(\{0: 4, 1: 5\}"
    ) as told:
        fit(module, None, callbacks=[adapt(4, 16)], epochs=3, reload_dataloaders_every_n_epochs=1, root=tmp_path)
    assert [module.sizes_in(epoch)[0] for epoch in range(3)] == [4, 16, 16]
    assert sum("the reloaded train loader" in str(one.message) for one in told) == 1


@pytest.mark.parametrize("where", ["hard-coded", "bs", "fit", "module"])
def test_wherever_the_loader_comes_from(where, tmp_path):
    """C37, C36: the initial size is the loader's, from a datamodule, the module or fit; attributes are left alone."""

    class Data(pl.LightningDataModule):
        bs = 4

        def train_dataloader(self):
            return DataLoader(Indexed(64), batch_size=self.bs if where == "bs" else 4)

    class WithLoader(Recorder):
        def train_dataloader(self):
            return loader(64, 4)

    module = WithLoader() if where == "module" else Recorder()
    train = {"fit": loader(64, 4), "module": None}.get(where, Data())
    fit(module, train, callbacks=[adapt(4, 8)], epochs=1, root=tmp_path)
    assert module.sizes == [4] + [8] * 7 + [4]
    assert Data.bs == 4


def test_loader_asked_for_before_our_setup(tmp_path):
    """A callback that reads estimated_stepping_batches in its setup does not keep the plain loader in place."""

    class Early(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            self.steps = trainer.estimated_stepping_batches

    class Behind(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            assert multiprocessing.active_children() == []

    early, module = Early(), Recorder()
    train = loader(64, 4, num_workers=1)
    fit(module, train, loader(8, 8), callbacks=[early, adapt(4, 16), Behind()], root=tmp_path)
    assert early.steps == 2 * 16
    assert module.sizes == [4, 16, 16, 16, 12] + [16] * 4
    assert module.validations == [5, 9]


def one_cycle(optimizer, steps):
    """Return OneCycleLR alone."""
    return OneCycleLR(optimizer, 0.2, total_steps=steps)


def behind_a_warm_up(optimizer, steps):
    """Return OneCycleLR as the second part of a schedule."""
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=2), one_cycle(optimizer, steps - 2)], [2])


def behind_two(optimizer, steps):
    """Return OneCycleLR as a part of a part."""
    return ChainedScheduler([behind_a_warm_up(optimizer, steps)])


class Planned(Recorder):
    """Plans a schedule over what Lightning estimates."""

    def __init__(self, plan=one_cycle):
        super().__init__()
        self.plan = plan

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.total = self.trainer.estimated_stepping_batches
        schedule = self.plan(optimizer, self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_planned_schedule_with_growth(tmp_path):
    """C19: OneCycleLR over estimated_stepping_batches is planned at the initial size; one notice says what follows."""
    module = Planned()
    with pytest.warns(UserWarning, match="planned in them: OneCycleLR for 32.*interval='epoch'") as told:
        fit(module, loader(64, 4), callbacks=[adapt(4, 4, 16)], root=tmp_path)
    assert sum("planned in them" in str(warning.message) for warning in told) == 1
    assert module.total == 32
    assert len(module.batches) < 32


@pytest.mark.parametrize("automatic", [True, False])
def test_remedy_for_a_planned_schedule(automatic, tmp_path):
    """Under manual optimization the interval says nothing: there the module steps its schedulers."""

    class Net(Planned):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if automatic:
                return loss
            self.manual_backward(loss)
            return self.optimizers().step()

    remedy = "use interval='epoch'" if automatic else "step it once per epoch"
    with pytest.warns(UserWarning, match=f"For a schedule that keeps its shape {remedy}"):
        fit(Net(), loader(64, 4), callbacks=[adapt(4, 4, 16)], max_steps=1, root=tmp_path)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (behind_a_warm_up, "SequentialLR for 32"),
        (lambda o, steps: LambdaLR(o, lambda k: max(0.0, 1 - k / steps)), "LambdaLR for what its function says"),
        (lambda o, steps: LinearLR(o, 1.0, 0.1, total_iters=steps), "LinearLR for 32"),
        (StepLR, None),
    ],
)
@pytest.mark.filterwarnings("ignore:AdaptiveBatchSize changes the number of updates")
def test_every_planned_schedule_is_named(plan, said, tmp_path):
    """Schedules made of others, functions of the user's and straight lines down are planned in updates too."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(Planned(plan), loader(64, 4), callbacks=[adapt(4, 4, 16)], root=tmp_path)
    found = [str(one.message) for one in told if "planned in them" in str(one.message)]
    assert len(found) == (said is not None)
    assert said is None or f"planned in them: {said}. " in found[0]


@pytest.mark.filterwarnings("ignore:AdaptiveBatchSize changes the number of updates")
@pytest.mark.parametrize("plan", [one_cycle, behind_a_warm_up, behind_two])
def test_planned_schedule_that_runs_out(plan, tmp_path):
    """C19: with more updates than OneCycleLR was planned for, its final LR is held; nothing is raised."""
    module = Planned(plan)
    fit(module, loader(64, 16), callbacks=[adapt(16, 8)], root=tmp_path)
    assert module.total == 8
    assert len(module.batches) == 1 + 6 + 8
    rates = [batch.lr for batch in module.batches]
    assert rates[7] == rates[-1] < min(rates[:7])


def test_no_notice_where_the_number_of_updates_stays(tmp_path):
    """C19: a policy that never moves, and the -LR mode, keep the number of updates: nothing is said."""
    for ours in (AdaptiveBatchSize(Constant()), AdaptiveBatchSize(GeoDamp(2, 1), adapt="lr")):
        fit(Planned(), loader(64, 4), callbacks=[ours], root=tmp_path)


def test_looking_at_a_batch_leaves_the_epoch_alone(tmp_path):
    """Users' code may take a batch of trainer.train_dataloader at any time."""

    class Peek(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            next(iter(trainer.train_dataloader))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert len(next(iter(trainer.train_dataloader))[0]) == trainer.train_dataloader.batch_size

    module = Recorder()
    fit(module, loader(64, 4, shuffle=True), loader(8, 8), callbacks=[adapt(4, 4, 8), Peek()], root=tmp_path)
    assert module.seen_in(0) == module.seen_in(1) == dict.fromkeys(range(64), 1)
    assert len(module.validations) == 2


def test_loader_in_use_answers_like_a_data_loader(tmp_path):
    """C48: size, length and settings of the loader in use can be read at any time; len is delivered and to come."""
    lengths = []

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            train = self.trainer.train_dataloader
            assert train.batch_sampler.batch_size == train.batch_size == len(batch[0])
            assert (train.num_workers, train.pin_memory, len(train.dataset)) == (0, False, 64)
            lengths.append(len(train))
            return super().training_step(batch, batch_idx)

    fit(Net(), loader(64, 4), callbacks=[adapt(4, 4, 4, 4, 16)], epochs=1, root=tmp_path)
    assert lengths == [16] * 4 + [7] * 3


def test_other_loaders_are_untouched(tmp_path):
    """C38: validation, test and predict keep their own sizes, and add no observations."""

    class Net(Recorder):
        def test_step(self, batch, batch_idx):
            self.validation_sizes.append(len(batch[0]))

        def predict_step(self, batch, batch_idx):
            self.validation_sizes.append(len(batch[0]))
            return batch[0]

    module, ours = Net(), adapt(4, 8, 16, 4, 32, 8)
    trainer = fit(module, loader(80, 4), loader(50, 10), callbacks=[ours], root=tmp_path)
    count = ours.updates
    assert module.validation_sizes == [10] * (2 + 2 * 5)  # two of them in the sanity check
    module.validation_sizes.clear()
    trainer.test(module, loader(30, 10), verbose=False)
    trainer.predict(module, loader(20, 10))
    trainer.validate(module, loader(10, 10), verbose=False)
    assert module.validation_sizes == [10] * (3 + 2 + 1)
    assert ours.updates == count == len(module.batches)
