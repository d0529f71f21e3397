"""The privacy ledger's rows: reserved before a round begins, released with what leaves the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.privacy import Budget
from roundtable.server.store import tables
from roundtable.server.store.rows import LedgerRow


def entries(connection: Connection, population: str | None = None) -> list[LedgerRow]:
    """Everything that is charged to a population, or to any; reservations included, oldest first."""
    query = sa.select(tables.ledger)
    if population is not None:
        query = query.where(tables.ledger.c.population == population)
    return [
        LedgerRow(**{name: value for name, value in row._mapping.items() if name != "id"})
        for row in connection.execute(query.order_by(tables.ledger.c.id))
    ]


def reserve(connection: Connection, row: LedgerRow) -> None:
    """Replaces what this job has reserved and not released."""
    table = tables.ledger.c
    connection.execute(sa.delete(tables.ledger).where(table.job == row.job, table.released.is_(False)))
    connection.execute(sa.insert(tables.ledger).values(asdict(row)))


def settle(connection: Connection, job: str, released: Sequence[tuple[int, int]], over: bool) -> None:
    """Marks attempts as released; once the job is over, its other reservations are given back."""
    table = tables.ledger.c
    for round_number, attempt in released:
        step = sa.and_(table.job == job, table.round == round_number, table.attempt == attempt)
        connection.execute(sa.update(tables.ledger).where(step).values(released=True))
    if over:
        connection.execute(sa.delete(tables.ledger).where(table.job == job, table.released.is_(False)))


def add(connection: Connection, rows: Sequence[LedgerRow]) -> None:
    """Charges that are released as they are written."""
    if rows:
        connection.execute(sa.insert(tables.ledger), [asdict(row) for row in rows])


def budget_of(connection: Connection, population: str) -> Budget | None:
    """The most that an operator lets all jobs together spend on a population."""
    return budgets(connection).get(population)


def budgets(connection: Connection) -> dict[str, Budget]:
    """Every such limit by population."""
    table = tables.budgets.c
    rows = connection.execute(sa.select(table.population, table.epsilon, table.delta, table.accountant))
    return {row.population: Budget(row.population, row.epsilon, row.delta, row.accountant) for row in rows}


def set_budget(connection: Connection, budget: Budget, author: str, now: float) -> None:
    """Replaces the limit of a population."""
    table = tables.budgets
    connection.execute(sa.delete(table).where(table.c.population == budget.population))
    values = {"population": budget.population, "epsilon": budget.epsilon, "delta": budget.delta}
    values |= {"accountant": budget.accountant, "author": author, "time": now}
    connection.execute(sa.insert(table).values(values))
