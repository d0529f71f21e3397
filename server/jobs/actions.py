"""What a job's driver does for the engine once its decision is durable: messages, timers, models."""

from __future__ import annotations

from roundtable.core.errors import PrivacyError
from roundtable.engine import messages as m
from roundtable.server.jobs.aggregate_action import AggregateAction, despite_outages
from roundtable.server.jobs.background import BackgroundTasks, Timers
from roundtable.server.jobs.job_account import JobAccount
from roundtable.server.jobs.job_inbox import JobInbox
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.job_tracking import JobTracking
from roundtable.server.jobs.round_collection import RoundCollection
from roundtable.server.jobs.step_instructions import StepInstructions


class JobActions:
    """Performs one job's actions; every one of them can safely be performed again."""

    def __init__(
        self,
        job: str,
        instructions: StepInstructions,
        collection: RoundCollection,
        aggregate: AggregateAction,
        account: JobAccount,
        tracking: JobTracking,
        services: JobServices,
        inbox: JobInbox,
        tasks: BackgroundTasks,
    ) -> None:
        self._job = job
        self._instructions = instructions
        self._collection = collection
        self._aggregate = aggregate
        self._account = account
        self._tracking = tracking
        self._retention = services.retention
        self._inbox = inbox
        self._tasks = tasks
        self._timers = Timers(services.clock, lambda name: inbox.post(m.DeadlinePassed(name)))

    def perform(self, action: m.Action) -> None:
        """Performs an action; what takes time goes on in the background."""
        match action:
            case m.Instruct():
                certificates = self._collection.admit(action)
                if certificates is not None:
                    self._instructions.send(action, certificates)
            case m.Withdraw():
                self._instructions.withdraw(action)
            case m.SetTimer(timer, at):
                self._timers.set(timer, at)
            case m.Aggregate():
                self._tasks.spawn(self._aggregate.perform(action))
            case m.Unmask(step):
                self._collection.permit(step)
            case m.Authorize(step):
                self._tasks.spawn(self._authorize(step))
            case m.Commit(record, settled):
                self._collection.retire(record.round)
                self._tracking.committed(record)
                self._tasks.spawn(self._retention.after_commit(self._job, record, settled))
            case m.StatusChanged("paused"):
                self._collection.close(forget=True)
            case m.StatusChanged():
                pass
            case _:
                raise AssertionError(f"{action} is for the transaction, not to be performed")

    def close(self) -> None:
        """Ends what runs for a job that is over."""
        self._timers.clear()
        self._tracking.close(finished=True)
        self._collection.close(forget=True)

    def stop(self) -> None:
        """Drops what is under way when the process ends; the engine asks for it again after a start."""
        self._timers.clear()
        self._tracking.close(finished=False)
        self._collection.close(forget=False)
        self._tasks.cancel()

    async def _authorize(self, step: m.Step) -> None:
        """Asks the ledger whether it holds what the attempt can cost."""
        try:
            await despite_outages(self._job, lambda: self._account.reserve(step))
        except PrivacyError as error:
            await self._inbox.tell(m.Denied(step, str(error)))
        else:
            await self._inbox.tell(m.Authorized(step))
