"""What a job's driver does for the engine once its decision is durable: messages, timers, aggregation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from roundtable.core.errors import (
    PrivacyError,
    ResourceError,
    RoundtableError,
    SiteFailure,
    StorageError,
)
from roundtable.core.failpoints import failpoint
from roundtable.engine import Received
from roundtable.engine import messages as m
from roundtable.proto import agent_pb2, common_pb2
from roundtable.server.jobs import wire
from roundtable.server.jobs.combiner import Combiner, DamagedUpdates, Outcome, Trusted
from roundtable.server.jobs.job_tracking import JobTracking
from roundtable.server.jobs.privacy_budget import Account, Guarantee
from roundtable.server.jobs.secagg.secure_rounds import SecureRounds
from roundtable.server.jobs.sessions import Sessions
from roundtable.server.operations.alerts import Alerts
from roundtable.server.operations.coordinator_observer import Observer
from roundtable.server.operations.incidents import storage_fault
from roundtable.server.storage.artifact_store import DamagedArtifact, LocalArtifacts
from roundtable.server.storage.location import Unreachable
from roundtable.server.storage.retention import Retention
from roundtable.server.store import ArtifactRow, Database, LedgerRow, UpdateRow
from roundtable.server.store.database import LeaseLost
from roundtable.server.store.group_commit import GroupedWrites

log = logging.getLogger("roundtable.server.jobs.actions")

FULL_DISK_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
LEDGER_PAUSE = 2.0
Result = TypeVar("Result")
Post = Callable[[m.Event, tuple[ArtifactRow, ...]], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Services:
    """What every job's driver works with."""

    database: Database
    artifacts: LocalArtifacts
    sessions: Sessions
    clock: Callable[[], float]
    compute: ThreadPoolExecutor
    writer: str
    retention: Retention
    alerts: Alerts
    together: GroupedWrites
    tracking: Path
    trusted: Trusted | None = None
    observer: Observer = field(default_factory=Observer)


@dataclass
class Progress:
    """How far an agent says it is; kept in memory only."""

    done: int
    total: int
    loss: float
    figures: common_pb2.StepFigures | None = None


