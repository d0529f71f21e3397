"""All jobs: their drivers while they live, their rows afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from sqlalchemy.engine import Connection

from roundtable.core.config import JobConfig
from roundtable.core.errors import (
    ConfigError,
    PrivacyError,
    RoundtableError,
    SiteFailure,
    StorageError,
)
from roundtable.core.failpoints import failpoint
from roundtable.core.observability.link_estimate import LinkEstimate
from roundtable.core.observability.released import public
from roundtable.core.observability.transfer_figures import ModelArrival
from roundtable.engine import messages as m
from roundtable.server.door import to_agents
from roundtable.server.door.to_operators import QueuePlace
from roundtable.server.jobs.admission.new_job import rows_of
from roundtable.server.jobs.admission.series import Series, following, store_following
from roundtable.server.jobs.admission.turns import Turns
from roundtable.server.jobs.job_driver import (
    StoredJob,
    Submission,
    client_info,
    make_driver,
    parse_job,
)
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.operations.incidents import driver_incident
from roundtable.server.operations.populations import check_counted
from roundtable.server.queue.contenders import held_for
from roundtable.server.storage.artifact_store import DamagedArtifact
from roundtable.server.store import FINAL, AgentRow, EventRow, JobRow
from roundtable.server.store import jobs as store
from roundtable.server.store.agent_rows import all_clients
from roundtable.server.store.database import LeaseLost
from roundtable.server.store.job_silo_rows import clients_of
from roundtable.server.store.ledger import Limit, set_budget
from roundtable.server.store.trust_rows import Party

log = logging.getLogger("roundtable.server.jobs.job_registry")


class JobRegistry:
    """Starts, finds and ends jobs, and routes events to their drivers."""

    def __init__(self, services: JobServices) -> None:
        self._services = services
        self._runners: dict[str, JobRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._submitting = asyncio.Lock()
        self._reserving = asyncio.Lock()
        self.stopping = False
        self._background: asyncio.Task[None] | None = None
        self._left_out: set[tuple[str, str, m.Step]] = set()
        self._series = Series(services, self._follow)
        self.turns = Turns(self._runners.values, self._statuses, services.clock, services.queue)

    @property
    def running(self) -> int:
        """Jobs that are neither over nor paused."""
        return sum(1 for runner in self._runners.values() if runner.row.status in ("waiting", "running"))

    def runner(self, job: str) -> JobRunner | None:
        """The driver of a job that is not over."""
        return self._runners.get(job)

    def runners(self) -> list[JobRunner]:
        """The drivers of all jobs that are not over."""
        return list(self._runners.values())

    async def start(self) -> None:
        """Takes up every job that is not over. One that cannot be is paused, and says why."""
        await self._services.links.load()
        for row in await self._services.database.read(store.unfinished_jobs):
            try:
                await self._take_up(row)
            except RoundtableError as error:
                log.error("job %s cannot be taken up: %s", row.id, error, extra={"job": row.id})
                await self._pause_broken(row.id, f"it could not be taken up after a restart: {error}")
        await self._series.start()
        self.turns.start()

    def announce_stop(self) -> None:
        """Ends the streams of those who follow a job: the coordinator is about to stop."""
        self.stopping = True
        for runner in self._runners.values():
            runner.inbox.notify()

    async def stop(self) -> None:
        """Stops driving; every job can be taken up again."""
        await self._series.stop()
        await self.turns.stop()
        for runner in self._runners.values():
            runner.stop()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def submit(self, submission: Submission, admit: Callable[[int], None]) -> JobRow:
        """Returns the job of this request, made now or by an earlier call.

        ConfigError for one that cannot work. For a new one `admit` is told how many jobs the submitter has
        that are not over, and raises where that is enough.
        """
        if not 0 < len(submission.request_id) <= 200:
            raise ConfigError("request_id: between 1 and 200 characters that name this submission")
        async with self._submitting:
            stored = await self._services.database.read(
                lambda connection: store.job_of_request(connection, submission.request_id)
            )
            if stored is not None:
                if not stored.is_of(submission.submitter_role, submission.submitter):
                    raise ConfigError(
                        f"request_id {submission.request_id!r} is taken by another operator's job"
                    )
                if stored.status == store.DELETED:
                    raise ConfigError(
                        f"request_id {submission.request_id!r} has made job {stored.id}, which was "
                        f"{stored.reason}: submit it under another one"
                    )
                if stored.status not in FINAL and stored.id not in self._runners:
                    # It was stored, and the answer to that was lost: nobody drives it yet.
                    await self._take_up(stored)
                return self._newest(stored)
            whose_jobs = submission.submitter_role, submission.submitter
            admit(sum(runner.row.is_of(*whose_jobs) for runner in self._runners.values()))
            job = await asyncio.to_thread(parse_job, submission.config)
            if job.queue.repeat and "#" in submission.request_id:
                raise ConfigError("request_id: a job that is repeated has none with the sign #")
            after = await self._before(job, whose_jobs)
            row, artifact = await rows_of(submission, job, after, 1, self._services)
            first = public(
                EventRow(1, row.submitted, "job_submitted", f"{row.submitter} submitted {row.name}")
            )
            await self._services.database.write(
                lambda connection: store.insert_job(connection, row, artifact, [first])
            )
            failpoint("job_stored")
            await self._take_up(row)
            return row

    async def _follow(self, before: JobRow) -> None:
        """Makes the run after one that is over, and drives it."""
        async with self._submitting:
            submission = following(before, self._services.database.identity)
            job = await asyncio.to_thread(parse_job, submission.config)
            row, artifact = await rows_of(submission, job, (), before.run + 1, self._services)
            made = await self._services.database.write(lambda c: store_following(c, before, row, artifact))
            if not made:
                return
            log.info("%s follows %s", row.name, before.name, extra={"job": row.id})
            try:
                await self._take_up(row)
            except RoundtableError as error:
                await self._pause_broken(row.id, f"it could not be taken up: {error}")

    async def limit(self, limit: Limit) -> None:
        """Sets a population's budget; PrivacyError while a job goes on that its account would not see."""
        budget = limit.budget
        async with self._submitting:
            for row in await self._services.database.read(store.unfinished_jobs):
                job = await asyncio.to_thread(parse_job, row.config)
                if self._services.populations.of(job) == budget.population:
                    try:
                        check_counted(job, budget)
                    except PrivacyError as error:
                        raise PrivacyError(f"cancel job {row.id} ({row.name}) first: {error}") from error
            await self._services.database.write(lambda c: set_budget(c, budget, limit.author, limit.time))

    async def row(self, job: str) -> JobRow:
        """The job with this identifier; UnknownJob if there is none."""
        if (runner := self._runners.get(job)) is not None:
            return self._newest(runner.row)
        return self._newest(await self._services.database.read(lambda c: store.stored_job(c, job)))

    async def find(self, wanted: str, who: Party, *, own: bool = False) -> JobRow:
        """The job that a caller means by identifier, its beginning, or name; UnknownJob if not one."""
        read = self._services.database.read
        return self._newest(await read(lambda c: store.find_job(c, wanted, who, own=own)))

    async def rows(self) -> list[JobRow]:
        """Every job, newest first; of those that are over, or not yet taken up, without the snapshot."""
        return [self._newest(row) for row in await self._services.database.read(store.listed_jobs)]

    async def change(self, row: JobRow, event: m.Cancel | m.Pause | m.Resume | m.MovedInQueue) -> JobRow:
        """Cancels, pauses, resumes or moves a job that is not over; returns it as it is afterwards."""
        if (runner := self._runners.get(row.id)) is None:
            runner = await self._taken_up_anew(row.id)
        await runner.inbox.tell(event)
        self.turns.look()
        return runner.row

    async def _taken_up_anew(self, job: str) -> JobRunner:
        """The driver of a job that had none: paused as broken, or over since somebody looked."""
        async with self._submitting:
            if (runner := self._runners.get(job)) is not None:
                return runner
            row = await self._services.database.read(lambda connection: store.stored_job(connection, job))
            if row.status in FINAL:
                raise ConfigError(f"job {job} ({row.name}) is {row.status} already; nothing was changed")
            return await self._take_up(row)

    def places(self) -> list[tuple[JobRow, QueuePlace]]:
        """The jobs that are neither over nor paused as the queue has them: first those with a turn."""
        return [(self._runners[job].row, place) for job, place in self.turns.places()]

    async def delete(self, row: JobRow, who: str) -> str:
        """Deletes a job that is over, once its driver has ended; else says why not."""
        if row.status in FINAL and (task := self._tasks.get(row.id)) is not None:
            await asyncio.wait([task])
        # Nobody begins another job from its first model meanwhile.
        async with self._submitting:
            for runner in self._runners.values():
                if row.id in runner.after:  # Which is to begin after a restart, too.
                    return f"{runner.row.name} comes after it and has not begun"
            if await self._services.retention.delete_job(row.id, who, self._services.clock()):
                return ""
        return "it was deleted just now" if row.status in FINAL else "what goes on is cancelled first"

    def joined(self, client: AgentRow) -> None:
        """Tells every job whose task the agent has that it is connected."""
        for runner in self._runners.values():
            if client.offers(runner.job.task.name):
                runner.inbox.post(m.ClientJoined(client_info(runner.job, client, self.link(client.name))))
                runner.collection.rejoined(client.name)
        self.turns.learn(client)

    async def tell_what_ended(self, client: AgentRow, rows: Iterable[store.EndedJob]) -> None:
        """Tells an agent that was away of those of these jobs that are of its tasks."""
        for row in rows:
            if client.offers(await asyncio.to_thread(_task_in, row.config)):
                self._services.sessions.send(client.name, _over(row))

    def left(self, client: AgentRow) -> None:
        """Tells every job whose task the agent has that its connection has ended."""
        for runner in self._runners.values():
            if client.offers(runner.job.task.name):
                runner.inbox.post(m.ClientLeft(client.name))

    def held(self, client: AgentRow) -> None:
        """Tells every job whose task the agent has whether it may be asked for something new."""
        for runner in self._runners.values():
            if client.offers(runner.job.task.name):
                runner.inbox.post(m.ClientHeld(client.name, held_for(runner.job, client)))
        self.turns.look()

    def may_read(self, client: str, digest: str) -> bool:
        """Whether an instruction in force names this artifact to this agent."""
        return any(runner.may_read(client, digest) for runner in self._runners.values())

    def link(self, silo: str) -> LinkEstimate:
        """What was measured of a silo's line."""
        return self._services.links.of(silo)

    def sent(self, client: str, digest: str, sent: ModelArrival) -> None:
        """Notes that an agent was sent this artifact, for the job whose instruction names it."""
        for runner in self._runners.values():
            if runner.may_read(client, digest):
                runner.instructions.sent(client, sent)
                return

    def tasks_in_secret(self) -> frozenset[str]:
        """The tasks, by whole names and by files' stems, for which a job that runs here draws in secret.

        What an agent with one of them does may not be told: it would tell that it was drawn.
        """
        names = {runner.job.task.name for runner in self._runners.values() if not runner.tells_cohorts}
        return frozenset(names | {Path(name.partition(":")[0]).stem for name in names})

    def damaged(self, error: DamagedArtifact) -> None:
        """Pauses the jobs that need an artifact which is lost, until somebody brings it back."""
        for runner in self._runners.values():
            if runner.needs(error.digest):
                runner.inbox.post(m.Pause(str(error)))

    def _newest(self, row: JobRow) -> JobRow:
        runner = self._runners.get(row.id)
        if runner is None:
            return row
        if runner.waits and runner.standing is not None and runner.standing.reason:
            return replace(runner.row, reason=runner.standing.reason)
        return runner.row

    async def _before(self, job: JobConfig, who: Party) -> tuple[str, ...]:
        """The identifiers of the jobs that this one comes after. ConfigError for one that there is not."""
        found = []
        for wanted in job.queue.after:
            try:
                found.append((await self.find(wanted, who)).id)
            except store.UnknownJob as error:
                raise ConfigError(f"queue.after: {error}", key=("queue", "after")) from error
        return tuple(found)

    async def _statuses(self, jobs: frozenset[str]) -> dict[str, tuple[str, float]]:
        """How these jobs stand, and since when, by identifier."""
        return await self._services.database.read(lambda connection: store.statuses(connection, jobs))

    async def _take_up(self, row: JobRow) -> JobRunner:
        """Makes the driver of a stored job and starts it."""
        database = self._services.database
        sequence = await database.read(lambda connection: store.last_sequence(connection, row.id))
        records = await database.read(lambda connection: store.history(connection, row.id))
        agents = await database.read(all_clients)
        clients = await database.read(lambda connection: clients_of(connection, row.id))
        stored = StoredJob(row, clients, sequence, records, agents)
        runner = await asyncio.to_thread(make_driver, stored, self._services, self._reserving)
        self._runners[row.id] = runner
        task = asyncio.get_running_loop().create_task(runner.run(), name=f"job {row.id}")
        self._tasks[row.id] = task
        task.add_done_callback(lambda ended: self._ended(row.id, ended))
        for client in self._services.sessions.clients():
            if client.offers(runner.job.task.name):
                runner.inbox.post(m.ClientJoined(client_info(runner.job, client, self.link(client.name))))
        runner.when_moved = self.turns.look
        self.turns.look()
        return runner

    def _ended(self, job: str, task: asyncio.Task[None]) -> None:
        """Forgets the driver of a job that is over; pauses a job whose driver has failed."""
        runner = self._runners.pop(job)
        self.turns.look()
        del self._tasks[job]
        # A driver that failed has not answered what it never looked at: nobody waits for it for ever.
        runner.inbox.abandon(())
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._tell_agents(runner)
            self._series.ended(runner.row)
        elif isinstance(error, LeaseLost):
            log.error("job %s is another coordinator's now", job, extra={"job": job})
            runner.stop()
        else:
            log.error("the driver of job %s failed", job, exc_info=error, extra={"job": job})
            runner.stop()
            work = self._after_fault(runner, runner.fault(error))
            self._background = asyncio.get_running_loop().create_task(work)
            self._background.add_done_callback(lambda _: runner.inbox.notify())

    async def _after_fault(self, runner: JobRunner, fault: str) -> None:
        """Begins a broken driver anew without the silo at whose word it failed; the second time pauses."""
        job, culprit = runner.row.id, runner.culprit
        if culprit is None or (job, *culprit) in self._left_out:
            await self._pause_broken(job, f"{fault}; its log says why. Resume it to try again")
            return
        self._left_out.add((job, *culprit))
        client, step = culprit
        failure = SiteFailure(client, step.round, step.attempt, step.phase, "invalid_update", fault)
        try:
            row = await self._services.database.read(lambda connection: store.stored_job(connection, job))
            (await self._take_up(row)).give_up_on(step, failure)
        except RoundtableError as error:
            await self._pause_broken(job, f"{fault}; it could not be taken up again: {error}")

    def _tell_agents(self, runner: JobRunner) -> None:
        """Tells agents to forget a job that is over."""
        message = _over(runner.row)
        for client in self._services.sessions.clients():
            if client.offers(runner.job.task.name):
                self._services.sessions.send(client.name, message)

    async def _pause_broken(self, job: str, reason: str) -> None:
        """Stores that a job is paused whose driver cannot do so itself."""
        now, incident = self._services.clock(), driver_incident()

        def write(connection: Connection) -> None:
            store.mark(connection, job, "paused", reason, now)
            number = store.last_sequence(connection, job) + 1
            event = public(EventRow(number, now, "job_paused", reason, detail={"incident": incident.plain()}))
            store.insert_events(connection, job, [event])

        self._services.alerts.tell(incident, reason, now, job)
        try:
            await self._services.database.write(write)
        except StorageError as error:
            log.error("job %s: %s", job, error, extra={"job": job})


@lru_cache(maxsize=store.MOST_ENDED)
def _task_in(config: str) -> str:
    """The task of a stored job: many agents come back at once and ask for the same ones."""
    return str(parse_job(config).task.name)


def _over(row: JobRow | store.EndedJob) -> to_agents.ToAgent:
    return to_agents.job_over(row.id, f"the job is {row.status}: {row.reason}", row.updated)
