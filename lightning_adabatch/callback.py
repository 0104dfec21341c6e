# SPDX-License-Identifier: Apache-2.0
"""The Lightning callback: translates hooks into the parts that do the work."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_adabatch import guards
from lightning_adabatch.checkpoint import FRESH, Snapshot
from lightning_adabatch.controller import Controller
from lightning_adabatch.policies import Policy, RadaDamp, load_state
from lightning_adabatch.run import Run
from lightning_adabatch.settings import Settings


class AdaptiveBatchSize(pl.Callback):
    r"""Adapt the training batch size while the model trains.

    Add it to an ordinary Trainer with an ordinary ``DataLoader``. The batch after a decision has exactly the
    size decided, whatever the number of workers; every sample is seen once per epoch; validation,
    schedulers, progress bar and checkpoints stay right. The initial batch size B0 is the DataLoader's.

    Once the wanted batch size is above ``max_batch_size``, the learning rate is multiplied by their ratio
    instead, on top of whatever a scheduler says, and is given back as soon as the ratio allows it:

    .. math::
        \text{wanted} = \lceil B_0 \cdot \text{damping} \rceil, \quad
        B = \min(\text{wanted}, B_{\max}), \quad \text{lr factor} = \min(1, B_{\max} / \text{wanted})

    Args:
        policy: The rule that says how large the batch should be. None: ``RadaDamp()``.
        max_batch_size: B_max in samples, ≥ 1; ``math.inf`` for no cap and no LR decay. None: the larger of
            B0 and the number of training samples.
        min_batch_size: The batch size is never below this, in samples, ≥ 1.
        adapt: ``"batch_size"``, or ``"lr"`` to keep the batch size and let the learning rate take all of
            the damping (the paper's -LR variants).
        dwell: Decide every so many updates, ≥ 1.
        wait: Make no decision before so many updates, ≥ 0.
        multiple_of: Batch sizes are multiples of this, ≥ 1. Few distinct sizes suit ``torch.compile``.
        max_device_batch_size: The most samples in one forward and backward pass on one rank, ≥ 1. An update of
            more is split into micro-batches of about equal size, and its gradient is the mean over its samples.
            None: no limit, or the DataLoader's batch size with ``Trainer(accumulate_grad_batches=k)``, where B0
            is k of its batches. On one device it is lowered, with a warning, when a pass runs out of memory: the
            update is then done again in smaller parts.
        lr_scaling: What the learning rate does while the batch size moves: ``"none"``, ``"linear"``
            (times B / B0) or ``"sqrt"`` (times its square root).
        tail: What happens to an epoch's samples that do not fill a batch: ``"keep"`` trains them as one
            smaller batch, ``"carry"`` moves them into the next epoch's first batch, ``"drop"`` drops them.
            None: ``"drop"`` if the DataLoader has ``drop_last``, else ``"keep"``.

    Raises:
        ValueError: At construction, for an argument outside of its range.
        MisconfigurationException: At the start of the fit, for a set-up that is not supported.

    Example:
        >>> AdaptiveBatchSize(max_batch_size=1024).policy
        RadaDamp(rho=0.999, grad_norm_weight=0.001, optimal_loss=0.0, warmup=1)

    Note:
        A single leftover sample joins the batch before it (one sample above the cap at most) wherever the
        size in force is not the DataLoader's own, so that BatchNorm never sees a batch of one that we chose.
        A learning rate that you assign to a parameter group while training counts as its new base.

    References:
        Improving the convergence of SGD through adaptive batch sizes, Algorithm 1.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        max_batch_size: float | None = None,
        min_batch_size: int = 1,
        adapt: Literal["batch_size", "lr"] = "batch_size",
        dwell: int = 1,
        wait: int = 0,
        multiple_of: int = 1,
        max_device_batch_size: int | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        tail: Literal["keep", "carry", "drop"] | None = None,
    ) -> None:
        self.settings = Settings(
            policy=RadaDamp() if policy is None else policy,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            adapt=adapt,
            dwell=dwell,
            wait=wait,
            multiple_of=multiple_of,
            max_device_batch_size=max_device_batch_size,
            lr_scaling=lr_scaling,
            tail=tail,
        )
        self._run: Run | None = None  # from setup until everything is given back
        self._controller: Controller | None = None  # from the start of training on
        self._restored: Snapshot | None = None  # what a checkpoint says, until training starts
        self._ended: dict[str, Any] | None = None  # the state of a run that is over
        self._before: tuple[Controller | None, dict[str, Any] | None] = (None, None)  # of the one before this one

    def __getstate__(self) -> dict[str, Any]:
        """Leave the fit behind in a copy: the Trainer belongs to the original."""
        counts = None if self._controller is None else copy.copy(self._controller)
        if counts is not None:
            counts.let_go()
        return {**self.__dict__, "_run": None, "_controller": counts, "_before": (None, None)}

    # What it shows ----------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The rule."""
        return self.settings.policy

    @property
    def max_batch_size(self) -> int | float | None:
        """The cap as it was given, in samples."""
        return self.settings.max_batch_size

    @property
    def batch_size(self) -> int | None:
        """Samples of the next update (of this one, in its hooks), the epoch's tail apart; None before training."""
        return None if self._controller is None else self._controller.decision.batch_size

    @property
    def lr_factor(self) -> float:
        """What the learning rate of the next update (of this one, in its hooks) is multiplied by."""
        return 1.0 if self._controller is None else self._controller.decision.lr_factor

    @property
    def updates(self) -> int:
        """Model updates so far."""
        return int(self._restored_number("updates")) if self._controller is None else self._controller.updates

    @property
    def samples(self) -> int:
        """Training samples processed so far."""
        return int(self._restored_number("samples")) if self._controller is None else self._controller.samples

    @property
    def epochs(self) -> float:
        """Training samples processed so far, divided by the number of training samples."""
        return self._restored_number("epochs") if self._controller is None else self._controller.epochs

    @property
    def evaluated(self) -> int:
        """Training samples that were evaluated for the policy alone, over all ranks; they are not in ``samples``."""
        return int(self._restored_number("evaluated")) if self._controller is None else self._controller.evaluated

    def _restored_number(self, name: str) -> float:
        if self._restored is None:
            return 0
        number = self._restored.rule[name]
        return math.nan if number is None else float(number)

    # What it does -----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the place of the train loader before anybody asks for it."""
        if stage == "fit":
            guards.check_trainer(trainer, AdaptiveBatchSize)
            self._give_back()  # a fit whose exception another callback's hook answered with one never reached ours
            self._before = self._controller, self._ended
            self._controller = self._restored = self._ended = None
            self._run = Run(trainer, self.settings)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have the fit go on where the checkpoint was written.

        Raises:
            MisconfigurationException: For a checkpoint that holds no state of this callback, or that of a run with
                another policy.
        """
        if self._run is None:
            return  # weights are loaded to validate, test or predict
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            raise guards.refuse(
                "resuming from a checkpoint that was written without it: batch size, averages and counts are not there",
                "to start adapting from these weights, load them with load_from_checkpoint and fit without ckpt_path",
            )
        try:
            snapshot = Snapshot.from_state_dict(state)
            if snapshot is not None:
                load_state(self.policy, snapshot.rule["policy"])
        except ValueError as error:
            raise guards.refuse(
                f"this checkpoint: {error}",
                "resume with the policy that the checkpoint was written with, or load the weights with "
                "load_from_checkpoint and fit without ckpt_path",
            ) from None
        self._restored = snapshot
        self._run.resume_from(snapshot, checkpoint)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the set-up, and decide for the first update."""
        guards.check_module(trainer, pl_module, self.settings)
        self._running.start()
        self._controller = self._running.controller

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plan the epoch's batches and validation points at the size in force."""
        self._running.begin_epoch()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open a row of measurements."""
        self._running.begin_batch(batch, batch_idx)
        self._controller = self._running.controller

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Take the loss."""
        self._running.take_loss(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the gradients of an update's first part, where their variance is asked for."""
        self._running.after_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take the gradient norm, before clipping."""
        self._running.before_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the update, decide, and give loader, learning rate and counts what was decided."""
        self._running.end_batch(batch, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the epoch's last update."""
        self._running.end_epoch()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run as this process knows it: plain numbers, strings and tensors."""
        if self._ended is not None:
            return dict(self._ended)
        if self._run is not None:
            return self._run.state_dict(alone=True)
        return dict(FRESH) if self._restored is None else self._restored.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state to be looked at; a fit goes on from it if it resumes from the same checkpoint.

        Raises:
            ValueError: For the state of another version.
        """
        self._restored = Snapshot.from_state_dict(state_dict)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write what all ranks know, and the base learning rates without the factor."""
        if self._run is not None:
            if self._run.several_ranks and self._ended is None:
                # Not in state_dict, which may be asked of one rank alone.
                checkpoint["callbacks"][self.state_key] = self._run.state_dict(alone=False)
            self._run.write_base_learning_rates(checkpoint)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the state for checkpoints that are written from now on: Lightning takes the loops down first."""
        self._ended = self._running.state_dict(alone=False)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep the state, for others write a checkpoint now; after an exception Lightning calls no ``teardown``."""
        try:
            if self._run is not None and self._ended is None:
                self._ended = self._run.last_state()
        finally:
            self._give_back()
            self._show_the_run_before()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give everything back."""
        if stage == "fit":
            if self._run is not None:
                self._run.end()
            self._give_back()
            self._show_the_run_before()

    def _show_the_run_before(self) -> None:
        """Show what was trained last if this fit trained nothing, as one in which a tuner tries things out."""
        nothing = self._controller is None or self._controller.samples == 0
        if nothing and self._restored is None and self._before[0] is not None:
            self._controller, self._ended = self._before

    def _give_back(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.give_back()
        if self._controller is not None:
            self._controller.let_go()

    @property
    def _running(self) -> Run:
        assert self._run is not None  # for the type checker: setup("fit") came before
        return self._run