class Effects:
    """Performs one job's actions; every one of them can safely be performed again."""

    submission: common_pb2.Submission | None = None
    trouble = ""
    """What keeps the round from being combined, for now."""

    def __init__(
        self,
        job: str,
        config: str,
        layout: str,
        combiner: Combiner,
        account: Account | None,
        services: Services,
        secure: SecureRounds | None = None,
        tracking: JobTracking | None = None,
    ) -> None:
        self._job, self._config, self._layout = job, config, layout
        self._combiner, self._account, self._services = combiner, account, services
        self.secure, self._tracking = secure, tracking
        self._instructed: dict[str, m.Instruct] = {}
        self._progress: dict[str, Progress] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._post: Post
        self._notify: Callable[[], None]

    def connect(self, post: Post, notify: Callable[[], None]) -> None:
        """Where events go: `post` returns once they are durable. `notify` shows people what has changed."""
        self._post, self._notify = post, notify
        if self.secure is not None:
            self.secure.connect(self._send, self._spawn, notify)

    def perform(self, action: m.Action) -> None:
        """Does it, or begins to."""
        match action:
            case m.Instruct():
                self._instruct(action)
            case m.Withdraw():
                self.forget(action.client)
                self._services.sessions.send(action.client, wire.withdrawal(self._job, action))
            case m.SetTimer():
                self._set_timer(action)
            case m.Aggregate():
                self._spawn(self._aggregate(action))
            case m.Unmask(step):
                if self.secure is not None:
                    self.secure.permit(step)
            case m.Authorize():
                self._spawn(self._authorize(action))
            case m.Commit(record, settled):
                if self.secure is not None:
                    self.secure.retire(record.round)
                if self._tracking is not None:
                    self._tracking.committed(record)
                self._spawn(self._retire(record, settled))
            case m.StatusChanged(status):
                if status == "paused" and self.secure is not None:
                    self.secure.close(forget=True)
            case _:
                raise AssertionError(f"{action} is no effect")

    def drop_timers(self) -> None:
        """The job has ended: no deadline matters any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def close(self) -> None:
        """The job has ended."""
        self.drop_timers()
        if self._tracking is not None:
            self._tracking.close(finished=True)
        if self.secure is not None:
            self.secure.close(forget=True)

    def stop(self) -> None:
        """The process ends: what is under way is dropped, because the engine asks for it again."""
        self.drop_timers()
        if self._tracking is not None:
            self._tracking.close(finished=False)
        if self.secure is not None:
            self.secure.close(forget=False)
        for task in self._tasks:
            task.cancel()

    def may_read(self, client: str, digest: str) -> bool:
        """Whether the instruction that this agent was given last names the artifact."""
        told = self._instructed.get(client)
        return told is not None and told.model == digest

    def forget(self, client: str) -> None:
        """The agent's instruction no longer holds."""
        self._instructed.pop(client, None)
        self._progress.pop(client, None)

    def report(self, client: str, message: agent_pb2.Progress) -> None:
        """Notes what an agent says of the step that it was asked for."""
        told = self._instructed.get(client)
        if told is not None and told.step == wire.step_of(message.step):
            figures = message.figures if message.HasField("figures") else None
            total = max(message.total, message.done)
            self._progress[client] = Progress(message.done, total, message.loss, figures)

    def figures(self) -> dict[str, dict[str, float]]:
        """The newest training step of each silo at work that tells of them, by name; "loss" among them."""
        return {
            client: {"loss": progress.loss, **{field.name: value for field, value in told.ListFields()}}
            for client, progress in self._progress.items()
            if (told := progress.figures) is not None
        }

    def step_of(self, client: str) -> m.Step | None:
        """The step that the agent was asked for last."""
        told = self._instructed.get(client)
        return told.step if told else None

    def protocol(self) -> str:
        """Where secure aggregation is, in words; empty where nothing waits for it."""
        return self.secure.waiting() if self.secure is not None else ""

    def take_up(self, step: m.Step) -> None:
        """After a restart: the attempt that was under way."""
        if self.secure is not None:
            self.secure.take_up(step)

    def exchanged(self, client: str, step: m.Step, payload: bytes) -> None:
        """A silo's message of secure aggregation."""
        if self.secure is not None:
            self.secure.hear(client, step, payload)

    def rejoined(self, client: str) -> None:
        """The silo is connected again."""
        if self.secure is not None:
            self.secure.rejoined(client)

    def charges(self, updates: Sequence[UpdateRow]) -> list[LedgerRow]:
        """What silos have spent by sending these updates: due when they become durable, used or not."""
        return self._account.of_updates(updates) if self._account is not None else []

    def failed(self, failure: SiteFailure) -> None:
        """A silo will not answer its step: secure aggregation need not wait for it either."""
        if self.secure is not None:
            self.secure.lost(failure)

    def progress_of(self, client: str) -> Progress | None:
        """What the agent said last of the step that it works on."""
        return self._progress.get(client)

    def _instruct(self, action: m.Instruct) -> None:
        identities: list[bytes] = []
        if self.secure is not None and action.step.phase == m.TRAIN:
            identities = self.secure.identities(action)
            if not identities:
                return
        if self._instructed.get(action.client) != action:
            self._progress.pop(action.client, None)
        self._instructed[action.client] = action
        size = self._services.artifacts.size(action.model)
        if size is None:
            log.error("model %s is missing from the artifacts", action.model, extra={"job": self._job})
            return
        message = wire.instruction(
            self._job,
            self._config,
            self._layout,
            action,
            size,
            self._services.clock(),
            identities,
            self.submission,
        )
        self._services.sessions.send(action.client, message)

    def _set_timer(self, action: m.SetTimer) -> None:
        older = self._timers.pop(action.timer, None)
        if older is not None:
            older.cancel()
        delay = max(0.0, action.at - self._services.clock())
        self._timers[action.timer] = asyncio.get_running_loop().call_later(delay, self._ring, action.timer)

    def _ring(self, timer: str) -> None:
        self._timers.pop(timer, None)
        self._spawn(self._send(m.DeadlinePassed(timer)))

    async def _send(self, event: m.Event, artifacts: tuple[ArtifactRow, ...] = ()) -> None:
        await self._post(event, artifacts)

    async def _aggregate(self, action: m.Aggregate) -> None:
        """Combines; waits for room if the disk is full, and pauses the job if there is none for long.

        A bucket that is away is waited for, like the database.
        """
        loop, now = asyncio.get_running_loop(), self._services.clock()
        guarantee: Guarantee | None = None
        if self._account is not None:
            guarantee = await self._patiently(lambda account: account.guarantee(action.step))

        async def pay() -> None:
            """Charges the attempt, and has the engine close the round should no model come of it."""
            if self._account is not None:
                await self._patiently(lambda account: account.release(action.step))
            await self._send(m.Unmasking(action.step, guarantee.figures if guarantee else {}))

        async def collect() -> Received:
            if self.secure is not None:
                return await self.secure.total(action, pay)
            return await loop.run_in_executor(self._services.compute, self._combiner.rows, action)

        async def combined() -> Outcome:
            # Collected anew for each try: to combine uses up what was received.
            work = partial(self._combiner, action, await collect(), now, guarantee)
            return await loop.run_in_executor(self._services.compute, work)

        for pause in (*FULL_DISK_PAUSES, None):
            try:
                outcome = await self._reaching(combined)
            except ResourceError as error:
                log.error("round %d: %s", action.step.round, error, extra={"job": self._job})
                if pause is None:
                    await self._send(m.Pause(str(error)))
                    return
                await asyncio.sleep(pause)
            except RoundtableError as error:
                lost = isinstance(error, DamagedArtifact) and error.digest in (action.model, action.optimizer)
                # Another cohort would change nothing where the model itself is gone.
                damaged = error.damaged if isinstance(error, DamagedUpdates) else {}
                failed = m.AggregationFailed(action.step, str(error), damaged)
                await self._send(m.Pause(str(error)) if lost else failed)
                return
            else:
                failpoint("aggregated", action.step.round, action.step.phase)
                await self._send(outcome.event, outcome.artifacts)
                self._services.artifacts.unpin(row.digest for row in outcome.artifacts)
                return

    async def _reaching(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """What the work gives; a bucket that is away is waited for, and told of."""
        pause = FIRST_PAUSE
        try:
            while True:
                try:
                    return await work()
                except Unreachable as error:
                    if not self.trouble:
                        told = (str(error), self._services.clock(), self._job, "")
                        self._services.alerts.tell(storage_fault(str(error)), *told)
                    self.trouble = f"the round cannot be combined: {error}; trying again"
                    log.error("%s", self.trouble, extra={"job": self._job})
                    self._notify()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self.trouble = ""

    async def _authorize(self, action: m.Authorize) -> None:
        """Asks the ledger; without a budget there is nothing to ask."""
        if self._account is None:
            await self._send(m.Authorized(action.step))
            return
        try:
            await self._patiently(lambda account: account.reserve(action.step))
        except PrivacyError as error:
            await self._send(m.Denied(action.step, str(error)))
        else:
            await self._send(m.Authorized(action.step))

    async def _patiently(self, work: Callable[[Account], Coroutine[Any, Any, Result]]) -> Result:
        """What the ledger answers; a database that is away is waited for."""
        assert self._account is not None
        while True:
            try:
                return await work(self._account)
            except LeaseLost:
                raise
            except StorageError as error:
                log.error("the privacy ledger: %s; trying again", error, extra={"job": self._job})
                await asyncio.sleep(LEDGER_PAUSE)

    async def _retire(self, record: m.RoundRecord, settled: int) -> None:
        """After a commit: copies what is new and deletes what no round needs any more."""
        await self._services.retention.after_commit(self._job, record, settled)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an action of the job failed", exc_info=error, extra={"job": self._job})
