"""What the database knows of agents that arrive, and is to know: asked and written for many at once.

Thousands come within seconds when a coordinator or a relay has started again. Each asks the same few things,
so that a transaction answers all who wait, in one statement of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sqlalchemy.engine import Connection

from roundtable.server.door.agent_messages import Introduction
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.store import FINAL, AgentRow, Database
from roundtable.server.store.agent_rows import remember, stored_clients
from roundtable.server.store.group_commit import Gathered
from roundtable.server.store.jobs import EndedJob, JobPosition, jobs_ended, positions_of
from roundtable.server.store.report_rows import ReportRow, open_reports
from roundtable.server.store.trust_rows import InstallationRow, bind_installations, installations_of

AT_ONCE = 1000
"""Jobs in one query."""


@dataclass(frozen=True)
class Known:
    """What is stored of an agent that says hello: which installations the keys that it shows, and others of
    its name, are bound to, how it was when it was here last, how far the jobs that it remembers have come."""

    installations: Sequence[InstallationRow]
    client: AgentRow | None
    positions: Mapping[str, JobPosition]


@dataclass(frozen=True)
class News:
    """What an agent is told once it is here: jobs that have ended without it, and what operators ask."""

    ended: Sequence[EndedJob]
    report: ReportRow | None


@dataclass(frozen=True)
class _Comer:
    name: str
    keys: Sequence[str]
    jobs: frozenset[str]


_Rows: TypeAlias = Sequence[InstallationRow]


@dataclass(frozen=True)
class _Here:
    name: str
    since: float | None
    now: float


class Arrivals:
    """One for a coordinator that is active. Everything raises StorageError where the database is away."""

    def __init__(self, database: Database) -> None:
        self._identity = database.identity
        self._known: Gathered[_Comer, Known] = Gathered(database.read, _known_of)
        self._bound: Gathered[_Rows, _Rows] = Gathered(database.write, _bind)
        self._remembered: Gathered[AgentRow, None] = Gathered(database.write, _remember)
        self._news: Gathered[_Here, News] = Gathered(database.read, _news_of)

    async def known(self, name: str, keys: Sequence[str], hello: Introduction) -> Known:
        """What is stored of the agent that says this, whose certificates have these keys."""
        ours = hello.coordinator == self._identity
        jobs = frozenset(job for job, *_ in hello.seen) if ours else frozenset[str]()
        return await self._known.ask(_Comer(name, keys, jobs))

    async def bind(self, rows: Sequence[InstallationRow]) -> Sequence[InstallationRow]:
        """Binds each key to an installation unless it is bound; those that they belong to now."""
        return await self._bound.ask(rows)

    async def remember(self, client: AgentRow) -> None:
        """Stores what the agent says of itself."""
        await self._remembered.ask(client)

    async def news(self, name: str, since: float | None, now: float) -> News:
        """What has come up for an agent; jobs that have ended `since` then, none for one that is new."""
        return await self._news.ask(_Here(name, since, now))

    def forgotten(self, jobs: JobRegistry, hello: Introduction, known: Known) -> str:
        """Names what the agent has seen and the database does not know, with the remedy; empty if nothing.

        Then it was restored from an old backup.
        """
        if hello.coordinator != self._identity:
            return ""
        for job, round, attempt in hello.seen:
            position = _position(jobs, job, known.positions.get(job))
            if position is None or (round, attempt) > position:
                at = f"round {position[0]}, attempt {position[1]}" if position else "nothing"
                return (
                    f"the coordinator's database is older than what this silo has seen: of job {job} "
                    f"the silo knows round {round}, attempt {attempt}, the database {at}. It was "
                    "restored from an old backup; restore a newer one, or accept the loss with "
                    "`roundtable restore --new-identity`"
                )
        return ""


def _position(jobs: JobRegistry, job: str, stored: JobPosition | None) -> tuple[int, float] | None:
    """(round, attempt) that the job has come to; every attempt at the last round of one that is over.

    A job is over before its driver is gone, for as long as its end waits for the database.
    """
    runner = jobs.runner(job)
    if runner is not None and (view := runner.view().value).status not in FINAL:
        return view.round, view.attempt
    if stored is None:
        return None
    return (stored.done + 1 if stored.status in FINAL else stored.rounds, float("inf"))


def _known_of(connection: Connection, comers: Sequence[_Comer]) -> list[Known]:
    jobs = sorted(frozenset[str]().union(*(comer.jobs for comer in comers)))
    positions: dict[str, JobPosition] = {}
    for first in range(0, len(jobs), AT_ONCE):
        positions |= positions_of(connection, jobs[first : first + AT_ONCE])
    names = {comer.name for comer in comers}
    bound = installations_of(connection, {key for comer in comers for key in comer.keys}, names)
    of_name: dict[str, list[InstallationRow]] = {}
    for row in bound.values():
        of_name.setdefault(row.name, []).append(row)
    clients = stored_clients(connection, names)
    found = []
    for comer in comers:
        shown = [bound[key] for key in comer.keys if key in bound]
        others = [row for row in of_name.get(comer.name, ()) if row.key not in comer.keys]
        found.append(Known([*shown, *others], clients.get(comer.name), positions))
    return found


def _bind(connection: Connection, asked: Sequence[_Rows]) -> list[_Rows]:
    bound = iter(bind_installations(connection, [row for rows in asked for row in rows]))
    return [[next(bound) for _ in rows] for rows in asked]


def _remember(connection: Connection, clients: Sequence[AgentRow]) -> list[None]:
    remember(connection, clients)
    return [None] * len(clients)


def _news_of(connection: Connection, comers: Sequence[_Here]) -> list[News]:
    times = [comer.since for comer in comers if comer.since is not None]
    ended = jobs_ended(connection, min(times)) if times else []
    reports = open_reports(connection, {comer.name: comer.now for comer in comers})
    return [
        News(
            [job for job in ended if comer.since is not None and job.updated > comer.since],
            reports.get(comer.name),
        )
        for comer in comers
    ]
