"""Federated learning for organisations that may not pool their data: `import roundtable as rt`.

What is listed in `__all__` is the public face; a name is loaded when it is first used, so that
`import roundtable` and `roundtable --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundtable.client.join import join
    from roundtable.core.config import JobConfig, load_job
    from roundtable.core.errors import RoundtableError
    from roundtable.core.task import ArrayTask, Site, Task, load_task
    from roundtable.loading import load_model
    from roundtable.operator import OperatorClient
    from roundtable.simulation import simulate

__version__ = "0.1.0"

__all__ = [
    "ArrayTask",
    "JobConfig",
    "OperatorClient",
    "RoundtableError",
    "Site",
    "Task",
    "__version__",
    "join",
    "load_job",
    "load_model",
    "load_task",
    "simulate",
]

_HOMES = {
    "ArrayTask": "roundtable.core.task",
    "JobConfig": "roundtable.core.config",
    "OperatorClient": "roundtable.operator",
    "RoundtableError": "roundtable.core.errors",
    "Site": "roundtable.core.task",
    "Task": "roundtable.core.task",
    "join": "roundtable.client.join",
    "load_job": "roundtable.core.config",
    "load_model": "roundtable.loading",
    "load_task": "roundtable.core.task",
    "simulate": "roundtable.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
