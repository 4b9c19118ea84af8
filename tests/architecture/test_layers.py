# SPDX-License-Identifier: Apache-2.0
"""Imports go downwards through the layers, never in a circle, and the planner half needs no numerical library."""

import pytest

from tests.architecture import sources
from tests.architecture.layers import (
    LAYERS,
    NEVER_IN_THE_PLANNER,
    NUMPY_IN_THE_PLANNER,
    PLANNER_LAYERS,
    layer_of,
)

MODULES = sources.modules()
LAYER = {module: index for module in MODULES if (index := layer_of(module)) is not None}


def test_every_module_stands_in_a_layer() -> None:
    assert not sorted(MODULES.keys() - LAYER.keys()), "add them to tests/architecture/layers.py"


@pytest.mark.parametrize("module", LAYER)
def test_a_module_imports_from_its_own_layer_and_below(module: str) -> None:
    own = LAYER[module]
    upwards = [
        f"line {line}: {LAYERS[own][0]} imports {name} of {LAYERS[LAYER[target]][0]}"
        for line, name, _ in sources.imports(MODULES[module])
        if (target := sources.own_module(name, MODULES)) and LAYER.get(target, 0) > own and target != "__init__"
    ]
    assert not upwards, f"detcomm.{module}: {upwards}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {
            target
            for _, name, eager in sources.imports(path)
            if eager and (target := sources.own_module(name, MODULES)) and target not in (module, "__init__")
        }
        for module, path in MODULES.items()
    }
    while free := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in free:
            del graph[module]
    assert not graph, f"in a circle: {sorted(graph)}"


@pytest.mark.parametrize("module", [name for name in LAYER if LAYERS[LAYER[name]][0] in PLANNER_LAYERS])
def test_the_planner_half_imports_no_numerical_or_native_library(module: str) -> None:
    allowed = ("numpy",) if module in NUMPY_IN_THE_PLANNER else ()
    found = [
        f"line {line}: {name}"
        for line, name, _ in sources.imports(MODULES[module])
        if (top := name.partition(".")[0]) in NEVER_IN_THE_PLANNER and top not in allowed
    ]
    assert not found, f"detcomm.{module}: {found}"


def test_every_named_layer_member_exists() -> None:
    members = [member for _, names in LAYERS for member in names]
    assert len(members) == len(set(members))
    assert not [member for member in members if member not in MODULES]
