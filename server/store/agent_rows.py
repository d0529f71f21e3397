"""The agents that the coordinator has ever seen."""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables
from roundtable.server.store.rows import AgentRow, Learnt

_LEARN = sa.update(tables.clients).where(tables.clients.c.name == sa.bindparam("silo"))


def remember(connection: Connection, client: AgentRow) -> None:
    """Stores what the agent says of itself; its counters stay as they are."""
    values = {
        "version": client.version,
        "tasks": json.dumps(list(client.tasks)),
        "metadata": json.dumps(dict(client.metadata), sort_keys=True),
        "devices": json.dumps(list(client.devices)),
        "last_seen": client.last_seen,
        "drained": client.drained,
    }
    change = sa.update(tables.clients).where(tables.clients.c.name == client.name).values(values)
    if connection.execute(change).rowcount == 0:
        fresh = {
            "name": client.name,
            "first_seen": client.first_seen,
            "selected": 0,
            "completed": 0,
            **values,
        }
        connection.execute(sa.insert(tables.clients).values(fresh))


def stored_client(connection: Connection, name: str) -> AgentRow | None:
    """The agent as it was when its connection began or ended last; None for one that has never come."""
    row = connection.execute(sa.select(tables.clients).where(tables.clients.c.name == name)).first()
    return None if row is None else AgentRow.of(row)


def learn(connection: Connection, learnt: Mapping[str, Learnt]) -> None:
    """Stores what the newest updates of agents have told of them."""
    for name, found in learnt.items():
        if values := found.values:
            connection.execute(_LEARN, {"silo": name, **values})


def seen(connection: Connection, name: str, time: float) -> None:
    """Stores when the agent's connection ended."""
    connection.execute(sa.update(tables.clients).where(tables.clients.c.name == name).values(last_seen=time))


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
