"""What a silo allows analyses: the table [policy.analyses] of its agent.toml, and its objections to a job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from roundtable.client.policy.known_jobs import KnownJob, KnownJobs, job_read
from roundtable.core.algorithms.analysis import LEAST_COUNT, AnalysisTable
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import NoPrivacy, masking_of
from roundtable.core.toml_tables import Finite, Table

DAY = 86400.0


class AnalysesTable(Table):
    """`[policy.analyses]`: what may be asked of the tables of [data], where [tasks] offers `analysis`."""

    least_count: int = Field(
        LEAST_COUNT, ge=1, description="fewest rows of a cell or group that an analysis may tell of"
    )
    round_to: int = Field(
        1, ge=1, description="what an analysis rounds counts to multiples of; others tell of more than counts"
    )
    allowed: list[str] | None = Field(
        None,
        description='kinds of questions, such as ["describe", "linear"]; default: all but those '
        "that tell of a silo's own estimates",
    )
    own_figures: bool = Field(
        False,
        description="answers may show figures of this silo's own rows beside those of others (by_silo of "
        "evaluate)",
    )
    tables: list[str] | None = Field(None, description="tables of [data] that may be asked; default: all")
    protected: list[str] = Field(
        default_factory=list, description="columns that no question may use as its outcome or group"
    )
    silos_apart: int = Field(
        3,
        ge=1,
        description="fewest silos by which the cohorts of two masked analyses of a column differ, if they do",
    )
    epsilon: Annotated[Finite, Field(gt=0)] | None = Field(
        None,
        description="most epsilon of one analysis; without differential privacy (level example) none is then "
        "answered",
    )
    a_day: int | None = Field(None, ge=1, description="most analyses that may begin within 24 hours")


@dataclass(frozen=True)
class AskedColumns:
    """What a masked analysis uses of a table: its cohort and another one's differ by no silo, or by at least
    so many as `apart` says."""

    table: str
    columns: tuple[str, ...]
    apart: int


def asked_columns(rules: AnalysesTable, job: JobConfig) -> AskedColumns | None:
    """Of an analysis whose sums are exact; None for any other job. With noise in each silo's sums the
    difference of two of them tells no more than both cost."""
    asked = job.algorithm
    if not isinstance(asked, AnalysisTable) or job.releases_sums:
        return None
    return AskedColumns(asked.table, tuple(sorted(asked.survey.needed)), rules.silos_apart)


def analysis_objections(rules: AnalysesTable, job: JobConfig) -> Iterator[str]:
    """Why this silo does not answer an analysis, a sentence each; none for a job that is not one."""
    asked = job.algorithm
    if not isinstance(asked, AnalysisTable):
        if job.task.name == "analysis":
            yield 'the task "analysis" answers jobs with [algorithm] name = "analysis", and no others'
        return
    if asked.least_count < rules.least_count and not job.releases_sums:
        yield (
            f"the analysis tells of {asked.least_count} rows, and this silo of no fewer than "
            f"{rules.least_count} ([policy.analyses] least_count): set least_count = {rules.least_count}"
        )
    if asked.round_to % rules.round_to and not job.releases_sums:
        yield (
            f"the analysis tells counts as multiples of {asked.round_to}, and this silo of "
            f"{rules.round_to} ([policy.analyses] round_to): set round_to = {rules.round_to}, and ask "
            "histogram, table and top_values alone"
        )
    if rules.tables is not None and asked.table not in rules.tables:
        yield f"the table {asked.table!r} may not be asked here ([policy.analyses] tables)"
    kinds = sorted({question.ask for question in asked.questions})
    if rules.allowed is not None and (others := [kind for kind in kinds if kind not in rules.allowed]):
        yield (
            f"questions of the kind {', '.join(others)} are not answered here; allowed: "
            f"{', '.join(rules.allowed) or 'none'} ([policy.analyses] allowed)"
        )
    for question in asked.survey.questions:
        if question.tells_of_silos and rules.allowed is None:
            yield (
                f"{question.title}: sums of {question.ask} over few silos tell of this silo's own estimates: "
                "its policy has to name it ([policy.analyses] allowed)"
            )
        if question.shows_silos and not rules.own_figures:
            yield (
                f"{question.title}: its answer shows figures of this silo's own rows to the coordinator and "
                "all who read it, masked or not: this silo has to allow that ([policy.analyses] own_figures "
                "= true), or the study leaves by_silo out"
            )
        if kept := sorted({*question.told} & {*rules.protected}):
            yield (
                f"{question.title}: {', '.join(map(repr, kept))} may be neither an outcome nor a group here "
                "([policy.analyses] protected)"
            )


def too_many_today(rules: AnalysesTable, job: JobConfig, known: KnownJob, jobs: KnownJobs) -> list[str]:
    """Why a new analysis is one too many for today; nothing for one that has begun here."""
    if rules.a_day is None or jobs.get(known.id) is not None:
        return []
    begun = [(each.first, job_read(each.config)) for each in jobs.taken_part()]
    return list(objections_to_count(rules, job, begun, time.time()))


def asked_in(job: JobConfig) -> dict[str, Any] | None:
    """What an analysis asks, for the silo's log; None for any other job."""
    asked = job.algorithm
    if not isinstance(asked, AnalysisTable):
        return None
    return {
        "table": asked.table,
        "questions": [question.model_dump(mode="json", exclude_none=True) for question in asked.questions],
        "least_count": asked.least_count,
        "round_to": asked.round_to,
        "masked": masking_of(job.privacy) is not None,
        "epsilon": None if isinstance(job.privacy, NoPrivacy) else job.privacy.epsilon,
    }


def objections_to_count(
    rules: AnalysesTable, job: JobConfig, begun: Iterable[tuple[float, JobConfig]], now: float
) -> Iterator[str]:
    """Why this silo answers no further analysis today; `begun` are the other jobs that it takes part in, and
    when each began (Unix time)."""
    if rules.a_day is None or not isinstance(job.algorithm, AnalysisTable):
        return
    today = sum(isinstance(each.algorithm, AnalysisTable) and now - when < DAY for when, each in begun)
    if today >= rules.a_day:
        yield (
            f"{today} analyses began here within 24 hours, and {rules.a_day} may ([policy.analyses] a_day): "
            "try again tomorrow"
        )
