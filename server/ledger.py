"""A job's account in the privacy ledger: nothing is asked of any silo before its cost is reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from roundtable.engine import PrivacyPlan
from roundtable.engine import messages as m
from roundtable.privacy import Budget, Charge, Entry, PrivacyConfig, check
from roundtable.server.store import Database, LedgerRow
from roundtable.server.store.ledger import entries, reserve


class Account:
    """What one job may spend. Its population is its own: the budget is the job's."""

    def __init__(
        self,
        job: str,
        privacy: PrivacyConfig,
        plan: PrivacyPlan,
        database: Database,
        clock: Callable[[], float],
    ) -> None:
        self._job, self._plan = job, plan
        self._database, self._clock = database, clock
        self._budget = None
        if privacy.epsilon is not None and privacy.delta is not None:
            self._budget = Budget(job, privacy.epsilon, privacy.delta, privacy.accountant, privacy.population)

    async def reserve(self, step: m.Step) -> None:
        """Writes the reservation of an attempt; BudgetExceeded where the budget does not hold it."""
        rows = await self._database.read(lambda connection: entries(connection, self._job))
        spent = [row for row in rows if row.released]
        charge = self._plan.charge
        if self._budget is not None:
            await asyncio.to_thread(check, self._budget, _entries(spent), charge)
        row = LedgerRow(
            self._job, "", self._job, step.round, step.attempt, charge.to_json(), False, self._clock()
        )
        await self._database.write(lambda connection: reserve(connection, row))


def _entries(rows: Sequence[LedgerRow]) -> list[Entry]:
    return [
        Entry(
            row.population,
            row.silo,
            row.job,
            row.round,
            row.attempt,
            Charge.from_json(row.charge),
            row.released,
        )
        for row in rows
    ]
