# SPDX-License-Identifier: Apache-2.0
"""One table: how every policy is set up in the tests that all of them must pass."""

from __future__ import annotations

from typing import Any

from lightning_adabatch import (
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
    Policy,
    PolynomialDamp,
    RadaDamp,
    Schedule,
)

#: On some tens of updates on 50 samples in batches of 4 each of them moves, but for the one that never does. The
#: learning rate is 0.1.
SETTINGS: dict[str, Policy[Any]] = {
    "RadaDamp": RadaDamp(rho=0.6, grad_norm_weight=0.1, warmup=2),
    "GradNormDamp": GradNormDamp(rho=0.6),
    "GeoDamp": GeoDamp(factor=2, delay=0.5),
    "PolynomialDamp": PolynomialDamp(rate=0.05, power=1.5),
    "ExponentialDamp": ExponentialDamp(rate=1.05),
    "Schedule": Schedule({0: 4, 0.4: 7, 1.7: 16}, unit="epochs"),
    "Constant": Constant(),
    "Cooldown": Cooldown(RadaDamp(rho=0.6, warmup=2), start=0.4, end=1.6, factor=8),
    "AdaDamp": AdaDamp(optimal_loss=0.01, fraction=0.5),
    "NoiseScale": NoiseScale(rho=0.6, scale=2.0, warmup=2),
    "CABS": CABS(rho=0.6, scale=40.0, warmup=2),
    "NormTest": NormTest(theta=0.7, rho=0.6, warmup=2),
    "DiveBatch": DiveBatch(delta=2.0, every=0.4, fraction=0.5),
}

#: Those that ask for more than a loss and a gradient norm.
MEASURING = {name: policy for name, policy in SETTINGS.items() if policy.requires - {"loss", "grad_norm_sq"}}

#: Those that follow the variance of gradients, which only updates of several batches or parts show.
IN_PARTS = frozenset(name for name, policy in SETTINGS.items() if "grad_variance" in policy.requires)
