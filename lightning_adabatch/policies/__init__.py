# SPDX-License-Identifier: Apache-2.0
"""The rules: pure functions of numbers. Nothing here knows of torch, Lightning, clocks or logs."""

from lightning_adabatch.policies.base import Observation, Policy, Progress, dump_state, load_state
from lightning_adabatch.policies.grad_norm import GradNormDamp, GradNormDampState
from lightning_adabatch.policies.growth import ExponentialDamp, PolynomialDamp
from lightning_adabatch.policies.open_loop import Constant, GeoDamp, Schedule
from lightning_adabatch.policies.radadamp import RadaDamp, RadaDampState

__all__ = [
    "Constant",
    "ExponentialDamp",
    "GeoDamp",
    "GradNormDamp",
    "GradNormDampState",
    "Observation",
    "Policy",
    "PolynomialDamp",
    "Progress",
    "RadaDamp",
    "RadaDampState",
    "Schedule",
    "dump_state",
    "load_state",
]
