"""From a job file to something that can be submitted: checked as a whole, with its initial model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundtable.client.private_training import check_task
from roundtable.core.config import JobConfig, load_job
from roundtable.core.initial import initial_model
from roundtable.core.models import Model
from roundtable.core.task import AnyTask, load_task
from roundtable.engine.plan import make_plan, weak_signal_of


@dataclass(frozen=True)
class Prepared:
    """A job that makes sense, its task, and the model that it starts from."""

    job: JobConfig
    task: AnyTask
    model: Model
    warnings: tuple[str, ...] = ()


def prepare(path: Path, overrides: Mapping[str, Any] | None = None) -> Prepared:
    """Reads a job file, imports its task, makes the initial model, and checks that all of it fits.

    Raises ConfigError, TaskError, LayoutError or PrivacyError; each says what to change.
    """
    job = load_job(path, dict(overrides or {}))
    task = load_task(job.task, path.parent, trains=False)
    model = initial_model(job, task)
    slices = tuple(place for _, place in model.layout.slices())
    population = max(job.cohort.size or 1, job.simulation.clients)
    plan = make_plan(job, population, slices)
    check_task(task, job, model.layout)
    weak = weak_signal_of(job, plan, population, model.layout.size)
    return Prepared(job, task, model, (weak,) if weak else ())
