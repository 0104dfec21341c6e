# SPDX-License-Identifier: Apache-2.0
"""What stands in for a method is taken off again, and stands in for nothing that is not there."""

from __future__ import annotations

import pytest

from lightning_adabatch.bridge.patches import Patches


class Owner:
    def method(self) -> str:
        return "its own"


def test_put_and_undo():
    """Two layers on one method come off, and the class's own is behind them."""
    owner, patches = Owner(), Patches()
    patches.put(owner, "method", lambda: "first")
    patches.put(owner, "method", lambda: "second")
    assert owner.method() == "second"
    assert patches
    patches.undo()
    patches.undo()
    assert owner.method() == "its own"
    assert vars(owner) == {}
    assert not patches


def test_what_somebody_else_wrapped_stays():
    """What was put over ours meanwhile is not ours to remove."""
    owner, patches = Owner(), Patches()
    patches.put(owner, "method", lambda: "ours")
    owner.method = lambda: "theirs"
    patches.undo()
    assert owner.method() == "theirs"


def test_a_method_that_is_not_there():
    """A release of Lightning without it would never call what stands in for it: that is said, not passed over."""
    owner, patches = Owner(), Patches()
    with pytest.raises(AttributeError, match=r"Owner has no method 'gone'.*needs lightning >= 2\.6, < 2\.7"):
        patches.put(owner, "gone", lambda: None)
    assert vars(owner) == {}
    assert not patches
