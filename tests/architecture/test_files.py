# SPDX-License-Identifier: Apache-2.0
"""Each file: licence line, docstring, length, and the mark ``bits:`` only where bits are decided."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture import sources
from tests.architecture.layers import (
    DECIDE_BITS,
    LENGTH_EXCEPTIONS,
    LONGEST_LINES,
    SHORT_ON_PURPOSE,
    SHORTEST_LINES,
)

FILES = [path for path in sources.source_files() if path.stat().st_size]
PYTHON = [path for path in FILES if sources.is_python(path)]
LICENCE = "SPDX-License-Identifier: Apache-2.0"
BITS = re.compile(r"(#|//|/\*) bits:")

each_file = pytest.mark.parametrize("path", FILES, ids=sources.relative)
each_python_file = pytest.mark.parametrize("path", PYTHON, ids=sources.relative)


@each_file
def test_the_licence_stands_on_top(path: Path) -> None:
    lines = sources.read_lines(path)
    top = lines[1] if lines[0].startswith("#!") else lines[0]
    assert LICENCE in top


@each_python_file
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(sources.parse(path))


@each_file
def test_a_file_is_one_idea_long(path: Path) -> None:
    name, num_lines = sources.relative(path), len(sources.read_lines(path))
    assert num_lines <= LENGTH_EXCEPTIONS.get(name, LONGEST_LINES), "split it"
    in_package = name.startswith("detcomm/") and path.name not in ("__init__.py", "__main__.py")
    assert num_lines >= SHORTEST_LINES or not in_package or name in SHORT_ON_PURPOSE, "too little for a file"


def test_the_exceptions_of_length_are_needed() -> None:
    needless = [name for name in LENGTH_EXCEPTIONS if len(sources.read_lines(sources.ROOT / name)) <= LONGEST_LINES]
    assert not needless


@each_file
def test_bits_are_decided_where_they_may_be(path: Path) -> None:
    name = sources.relative(path)
    if name.startswith(("tests/", *DECIDE_BITS)):
        return
    marked = [number for number, line in enumerate(sources.read_lines(path), 1) if BITS.search(line)]
    assert not marked, f"{name} lines {marked}: decide bits elsewhere, or list the file in layers.py"


@pytest.mark.parametrize("place", DECIDE_BITS)
def test_what_decides_bits_says_so(place: str) -> None:
    files = [path for path in FILES if sources.relative(path).startswith(place)]
    assert any(BITS.search(line) for path in files for line in sources.read_lines(path))
