# SPDX-License-Identifier: Apache-2.0
"""Replaced functions of modules that are loaded, that come later, that lack them; and all of them put back."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from detcomm.errors import UsageError
from detcomm.megatron.replacements import Replacements

PACKAGE = "stand_in_for_megatron"


@pytest.fixture
def replacements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replacements]:
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "groups.py").write_text("def create(x):\n    'Makes.'\n    return ['original', x]\n")
    (package / "user.py").write_text("from stand_in_for_megatron.groups import create\nat_import = create(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = Replacements()
    yield made
    made.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def _ours(original: Callable[[int], list[object]]) -> Callable[[int], list[object]]:
    return lambda x: ["ours", *original(x)]


def test_a_module_that_comes_later_is_changed_before_anybody_takes_from_it(replacements: Replacements) -> None:
    replacements.add(f"{PACKAGE}.groups", "create", _ours)
    assert f"{PACKAGE}.groups" not in sys.modules
    user = importlib.import_module(f"{PACKAGE}.user")
    assert user.at_import == ["ours", "original", 1]
    assert user.create.__doc__ == "Makes."


def test_a_module_that_is_loaded_is_changed_now(replacements: Replacements) -> None:
    groups = importlib.import_module(f"{PACKAGE}.groups")
    replacements.add(f"{PACKAGE}.groups", "create", _ours)
    assert groups.create(2) == ["ours", "original", 2]


def test_a_name_that_somebody_has_taken_before_is_changed_too(replacements: Replacements) -> None:
    user = importlib.import_module(f"{PACKAGE}.user")
    replacements.add(f"{PACKAGE}.groups", "create", _ours)
    assert user.create(2) == ["ours", "original", 2]
    replacements.undo()
    assert user.create is sys.modules[f"{PACKAGE}.groups"].create
    assert user.create(2) == ["original", 2]


def test_the_end_puts_back_also_what_others_have_taken(replacements: Replacements) -> None:
    replacements.add(f"{PACKAGE}.groups", "create", _ours)
    user = importlib.import_module(f"{PACKAGE}.user")
    groups = sys.modules[f"{PACKAGE}.groups"]
    num_finders = len(sys.meta_path)
    replacements.undo()
    assert len(sys.meta_path) == num_finders - 1
    assert groups.create(3) == user.create(3) == ["original", 3]
    replacements.undo()


def test_the_end_leaves_alone_what_came_after(replacements: Replacements) -> None:
    replacements.add(f"{PACKAGE}.groups", "create", _ours)
    groups = importlib.import_module(f"{PACKAGE}.groups")
    later = groups.create = lambda x: x
    replacements.undo()
    assert groups.create is later


def test_a_module_without_the_function_is_refused_at_its_import(replacements: Replacements) -> None:
    replacements.add(f"{PACKAGE}.groups", "create_all", _ours)
    with pytest.raises(UsageError, match=r"groups .* has no create_all"):
        importlib.import_module(f"{PACKAGE}.groups")
