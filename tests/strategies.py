# SPDX-License-Identifier: Apache-2.0
"""What property tests draw from."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from lightning_adabatch import Observation
from lightning_adabatch.limits import Limits


def numbers(least: float, most: float) -> st.SearchStrategy[float]:
    """Finite floats between two bounds, without the denormal ones."""
    return st.floats(least, most, allow_nan=False, allow_infinity=False, allow_subnormal=False)


#: Whatever a device can measure in float32; a norm is squared on the host.
observations = st.builds(
    Observation,
    loss=numbers(-5.0, 20.0) | st.floats(width=32, allow_nan=False, allow_infinity=False),
    grad_norm_sq=numbers(0.0, 100.0) | st.floats(0.0, width=32, allow_infinity=False).map(lambda norm: norm * norm),
    batch_size=st.integers(1, 4096),
    grad_variance=st.none() | numbers(-10.0, 1000.0) | st.floats(width=32, allow_nan=False, allow_infinity=False),
)

#: Observations of a healthy run: the terms of a rolling average are well above 0.
positive_observations = st.builds(
    Observation,
    loss=numbers(0.01, 20.0),
    grad_norm_sq=numbers(0.0, 100.0),
    batch_size=st.integers(1, 4096),
)

#: Batch sizes asked for one after the other.
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@st.composite
def limits(draw: st.DrawFn, lr_scaling: st.SearchStrategy[str] | None = None) -> Limits:
    """Limits that hold together: floor <= B0 <= cap, all multiples."""
    multiple = draw(st.integers(1, 8))
    floor, more, most = (draw(st.integers(low, 20)) for low in (1, 0, 0))
    initial = floor + more
    cap = draw(st.sampled_from([(initial + most) * multiple, math.inf]))
    epoch = draw(st.sampled_from([math.inf, draw(st.integers(1, 500))]))
    scaling = draw(lr_scaling) if lr_scaling is not None else "none"
    return Limits(initial * multiple, cap, floor * multiple, multiple, epoch, "batch_size", scaling)


#: Whatever an evaluation before a decision can give.
evaluations = st.fixed_dictionaries(
    {
        "full_loss": numbers(-5.0, 20.0) | st.floats(width=32, allow_nan=False, allow_infinity=False),
        "gradient_diversity": numbers(1.0, 1e6) | st.floats(1.0, width=32, allow_infinity=False),
    }
)
