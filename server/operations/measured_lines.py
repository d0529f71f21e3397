"""The measured line to each silo, over all jobs: in memory, and durable with each update.

Measured only in rounds of jobs that tell who takes part: an estimate that moves says that its silo did. It is
written in the transaction that takes the update: a transaction of its own for each would be one more that
receipts, and the next round, wait for.
"""

from __future__ import annotations

from collections.abc import Iterable

from roundtable.core.observability.link_estimate import UNKNOWN_LINK, LinkEstimate
from roundtable.core.observability.released import Tells, is_told
from roundtable.core.observability.transfer_figures import TransferFigures
from roundtable.core.privacy_table import NoPrivacy, Private
from roundtable.server.store import Database, Learnt, UpdateRow
from roundtable.server.store.agent_rows import all_clients


class MeasuredLines:
    """The estimates by silo. `load` brings back what an earlier coordinator has measured."""

    def __init__(self, database: Database) -> None:
        self._database = database
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

    def travelled(self, silo: str, figures: TransferFigures) -> None:
        """Notes what an update's way took; stored as `learnt` with the update."""
        self._known[silo] = self.of(silo).after(figures)

    def learnt(self, updates: Iterable[UpdateRow], privacy: NoPrivacy | Private) -> dict[str, Learnt]:
        """What is to be stored of silos with their updates, as far as a job of this level lets it be told."""
        counts, lines = is_told(privacy, Tells.SILO), is_told(privacy, Tells.COHORT)
        return {
            each.client: Learnt(
                each.examples if counts else None, self._known.get(each.client) if lines else None
            )
            for each in updates
            if each.receipt == "accepted"
        }
