# SPDX-License-Identifier: Apache-2.0
"""The repository's source files and what they import, read without running them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("detcomm", "native", "tests", "scripts", "demo", "docs")
_SUFFIXES = (".py", ".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh")


@cache
def source_files(*folders: str) -> tuple[Path, ...]:
    """All source files below these folders (default: all), scripts without a suffix included."""
    found = []
    for folder in folders or _FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and (path.suffix in _SUFFIXES or _is_script(path)):
                found.append(path)
    return tuple(found)


def relative(path: Path) -> str:
    """The path as reports name it."""
    return path.relative_to(ROOT).as_posix()


def is_python(path: Path) -> bool:
    """Whether it is Python, by its suffix or its first line."""
    return path.suffix == ".py" or (_is_script(path) and "python" in read_lines(path)[0])


@cache
def read_lines(path: Path) -> list[str]:
    """The lines of a file."""
    return path.read_text().splitlines()


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse("\n".join(read_lines(path)), filename=str(path))


def modules() -> dict[str, Path]:
    """detcomm's modules by dotted name, without the leading ``detcomm.``; a package by its own name."""
    found = {}
    for path in source_files("detcomm"):
        if path.suffix == ".py":
            parts = path.relative_to(ROOT / "detcomm").with_suffix("").parts
            if parts[-1] == "__init__" and len(parts) > 1:
                parts = parts[:-1]
            found[".".join(parts)] = path
    return found


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name and whether it is done at import, of each import; those for type checkers alone are not."""
    tree = parse(path)
    for_types = {id(node) for block in ast.walk(tree) if _is_type_checking(block) for node in ast.walk(block)}
    inside = {id(node) for block in ast.walk(tree) if isinstance(block, _FUNCTIONS) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        eager = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, eager
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", eager


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def own_module(name: str, known: dict[str, Path]) -> str | None:
    """The module of detcomm that an imported dotted name lies in, ``None`` for anything else's."""
    if name != "detcomm" and not name.startswith("detcomm."):
        return None
    inner = name.removeprefix("detcomm").removeprefix(".")
    while inner and inner not in known:
        inner = inner.rpartition(".")[0]
    return inner or "__init__"


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _is_script(path: Path) -> bool:
    return path.suffix == "" and path.is_file() and path.open("rb").read(2) == b"#!"
