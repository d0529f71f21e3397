"""What silos train jobs on, as they say it: kept for the jobs' records, where cohorts are told."""

from __future__ import annotations

import asyncio
import logging

from roundtable.core.errors import StorageError
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.server.store.group_commit import GroupedWrites
from roundtable.server.store.job_silo_rows import SetupRow, keep_setup

log = logging.getLogger("roundtable.server.operations.silo_setups")

MOST_KNOWN = 10_000


class SiloSetups:
    """Stores each setup that differs from what the silo said of the job before."""

    def __init__(self, together: GroupedWrites) -> None:
        self._together = together
        self._known: dict[tuple[str, str], TrainingSetup] = {}
        self._storing: set[asyncio.Task[None]] = set()

    def heard(self, fresh: SetupRow) -> None:
        """A silo says what it trains a job on."""
        key = fresh.job, fresh.client
        if self._known.get(key) == fresh.setup:
            return
        self._known[key] = fresh.setup
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        storing = asyncio.get_running_loop().create_task(self._store(fresh))
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)

    async def _store(self, fresh: SetupRow) -> None:
        try:
            await self._together.write(lambda connection: keep_setup(connection, fresh))
        except StorageError as error:
            # Said again in the silo's next round.
            self._known.pop((fresh.job, fresh.client), None)
            log.warning(
                "what %s trains on is not stored: %s", fresh.client, error, extra={"site": fresh.client}
            )
