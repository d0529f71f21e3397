"""The measured line to each silo, over all jobs: in memory, and durable with each update.

Measured only in rounds of jobs that tell who takes part: an estimate that moves says that its silo did.
"""

from __future__ import annotations

import logging

from sqlalchemy.engine import Connection

from roundtable.core.errors import StorageError
from roundtable.core.observability.link_estimate import UNKNOWN_LINK, LinkEstimate
from roundtable.core.observability.transfer_figures import TransferFigures
from roundtable.server.store import Database
from roundtable.server.store.agent_rows import all_clients, measured
from roundtable.server.store.group_commit import GroupedWrites

log = logging.getLogger("roundtable.server.operations.measured_lines")


class MeasuredLines:
    """The estimates by silo. `load` brings back what an earlier coordinator has measured."""

    def __init__(self, database: Database, together: GroupedWrites) -> None:
        self._database = database
        self._together = together
        self._known: dict[str, LinkEstimate] = {}

    async def load(self) -> None:
        """Reads what is stored."""
        self._known = {row.name: row.link for row in await self._database.read(all_clients)}

    def of(self, silo: str) -> LinkEstimate:
        """What is known of a silo's line."""
        return self._known.get(silo, UNKNOWN_LINK)

    def answered(self, silo: str, seconds: float) -> None:
        """Notes a round trip; stored with the silo's next update."""
        self._known[silo] = self.of(silo).after_round_trip(seconds)

    async def travelled(self, silo: str, figures: TransferFigures) -> None:
        """Notes what an update's way took. What cannot be stored now is stored with the next."""
        link = self._known[silo] = self.of(silo).after(figures)

        def write(connection: Connection) -> None:
            measured(connection, silo, link)

        try:
            await self._together.write(write)
        except StorageError as error:
            log.warning("the measured line to %s is not stored: %s", silo, error, extra={"site": silo})
