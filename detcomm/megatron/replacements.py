# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages that are replaced, whether their module has been imported yet or not, and put back.

Importing Megatron early would fix what its modules read at import. So a module that is not there yet is changed right
after its own code has run, before anybody can take a name out of it (``from m import f``). Where the module is there
already, the names that others have taken are changed too. Knows nothing of what is replaced.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from detcomm.errors import UsageError

Function = Callable[..., Any]


class Replacements:
    """A set of replaced functions, with one end for all.

    Who still holds a replacement after the end gets the original's behaviour: it asks whether it is in force.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, dict[str, Callable[[Function], Function]]] = {}
        self._replaced: list[tuple[ModuleType, str, Function, Function]] = []
        self._finder = _AfterImport(self._replace)
        self._in_force = True

    def add(self, module: str, name: str, make: Callable[[Function], Function]) -> None:
        """Replace ``module.name`` by ``make(original)``, now or when the module is imported.

        Raises:
            UsageError: the module has no such function; here, or at its import.
        """
        self._wanted.setdefault(module, {})[name] = make
        if (loaded := sys.modules.get(module)) is not None:
            self._replace_one(loaded, name, make)
            return
        self._finder.wanted.add(module)
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Put every function back. Idempotent."""
        self._in_force = False
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._replaced:
            module, name, original, replacement = self._replaced.pop()
            if getattr(module, name, None) is replacement:  # else somebody came after us
                setattr(module, name, original)

    def _replace(self, module: ModuleType) -> None:
        for name, make in self._wanted[module.__name__].items():
            self._replace_one(module, name, make)

    def _replace_one(self, module: ModuleType, name: str, make: Callable[[Function], Function]) -> None:
        original = getattr(module, name, None)
        if not callable(original):
            version = getattr(sys.modules.get("megatron.core"), "__version__", "of unknown version")
            raise UsageError(f"{module.__name__} (Megatron Core {version}) has no {name}, which detcomm replaces")
        replacement = self._while_in_force(make(original), original)
        for holder, held_as in _holders(module, original):
            setattr(holder, held_as, replacement)
            self._replaced.append((holder, held_as, original, replacement))

    def _while_in_force(self, ours: Function, original: Function) -> Function:
        @functools.wraps(original)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (ours if self._in_force else original)(*args, **kwargs)

        return either


def _holders(module: ModuleType, function: Function) -> list[tuple[ModuleType, str]]:
    """Every name of the function in the loaded modules of its package, and in the script."""
    package = module.__name__.partition(".")[0]
    loaded = [holder for name, holder in sys.modules.items() if name.partition(".")[0] in (package, "__main__")]
    return [(holder, name) for holder in loaded for name, value in list(vars(holder).items()) if value is function]


class _AfterImport(MetaPathFinder):
    """Finds nothing itself: lets the other finders find a module and has its loader call back at the end."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self.wanted: set[str] = set()
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.wanted:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                self._call_back(spec)
                return spec
        return None

    def _call_back(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._imported(module)

        loader.exec_module = exec_module  # this module's own loader: the finders make one for each
