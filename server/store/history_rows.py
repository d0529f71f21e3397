"""A job's committed rounds, as much of them as one answer may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.observability.thinning import spread
from roundtable.server.store import tables
from roundtable.server.store.rows import to_json

HISTORY_PAGE = 100
MOST_ROUNDS = 2**31 - 1
_PROBES = 16
# Built once: each round runs them, and building one takes longer than running it.
_INSERT = sa.insert(tables.rounds)
_SELECTED, _COMPLETED = (
    sa.update(tables.clients)
    .where(tables.clients.c.name.in_(sa.bindparam("names", expanding=True)))
    .values({column: column + 1})
    for column in (tables.clients.c.selected, tables.clients.c.completed)
)


def insert_round(connection: Connection, job: str, record: dict[str, Any]) -> None:
    """Adds a committed round, and counts it for the clients that it asked and that contributed."""
    connection.execute(
        _INSERT,
        {
            "job": job,
            "round": record["round"],
            "attempt": record["attempt"],
            "model": record["model"],
            "optimizer": record["optimizer"],
            "record": to_json(record),
            "committed": record["ended"],
        },
    )
    # Whoever only stood in line was asked for nothing, as far as its reliability goes.
    asked = set(record["cohort"]) - set(record.get("excused", ()))
    for names, change in ((asked, _SELECTED), (record["contributors"], _COMPLETED)):
        if names:
            connection.execute(change, {"names": list(names)})


def history_within(
    connection: Connection, job: str, between: tuple[int, int], rounds: int, most: int
) -> list[str]:
    """`spread_history`, or for `rounds` = 0 `newest_history`, whatever is between."""
    if rounds:
        return spread_history(connection, job, between, rounds, most)
    return newest_history(connection, job, most)


def newest_history(connection: Connection, job: str, most: int) -> list[str]:
    """The newest of these records that have at most `most` characters together, oldest first."""
    table, kept, size, before = tables.rounds.c, list[str](), 0, MOST_ROUNDS
    while True:
        query = sa.select(table.round, table.record).where(table.job == job, table.round < before)
        # A page at a time: of a long job, all of them together may be more than memory should hold.
        rows = connection.execute(query.order_by(table.round.desc()).limit(HISTORY_PAGE)).all()
        for row in rows:
            size += len(row.record)
            if size > most:
                return kept[::-1]
            kept.append(row.record)
        if len(rows) < HISTORY_PAGE:
            return kept[::-1]
        before = rows[-1].round


def spread_history(
    connection: Connection, job: str, between: tuple[int, int], rounds: int, most: int
) -> list[str]:
    """At most so many records of the rounds between these two, evenly over them, oldest first.

    The first and the last are among them; fewer where they would have more than `most` characters together,
    and none where one has. 0 in the place of a round is no bound.
    """
    table, (first, last) = tables.rounds.c, between
    bounds = [table.job == job, table.round >= first, *([table.round <= last] if last else [])]
    numbers = list(connection.execute(sa.select(table.round).where(*bounds).order_by(table.round)).scalars())
    probes = _records(connection, job, [numbers[index] for index in spread(len(numbers), _PROBES)])
    size = sum(map(len, probes)) / max(1, len(probes))
    count = min(rounds, len(numbers), int(most / size) if size else 0)
    while count:
        found = _records(connection, job, [numbers[index] for index in spread(len(numbers), count)])
        taken = sum(map(len, found))
        if taken <= most:
            return found
        # Records differ in length: those chosen are longer than those that were probed.
        count = min(count - 1, int(count * most / taken))
    return []


def _records(connection: Connection, job: str, numbers: Sequence[int]) -> list[str]:
    table, found = tables.rounds.c, list[str]()
    for start in range(0, len(numbers), HISTORY_PAGE):
        some = numbers[start : start + HISTORY_PAGE]
        query = sa.select(table.record).where(table.job == job, table.round.in_(some)).order_by(table.round)
        found += connection.execute(query).scalars()
    return found
