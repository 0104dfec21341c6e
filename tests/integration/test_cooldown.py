# SPDX-License-Identifier: Apache-2.0
"""A cooldown around every rule, in a Trainer: nothing differs before it, and it can be taken on or off at a resume."""

from __future__ import annotations

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Recorder, Streamed, fit
from resuming import Cut, Outcome, Setup, assert_goes_on, resume, run
from settings_of_policies import SETTINGS
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize, Cooldown, GeoDamp, Policy, RadaDamp

START, END, FACTOR = 1.0, 1.8, 8.0  # epochs, of three
BEFORE = Cut("train_batch_end", 0, 3)  # where updates have two parts, the end of the second one

every_rule = pytest.mark.parametrize("name", SETTINGS)


def plan(policy: Policy) -> Setup:
    """Return a training of three epochs, with a cap that most rules pass."""
    return Setup(lambda: AdaptiveBatchSize(policy, max_batch_size=12))


def cooled(name: str) -> Cooldown:
    """Return a rule in a cooldown over most of the second epoch."""
    return Cooldown(SETTINGS[name], start=START, end=END, factor=FACTOR)


def until(outcome: Outcome, epochs: float) -> list[object]:
    """Return the steps up to the first decision that knew of a later moment."""
    return [step for step in outcome.steps if step.decision[4] <= epochs]


@every_rule
def test_nothing_differs_before_the_start(name, tmp_path):
    """Batches, losses and learning rates are the rule's own until the cooldown starts; then the LR goes below its."""
    bare, ours = run(plan(SETTINGS[name]), tmp_path), run(plan(cooled(name)), tmp_path)
    assert until(ours, START) == until(bare, START) != []
    assert ours.steps != bare.steps
    expected = 12 if name != "Constant" else 4  # the batch grows to the cap, then the LR falls
    assert ours.ours.batch_size >= expected
    # With a bare damping d the factor is at most cap / (B0 · d · 8) once the cooldown is complete.
    assert ours.ours.lr_factor < 1.0


@every_rule
def test_a_run_without_it_goes_on_with_it(name, tmp_path):
    """The checkpoint of a bare rule, resumed with a cooldown to come: as if that had been there all along."""
    cut = run(plan(SETTINGS[name]), tmp_path, [BEFORE])
    uncut = run(plan(cooled(name)), tmp_path)
    assert_goes_on(uncut, resume(plan(cooled(name)), tmp_path / f"{BEFORE}.ckpt", tmp_path), cut.marks[BEFORE])


@every_rule
def test_a_run_with_it_goes_on_without_it(name, tmp_path):
    """And the other way round: the rule alone, from the checkpoint of a run with a cooldown to come."""
    cut = run(plan(cooled(name)), tmp_path, [BEFORE])
    uncut = run(plan(SETTINGS[name]), tmp_path)
    assert_goes_on(uncut, resume(plan(SETTINGS[name]), tmp_path / f"{BEFORE}.ckpt", tmp_path), cut.marks[BEFORE])


def test_taken_off_in_its_middle(tmp_path):
    """A rule without memory is at its own damping again, one update after it is left alone."""
    middle = Cut("train_batch_end", 1, 1)
    cut = run(plan(Cooldown(GeoDamp(2, 0.5), 0.5, 1.5, factor=50)), tmp_path, [middle])
    # After three epochs there are six delays: 4 · 2⁶ = 256 samples are wanted, of which the cap lets 12 be.
    assert cut.ours.lr_factor == 12 / (256 * 50)
    alone = resume(plan(GeoDamp(2, 0.5)), tmp_path / f"{middle}.ckpt", tmp_path)
    assert alone.ours.lr_factor == 12 / 256
    rates = [step.lr for step in alone.steps]
    assert rates[0] < 0.1 * 12 / 32 == rates[1]  # decided before the cut, and alone


@pytest.mark.parametrize("unit", ["epochs", "updates", "samples"])
def test_streams_without_a_length(unit, tmp_path):
    """Where nobody knows what an epoch is, a cooldown in epochs is refused by name; one in updates or samples works."""
    ours = AdaptiveBatchSize(Cooldown(RadaDamp(), 1, 2, unit=unit), max_batch_size=16)
    module = Recorder()
    if unit == "epochs":
        with pytest.raises(MisconfigurationException, match=r"epochs.*Cooldown|Cooldown.*epochs"):
            fit(module, DataLoader(Streamed(20), 4), callbacks=[ours], epochs=1, root=tmp_path)
    else:
        fit(module, DataLoader(Streamed(100), 4), callbacks=[ours], epochs=1, root=tmp_path)
        assert max(module.sizes) == 16  # 20 times as many are wanted once it is complete
