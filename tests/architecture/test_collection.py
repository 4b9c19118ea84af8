# SPDX-License-Identifier: Apache-2.0
"""Every test is collected: none lies in a file or folder that pytest passes over."""

import ast
from pathlib import Path

import pytest

from tests.architecture import sources

FILES = [path for path in sources.source_files("tests") if path.suffix == ".py" and path.stat().st_size]


def _tests_in(path: Path) -> list[str]:
    body = list(sources.parse(path).body)
    for node in sources.parse(path).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            body += node.body
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]


@pytest.mark.parametrize("path", FILES, ids=sources.relative)
def test_tests_lie_in_files_that_pytest_collects(path: Path) -> None:
    assert bool(_tests_in(path)) == path.name.startswith("test_"), f"{path.name}: {_tests_in(path)}"


@pytest.mark.parametrize("path", FILES, ids=sources.relative)
def test_a_name_is_used_once_in_a_file(path: Path) -> None:
    names = _tests_in(path)
    assert len(names) == len(set(names)), "the later one hides the earlier"


@pytest.mark.parametrize("path", FILES, ids=sources.relative)
def test_test_folders_are_packages(path: Path) -> None:
    assert (path.parent / "__init__.py").exists(), "ranks import test functions by their module's full name"
