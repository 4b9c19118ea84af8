# SPDX-License-Identifier: Apache-2.0
"""The Megatron Core that is installed, read as text: its groups are known here, and what is replaced is there."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from detcomm.megatron import gradient_norm, routing
from detcomm.megatron.inventory import traffic_of

HIERARCHICAL = ("CONTEXT_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP")
"""What Megatron's ``create_hierarchical_groups`` is called for."""


def _source(module: str) -> str:
    package = find_spec("megatron")  # a namespace: importing it runs nothing
    places = [] if package is None else list(package.submodule_search_locations or ())
    file = Path(*module.split(".")[1:]).with_suffix(".py")
    found = next((path for place in places if (path := Path(place) / file).is_file()), None)
    if found is None:
        pytest.skip("megatron-core is not installed")
    return found.read_text()


def test_every_group_that_megatron_describes_is_known() -> None:
    descriptions = set()
    for text in re.findall(r"""group_desc=f?["']([^"']+)["']""", _source(routing.MODULE)):
        for base in HIERARCHICAL:
            descriptions.add(re.sub(r"\{\w+\}", "2", text.replace("{group_desc}", base)))
    assert len(descriptions) > 20, "the pattern finds nothing any more"
    assert not [name for name in sorted(descriptions) if traffic_of(name) is None]


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        (
            routing.MODULE,
            routing.FUNCTION,
            ["ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc"],
        ),
        (
            gradient_norm.MODULE,
            gradient_norm.FUNCTION,
            ["grads_for_norm", "norm_type", "grad_stats_parallel_group"],
        ),
    ],
)
def test_what_is_replaced_has_the_arguments_that_ours_has(module: str, function: str, arguments: list[str]) -> None:
    tree = ast.parse(_source(module))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert [argument.arg for argument in found.args.args] == arguments
