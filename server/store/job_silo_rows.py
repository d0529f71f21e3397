"""What is known of silos for single jobs: what a job's engine remembers of them, what they train it on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.server.store import tables
from roundtable.server.store.rows import to_json

MOST_KEPT = 20
"""Of one silo in one job: those that it said last."""
_AT_ONCE = 500


def _in_place(insert: sqlite.Insert | postgresql.Insert) -> sqlite.Insert | postgresql.Insert:
    return insert.on_conflict_do_update(
        index_elements=["job", "client"], set_={"record": insert.excluded.record}
    )


# Built once: each transition of a job runs it, and building it takes longer than running it.
_STORE = {
    "sqlite": _in_place(sqlite.insert(tables.job_clients)),
    "postgresql": _in_place(postgresql.insert(tables.job_clients)),
}


@dataclass(frozen=True)
class SetupRow:
    """A silo has said, at a Unix time and in a round, what it trains the job on from then."""

    job: str
    client: str
    time: float
    round: int
    setup: TrainingSetup


def keep_setup(connection: Connection, fresh: SetupRow) -> None:
    """Stores it, unless it is what the silo said last; the oldest of more than MOST_KEPT goes."""
    table = tables.job_setups.c
    of_silo = sa.and_(table.job == fresh.job, table.client == fresh.client)
    query = sa.select(table.number, table.setup).where(of_silo).order_by(table.number.desc()).limit(1)
    last, text = connection.execute(query).first(), to_json(fresh.setup.plain())
    if last is not None and last.setup == text:
        return
    number = 1 if last is None else last.number + 1
    values = {
        "job": fresh.job,
        "client": fresh.client,
        "number": number,
        "time": fresh.time,
        "round": fresh.round,
        "setup": text,
    }
    connection.execute(sa.insert(tables.job_setups).values(values))
    old = sa.delete(tables.job_setups).where(of_silo, table.number <= number - MOST_KEPT)
    connection.execute(old)


def setups_of(connection: Connection, job: str) -> list[SetupRow]:
    """What silos have said of a job, by silo, each from the oldest on."""
    table = tables.job_setups.c
    query = sa.select(tables.job_setups).where(table.job == job).order_by(table.client, table.number)
    return [
        SetupRow(row.job, row.client, row.time, row.round, TrainingSetup(**json.loads(row.setup)))
        for row in connection.execute(query)
    ]


def store_clients(connection: Connection, job: str, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Stores what the job's engine remembers of these clients, in the place of what it did."""
    names = sorted(records)
    for place in range(0, len(names), _AT_ONCE):
        some = names[place : place + _AT_ONCE]
        rows = [{"job": job, "client": name, "record": to_json(records[name])} for name in some]
        connection.execute(_STORE[connection.dialect.name], rows)


def clients_of(connection: Connection, job: str) -> dict[str, dict[str, Any]]:
    """What the job's engine remembered of each client that it had asked."""
    table = tables.job_clients.c
    query = sa.select(table.client, table.record).where(table.job == job).order_by(table.client)
    return {row.client: json.loads(row.record) for row in connection.execute(query)}


def has_asked(connection: Connection, job: str, client: str) -> bool:
    """Whether a round of the job has ever drawn this client."""
    table = tables.job_clients.c
    query = sa.select(table.record).where(table.job == job, table.client == client)
    record = connection.execute(query).scalar()
    return record is not None and bool(json.loads(record).get("selected"))
