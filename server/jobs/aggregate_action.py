"""`Aggregate` performed: what the round has received becomes the new model, however often that is tried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.core.errors import ResourceError, RoundtableError, StorageError
from roundtable.core.failpoints import failpoint
from roundtable.engine import messages as m
from roundtable.server.jobs.combiner import Combiner, NewModel
from roundtable.server.jobs.job_account import JobAccount
from roundtable.server.jobs.job_inbox import JobInbox
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.plain_rounds import DamagedUpdates
from roundtable.server.jobs.round_collection import RoundCollection
from roundtable.server.operations.incidents import rot_incident
from roundtable.server.operations.storage_troubles import StorageTroubles
from roundtable.server.storage.artifact_store import DamagedArtifact
from roundtable.server.storage.location import Unreachable
from roundtable.server.store.database import LeaseLost

log = logging.getLogger("roundtable.server.jobs.aggregate_action")

FULL_DISK_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
MENDED_AT_MOST = 2
LEDGER_PAUSE = 2.0
_WHAT = "the round cannot be combined"
Result = TypeVar("Result")


async def despite_outages(job: str, work: Callable[[], Awaitable[Result]]) -> Result:
    """Returns what the privacy ledger answers; waits while the database is away."""
    while True:
        try:
            return await work()
        except LeaseLost:
            raise
        except StorageError as error:
            log.error("the privacy ledger: %s; trying again", error, extra={"job": job})
            await asyncio.sleep(LEDGER_PAUSE)


class AggregateAction:
    """Makes the models of one job; what keeps a round from being combined, for now, goes into `troubles`."""

    def __init__(
        self,
        job: str,
        combiner: Combiner,
        collection: RoundCollection,
        account: JobAccount,
        services: JobServices,
        inbox: JobInbox,
        troubles: StorageTroubles,
    ) -> None:
        self._job = job
        self._combiner = combiner
        self._collection = collection
        self._account = account
        self._services = services
        self._inbox = inbox
        self._troubles = troubles

    async def perform(self, action: m.Aggregate) -> None:
        """Makes the model and tells the engine.

        Waits for room if the disk is full, and pauses the job if there is none for long. A bucket that is
        away is waited for, like the database.
        """
        for pause in (*FULL_DISK_PAUSES, None):
            try:
                made = await self._of_sound_files(action)
            except ResourceError as error:
                self._troubles.note(_WHAT, error)
                if pause is None:
                    self._troubles.over(_WHAT)
                    await self._inbox.tell(m.Pause(str(error)))
                    return
                await asyncio.sleep(pause)
            except RoundtableError as error:
                await self._inbox.tell(_failure(action, error))
                return
            else:
                failpoint("aggregated", action.step.round, action.step.phase)
                await self._inbox.tell(made.event, made.artifacts)
                self._services.artifacts.unpin(row.digest for row in made.artifacts)
                return

    async def _of_sound_files(self, action: m.Aggregate) -> NewModel:
        """Makes the new model of files that were read as they should be; damaged ones are mended first.

        Raises DamagedUpdates for updates that are whole nowhere or are spoiled time and again, for anything
        else DamagedArtifact or DamagedRows.
        """
        # A relay's sum cannot be sent again as it was: the attempt is made again.
        clients = {update.digest: update.client for update in action.updates if not update.relay}
        for left in range(MENDED_AT_MOST, -1, -1):
            try:
                return await self._patiently(action)
            except (DamagedRows, DamagedArtifact) as error:
                log.error("round %d: %s", action.step.round, error, extra={"job": self._job})
                digests = error.digests if isinstance(error, DamagedRows) else (error.digest,)
                updates = {clients[digest]: str(error) for digest in digests if digest in clients}
                if left == 0 and updates:
                    raise DamagedUpdates(updates) from error
                if left == 0:
                    raise
                stored = {*(each.digest for each in action.updates), action.model, action.optimizer}
                await self._mend([digest for digest in digests if digest in stored], clients)
                self._services.alerts.tell(rot_incident(), str(error), self._services.clock(), self._job)
        raise AssertionError("the last try returns or raises")

    async def _mend(self, digests: Sequence[str], clients: Mapping[str, str]) -> None:
        """Has damaged artifacts fetched; `clients` are those of the updates' digests."""
        artifacts, loop = self._services.artifacts, asyncio.get_running_loop()
        lost: dict[str, str] = {}
        for digest in digests:
            try:
                await loop.run_in_executor(artifacts.threads(self._services.compute), artifacts.mend, digest)
            except DamagedArtifact as error:
                if digest not in clients:
                    raise
                lost[clients[digest]] = str(error)
        if lost:
            raise DamagedUpdates(lost)

    async def _patiently(self, action: m.Aggregate) -> NewModel:
        """Makes the new model; while a bucket is away, waits and alerts."""
        pause = FIRST_PAUSE
        while True:
            try:
                made = await self._new_model(action)
            except Unreachable as error:
                self._troubles.note(_WHAT, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._troubles.over(_WHAT)
                return made

    async def _new_model(self, action: m.Aggregate) -> NewModel:
        """Tries once. Collects anew each time, because combining uses up what was received."""
        step, account = action.step, self._account
        guarantee = await despite_outages(self._job, lambda: account.guarantee(step))

        async def pay() -> None:
            """Charges the attempt, and has the engine close the round should no model come of it."""
            await despite_outages(self._job, lambda: account.release(step))
            await self._inbox.tell(m.Unmasking(step, guarantee.figures))

        received = await self._collection.collect(action, pay)
        return await asyncio.get_running_loop().run_in_executor(
            self._services.compute,
            self._combiner.combine,
            action,
            received,
            guarantee,
            self._services.clock(),
        )


def _failure(action: m.Aggregate, error: RoundtableError) -> m.Event:
    """The event for a failure. Where the model itself is gone, another cohort would change nothing."""
    if isinstance(error, DamagedArtifact) and error.digest in (action.model, action.optimizer):
        return m.Pause(str(error))
    damaged = error.damaged if isinstance(error, DamagedUpdates) else {}
    return m.AggregationFailed(action.step, str(error), damaged)
