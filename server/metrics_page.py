"""The coordinator's page of metrics, made when somebody asks for it.

Anybody who reaches its address may read it: silos are counted, not named, and jobs are identifiers. Names are
for those who show a certificate or a token (`roundtable clients list`, `roundtable job show`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
from prometheus_client.core import Metric
from sqlalchemy.engine import Connection

from roundtable.core.config import JobConfig
from roundtable.core.errors import StorageError
from roundtable.core.identity.lifetimes import Lifetimes
from roundtable.core.observability.monitoring import Families, Interval
from roundtable.engine.selection import quorum
from roundtable.proto.pieces import traffic
from roundtable.server.auth.quotas import QUOTAS
from roundtable.server.config import ServerConfig
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.privacy_report import Books, books
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.jobs.sessions import Sessions
from roundtable.server.leadership.election import Sight
from roundtable.server.operations.coordinator_observer import CoordinatorObserver
from roundtable.server.queue.contenders import held_of
from roundtable.server.services.security import Security
from roundtable.server.store import AgentRow, Database
from roundtable.server.store.agent_rows import all_clients
from roundtable.server.store.trust_rows import revoked_silos

log = logging.getLogger("roundtable.server.metrics_page")

REFRESH_SECONDS = 15.0
ANSWER_SECONDS = 3.0
SILENT_SECONDS = 900.0
SILO_STATES = ("available", "training", "uploading", "offline")
_FROM_ZERO: dict[str, dict[tuple[str, ...], float]] = {"rounds": {("committed",): 0.0, ("failed",): 0.0}}
"""An alert on the increase of a counter does not see it appear."""
STATES = ("waiting", "running", "paused", "finished", "cancelled", "failed")


class CoordinatorPage:
    """The page of one coordinator. Until `opened` it shows one that stands by or waits for its database."""

    def __init__(
        self,
        config: ServerConfig,
        observer: CoordinatorObserver,
        clock: Callable[[], float],
        sight: Callable[[], Sight | None],
    ) -> None:
        self._sight = sight
        self._config = config
        self._certificates = Lifetimes(Path(config.credentials))
        self._observer = observer
        self._clock = clock
        self._parts: tuple[JobRegistry, Sessions, Database] | None = None
        self._security: Security | None = None
        self._turn = asyncio.Lock()
        self._interval = Interval(REFRESH_SECONDS)
        self._silos: list[AgentRow] = []
        self._statuses: Counter[str] = Counter()
        self._accounts: dict[str, tuple[float, float, float]] = {}
        self._known: dict[str, Books] = {}
        self._answers = False

    def opened(self, jobs: JobRegistry, sessions: Sessions, database: Database, security: Security) -> None:
        """Shows an active coordinator from now on."""
        self._parts = (jobs, sessions, database)
        self._security = security

    def closed(self) -> None:
        """Shows a coordinator that is no longer active."""
        self._parts = None

    async def ready(self) -> tuple[bool, str]:
        """One that stands by is ready while its database answers: else it could not take over."""
        if self._parts is None:
            return _stands_by(self._sight())
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._parts[2].read(lambda connection: connection.execute(sa.select(1)).scalar())
        except (StorageError, TimeoutError) as error:
            return False, f"the database does not answer: {error or 'no answer in time'}"
        return True, "active"

    async def figures(self) -> list[Metric]:
        page, parts = Families(), self._parts
        page.gauge("roundtable_coordinator_active", "1 active, 0 standing by", {(): float(parts is not None)})
        page.process(self._observer.tally, *traffic.both())
        folders = {"state": Path(self._config.state), "artifacts": Path(self._config.artifacts)}
        page.surroundings(folders, self._certificates.now())
        self._counted(page)
        if parts is not None:
            jobs, sessions, database = parts
            await self._refresh(jobs, database)
            self._jobs(page, jobs, sessions)
            self._silo_states(page, jobs, sessions)
            self._privacy(page)
            waiting = {("database",): float(database.waiting)}
            open_ones = (runner for runner in jobs.runners() if runner.tells_cohorts)
            waiting["events",] = float(sum(runner.inbox.waiting for runner in open_ones))
            page.gauge("roundtable_queue_length", "what waits to be done", waiting, ("queue",))
            _database_up(page, self._answers)
        elif (sight := self._sight()) is not None:
            _database_up(page, not sight.trouble)
            text = "how long ago one that stands by has read the lease"
            page.gauge("roundtable_standby_lag_seconds", text, {(): sight.lag})
        return page.made

    def _counted(self, page: Families) -> None:
        tally = self._observer.tally
        for name, text, labels in (
            ("rounds", "attempts at rounds that have ended", ("outcome",)),
            ("updates", "uploads by how they were answered", ("result",)),
            ("refused", "updates that no model holds, by reason", ("reason",)),
            ("incidents", "incidents in the histories of jobs", ("kind", "severity")),
        ):
            shown = "updates_refused" if name == "refused" else name
            values = {**_FROM_ZERO.get(name, {}), **tally.of(name)}
            page.counter(f"roundtable_{shown}", text, values, labels)
        if self._security is not None:
            text, labels = "calls that the gate or the service refused", ("call", "status")
            refused = {key: float(count) for key, count in self._security.access.refusals.items()}
            page.counter("roundtable_calls_refused", text, refused, labels)
            quotas = {(name,): float(self._security.quotas.refusals[name]) for name in QUOTAS}
            page.counter(
                "roundtable_quota_refusals", "what callers wanted beyond a quota", quotas, ("quota",)
            )
        self._travelled(page)
        page.histogram(
            "roundtable_round_seconds", "from a round's start to its commit", tally.spreads_of("round")
        )
        text = "how long phases of rounds took"
        page.histogram("roundtable_phase_seconds", text, tally.spreads_of("phase"), "phase")

    def _travelled(self, page: Families) -> None:
        tally, label = self._observer.tally, ("form",)
        for name, text in (
            ("update_bytes", "updates of committed rounds: as they were sent, and as plain float32"),
            ("model_bytes", "models sent for those updates: as they were sent, and each model whole"),
        ):
            page.counter(f"roundtable_{name}", text, dict(tally.of(name)), label)
        for name, text in (
            ("encoding_seconds", "how long silos took to encode an update, as they tell"),
            ("decoding_seconds", "how long it took to decode an update on its arrival"),
            ("encoding_error", "norm of what encoding lost of an update, relative to the update's"),
        ):
            page.histogram(f"roundtable_{name}", text, tally.spreads_of(name))

    def _jobs(self, page: Families, jobs: JobRegistry, sessions: Sessions) -> None:
        live = {(runner.row.id,): runner for runner in jobs.runners()}
        statuses = Counter({status: self._statuses[status] for status in STATES})
        statuses.update(runner.row.status for runner in live.values())
        values = {(status,): float(count) for status, count in statuses.items()}
        page.gauge("roundtable_jobs", "jobs by status", values, ("status",))
        labels = ("job_id",)
        online = [client for client in sessions.clients() if held_of(client) is None]

        def each(name: str, text: str, value: Callable[[JobRunner], float]) -> None:
            page.gauge(name, text, {key: value(runner) for key, runner in live.items()}, labels)

        each("roundtable_job_rounds_done", "rounds committed", lambda runner: runner.row.rounds_done)
        each(
            "roundtable_job_rounds_wanted", "rounds that the job is to have", lambda runner: runner.row.rounds
        )
        each(
            "roundtable_job_running", "1 while it runs", lambda runner: float(runner.row.status == "running")
        )
        text = "silos that are connected, have the job's task and may be asked"
        each("roundtable_job_silos_online", text, lambda runner: _offering(runner, online))
        text = "silos that are known to have the job's task and may be asked"
        each("roundtable_job_silos_known", text, lambda runner: _offering(runner, self._asked()))
        text = "updates without which the job's rounds fail"
        each("roundtable_job_silos_needed", text, lambda runner: self._needed(runner))
        text = (
            "when the round that is under way began: its first attempt, or the job's going on after a pause"
        )
        each("roundtable_job_round_began_timestamp_seconds", text, lambda runner: runner.round_began)
        text = "how long the job lets its silos work on a round"
        each("roundtable_job_round_deadline_seconds", text, lambda runner: _deadline(runner.job))

    def _needed(self, runner: JobRunner) -> float:
        cohort = runner.job.cohort
        return float(quorum(cohort, cohort.size or max(1, int(_offering(runner, self._asked())))))

    def _asked(self) -> list[AgentRow]:
        """Silos that are neither drained nor disabled: one that is awaits nobody's remedy."""
        return [silo for silo in self._silos if held_of(silo) is None]

    def _silo_states(self, page: Families, jobs: JobRegistry, sessions: Sessions) -> None:
        states: Counter[str] = Counter(dict.fromkeys(SILO_STATES, 0))
        silent, secret = 0, jobs.tasks_in_secret()
        for silo in self._silos:
            session = sessions.get(silo.name)
            state = "offline"
            if session is not None:
                # Who works was drawn.
                state = session.state if secret.isdisjoint(silo.tasks) else "available"
            # A silo's own words are not a label's value.
            states[state if state in SILO_STATES else "available"] += 1
            silent += session is None and self._clock() - silo.last_seen > SILENT_SECONDS
        values = {(state,): float(count) for state, count in states.items()}
        page.gauge("roundtable_silos", "silos by what they do", values, ("status",))
        self._lines(page, jobs)
        text = "silos that were not heard of for a quarter of an hour"
        page.gauge("roundtable_silos_silent", text, {(): float(silent)})
        text = "connected silos whose certificate ends soon, and should have been renewed by now"
        ending = sum(shown.lifetime.ends_soon(self._clock()) for shown in sessions.certificates())
        page.gauge("roundtable_silos_certificate_ending", text, {(): float(ending)})

    def _lines(self, page: Families, jobs: JobRegistry) -> None:
        """The slowest, the median and the fastest of the lines to silos."""
        links = [jobs.link(silo.name) for silo in self._silos]
        rates = {("up",): [each.up.value for each in links], ("down",): [each.down.value for each in links]}
        values = {(*key, of): value for key, found in rates.items() for of, value in _spread(found).items()}
        text = "bytes a second of the lines to silos, as measured over rounds"
        page.gauge("roundtable_silo_bandwidth_bytes", text, values, ("direction", "silo"))
        trips = [each.round_trip.value for each in links]
        speeds = [each.encoding.value for each in links]
        for name, text, found in (
            ("round_trip_seconds", "a round trip to silos", trips),
            ("encoding_bytes", "float32 bytes that silos encode a second", speeds),
        ):
            shown = {(of,): value for of, value in _spread(found).items()}
            page.gauge(f"roundtable_silo_{name}", text, shown, ("silo",))

    def _privacy(self, page: Families) -> None:
        label = ("population",)
        for place, name, text in (
            (0, "spent", "epsilon that the models published so far have spent"),
            (1, "budget", "epsilon that may be spent; +Inf without a budget"),
            (2, "left", "epsilon that is neither spent nor reserved"),
        ):
            values = {(population,): values[place] for population, values in self._accounts.items()}
            page.gauge(f"roundtable_privacy_epsilon_{name}", text, values, label)

    async def _refresh(self, jobs: JobRegistry, database: Database) -> None:
        """Asks the database, seldom: a page that is asked for often costs it nothing."""
        async with self._turn:
            if not self._interval.due():
                return
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    self._silos = await database.read(_expected)
                    reports, _ = await database.read(lambda connection: books(connection, ""))
                    rows = await jobs.rows()
            except (StorageError, TimeoutError) as error:
                self._answers = False
                log.warning("metrics: the database does not answer: %s", error)
                return
            self._answers = True
            driven = {runner.row.id for runner in jobs.runners()}
            self._statuses = Counter(row.status for row in rows if row.id not in driven)
            changed = [each for each in reports if self._known.get(each.population) != each]
            self._accounts.update(
                await asyncio.to_thread(lambda: {b.population: _account(b) for b in changed})
            )
            self._known = {each.population: each for each in reports}


