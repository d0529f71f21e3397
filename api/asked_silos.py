"""Analyses of a coordinator's silos: begun, waited for, and read from the model that they end with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.models import open_model, save_model
from roundtable.preparation import prepare_job
from roundtable.simulation.world.standardised import filled_from, standardise_job

if TYPE_CHECKING:
    from torch import Tensor

    from roundtable.operator import OperatorClient
    from roundtable.proto.operator_pb2 import Job, JobDetail

TASK = "analysis"


def offering(operator: OperatorClient, task: str = TASK) -> list[str]:
    """The silos of the coordinator that answer analyses, by this task. ConfigError where none does."""
    plain = Path(task.partition(":")[0]).stem
    silos = [client.name for client in operator.clients() if task in client.tasks or plain in client.tasks]
    if not silos:
        reference = task if task == TASK else "FILE.py:CLASS"
        kind = "analyses" if task == TASK else repr(plain)
        raise ConfigError(
            f"no silo of the coordinator offers {kind} yet: a silo does "
            f'by [tasks] {plain} = "{reference}" in its agent.toml'
        )
    return silos


def begin(
    operator: OperatorClient, analysis: JobConfig, request: str | None = None, folder: Path | None = None
) -> Job:
    """Submits the job of an analysis, whose code lies in `folder`; the same `request` twice gives the same
    one."""
    prepared = prepare_job(analysis, Path.cwd() if folder is None else folder)
    with tempfile.TemporaryDirectory(prefix="roundtable-") as place:
        model = Path(place) / "analysis.safetensors"
        save_model(model, prepared.model)
        return operator.submit(prepared.job, model, request)


def outcome(operator: OperatorClient, job: str) -> tuple[JobDetail, Tensor]:
    """A finished analysis and its global vector. AggregationError for one that is not finished."""
    detail = operator.job(job)
    if detail.job.status != "finished":
        raise AggregationError(
            f"analysis {detail.job.id} is {detail.job.status}: "
            f"{detail.job.reason or f'{detail.job.rounds_done} rounds are done'}"
        )
    with tempfile.TemporaryDirectory(prefix="roundtable-") as folder:
        model = Path(folder) / "analysis.safetensors"
        operator.get_artifact(detail.job.model.digest, detail.job.model.size, model)
        return detail, open_model(model).vector.clone()


def standardised_by_silos(
    operator: OperatorClient,
    job: JobConfig,
    request: str | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> JobConfig:
    """The job with the figures of `[standardise]`, where it lacks some: from an analysis of all silos that
    answer analyses; `told` hears how far it is.

    With the `request` of a submission that is repeated it is the same analysis. Raises ConfigError where
    there can be none, AggregationError where one of the silos does not answer.
    """
    if job.standardise is None or job.standardise.complete:
        return job
    analysis = standardise_job(job, len(offering(operator)))
    began = begin(operator, analysis, None if request is None else f"{request}.standardise")
    told(f"analysis {began.id} begins")
    for update in operator.watch(began.id, 1):
        told(f"analysis {began.id}, round {update.detail.job.rounds_done + 1}")
        if update.detail.job.status == "paused":
            break
    detail, vector = outcome(operator, began.id)
    return filled_from(job, job_from_json(detail.job_config), vector, f"analysis {detail.job.id}")
