# SPDX-License-Identifier: Apache-2.0
"""One table: how every policy is set up in the tests that all of them must pass."""

from __future__ import annotations

from typing import Any

from lightning_adabatch import (
    Constant,
    ExponentialDamp,
    GeoDamp,
    GradNormDamp,
    Policy,
    PolynomialDamp,
    RadaDamp,
    Schedule,
)

#: On some tens of updates on 50 samples in batches of 4 each of them moves, but for the one that never does.
SETTINGS: dict[str, Policy[Any]] = {
    "RadaDamp": RadaDamp(rho=0.6, grad_norm_weight=0.1, warmup=2),
    "GradNormDamp": GradNormDamp(rho=0.6),
    "GeoDamp": GeoDamp(factor=2, delay=0.5),
    "PolynomialDamp": PolynomialDamp(rate=0.05, power=1.5),
    "ExponentialDamp": ExponentialDamp(rate=1.05),
    "Schedule": Schedule({0: 4, 0.4: 7, 1.7: 16}, unit="epochs"),
    "Constant": Constant(),
}
