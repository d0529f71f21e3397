"""Which of the updates that were received a committed round was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables
from roundtable.server.store.rows import UpdateRow

_updates = tables.updates.c
# Built once: each round runs it, and building it takes longer than running it.
_ACCEPTED = (
    sa.select(tables.updates)
    .where(
        _updates.job == sa.bindparam("job"),
        _updates.round.in_(sa.bindparam("rounds", expanding=True)),
        _updates.receipt == "accepted",
    )
    .order_by(_updates.attempt)
)


def combined_updates(connection: Connection, job: str, record: Mapping[str, Any]) -> list[UpdateRow]:
    """The updates that a round's model was made of, also those that its rule left out, by client.

    `record` is the round's, as it is stored. Of a round that was closed without a model: all it received.
    """
    staleness, number = record.get("staleness") or {}, record["round"]
    names = {*record["contributors"], *record.get("excluded", ())}
    rounds = {number - age for age in staleness.values()} or {number}
    found: dict[str, UpdateRow] = {}
    for row in connection.execute(_ACCEPTED, {"job": job, "rounds": sorted(rounds)}):
        wanted = record.get("closed") or row.client in names
        asked = number - staleness.get(row.client, 0)
        # A client is asked once for each attempt; what an earlier attempt received is not combined later,
        # except in buffered rounds, where the newest answer is the one that counts.
        if wanted and row.round == asked and (staleness or row.attempt == record["attempt"]):
            found[row.client] = UpdateRow.of(row)
    return [found[name] for name in sorted(found)]
