"""Encodes what operators are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from roundtable.core.observability.link_estimate import UNKNOWN_LINK, LinkEstimate
from roundtable.engine import ClientView
from roundtable.privacy.protection import HoldsAgainst
from roundtable.proto import common_pb2, operator_pb2
from roundtable.server.door.agent_messages import StepProgress
from roundtable.server.store import AgentRow, EventRow, JobRow, LedgerRow
from roundtable.server.store.job_lines import LineRow
from roundtable.server.store.job_silo_rows import SetupRow
from roundtable.server.store.ledger import Limit
from roundtable.server.store.report_rows import ReportRow

Job = operator_pb2.Job
JobUpdate = operator_pb2.JobUpdate
"""Messages made here and handed on unread."""


@dataclass(frozen=True)
class QueuePlace:
    """Where a job stands in the queue; see operator.proto."""

    place: int
    project: str
    priority: int
    level: int
    since: float
    reason: str
    expected: float | None
    silos: int
    connected: int
    least: int


def place_to(job: Job, place: QueuePlace) -> operator_pb2.QueuedJob:
    """A job in the queue."""
    return operator_pb2.QueuedJob(job=job, **asdict(place))


@dataclass(frozen=True)
class PopulationAccount:
    """An account of a population, or of a silo of it: ε at δ, the promise in words, the jobs behind it."""

    population: str
    silo: str
    epsilon: float
    delta: float
    accountant: str
    relation: str
    releases: int
    reserved_epsilon: float
    jobs: Sequence[str]
    statement: str


@dataclass(frozen=True)
class JobPromise:
    """What a job promises against whom, and spends, to its last round; None where that is not stated."""

    job: str
    level: str
    hides: str
    protections: Sequence[HoldsAgainst]
    population: str
    silos: int
    rounds_done: int
    rounds: int
    population_budget: float | None = None
    delta: float | None = None
    budget: float | None = None
    epsilon: float | None = None
    forecast: float | None = None
    own_forecast: float | None = None
    statement: str | None = None
    people: str | None = None
    settled_job: str | None = None
    dimension: int | None = None


def job_to(row: JobRow, size: int, best_size: int, own: bool) -> operator_pb2.Job:
    """A job as operators see it; `size` is its newest model's, `own` whether it is the caller's."""
    best = common_pb2.Artifact(digest=row.best_model, size=best_size)
    told = operator_pb2.BestModel(round=row.best_round, value=row.best_value, model=best)
    return operator_pb2.Job(
        best=told if row.best_model else None,
        id=row.id,
        name=row.name,
        status=row.status,
        reason=row.reason,
        rounds_done=row.rounds_done,
        rounds=row.rounds,
        model=common_pb2.Artifact(digest=row.model, size=size),
        submitted=row.submitted,
        updated=row.updated,
        submitter=row.submitter,
        own=own,
        algorithm=_algorithm_in(row.config),
    )


@lru_cache(maxsize=4096)
def _algorithm_in(config: str) -> str:
    """The name of a stored job's algorithm; the list of jobs is asked for every second."""
    return str(json.loads(config).get("algorithm", {}).get("name", ""))


def event_to(event: EventRow) -> common_pb2.Event:
    """An event as operators see it."""
    return common_pb2.Event(
        sequence=event.sequence,
        time=event.time,
        kind=event.kind,
        round=event.round,
        attempt=event.attempt,
        client=event.client,
        message=event.message,
        detail=json.dumps(dict(event.detail), separators=(",", ":")) if event.detail else "",
    )


def setup_to(row: SetupRow) -> operator_pb2.SiloSetup:
    """What a silo trained a job on, as operators see it."""
    return operator_pb2.SiloSetup(client=row.client, time=row.time, round=row.round, **row.setup.plain())


def log_page(lines: Iterable[LineRow]) -> operator_pb2.JobLogLines:
    """Lines of a job's log as operators see them."""
    return operator_pb2.JobLogLines(lines=[operator_pb2.JobLogLine(**asdict(line)) for line in lines])


def report_to(row: ReportRow) -> operator_pb2.Report:
    """A request for a report as operators see it."""
    return operator_pb2.Report(**{**asdict(row), "report": row.report.encode()})


def link_to(link: LinkEstimate) -> operator_pb2.Link | None:
    """What was measured of a silo's line; None for nothing."""
    if link == UNKNOWN_LINK:
        return None
    return operator_pb2.Link(
        up=link.up.value,
        down=link.down.value,
        round_trip=link.round_trip.value,
        encoding=link.encoding.value,
    )


def client_to(row: AgentRow, link: LinkEstimate) -> operator_pb2.Client:
    """An agent as operators see it, by what is stored of it and what its line is measured at."""
    metadata: Mapping[str, str] = row.metadata
    return operator_pb2.Client(
        name=row.name,
        version=row.version,
        tasks=row.tasks,
        metadata=metadata,
        devices=row.devices,
        last_seen=row.last_seen,
        selected=row.selected,
        completed=row.completed,
        drained=row.drained,
        disabled=row.disabled,
        link=link_to(link),
    )


def activity_to(name: str, client: ClientView, progress: StepProgress | None) -> operator_pb2.ClientActivity:
    """What a silo does for a job."""
    activity = operator_pb2.ClientActivity(
        client=name, state=client.state, since=client.since, note=client.note, loss=float("nan")
    )
    if progress is not None:
        activity.done, activity.total, activity.loss = progress.done, progress.total, progress.loss
        if progress.figures is not None:
            activity.figures.CopyFrom(_figures(progress.figures))
    return activity


def privacy_reply(
    accounts: Iterable[PopulationAccount], limits: Iterable[Limit], kept_by_silos: Sequence[str]
) -> operator_pb2.PrivacyReply:
    """All accounts and limits, and the jobs whose accounts no one but the silos keeps."""
    return operator_pb2.PrivacyReply(
        accounts=[operator_pb2.PrivacyAccount(**asdict(each)) for each in accounts],
        budgets=[limit_to(each) for each in limits],
        kept_by_silos=kept_by_silos,
    )


def job_privacy_to(told: JobPromise) -> operator_pb2.JobPrivacy:
    """A job's promises as operators see them."""
    values = {name: value for name, value in vars(told).items() if value is not None}
    values["protections"] = [
        operator_pb2.Protection(party=each.party, holds=each.holds, assumption=each.assumption)
        for each in told.protections
    ]
    return operator_pb2.JobPrivacy(**values)


def limit_to(limit: Limit) -> operator_pb2.PrivacyBudget:
    """A limit as a message."""
    budget = limit.budget
    return operator_pb2.PrivacyBudget(
        population=budget.population,
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.accountant,
        author=limit.author,
        time=limit.time,
    )


def charge_to(row: LedgerRow) -> operator_pb2.PrivacyCharge:
    """A row of the ledger as a message."""
    # Written again, so that every charge has the same fields, whichever version wrote it.
    text = json.dumps(json.loads(row.charge), sort_keys=True)
    return operator_pb2.PrivacyCharge(
        population=row.population,
        silo=row.silo,
        job=row.job,
        round=row.round,
        attempt=row.attempt,
        charge=text,
        released=row.released,
        time=row.time,
    )


def _figures(figures: Mapping[str, float]) -> common_pb2.StepFigures:
    """A silo's newest training step as operators see it."""
    exact = {"step", "steps", "memory_bytes"}
    values = {name: int(value) if name in exact else value for name, value in figures.items()}
    return common_pb2.StepFigures(**values)  # type: ignore[arg-type]
