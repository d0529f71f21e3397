"""The privacy ledger's rows: reserved before a round begins, released with what leaves the coordinator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.privacy_table import NoPrivacy, Private, privacy_from
from roundtable.privacy import Budget
from roundtable.server.store import tables
from roundtable.server.store.rows import LedgerRow

# A reservation against each silo apart: none is released, each silo's own row takes its place.
EVERY_SILO = "*"
# Built once: each round runs them, and building one takes longer than running it.
_ledger = tables.ledger.c
_step = sa.and_(
    _ledger.job == sa.bindparam("of_job"),
    _ledger.round == sa.bindparam("of_round"),
    _ledger.attempt == sa.bindparam("of_attempt"),
)
_UNRESERVE = sa.delete(tables.ledger).where(_step, _ledger.silo == EVERY_SILO)
_RELEASE = sa.update(tables.ledger).where(_step).values(released=True)


@dataclass(frozen=True)
class Total:
    """Equal charges to one account, added up; `silo` is empty for what all silos of a population bear."""

    silo: str
    charge: str
    released: bool
    count: int


@dataclass(frozen=True)
class Limit:
    """An operator's limit with who set it and when (Unix time)."""

    budget: Budget
    author: str
    time: float


def totals(connection: Connection, population: str, instead_of: str = "") -> list[Total]:
    """All charges of a population by account; without what the job `instead_of` has only reserved.

    As long as the number of different charges, not as the number of rounds.
    """
    table = tables.ledger.c
    columns = (table.silo, table.charge, table.released)
    query = sa.select(*columns, sa.func.count().label("times"))
    query = query.where(table.population == population).group_by(*columns)
    if instead_of:
        query = query.where(sa.or_(table.released, table.job != instead_of))
    return [
        Total(silo=row.silo, charge=row.charge, released=row.released, count=row.times)
        for row in connection.execute(query.order_by(*columns))
    ]


def populations(connection: Connection) -> list[str]:
    """Every population that has been charged or has a limit, by name."""
    names = sa.union(sa.select(tables.ledger.c.population), sa.select(tables.budgets.c.population))
    return sorted(connection.execute(names).scalars())


def jobs_of(connection: Connection, population: str) -> list[str]:
    """Identifiers of the jobs that have released anything about a population."""
    table = tables.ledger.c
    query = sa.select(table.job).where(table.population == population, table.released).distinct()
    return sorted(connection.execute(query).scalars())


def private_jobs(connection: Connection) -> dict[str, Private]:
    """The level of each job with a guarantee, by identifier, oldest job first."""
    query = sa.select(tables.jobs.c.id, tables.jobs.c.config).order_by(tables.jobs.c.submitted)
    levels = {row.id: privacy_from(json.loads(row.config)["privacy"]) for row in connection.execute(query)}
    return {job: privacy for job, privacy in levels.items() if not isinstance(privacy, NoPrivacy)}


def is_released(connection: Connection, job: str, round: int, attempt: int) -> bool:
    """Whether this attempt is charged for good."""
    table = tables.ledger.c
    step = sa.and_(table.job == job, table.round == round, table.attempt == attempt)
    return connection.execute(sa.select(table.id).where(step, table.released)).first() is not None


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
        step = {"of_job": job, "of_round": round_number, "of_attempt": attempt}
        connection.execute(_UNRESERVE, step)
        connection.execute(_RELEASE, step)
    if over:
        connection.execute(sa.delete(tables.ledger).where(table.job == job, table.released.is_(False)))


def release(connection: Connection, job: str, round: int, attempt: int) -> bool:
    """Charges an attempt for good; False where nothing is reserved for it."""
    settle(connection, job, [(round, attempt)], over=False)
    return is_released(connection, job, round, attempt)


def add(connection: Connection, row: LedgerRow) -> None:
    """Inserts a charge that is released as it is written, unless the same update has paid in this attempt."""
    table = tables.ledger.c
    step = (table.job == row.job, table.round == row.round, table.attempt == row.attempt)
    same = sa.select(table.id).where(*step, table.silo == row.silo, table.digest == row.digest)
    if connection.execute(same).first() is None:
        connection.execute(sa.insert(tables.ledger).values(asdict(row)))


def budget_of(connection: Connection, population: str) -> Budget | None:
    """The most that an operator lets all jobs together spend on a population."""
    limit = limits(connection).get(population)
    return limit.budget if limit else None


def limits(connection: Connection) -> dict[str, Limit]:
    """Every such limit by population."""
    table = tables.budgets.c
    columns = (table.population, table.epsilon, table.delta, table.accountant, table.author, table.time)
    rows = connection.execute(sa.select(*columns).order_by(table.population))
    return {
        row.population: Limit(
            Budget(row.population, row.epsilon, row.delta, row.accountant), row.author, row.time
        )
        for row in rows
    }


def set_budget(connection: Connection, budget: Budget, author: str, now: float) -> None:
    """Replaces the limit of a population."""
    table = tables.budgets
    connection.execute(sa.delete(table).where(table.c.population == budget.population))
    values = {"population": budget.population, "epsilon": budget.epsilon, "delta": budget.delta}
    values |= {"accountant": budget.accountant, "author": author, "time": now}
    connection.execute(sa.insert(table).values(values))


def remove_budget(connection: Connection, population: str) -> Limit | None:
    """Removes the limit of a population; returns the one that there was."""
    limit = limits(connection).get(population)
    connection.execute(sa.delete(tables.budgets).where(tables.budgets.c.population == population))
    return limit
