"""The privacy ledger: what a job may spend is reserved before any silo is asked for anything.

An account belongs to a population: the silos' data under one name, over all jobs that use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from roundtable.core.config import JobConfig
from roundtable.engine import Plan
from roundtable.engine import messages as m
from roundtable.privacy import (
    Budget,
    Charge,
    Entry,
    PrivacyConfig,
    Spent,
    check,
    compose,
    local_gaussian_charge,
    relation_of,
    spent,
    statement,
)
from roundtable.server.store import Database, LedgerRow
from roundtable.server.store.ledger import budget_of, entries, reserve


def population_of(job: JobConfig) -> str:
    """Whose privacy a job spends: `privacy.population_name`, or the task, which stands for its data."""
    named = job.privacy.get("population_name")
    return str(named) if named else Path(job.task.partition(":")[0]).stem


def entry_of(row: LedgerRow) -> Entry:
    """A stored row as the ledger's arithmetic takes it."""
    charge = Charge.from_json(row.charge)
    return Entry(row.population, row.silo, row.job, row.round, row.attempt, charge, row.released)


class Account:
    """What one job charges to its population: nothing where silos keep the only accounts.

    `turn` is held while anything is reserved, by all jobs: two of one population cannot both take what
    is left of its budget.
    """

    def __init__(
        self,
        job: str,
        config: JobConfig,
        plan: Plan,
        database: Database,
        clock: Callable[[], float],
        turn: asyncio.Lock,
    ) -> None:
        self._job, self._plan, self._privacy = job, plan, plan.privacy
        self._database, self._clock, self._turn = database, clock, turn
        self.population = population_of(config)

    async def reserve(self, step: m.Step) -> None:
        """Writes the reservation of an attempt; BudgetExceeded where a budget does not hold it."""
        charge = self._plan.charge_of(step.round)
        if charge is None:
            return
        async with self._turn:
            # What this job has reserved for an earlier attempt and not released is replaced.
            rows = [row for row in await self._rows() if row.released or row.job != self._job]
            limit = await self._database.read(lambda connection: budget_of(connection, self.population))
            budgets = [*budgets_of(self._privacy, self.population), *([limit] if limit else [])]
            await asyncio.to_thread(check_all, budgets, rows, charge)
            row = LedgerRow(
                self.population,
                "",
                self._job,
                step.round,
                step.attempt,
                charge.to_json(),
                False,
                self._clock(),
            )
            await self._database.write(lambda connection: reserve(connection, row))

    async def statement(self, step: m.Step) -> str:
        """The guarantee, in words, of the model that this step publishes; its own charge is counted."""
        rows = await self._rows()
        return await asyncio.to_thread(self._statement, step, rows)

    def _statement(self, step: m.Step, rows: Sequence[LedgerRow]) -> str:
        privacy = self._privacy
        assert privacy.delta is not None
        if privacy.level == "example":
            return silo_statement(privacy)
        if privacy.level == "client_local":
            return statement(privacy, self._local(step, privacy))
        mine = (self._job, step.round, step.attempt)
        paid = [
            entry_of(replace(row, released=True))
            for row in rows
            if row.released or (row.job, row.round, row.attempt) == mine
        ]
        total = spent(paid, self.population, privacy.delta, privacy.accountant)
        sampling = self._plan.central.sampling if self._plan.central else ""
        return statement(privacy, total, sampling)

    def _local(self, step: m.Step, privacy: PrivacyConfig) -> Spent:
        """One silo that took part in every round of this job so far."""
        assert privacy.delta is not None
        assert self._plan.silo_noise is not None
        charge = local_gaussian_charge(self._plan.silo_noise, step.round)
        epsilon = compose([charge], privacy.delta, privacy.accountant)
        return Spent(self.population, epsilon, privacy.delta, relation_of([charge]), step.round, (self._job,))

    async def _rows(self) -> list[LedgerRow]:
        rows = await self._database.read(lambda connection: entries(connection, self.population))
        return [row for row in rows if not row.silo]


def budgets_of(privacy: PrivacyConfig, population: str) -> list[Budget]:
    """The budget that a job brings itself: none or one."""
    if privacy.epsilon is None or privacy.delta is None:
        return []
    return [Budget(population, privacy.epsilon, privacy.delta, privacy.accountant, privacy.population)]


def check_all(budgets: Iterable[Budget], rows: Iterable[LedgerRow], charge: Charge) -> None:
    """BudgetExceeded where one of the budgets does not hold one more charge."""
    known = [entry_of(row) for row in rows]
    for budget in budgets:
        check(budget, known, charge)


def silo_statement(privacy: PrivacyConfig) -> str:
    """What is known of a guarantee whose account each silo keeps for itself."""
    limit = (
        f"at most epsilon = {privacy.epsilon:g} at delta = {privacy.delta:g} for this job"
        if privacy.epsilon is not None
        else f"what a noise multiplier of {privacy.noise_multiplier:g} costs its number of records"
    )
    return (
        "Differential privacy for any one record of a participating organisation (silo). Each silo adds the "
        f"noise to its own training before anything leaves it, and spends {limit}; its own account, over all "
        "jobs, is kept at the silo, which refuses a round that would pass its budget. No other party is "
        "trusted. What it does not cover: that a silo took part, facts about the whole population that the "
        "model is meant to learn, and other uses of the same records."
    )
