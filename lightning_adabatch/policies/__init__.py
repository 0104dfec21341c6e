# SPDX-License-Identifier: Apache-2.0
"""The rules: pure functions of numbers. Nothing here knows of torch, Lightning, clocks or logs."""

from lightning_adabatch.policies.adadamp import AdaDamp, AdaDampState
from lightning_adabatch.policies.base import (
    EVALUATED,
    OBSERVED,
    Observation,
    Policy,
    Progress,
    dump_state,
    load_state,
    lost_with_checkpoint,
)
from lightning_adabatch.policies.cabs import CABS, CABSState
from lightning_adabatch.policies.cooldown import Cooldown
from lightning_adabatch.policies.divebatch import DiveBatch, DiveBatchState
from lightning_adabatch.policies.grad_norm import GradNormDamp, GradNormDampState
from lightning_adabatch.policies.growth import ExponentialDamp, PolynomialDamp
from lightning_adabatch.policies.noise_scale import NoiseScale, NoiseScaleState
from lightning_adabatch.policies.norm_test import NormTest, NormTestState
from lightning_adabatch.policies.open_loop import Constant, GeoDamp, Schedule
from lightning_adabatch.policies.radadamp import RadaDamp, RadaDampState

__all__ = [  # noqa: RUF022  # as sorted() has it
    "AdaDamp",
    "AdaDampState",
    "CABS",
    "CABSState",
    "Constant",
    "Cooldown",
    "DiveBatch",
    "DiveBatchState",
    "EVALUATED",
    "ExponentialDamp",
    "GeoDamp",
    "GradNormDamp",
    "GradNormDampState",
    "NoiseScale",
    "NoiseScaleState",
    "NormTest",
    "NormTestState",
    "OBSERVED",
    "Observation",
    "Policy",
    "PolynomialDamp",
    "Progress",
    "RadaDamp",
    "RadaDampState",
    "Schedule",
    "dump_state",
    "load_state",
    "lost_with_checkpoint",
]
