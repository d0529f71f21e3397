"""What computes here, for the audit log."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

import torch

from roundtable.core.evidence.release import release

_NAMED = ("torch", "numpy", "grpcio", "cryptography")


@cache
def _found() -> dict[str, str]:
    # Which instructions sums are made with: another processor may round otherwise.
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    named = {name: version(name) for name in _NAMED}
    ours = {"roundtable": release().version, "commit": release().commit}
    return ours | named | {"python": platform.python_version(), "processor": processor}


def versions() -> dict[str, str]:
    """Names of the software and of Python with their versions, and the kind of processor."""
    return dict(_found())
