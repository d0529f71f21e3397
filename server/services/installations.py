"""Tells a silo's agent from a clone that has copied its credentials.

Each installation of an agent makes an Ed25519 key in its state folder, which is no part of the credentials.
The first one that connects with a certificate's key is bound to it, and proves itself at each hello by
signing a number that was drawn for this hello. Another installation with the same credentials is refused,
operators are told, and the agent that was bound goes on undisturbed. It is told as well: at its next
heartbeat, or when it comes again. Enrolling anew gives a new key, which binds anew.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from roundtable.core.errors import IdentityError
from roundtable.core.identity.signing import check_signature
from roundtable.server.auth.audit import AuditLog
from roundtable.server.auth.principals import label_of
from roundtable.server.auth.rate_limit import RateLimit
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import InstallationProof
from roundtable.server.door.from_agents import message_of
from roundtable.server.door.to_agents import CloneSighting
from roundtable.server.operations.alerts import Alerts
from roundtable.server.operations.incidents import clone_incident
from roundtable.server.services.arrivals import Arrivals
from roundtable.server.services.lines import Line
from roundtable.server.store import Database
from roundtable.server.store import trust_rows as store

log = logging.getLogger("roundtable.server.services.installations")

PROOF_SECONDS = 30.0
ALERTS_A_SECOND = 1 / 3600


class Installations:
    """Asks who says hello for a proof, and compares with what is bound."""

    def __init__(
        self,
        database: Database,
        arrivals: Arrivals,
        audit: AuditLog,
        alerts: Alerts,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._arrivals = arrivals
        self._clock = clock
        self._audit = audit
        self._alerts = alerts
        self._told = RateLimit(ALERTS_A_SECOND, 1.0, time.monotonic)
        self._sightings: dict[str, CloneSighting] = {}

    async def objection(self, line: Line, installation: bytes, bound: store.InstallationRow | None) -> str:
        """Why this is not the installation that the certificate belongs to; empty for the one that is.

        `bound` is what was stored of that.
        """
        name = line.name
        if installation:
            proof, values = await _proof(line)
            if proof is None:
                # A line that broke looks the same: no reason for an alarm.
                reason = f"{name!r} did not prove which installation it is"
                self._audit.refused(label_of("agent", name), "Agents/Connect", reason, line.address)
                return reason
            try:
                check_signature(installation, "installation", values, proof, name)
            except IdentityError as error:
                return await self._refused(line, str(error))
        if bound is None and installation:
            row = store.InstallationRow(line.shown.key, name, installation.hex(), self._clock())
            bound = await self._arrivals.bind(row)
        if (bound.installation if bound else "") == installation.hex():
            return ""
        return await self._refused(
            line,
            f"the certificate of {name!r} belongs to another installation of the agent, and this one has "
            "copied it or lost its state folder; bring that folder back, or enrol anew with a new invitation",
        )

    async def _refused(self, line: Line, reason: str) -> str:
        """Tells operators of what may be a clone, and keeps it for the silo's own agent; the reason."""
        name, address = line.name, line.address
        self._audit.refused(label_of("agent", name), "Agents/Connect", reason, address)
        log.warning("a second installation as %s, from %s, is refused", name, address, extra={"site": name})
        if self._told.allows(name):
            now, key = self._clock(), line.shown.key
            self._alerts.tell(clone_incident(name), f"{reason} (from {address})", now)
            await self._database.write(lambda connection: store.note_clone(connection, key, now, address))
            self._sightings[key] = CloneSighting(now, address)
        return reason

    def sighting(self, key: str, bound: store.InstallationRow | None) -> CloneSighting | None:
        """Who was refused last for coming with this key, of which this was stored; None where nobody was."""
        if key not in self._sightings and bound is not None and bound.clone_time:
            self._sightings[key] = CloneSighting(bound.clone_time, bound.clone_address)
        return self._sightings.get(key)

    def news(self, key: str) -> CloneSighting | None:
        """The newest sighting that this coordinator has noted or looked up since its start."""
        return self._sightings.get(key)


async def _proof(line: Line) -> tuple[bytes | None, dict[str, str]]:
    """The installation's signature, and what it is to be over: a fresh number. None where none came."""
    nonce = secrets.token_bytes(32)
    values = {"nonce": nonce.hex(), "name": line.name}
    await line.write(to_agents.challenge(nonce))
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            answer = message_of(await anext(line.requests))
    except (TimeoutError, StopAsyncIteration):
        return None, values
    return answer.signature if isinstance(answer, InstallationProof) else b"", values
