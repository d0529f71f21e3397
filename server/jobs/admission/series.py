"""Jobs that are repeated (`[queue] repeat`): each run is a job of its own, and the next is made when it ends.

So of a series one run at most is not over. It waits in the queue until it is due; a time at which the last
run goes on is left out. Whether a run is to be followed is a mark in its row, which goes in the transaction
that makes the next: however often a coordinator dies, or hands over, no run is made twice and none is lost.
A series ends with a run that is cancelled, and where the next one cannot be made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sqlalchemy.engine import Connection

from roundtable.core.config import JobConfig
from roundtable.core.errors import RoundtableError, StorageError
from roundtable.core.identity.signing import job_identifier, run_request, signed_request
from roundtable.core.job_tables.due_times import MOST_RUNS, next_due
from roundtable.core.observability.released import public
from roundtable.server.jobs.job_driver import Submission
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.operations.incidents import series_incident
from roundtable.server.store import ArtifactRow, EventRow, JobRow
from roundtable.server.store.jobs import insert_events, insert_job, last_sequence
from roundtable.server.store.series_rows import FOLLOWED, runs_to_follow, take_mark

log = logging.getLogger("roundtable.server.jobs.series")

LOOK_SECONDS = 5.0
"""How long a run is waited with whose making the database did not take."""


class Series:
    """Makes the next run of each series whose last is over; `ended` tells it of jobs that are."""

    def __init__(self, services: JobServices, follow: Callable[[JobRow], Awaitable[None]]) -> None:
        self._services = services
        self._follow = follow
        self._over: asyncio.Queue[JobRow] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Takes up the series whose last run was over before the next was made."""
        for row in await self._services.database.read(runs_to_follow):
            self._over.put_nowait(row)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="series of jobs")

    async def stop(self) -> None:
        """Makes no more runs; what is due then is made after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def ended(self, row: JobRow) -> None:
        """A job is over."""
        if row.repeats and row.status in FOLLOWED:
            self._over.put_nowait(row)

    async def _run(self) -> None:
        while True:
            row = await self._over.get()
            try:
                await self._follow(row)
            except StorageError as error:
                log.warning("the run after %s cannot be made: %s; it is tried again", row.name, error)
                await asyncio.sleep(LOOK_SECONDS)
                self._over.put_nowait(row)
            except RoundtableError as error:
                await self._give_up(row, error)
            except Exception:
                log.exception("the run after %s could not be made: the series stands still", row.name)

    async def _give_up(self, row: JobRow, error: RoundtableError) -> None:
        now, incident = self._services.clock(), series_incident()
        reason = f"no run follows this one, and the series is over: {error}"

        def write(connection: Connection) -> None:
            if take_mark(connection, row.id):
                number = last_sequence(connection, row.id) + 1
                event = EventRow(number, now, "series_over", reason, detail={"incident": incident.plain()})
                insert_events(connection, row.id, [public(event)])

        log.error("job %s: %s", row.name, reason, extra={"job": row.id})
        self._services.alerts.tell(incident, reason, now, row.id)
        try:
            await self._services.database.write(write)
        except StorageError as trouble:
            log.error("job %s: %s", row.id, trouble, extra={"job": row.id})


def in_series(row: JobRow, job: JobConfig, run: int, now: float) -> JobRow:
    """The row as that of a run of a series, if the job is repeated: its name, and when it begins."""
    queue = job.queue
    if not queue.repeat:
        return row
    # Later than a second before `start`: also then.
    begins = next_due(queue.repeat, queue.zone, max(now, queue.earliest - 1))
    name = f"{job.title[:90]}#{run}"
    more = int(run < MOST_RUNS)
    return replace(row, name=name, run=run, repeats=more, snapshot={**row.snapshot, "begins": begins})


def following(row: JobRow, coordinator: str) -> Submission:
    """What would submit the run after this one: the same job, signed by the same signature."""
    request = run_request(signed_request(row.request_id, repeats=True)[0], row.run + 1)
    signed = row.snapshot.get("signed", {})
    coordinator = signed.get("coordinator") or coordinator
    return Submission(
        job_identifier(coordinator, row.submitter, request),
        request,
        row.config,
        row.initial_model,
        row.submitter,
        row.submitter_role,
        signature=bytes.fromhex(row.snapshot.get("signature", "")),
        certificate=row.snapshot.get("certificate", "").encode(),
        **signed,
    )


def store_following(connection: Connection, before: JobRow, made: JobRow, artifact: ArtifactRow) -> bool:
    """Stores the run after `before`, once: False where it was made already."""
    if not take_mark(connection, before.id):
        return False
    told = f"run {made.run} of {before.submitter}'s series, after {before.name}"
    first = public(EventRow(1, made.submitted, "job_submitted", told))
    insert_job(connection, made, artifact, [first])
    return True
