# SPDX-License-Identifier: Apache-2.0
"""Imports go one way, and what is private of Lightning is touched in one module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import lightning_adabatch

ROOT = Path(lightning_adabatch.__file__).parent
PACKAGE = ROOT.name

#: What each layer may import of this package; a layer is a module or a folder directly below the package.
LAYERS: dict[str, set[str]] = {
    "plain": set(),
    "policies": {"plain"},
    "limits": set(),
    "controller": {"limits", "policies"},
    "report": set(),
    "validation": set(),
    "meter": {"policies"},
    "hooks": set(),
    "schedulers": set(),
    "lr": {"hooks"},
    "generators": set(),
    "ranks": set(),
    "checkpoint": {"plain"},
    "loader": {"generators", "plain"},
    "settings": {"controller", "limits", "loader", "plain", "policies"},
    "sinks": {"report"},
    "guards": {"hooks", "loader", "settings"},
    "loader_guards": {"guards", "loader", "settings"},
    "fixed": {"guards", "loader", "loader_guards", "ranks"},
    "diversity": set(),
    "subset": set(),
    "bridge": {"generators", "loader", "ranks", "sinks", "validation"},
    "places": {"bridge", "checkpoint", "guards", "loader", "ranks"},
    "data": {"bridge", "controller", "fixed", "guards", "loader", "loader_guards", "places", "ranks", "settings"},
    "evaluation": {"bridge", "diversity", "ranks", "subset"},
    "logbook": {"controller", "limits", "policies", "report", "sinks"},
    "notices": {"policies"},
    "update": {"hooks", "meter"},
    "division": {"bridge", "data", "guards", "settings", "update"},
    "rates": {"lr", "policies", "schedulers", "settings"},
    "standing": {
        *("bridge", "checkpoint", "controller", "data", "division", "evaluation", "limits", "logbook", "meter"),
        *("policies", "ranks", "rates", "report", "update"),
    },
    "run": {
        *("bridge", "checkpoint", "controller", "data", "division", "evaluation", "guards", "limits", "logbook"),
        *("meter", "notices", "rates", "report", "settings", "standing", "update"),
    },
    "callback": {"checkpoint", "controller", "guards", "policies", "run", "settings"},
    "__init__": {"callback", "policies"},
}

PURE = {"plain", "policies", "limits", "controller", "report", "validation", "checkpoint"}
TORCH_ONLY = {"loader", "meter", "hooks", "schedulers", "lr", "generators", "ranks", "update", "diversity", "subset"}
POLICIES_MAY_IMPORT = {
    "__future__",
    "abc",
    "collections",
    "dataclasses",
    "math",
    "numbers",
    "typing",
    "typing_extensions",
}

FILES = sorted(ROOT.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def layer(path: Path) -> str:
    """Return the layer of a file."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str) -> set[str]:
    """Return the dotted names of the modules that a source imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def outside(source: str) -> set[str]:
    """Return the top-level packages that a source imports, without this one."""
    return {name.split(".")[0] for name in imported(source)} - {PACKAGE}


def inside(source: str) -> set[str]:
    """Return the layers that a source imports."""
    return {name.split(".")[1] for name in imported(source) if name.startswith(PACKAGE + ".")}


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is none of Python's own."""
    return name.startswith("_") and not name.endswith("__")


def private_touches(source: str) -> set[str]:
    """Return private attributes of anything but oneself, and private names imported from Lightning."""
    touches: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", "cls"}:
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "hasattr", "delattr"}:
            names = [ast.literal_eval(name) for name in node.args[1:2] if isinstance(name, ast.Constant)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", "") or ""
            dotted = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            names = [part for name in dotted if name.startswith("lightning.") for part in name.split(".")]
        touches |= {name for name in names if is_private(name)}
    return touches


@every_file
def test_imports_go_one_way(path):
    """A layer imports only what stands for it in the table, and each layer stands in it."""
    assert inside(path.read_text()) - {layer(path)} <= LAYERS[layer(path)]


def test_table_of_layers_has_no_cycle():
    """The table itself goes one way: every layer stands below those that import it."""
    below: set[str] = set()
    for name, imports in LAYERS.items():
        assert imports <= below
        below.add(name)


def test_table_of_layers_is_used_up():
    """The table allows no import that nobody makes, and names no layer that is not there."""
    made: dict[str, set[str]] = {}
    for path in FILES:
        made.setdefault(layer(path), set()).update(inside(path.read_text()) - {layer(path)})
    assert made == LAYERS


@every_file
def test_packages_outside(path):
    """Policies import arithmetic alone, pure layers no torch and no Lightning, loader, meter and lr no Lightning."""
    packages = outside(path.read_text())
    if layer(path) == "policies":
        assert packages <= POLICIES_MAY_IMPORT
    if layer(path) in PURE:
        assert packages <= set(sys.stdlib_module_names) | {"typing_extensions"}
    if layer(path) in TORCH_ONLY:
        assert packages.isdisjoint({"lightning", "pytorch_lightning", "lightning_fabric"})


@every_file
def test_only_the_bridge_touches_what_is_private_of_lightning(path):
    """Outside of the bridge a file that knows Lightning touches no private name but its own."""
    source = path.read_text()
    if layer(path) != "bridge" and "lightning" in outside(source):
        assert private_touches(source) == set()


def test_nothing_imports_the_callback():
    """Only the package itself imports the callback."""
    assert [layer(path) for path in FILES if "callback" in inside(path.read_text())] == ["__init__"]


# The test's own eyes -------------------------------------------------------------------------------------------------


def test_touches_are_seen():
    """Private attributes of anything but oneself are found, also by their name, and private imports of Lightning."""
    source = """
from lightning.pytorch.loops.fetchers import _Fetcher
from lightning.pytorch._module import Name
import lightning._deep
from torch._other import _name
class Own:
    def __init__(self, trainer):
        self._mine = trainer.fit_loop._theirs
        self.__dict__["key"] = trainer.public
        trainer.strategies[0]._first = trainer.loop()._second
        setattr(trainer, "_third", getattr(trainer, "fourth", "_fifth"))
"""
    assert private_touches(source) == {"_Fetcher", "_module", "_deep", "_theirs", "_first", "_second", "_third"}


def test_imports_are_seen():
    """Imports inside functions and of submodules are found."""
    source = f"""
import {PACKAGE}.lr
import torch.nn
from {PACKAGE} import limits
def later():
    from {PACKAGE}.policies.base import Policy
"""
    assert inside(source) == {"lr", "limits", "policies"}
    assert outside(source) == {"torch"}


def test_bridge_touches_what_is_private():
    """The walk finds what the bridge is there for."""
    assert sum(len(private_touches(path.read_text())) for path in (ROOT / "bridge").glob("*.py")) > 5
