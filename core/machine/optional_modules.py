"""Modules of the standard library that some systems lack; None there."""

from __future__ import annotations

from types import ModuleType


def _fcntl() -> ModuleType | None:
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def _resource() -> ModuleType | None:
    try:
        import resource
    except ImportError:
        return None
    return resource


def _msvcrt() -> ModuleType | None:
    try:
        import msvcrt
    except ImportError:
        return None
    return msvcrt


FCNTL = _fcntl()
MSVCRT = _msvcrt()
RESOURCE = _resource()
