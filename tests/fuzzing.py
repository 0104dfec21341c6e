# SPDX-License-Identifier: Apache-2.0
"""What the tests that draw whole fits have in common."""

from __future__ import annotations

import signal
from contextlib import contextmanager

from hypothesis import HealthCheck

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@contextmanager
def never_hangs(seconds: int = 30):
    """Raise where it does not end."""

    def end(signum, frame):
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
