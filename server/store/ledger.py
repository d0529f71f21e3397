"""The privacy ledger's rows: reserved before a round begins, released with what leaves the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables
from roundtable.server.store.rows import LedgerRow


def entries(connection: Connection, population: str) -> list[LedgerRow]:
    """Everything that is charged to a population, reservations included."""
    query = sa.select(tables.ledger).where(tables.ledger.c.population == population)
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
