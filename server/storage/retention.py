"""Deleting what nothing needs any more, so that the database never mentions a file that is gone.

First a transaction forgets the rows; the files go afterwards, in the turn of another transaction in which
nobody mentions them again. What a crash between the two leaves behind is found by `sweep`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.core.failpoints import failpoint
from roundtable.engine.messages import RoundRecord
from roundtable.server.config import RetentionTable
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.replicas import Replicas
from roundtable.server.store import FINAL, Database
from roundtable.server.store.artifacts import (
    Keep,
    forget_unused,
    left_behind,
    left_over,
    mentioned,
)
from roundtable.server.store.audit_archives import archives
from roundtable.server.store.ended_jobs import delete_job, retire_artifacts, retire_events
from roundtable.server.store.job_lines import retire_lines
from roundtable.server.store.jobs import listed_jobs, unfinished_jobs
from roundtable.server.store.report_rows import retire_reports

log = logging.getLogger("roundtable.server.storage.retention")

UNUSED_SECONDS = 7 * 86400.0
STORED_BY = "put."
"""Owners of what operators store begin so."""
AT_ONCE = 500


@dataclass(frozen=True)
class Stay:
    """Seconds that artifacts and events of a job that is over, and lines of logs, stay; 0: for good."""

    artifacts: float = 0.0
    events: float = 0.0
    lines: float = 0.0

    @classmethod
    def of_days(cls, days: RetentionTable) -> Stay:
        """As the coordinator's file says."""
        return cls(*(86400.0 * each for each in (days.artifacts, days.events, days.logs)))


class Retention:
    """Deletes what is not needed any more, after each commit, when the coordinator starts, and each hour."""

    def __init__(
        self,
        database: Database,
        artifacts: ArtifactStore,
        keep: Keep,
        replicas: Replicas,
        stay: Stay | None = None,
    ) -> None:
        self._database = database
        self._artifacts = artifacts
        self.keep = keep
        self._stay = stay or Stay()
        self.replicas = replicas

    async def after_commit(self, job: str, record: RoundRecord, settled: int) -> list[str]:
        """Deletes updates of committed rounds and models that are too old; returns their digests.

        Half an upload for round `settled` is of no use any more; for later rounds it may be.
        """
        self.replicas.offer(record.model)
        self.replicas.offer(record.optimizer)

        def forget(connection: Connection) -> list[str]:
            return forget_unused(connection, left_behind(connection, job, record.round, self.keep), self.keep)

        try:
            deleted = await self._database.write(forget)
            failpoint("retired")
            await self._delete(deleted)
            self._artifacts.discard(f"{job}.{settled}.")
        except StorageError as error:
            log.warning("old artifacts stay for now: %s", error, extra={"job": job})
            return []
        self.replicas.forget(deleted)
        return deleted

    async def copy_newest(self) -> None:
        """Queues for copying, after a start, what was committed while nothing could be copied."""
        try:
            rows = await self._database.read(unfinished_jobs)
            archived = await self._database.read(archives)
        except StorageError as error:
            log.warning("copies are made after the next commit: %s", error)
            return
        for row in rows:
            for digest in filter(None, (row.initial_model, row.model, row.optimizer, row.best_model)):
                self.replicas.offer(digest)
        for archive in archived:
            self.replicas.offer(archive.artifact)

    async def delete_job(self, job: str, who: str, now: float) -> bool:
        """Deletes a job that is over, but for its charges; False where it is not, or was deleted before."""
        forgotten = await self._database.write(lambda c: delete_job(c, job, who, now, self.keep))
        if forgotten is None:
            return False
        await self._delete(forgotten)
        self.replicas.forget(forgotten)
        return True

    async def sweep(self, now: float) -> int:
        """Deletes what crashes, failed attempts and finished jobs have left; returns how many artifacts."""

        def forget(connection: Connection) -> list[str]:
            unused = forget_unused(connection, left_over(connection, now - UNUSED_SECONDS), self.keep)
            if self._stay.events:
                retire_events(connection, now - self._stay.events, now)
            if self._stay.lines:
                retire_lines(connection, now - self._stay.lines, now)
                retire_reports(connection, now - self._stay.lines)
            if self._stay.artifacts:
                keep = replace(self.keep, ended_before=now - self._stay.artifacts)
                unused += retire_artifacts(connection, keep, now)
            return unused

        try:
            forgotten = await self._database.write(forget)
            candidates = [*forgotten, *await asyncio.to_thread(self._artifacts.digests)]
            count = 0
            for start in range(0, len(candidates), AT_ONCE):
                count += await self._delete(candidates[start : start + AT_ONCE])
            over = await self._database.read(
                lambda connection: [row.id for row in listed_jobs(connection) if row.status in FINAL]
            )
        except StorageError as error:
            log.warning("what is left over stays for now: %s", error)
            return 0
        self.replicas.forget(forgotten)
        for job in over:
            self._artifacts.discard(f"{job}.")
        self._artifacts.discard(STORED_BY, now - UNUSED_SECONDS)
        if count:
            log.info("deleted %d artifacts that nothing mentions", count)
        return count

    async def _delete(self, digests: Iterable[str]) -> int:
        """Deletes the files of those that nobody mentions, while no other transaction can.

        None while a backup is made, which reads what it has seen mentioned: `sweep` finds them later.
        """
        wanted: Sequence[str] = list(digests)

        def delete(connection: Connection) -> int:
            with self._database.deleting(connection) as allowed:
                if not allowed:
                    log.info("a backup is being made: nothing is deleted until it is done")
                    return 0
                still_mentioned = mentioned(connection, wanted)
                return self._artifacts.delete(digest for digest in wanted if digest not in still_mentioned)

        return await self._database.write(delete) if wanted else 0
