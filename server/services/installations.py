"""Tells a silo's agent from a clone that has copied its credentials.

Each installation of an agent makes an Ed25519 key in its state folder, which is no part of the credentials.
The first one that connects with a silo's keys is bound to them, and proves itself at each hello by signing a
number that was drawn for this hello. Another installation with the same credentials is refused, operators are
told, and the agent that was bound goes on undisturbed. It is told as well: at its next heartbeat, or when it
comes again. Enrolling anew gives new keys, which bind anew.

A silo has two keys, its connection's and its identity's, and by a relay it shows the second alone. Both are
bound together, or who has copied both could come by the way by which the silo itself does not.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from roundtable.core.errors import IdentityError
from roundtable.core.identity.credentials import verify_identity
from roundtable.core.identity.signing import check_signature
from roundtable.server.auth.audit import AuditLog
from roundtable.server.auth.principals import CertifiedCallers, label_of
from roundtable.server.auth.rate_limit import RateLimit
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import InstallationProof
from roundtable.server.door.from_agents import message_of
from roundtable.server.door.to_agents import CloneSighting
from roundtable.server.jobs.sessions import Identity
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

    async def objection(
        self, line: Line, installation: bytes, keys: Sequence[str], bound: Sequence[store.InstallationRow]
    ) -> str:
        """Why this is not the installation that the silo's keys belong to; empty for the one that is.

        `keys` are those that it shows; the connection's alone must be known. `bound` is what was stored of
        these and of other keys of its name.
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
                return await self._refused(line, str(error), bound)
        shown = {row.key: row for row in bound if row.key in keys}
        if bound and not shown and len(keys) == 1 and not line.relay:
            return await self._refused(
                line,
                f"{name!r} shows a key that is not known here, and not the certificate of its identity: its "
                "credentials must hold identity.crt",
                bound,
            )
        if installation and (fresh := [key for key in keys if key not in shown]):
            now = self._clock()
            rows = [store.InstallationRow(key, name, installation.hex(), now) for key in fresh]
            own = all(row.installation == installation.hex() for row in shown.values())
            shown |= {row.key: row for row in (await self._arrivals.bind(rows) if own else ())}
        if all(row.installation == installation.hex() for row in shown.values()):
            return ""
        return await self._refused(
            line,
            f"the certificate of {name!r} belongs to another installation of the agent, and this one has "
            "copied it or lost its state folder; bring that folder back, or enrol anew with a new invitation",
            [row for row in bound if row.installation in {each.installation for each in shown.values()}],
        )

    async def _refused(self, line: Line, reason: str, bound: Sequence[store.InstallationRow]) -> str:
        """Tells operators of what may be a clone, and keeps it for the silo's own agent; the reason. `bound`
        are the keys by which that is known."""
        name, address = line.name, line.address
        self._audit.refused(label_of("agent", name), "Agents/Connect", reason, address)
        log.warning("a second installation as %s, from %s, is refused", name, address, extra={"site": name})
        if self._told.allows(name):
            now, keys = self._clock(), [row.key for row in bound]
            self._alerts.tell(clone_incident(name), f"{reason} (from {address})", now)
            await self._database.write(lambda connection: store.note_clone(connection, keys, now, address))
            self._sightings |= dict.fromkeys(keys, CloneSighting(now, address))
        return reason

    def sighting(self, key: str, bound: Sequence[store.InstallationRow]) -> CloneSighting | None:
        """Who was refused last in the place of the installation with this key, of which this was stored; None
        where nobody was."""
        for row in bound:
            if row.key == key and key not in self._sightings and row.clone_time:
                self._sightings[key] = CloneSighting(row.clone_time, row.clone_address)
        return self._sightings.get(key)

    def news(self, key: str) -> CloneSighting | None:
        """The newest sighting that this coordinator has noted or looked up since its start."""
        return self._sightings.get(key)


def shown_identity(
    name: str, certificate: bytes, authority: bytes, principals: CertifiedCallers
) -> Identity | None:
    """The signing identity (PEM) that a silo shows, None where it has none; IdentityError for one that does
    not hold. `authority` is the root's certificate."""
    if not certificate:
        return None
    try:
        holder, key = verify_identity(certificate, authority)
        principals.of_certificate(certificate)
    except IdentityError as error:
        raise IdentityError(
            f"{error}; issue the agent's credentials anew with `roundtable ca issue`"
        ) from error
    if holder != name:
        raise IdentityError(f"the identity certificate that {name!r} shows is one of {holder!r}")
    return Identity(certificate, key)


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
