"""What computes here, for the audit log."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

_NAMED = ("roundtable", "torch", "numpy", "grpcio", "cryptography")


@cache
def _found() -> dict[str, str]:
    return {name: version(name) for name in _NAMED} | {"python": platform.python_version()}


def versions() -> dict[str, str]:
    """Names of the software and of Python with their versions."""
    return dict(_found())