class DatabaseAway:
    """The page of a coordinator that was active and waits for its database."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def ready(self) -> tuple[bool, str]:
        return False, self._reason

    async def figures(self) -> list[Metric]:
        page = Families()
        page.gauge("roundtable_coordinator_active", "1 active, 0 standing by", {(): 0.0})
        _database_up(page, False)
        return page.made


def _spread(values: list[float]) -> dict[str, float]:
    known = sorted(value for value in values if value)
    if not known:
        return {}
    return {"least": known[0], "median": known[len(known) // 2], "most": known[-1]}


def _database_up(page: Families, answers: bool) -> None:
    text = "whether the database answered when asked last"
    page.gauge("roundtable_database_up", text, {(): float(answers)})


def _stands_by(sight: Sight | None) -> tuple[bool, str]:
    if sight is None:
        return False, "starting"
    if sight.trouble:
        return False, f"standing by, and the database does not answer: {sight.trouble}"
    return True, f"standing by, the lease read {sight.lag:.1f} s ago"


def _expected(connection: Connection) -> list[AgentRow]:
    """The agents that may come back: one that is revoked is neither silent nor missing."""
    revoked = revoked_silos(connection)
    return [row for row in all_clients(connection) if row.name not in revoked]


def _offering(runner: JobRunner, silos: list[AgentRow]) -> float:
    return float(sum(silo.offers(runner.job.task.name) for silo in silos))


def _deadline(job: JobConfig) -> float:
    """The longest that silos may be waited for in an attempt at a round."""
    evaluation = 0.0 if job.evaluation.bounds or not job.evaluation.every else job.evaluation.deadline
    return job.cohort.wait + job.cohort.deadline + job.cohort.grace + evaluation


def _account(book: Books) -> tuple[float, float, float]:
    """ε spent, allowed and left, of the silo that bears most; the limit is the operator's, or its jobs'."""
    if book.limit is not None:
        budget = book.limit.budget.epsilon
    else:
        budgets = (privacy.epsilon for privacy in book.jobs.values())
        budget = max((epsilon for epsilon in budgets if epsilon is not None), default=math.inf)
    accounts = book.accounts(0.0)
    spent = max((account.epsilon for account in accounts), default=0.0)
    held = max((max(account.epsilon, account.reserved_epsilon) for account in accounts), default=0.0)
    return spent, budget, max(0.0, budget - held)
