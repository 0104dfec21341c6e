# SPDX-License-Identifier: Apache-2.0
"""The public names, and what an installed package has to have."""

from __future__ import annotations

import inspect
from importlib import metadata, resources
from types import ModuleType

import pytest

import lightning_adabatch

PUBLIC = [
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


def test_all_is_exactly_the_public_names():
    """``__all__`` is sorted, without repeats, and a new name is a decision."""
    assert lightning_adabatch.__all__ == PUBLIC
    assert sorted(set(PUBLIC)) == PUBLIC


def test_all_is_exactly_what_can_be_imported():
    """Every public name is there, and every name that is there without an underscore is public or a submodule."""
    found = {name for name, value in vars(lightning_adabatch).items() if not isinstance(value, ModuleType)}
    assert {name for name in found if not name.startswith("_")} - {"TYPE_CHECKING"} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name):
    """Every public class has a docstring of its own."""
    assert inspect.cleandoc(vars(getattr(lightning_adabatch, name))["__doc__"])


def test_typing_marker_is_there():
    """Type checkers read the annotations of an installed package only with this marker."""
    assert resources.files(lightning_adabatch).joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution():
    """``__version__`` is looked up in the installed distribution; where it is only a folder, there is none."""
    try:
        expected = metadata.version("lightning-adabatch")
    except metadata.PackageNotFoundError:
        with pytest.raises(metadata.PackageNotFoundError, match="lightning-adabatch"):
            _ = lightning_adabatch.__version__
    else:
        assert lightning_adabatch.__version__ == expected


def test_other_names_are_not_there():
    """A name that does not exist is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="module 'lightning_adabatch' has no attribute 'Nothing'"):
        _ = lightning_adabatch.Nothing
