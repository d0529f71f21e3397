"""The parts of SciPy that answers need, imported by the first answer.

A job's file, which may ask for an analysis, is read by every command.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _LaterImport:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


linalg: Any = _LaterImport("scipy.linalg")
special: Any = _LaterImport("scipy.special")
stats: Any = _LaterImport("scipy.stats")
