"""The agents that the coordinator has ever seen."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables
from roundtable.server.store.rows import AgentRow, Learnt

_OF_SILO = sa.update(tables.clients).where(tables.clients.c.name == sa.bindparam("silo"))


def remember(connection: Connection, clients: Sequence[AgentRow]) -> None:
    """Stores what agents say of themselves, of two of the same name the later; their counters stay as they
    are."""
    newest = {client.name: client for client in clients}
    known = stored_clients(connection, newest)
    said = {
        name: {
            "version": client.version,
            "tasks": json.dumps(list(client.tasks)),
            "metadata": json.dumps(dict(client.metadata), sort_keys=True),
            "devices": json.dumps(list(client.devices)),
            "last_seen": client.last_seen,
            "drained": client.drained,
        }
        for name, client in newest.items()
    }
    if again := [{"silo": name, **values} for name, values in said.items() if name in known]:
        connection.execute(_OF_SILO, again)
    if fresh := [
        {"name": name, "first_seen": newest[name].first_seen, "selected": 0, "completed": 0, **values}
        for name, values in said.items()
        if name not in known
    ]:
        connection.execute(sa.insert(tables.clients), fresh)


def stored_clients(connection: Connection, names: Collection[str]) -> dict[str, AgentRow]:
    """Agents by name as they were when their connections began or ended last, without those that have never
    come."""
    query = sa.select(tables.clients).where(tables.clients.c.name.in_(list(names)))
    return {row.name: AgentRow.of(row) for row in connection.execute(query)}


def learn(connection: Connection, learnt: Mapping[str, Learnt]) -> None:
    """Stores what the newest updates of agents have told of them."""
    for name, found in learnt.items():
        if values := found.values:
            connection.execute(_OF_SILO, {"silo": name, **values})


def seen(connection: Connection, times: Sequence[tuple[str, float]]) -> list[None]:
    """Stores when agents' connections have ended: name and Unix time."""
    connection.execute(_OF_SILO, [{"silo": name, "last_seen": time} for name, time in times])
    return [None] * len(times)


def drain(connection: Connection, name: str, reason: str) -> None:
    """Stores why its silo wants it to be asked for nothing new; "" where it may be asked."""
    connection.execute(sa.update(tables.clients).where(tables.clients.c.name == name).values(drained=reason))


def disable(connection: Connection, name: str, reason: str) -> AgentRow | None:
    """Stores why operators want it to be asked for nothing new; the row as it was before, None if unknown."""
    row = connection.execute(sa.select(tables.clients).where(tables.clients.c.name == name)).first()
    if row is None:
        return None
    connection.execute(sa.update(tables.clients).where(tables.clients.c.name == name).values(disabled=reason))
    return AgentRow.of(row)


def all_clients(connection: Connection) -> list[AgentRow]:
    """Every agent, by name."""
    query = sa.select(tables.clients).order_by(tables.clients.c.name)
    return [AgentRow.of(row) for row in connection.execute(query)]
