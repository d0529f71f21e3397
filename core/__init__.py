"""What everything else stands on: the flat vector, the task, the job, errors and seeds.

Names are loaded when they are first used: who needs an error or a certificate does not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roundtable.core.allocator import importing

if TYPE_CHECKING:
    from roundtable.core.config import JobConfig, job_from_json, load_job, parse_job
    from roundtable.core.encodings import Encoding, get_encoding
    from roundtable.core.errors import RoundtableError, SiteFailure
    from roundtable.core.initial_model import initial_model
    from roundtable.core.layout import Layout, LayoutRules
    from roundtable.core.models import Model, model_digest, open_model, save_model
    from roundtable.core.seeds import derive_seed, numpy_generator, torch_generator
    from roundtable.core.task import ArrayTask, Site, Task, initial_state, load_task
    from roundtable.core.tensor_spec import TensorSpec

_HOMES = {
    "config": ("JobConfig", "job_from_json", "load_job", "parse_job"),
    "encodings": ("Encoding", "get_encoding"),
    "errors": ("RoundtableError", "SiteFailure"),
    "initial_model": ("initial_model",),
    "layout": ("Layout", "LayoutRules"),
    "models": ("Model", "model_digest", "open_model", "save_model"),
    "seeds": ("derive_seed", "numpy_generator", "torch_generator"),
    "task": ("ArrayTask", "Site", "Task", "initial_state", "load_task"),
    "tensor_spec": ("TensorSpec",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ArrayTask",
    "Encoding",
    "JobConfig",
    "Layout",
    "LayoutRules",
    "Model",
    "RoundtableError",
    "Site",
    "SiteFailure",
    "Task",
    "TensorSpec",
    "derive_seed",
    "get_encoding",
    "initial_model",
    "initial_state",
    "job_from_json",
    "load_job",
    "load_task",
    "model_digest",
    "numpy_generator",
    "open_model",
    "parse_job",
    "save_model",
    "torch_generator",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
