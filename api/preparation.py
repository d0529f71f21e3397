"""From a job file to something that can be submitted: checked as a whole, with its initial model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundtable.client.training.task_composition import check_task_with
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig, job_document, read_job
from roundtable.core.errors import ConfigError, LayoutError
from roundtable.core.foundation.checkpoint_files import CheckpointTensors
from roundtable.core.initial_model import initial_model
from roundtable.core.models import Model, open_model
from roundtable.core.plugins.doors import is_file
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy
from roundtable.core.task import AnyTask, load_task
from roundtable.core.tensor_spec import DTYPES
from roundtable.core.toml import with_place
from roundtable.engine.validation.feasibility import check_rule
from roundtable.engine.validation.layout_composition import check_layout
from roundtable.engine.validation.round_plan import make_plan, weak_signal_of
from roundtable.simulation.world.config import check_population
from roundtable.simulation.world.standardised import with_answers
from roundtable.simulation.world.tables_check import check_tables


@dataclass(frozen=True)
class Prepared:
    """A job that makes sense, its task, and the model that it starts from."""

    job: JobConfig
    task: AnyTask
    model: Model
    warnings: tuple[str, ...] = ()


def prepare(path: Path, overrides: Mapping[str, Any] | None = None, start: Path | None = None) -> Prepared:
    """Reads a job file, imports its task, makes the initial model, and checks that all of it fits.

    `start` is what to start from in the place of the task's own weights: a model artifact, or the folder
    of a checkpoint in safetensors, of one file or many with an index. Raises
    ConfigError, TaskError, EncodingError, LayoutError or PrivacyError; each says what to change.
    """
    document = job_document(path, overrides)
    folder = path.resolve().parent
    with with_place(document):
        return prepare_job(read_job(document, folder), folder, start)


def prepare_job(job: JobConfig, folder: Path, start: Path | None = None) -> Prepared:
    """The same of a job that is read already; `folder` is where its files lie. Raises as `prepare`."""
    check_tables(job, folder)
    job = with_answers(job, folder)
    task = load_task(job.task.name, folder, parameters=job.task.parameters, trains=False)
    algorithm = make_algorithm(job.algorithm, folder)
    model = initial_model(job, task, algorithm)
    if start is not None:
        model = _started(start, model, job.task.name)
    slices = tuple(place for _, place in model.layout.sent.slices())
    population = likely_population(job)
    plan = make_plan(job, population, slices, folder=folder)
    check_layout(job, model.layout, folder)
    if job.cohort.size is not None or job.round.buffer is not None:
        check_rule(job, plan, population)
    check_task_with(job, algorithm, task, model.layout)
    weak = weak_signal_of(job, plan, population, model.layout.sent.size)
    warnings = (weak, _not_simulated(job), _not_submitted(job))
    return Prepared(job, task, model, tuple(warning for warning in warnings if warning))


def likely_population(job: JobConfig) -> int:
    """The silos that a job will have, as far as its file tells: what it states, else what it simulates."""
    stated = None if isinstance(job.privacy, NoPrivacy | ExampleLevel) else job.privacy.population
    return stated or max(job.cohort.size or 1, job.simulation.clients)


def _not_simulated(job: JobConfig) -> str | None:
    """A warning where the file names a number of simulated clients that is too small for its rounds."""
    if "clients" not in job.simulation.model_fields_set:
        return None
    try:
        check_population(job)
    except ConfigError as error:
        return f"It cannot be simulated: {error}."
    return None


def _not_submitted(job: JobConfig) -> str | None:
    """A warning where the file names what no coordinator has: code beside it, test data of the server."""
    named = [
        job.aggregation.rule,
        *(str(step.get("name")) for step in job.aggregation.pre),
        job.aggregation.server_optimizer.name,
        job.cohort.strategy,
        job.algorithm.name,
        *job.transfer.foreign,
    ]
    if job.stop.central:
        return f"It can only be simulated: its server measures stop.metric = {job.stop.metric!r}."
    files = [name for name in named if is_file(name)]
    if not files:
        return None
    code = ", ".join(files)
    return f"It can only be simulated: {code} is code beside the job, and a job that is sent brings none."


def _started(path: Path, own: Model, task: str) -> Model:
    """The weights of an artifact or a checkpoint, for a job whose task makes models like `own`."""
    if path.is_dir() or path.suffix == ".json":
        return _of_checkpoint(path, own, task)
    start = open_model(path)
    if start.layout.fingerprint != own.layout.fingerprint:
        theirs, ours = set(start.layout.tensors), set(own.layout.tensors)
        other = min(spec.name for spec in theirs ^ ours) if theirs != ours else start.layout.tensors[0].name
        raise LayoutError(
            f"{path} does not hold a model of task {task!r} under this job: {other!r} is absent on one side, "
            "or differs in shape, dtype, its rule in [model] or its frozen values; take an artifact of a "
            "job with the same model"
        )
    if not torch.isfinite(start.vector).all():
        raise LayoutError(f"{path} holds weights that are not finite; start from an earlier model")
    return replace(start.without_frozen(), metadata=own.metadata)


def _of_checkpoint(path: Path, own: Model, task: str) -> Model:
    """`own` with the values of a checkpoint, tensor by tensor: each that travels has to be there.

    What stays at silos is taken where it is there; what is frozen is checked. Half precision is exact in
    float32, other conversions are refused.
    """
    found = CheckpointTensors(path)
    found.verify()
    layout = own.layout.model
    known = {spec.name: spec for spec in layout.tensors}
    missing = [spec.name for spec in layout.averaged if spec.name not in found]
    odd = sorted(found.keys() - known.keys())
    if missing or odd:
        what = f"lacks {missing[0]!r}" if missing else f"has {odd[0]!r}, which the model has not"
        raise LayoutError(
            f"{path} is no checkpoint of the model of task {task!r}: it {what}; tensors are found by the "
            "names of the model's state_dict()"
        )
    local = dict(own.local)
    for name in found:
        spec, value = known[name], found[name]
        exact = spec.dtype == "float32" and value.dtype in (torch.bfloat16, torch.float16)
        if tuple(value.shape) != spec.shape or not (exact or value.dtype == DTYPES[spec.dtype]):
            raise LayoutError(
                f"{path}: {name!r} is {str(value.dtype).removeprefix('torch.')} {list(value.shape)}, and the "
                f"model of task {task!r} has {spec.dtype} {list(spec.shape)}"
            )
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise LayoutError(f"{path}: {name!r} holds NaN or infinity; start from an earlier model")
        if spec.offset >= 0:
            own.vector[spec.offset : spec.offset + spec.size].view(spec.shape).copy_(value)
        elif spec.rule == "frozen":
            layout.check_frozen({name: value.to(DTYPES[spec.dtype])})
        elif spec.alias_of is not None:
            _check_tied(path, name, value, spec.alias_of, found)
        elif spec.rule == "local":
            local[name] = value.to(DTYPES[spec.dtype])
    return replace(own, local=local)


def _check_tied(path: Path, name: str, value: Tensor, other: str, found: CheckpointTensors) -> None:
    if other in found and not torch.equal(value, found[other]):
        raise LayoutError(f"{path}: {name!r} and {other!r} are one tensor of the model, and two here")
