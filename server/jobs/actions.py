"""What a job's driver does for the engine once its decision is durable: messages, timers, models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roundtable.core.errors import PrivacyError
from roundtable.core.observability.released import Told
from roundtable.engine import messages as m
from roundtable.server.jobs.aggregate_action import AggregateAction, despite_outages
from roundtable.server.jobs.background import BackgroundTasks, Timers
from roundtable.server.jobs.job_account import JobAccount
from roundtable.server.jobs.job_inbox import Arrival, JobInbox
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.job_tracking import JobTracking
from roundtable.server.jobs.round_collection import RoundCollection
from roundtable.server.jobs.step_instructions import StepInstructions
from roundtable.server.operations.storage_troubles import StorageTroubles
from roundtable.server.store import ArtifactRow, EventRow, RelayedSumRow, UpdateRow


@dataclass(frozen=True)
class JobParts:
    """The parts of a job's driver.

    `inbox` is where events for it go, `instructions` what its agents were asked, `collection` how updates
    come in, `account` whose privacy it spends, `aggregate` how its models are made, `troubles` what cannot be
    stored for now.
    """

    inbox: JobInbox
    instructions: StepInstructions
    collection: RoundCollection
    account: JobAccount
    aggregate: AggregateAction
    troubles: StorageTroubles


@dataclass
class PendingTransition:
    """What one transaction has to hold, and the actions that are performed after it."""

    events: list[Told[EventRow]] = field(default_factory=list)
    updates: list[UpdateRow] = field(default_factory=list)
    sums: list[RelayedSumRow] = field(default_factory=list)
    artifacts: list[ArtifactRow] = field(default_factory=list)
    records: list[Told[dict[str, Any]]] = field(default_factory=list)
    actions: list[m.Action] = field(default_factory=list)
    worth_writing: bool = False

    def hold(self, arrival: Arrival) -> None:
        """Takes what came with an event that is no update's own row."""
        self.artifacts.extend(arrival.artifacts)
        self.sums.extend(arrival.sums)

    @property
    def shows(self) -> bool:
        """Whether it tells anything of the job."""
        return bool(self.events or self.records)

    @property
    def released(self) -> list[tuple[int, int]]:
        """(round, attempt) of new models that leave the coordinator before their round is committed."""
        steps = {action.step for action in self.actions if isinstance(action, m.Instruct)}
        return [(step.round, step.attempt) for step in steps if step.phase == m.EVALUATE]


class JobActions:
    """Performs one job's actions; every one of them can safely be performed again."""

    def __init__(
        self,
        job: str,
        parts: JobParts,
        tracking: JobTracking,
        services: JobServices,
        tasks: BackgroundTasks,
    ) -> None:
        self._job = job
        self._parts = parts
        self._tracking = tracking
        self._retention = services.retention
        self._tasks = tasks
        self._timers = Timers(services.clock, lambda name: parts.inbox.post(m.DeadlinePassed(name)))

    def perform(self, action: m.Action) -> None:
        """Performs an action; what takes time goes on in the background."""
        match action:
            case m.Instruct():
                certificates = self._parts.collection.admit(action)
                if certificates is not None:
                    self._parts.instructions.send(action, certificates)
            case m.Withdraw():
                self._parts.instructions.withdraw(action)
            case m.SetTimer(timer, at):
                self._timers.set(timer, at)
            case m.Aggregate():
                self._tasks.spawn(self._parts.aggregate.perform(action))
            case m.Unmask(step):
                self._parts.collection.permit(step)
            case m.Authorize(step):
                self._tasks.spawn(self._authorize(step))
            case m.Commit(record, settled):
                self._parts.collection.retire(record.round)
                means = self._parts.instructions.means.of(record.round, record.attempt)
                self._tracking.committed(record, means)
                self._tasks.spawn(self._retention.after_commit(self._job, record, settled))
            case m.StatusChanged("paused" | "waiting"):
                self._parts.collection.close(forget=True)
            case m.StatusChanged():
                pass
            case _:
                raise AssertionError(f"{action} is for the transaction, not to be performed")

    def close(self) -> None:
        """Ends what runs for a job that is over."""
        self._timers.clear()
        self._tracking.close(finished=True)
        self._parts.collection.close(forget=True)

    def stop(self) -> None:
        """Drops what is under way when the process ends; the engine asks for it again after a start."""
        self._timers.clear()
        self._tracking.close(finished=False)
        self._parts.collection.close(forget=False)
        self._tasks.cancel()

    async def _authorize(self, step: m.Step) -> None:
        """Asks the ledger whether it holds what the attempt can cost."""
        try:
            await despite_outages(self._job, lambda: self._parts.account.reserve(step))
        except PrivacyError as error:
            await self._parts.inbox.tell(m.Denied(step, str(error)))
        else:
            await self._parts.inbox.tell(m.Authorized(step))
