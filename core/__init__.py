"""What everything else stands on: the flat vector, the task, the job, errors and seeds."""

from roundtable.core.config import JobConfig, job_from_json, load_job, parse_job
from roundtable.core.encodings import ENCODINGS, Encoding, get_encoding
from roundtable.core.errors import RoundtableError, SiteFailure
from roundtable.core.layout import Layout, LayoutRules, TensorSpec
from roundtable.core.models import Model, model_digest, open_model, save_model
from roundtable.core.seeds import derive_seed, numpy_generator, torch_generator
from roundtable.core.task import ArrayTask, Site, Task, initial_state, load_task

__all__ = [
    "ENCODINGS",
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
