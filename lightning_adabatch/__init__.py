# SPDX-License-Identifier: Apache-2.0
"""Adaptive batch sizes for PyTorch Lightning: one callback, exact sizes, every sample once per epoch."""

from typing import TYPE_CHECKING

from lightning_adabatch.callback import AdaptiveBatchSize
from lightning_adabatch.policies import (
    CABS,
    AdaDamp,
    Constant,
    Cooldown,
    DiveBatch,
    ExponentialDamp,
    GeoDamp,
    GradNormDamp,
    NoiseScale,
    NormTest,
    Observation,
    Policy,
    PolynomialDamp,
    Progress,
    RadaDamp,
    Schedule,
)

if TYPE_CHECKING:
    __version__: str

__all__ = [  # noqa: RUF022  # as sorted() has it
    "AdaDamp",
    "AdaptiveBatchSize",
    "CABS",
    "Constant",
    "Cooldown",
    "DiveBatch",
    "ExponentialDamp",
    "GeoDamp",
    "GradNormDamp",
    "NoiseScale",
    "NormTest",
    "Observation",
    "Policy",
    "PolynomialDamp",
    "Progress",
    "RadaDamp",
    "Schedule",
]


def __getattr__(name: str) -> str:
    """Look the version up only when it is asked for."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415  # rarely needed, slow to import

        return version("lightning-adabatch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
