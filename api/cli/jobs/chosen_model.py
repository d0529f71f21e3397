"""Which of a job's models somebody means."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundtable.core.bounds import is_digest
from roundtable.core.errors import ConfigError

if TYPE_CHECKING:
    from roundtable.proto.operator_pb2 import JobDetail

_ANY_SIZE = 1 << 62


@dataclass(frozen=True)
class ChosenModel:
    """A model at the coordinator: its digest, its size as far as it is known, the round that made it."""

    digest: str
    size: int
    round: int
    best: bool = False


def model_of(detail: JobDetail, *, best: bool, last: bool, number: int | None) -> ChosenModel:
    """The best, the newest or that of a round; with none of them the best where the job keeps it.

    ConfigError for one that there is not.
    """
    job = detail.job
    if job.HasField("best") and not last and number is None:
        return ChosenModel(job.best.model.digest, job.best.model.size, job.best.round, True)
    if best:
        raise ConfigError(_why_no_best(detail))
    if number is None or number == job.rounds_done:
        return ChosenModel(job.model.digest, job.model.size, job.rounds_done)
    if number == 0:
        return ChosenModel(detail.initial_model.digest, detail.initial_model.size, 0)
    if number > job.rounds_done:
        raise ConfigError(
            f"job {job.id} ({job.name}) has no round {number} yet: {job.rounds_done} are committed"
        )
    records = (json.loads(text) for text in detail.history)
    found = next((str(record.get("model")) for record in records if record.get("round") == number), "")
    if not is_digest(found):
        raise ConfigError(
            f"the coordinator does not tell of round {number} of job {job.id} any more: its record is not "
            "among the newest"
        )
    return ChosenModel(found, _ANY_SIZE, number)


def _why_no_best(detail: JobDetail) -> str:
    """What a job lacks of which the best model is wanted."""
    tables = json.loads(detail.job_config or "{}")
    if not tables.get("keep", {}).get("best"):
        return (
            f"job {detail.job.id} ({detail.job.name}) keeps no best model: its file would have to say "
            "[keep] best = true and [stop] metric; --last and --round fetch others"
        )
    metric = tables.get("stop", {}).get("metric")
    what = f"no round of job {detail.job.id} ({detail.job.name}) has measured {metric} yet"
    return f"{what}; --last fetches the newest"
