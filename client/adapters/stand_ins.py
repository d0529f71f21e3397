"""Modules that stand in for those of another framework while code written for it runs here.

One that is installed is put aside for that time, so that code meets the same classes at every silo.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from roundtable.core.errors import TaskError


class StandIns:
    """The modules of `names`, all of the one package `top`.

    A name that a module lacks is refused with what `instead` says of the longest beginning of the
    module's name, else with `otherwise`.
    """

    def __init__(
        self, top: str, names: Mapping[str, Mapping[str, Any]], instead: Mapping[str, str], otherwise: str
    ) -> None:
        self._top = top
        self._instead = dict(instead)
        self._otherwise = otherwise
        self._modules = {name: self._module(name, content) for name, content in names.items()}
        self._lock = threading.Lock()
        self._aside: dict[str, ModuleType] = {}
        self._users = 0
        for name, module in self._modules.items():
            home, _, last = name.rpartition(".")
            if home:
                setattr(self._modules[home], last, module)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Importing `top` finds these meanwhile, in all threads of this process."""
        with self._lock:
            if self._users == 0:
                self._aside = self._taken_out()
                sys.modules.update(self._modules)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._taken_out()
                    sys.modules.update(self._aside)
                    self._aside = {}

    def _taken_out(self) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name == self._top or name.startswith(f"{self._top}.")]
        return {name: sys.modules.pop(name) for name in names}

    def _module(self, name: str, content: Mapping[str, Any]) -> ModuleType:
        module = ModuleType(name, f"Stands in for the module of this name of {self._top}.")
        module.__path__ = []
        vars(module).update(content)
        vars(module)["__getattr__"] = self._refusing(name)
        return module

    def _refusing(self, module: str) -> Callable[[str], Any]:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            known = [start for start in self._instead if module.startswith(start)]
            said = self._instead[max(known, key=len)] if known else self._otherwise
            raise TaskError(f"{module}.{name} cannot be carried over: {said}")

        return missing
