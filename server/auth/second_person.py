"""What one administrator cannot do alone: voiding another administrator's certificate or token.

A request waits a day for a second administrator. Both must have certificates: the root gives those out to
people, offline, while any administrator could make a token for a second self. Where there are not two with
certificates, nobody voids an administrator online; the root's list does (`roundtable ca revoke`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Literal

import grpc
from sqlalchemy.engine import Connection

from roundtable.core.evidence.audit_log import entry
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.principals import Principal
from roundtable.server.store import Database
from roundtable.server.store import audit as audit_store
from roundtable.server.store import trust_rows as store

Action = Literal["revoke", "revoke_token"]
WAIT_SECONDS = 86400.0
MOST_OF_ONE = 10


class SecondPerson:
    """Keeps requests until somebody else confirms them."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def ask(
        self, who: Principal, action: Action, role: str, name: str, reason: str = ""
    ) -> store.PendingRow:
        """Keeps a request; the same one of the same person is not kept twice."""
        _check_person(who)
        now = self._clock()
        row = store.PendingRow(
            secrets.token_hex(4), action, role, name, who.label, reason[:500], now, now + WAIT_SECONDS
        )

        def work(connection: Connection) -> store.PendingRow:
            known = store.all_pending(connection, now)
            for other in known:
                if (other.action, other.role, other.name, other.author) == (action, role, name, who.label):
                    return other
            # Of each: one administrator's requests must not keep another from asking.
            if sum(other.author == who.label for other in known) >= MOST_OF_ONE:
                raise Refusal(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{MOST_OF_ONE} requests of {who.label} wait already for a second person; each for a day",
                )
            store.add_pending(connection, row)
            detail = {"request": row.identifier, "action": action, "role": role, "reason": row.reason}
            audit_store.append(connection, entry(now, who.label, "requested", name, detail))
            return row

        return await self._database.write(work)

    async def waiting(self) -> list[store.PendingRow]:
        """What waits now, the oldest first."""
        now = self._clock()
        return await self._database.read(lambda connection: store.all_pending(connection, now))

    def confirmed(self, connection: Connection, who: Principal, identifier: str) -> store.PendingRow:
        """Takes somebody else's request; Refusal where there is none that this person may confirm."""
        _check_person(who)
        now = self._clock()
        row = next((one for one in store.all_pending(connection, now) if one.identifier == identifier), None)
        if row is None:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND, f"no request {identifier[:16]!r} waits for a second person"
            )
        if row.author == who.label:
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"request {identifier} is your own: another administrator must confirm it",
            )
        store.remove_pending(connection, identifier)
        detail = {"request": identifier, "action": row.action, "role": row.role, "author": row.author}
        audit_store.append(connection, entry(now, who.label, "confirmed", row.name, detail))
        return row


def _check_person(who: Principal) -> None:
    if who.source != "certificate":
        raise Refusal(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{who.name!r} is here by a token: voiding an administrator takes two who have certificates of "
            "the root. Where there are not two, use the root's list: `roundtable ca revoke`",
        )
