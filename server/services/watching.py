"""A job as people follow it: its history from any point, then what comes, and what each silo does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

from roundtable.core.errors import UnavailableError
from roundtable.engine.view import ClientView
from roundtable.proto import EVENTS_AT_ONCE, operator_pb2
from roundtable.server.door import to_operators
from roundtable.server.door.agent_messages import StepProgress
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.store import FINAL, EventRow, JobRow
from roundtable.server.store.job_silo_rows import setups_of
from roundtable.server.store.jobs import events_from, newest_incidents

LEAST_SECONDS_BETWEEN = 0.1


Line = tuple[ClientView, StepProgress | None]


class ClientsTold:
    """Which clients a stream has listed, and how they stood."""

    def __init__(self) -> None:
        self._told: dict[str, Line] = {}

    def changed(self, lines: Mapping[str, Line]) -> dict[str, Line]:
        """Those that stand otherwise than they were last listed, which from now on they are."""
        found = {name: line for name, line in lines.items() if self._told.get(name) != line}
        self._told.update(found)
        return found


def detail_of(
    row: JobRow,
    runner: JobRunner | None,
    job: operator_pb2.Job,
    *,
    listed: operator_pb2.ListedClients.ValueType = operator_pb2.ALL_CLIENTS,
    told: ClientsTold | None = None,
) -> operator_pb2.JobDetail:
    """A job's current state, without its configuration and history; of its clients those that are `listed`,
    by what was `told` before."""
    if runner is None:
        return operator_pb2.JobDetail(job=job, round=row.rounds_done, waiting_for="")
    view = runner.view(with_clients=listed != operator_pb2.NO_CLIENTS).value
    step = runner.instructions.progress_of
    lines = {name: (client, step(name)) for name, client in view.clients.items()}
    if told is not None and listed == operator_pb2.CHANGED_CLIENTS:
        lines = told.changed(lines)
    return operator_pb2.JobDetail(
        job=job,
        round=view.round,
        attempt=view.attempt,
        phase=view.phase,
        deadline=view.deadline or 0.0,
        waiting_for=view.waiting_for,
        clients=[
            to_operators.activity_to(name, client, progress) for name, (client, progress) in lines.items()
        ],
    )


async def add_faults_and_setups(detail: operator_pb2.JobDetail, services: JobServices, job: str) -> None:
    """Puts the newest incidents into a job's detail, and what silos have trained it on."""
    incidents, setups = await services.database.read(
        lambda connection: (newest_incidents(connection, job), setups_of(connection, job))
    )
    detail.incidents.extend(map(to_operators.event_to, incidents))
    detail.setups.extend(map(to_operators.setup_to, setups))


async def updates(
    jobs: JobRegistry,
    services: JobServices,
    job: str,
    first: int,
    show: Callable[[JobRow], operator_pb2.Job],
    *,
    listed: operator_pb2.ListedClients.ValueType = operator_pb2.ALL_CLIENTS,
) -> AsyncIterator[operator_pb2.JobUpdate]:
    """Yields events from `first` onwards with the job's current state, until it is over and all are sent."""
    told = ClientsTold()
    last: operator_pb2.JobDetail | None = None
    while True:
        runner = jobs.runner(job)
        change = runner.inbox.next_change() if runner else None
        row = await jobs.row(job)
        events: list[EventRow] = []
        # A job changes more often than it has something new to tell.
        if runner is None or runner.sequence >= first:
            held = None if runner is None else runner.told.since(first, EVENTS_AT_ONCE)
            read = partial(events_from, job=job, sequence=first, limit=EVENTS_AT_ONCE)
            events = await services.database.read(read) if held is None else held
        # Not by their number: the oldest may have been retired.
        first = events[-1].sequence + 1 if events else first
        detail = detail_of(row, runner, show(row), listed=listed, told=told)
        # That something has changed which is withheld is withheld, too.
        if events or detail != last:
            last = detail
            yield operator_pb2.JobUpdate(
                events=[to_operators.event_to(event) for event in events], detail=detail
            )
        if len(events) == EVENTS_AT_ONCE:
            continue
        if row.status in FINAL:
            return
        # Many changes in a moment are told as one; a job without a driver changes seldom.
        await asyncio.sleep(LEAST_SECONDS_BETWEEN if change else 1.0)
        if change is not None:
            await change.wait()
        if jobs.stopping:
            raise UnavailableError("the coordinator is stopping; follow the job again once it is back")
