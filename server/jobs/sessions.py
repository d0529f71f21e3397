"""The agents that are connected: one session each, the newest one if there are two."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from roundtable.core.identity.lifetimes import Lifetime
from roundtable.server.door import to_agents
from roundtable.server.door.to_agents import CloneSighting, ToAgent
from roundtable.server.store import AgentRow

log = logging.getLogger("roundtable.server.jobs.sessions")


@dataclass(frozen=True)
class Identity:
    """An agent's signing identity in secure aggregation: its certificate (PEM) and the public key in it."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class ShownCertificate:
    """The certificate of a connection; `key` is SHA-256 of its public key, the same after a renewal."""

    key: str
    lifetime: Lifetime


@dataclass
class AgentSession:
    """One agent's control stream. `None` in the outbox ends it; `revocations` is the list it was given,
    `clone` the sighting that it was told of."""

    client: AgentRow
    shown: ShownCertificate
    heard: float
    state: str = "available"
    revocations: bytes = b""
    clone: CloneSighting | None = None
    outbox: asyncio.Queue[ToAgent | None] = field(default_factory=asyncio.Queue)

    @property
    def name(self) -> str:
        return self.client.name

    def send(self, message: ToAgent) -> None:
        """Queues a message for the agent."""
        self.outbox.put_nowait(message)

    def end(self, reason: str = "") -> None:
        """Ends the stream; with a reason the agent is told not to come back by itself."""
        if reason:
            self.send(to_agents.refused(reason))
        self.outbox.put_nowait(None)


class Sessions:
    """The connected agents. `joined` and `left` are called as agents connect and disconnect.

    `identities` are those that agents have shown, checked; they outlast a connection. So do `known`, all that
    have come since the coordinator's start, with an identity or without one, and `disabled`: agents that
    operators have disabled, by name, and why.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        heartbeat: float,
        joined: Callable[[AgentRow], None],
        left: Callable[[AgentRow], None],
    ) -> None:
        self._clock = clock
        self.heartbeat = heartbeat
        self._joined = joined
        self._left = left
        self.identities: dict[str, Identity] = {}
        self.known: set[str] = set()
        self.disabled: dict[str, str] = {}
        self._sessions: dict[str, AgentSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, name: str) -> AgentSession | None:
        """The agent's session, if it is connected."""
        return self._sessions.get(name)

    def clients(self) -> list[AgentRow]:
        """Every agent that is connected."""
        return [session.client for session in self._sessions.values()]

    def certificates(self) -> list[ShownCertificate]:
        """What the agents that are connected have shown."""
        return [session.shown for session in self._sessions.values()]

    def know(self, name: str, identity: Identity | None) -> None:
        """Notes that an agent has come, with what it signs by from now on."""
        self.known.add(name)
        self.identities.pop(name, None)
        if identity is not None:
            self.identities[name] = identity

    def know_of(self, name: str, identity: Identity) -> None:
        """A relay has shown what an agent signs by; it counts until that shows one itself."""
        if name not in self.identities:
            self.know(name, identity)

    def open(self, client: AgentRow, shown: ShownCertificate) -> AgentSession:
        """A new session; an older one under the same name ends. A disabled agent is told that it is."""
        reason = self.disabled.get(client.name, "")
        client = replace(client, disabled=reason)
        session = AgentSession(client, shown, self._clock())
        if reason:
            session.send(to_agents.standing(reason))
        older = self._sessions.get(client.name)
        self._sessions[client.name] = session
        if older is not None:
            log.warning(
                "%s connected again; its older connection ends", client.name, extra={"site": client.name}
            )
            older.end(
                f"another connection as {client.name!r} has taken the place of this one; "
                "if two agents share a certificate, issue one for each"
            )
        self._joined(client)
        return session

    def disable(self, name: str, reason: str) -> None:
        """Notes that an agent is disabled, or with "" that it is not, and tells it."""
        self.disabled.pop(name, None)
        if reason:
            self.disabled[name] = reason
        if (session := self._sessions.get(name)) is not None:
            session.client = replace(session.client, disabled=reason)
            session.send(to_agents.standing(reason))

    def close(self, session: AgentSession) -> None:
        """Removes a session whose stream is over; one that was replaced is left alone."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            log.info("%s is gone", session.name, extra={"site": session.name})
            self._left(session.client)

    def send(self, name: str, message: ToAgent) -> bool:
        """Pushes a message; False if the agent is not connected."""
        session = self._sessions.get(name)
        if session is None:
            return False
        session.send(message)
        return True

    def hear(self, names: Iterable[str]) -> None:
        """These agents are alive, as the relay says that they have come by."""
        now = self._clock()
        for name in names:
            if (session := self._sessions.get(name)) is not None:
                session.heard = now

    async def watch(self) -> None:
        """Ends sessions that have been silent for three heartbeats; runs until cancelled."""
        while True:
            await asyncio.sleep(self.heartbeat)
            self.end_silent()

    def end_silent(self) -> None:
        """Ends the sessions of agents that have not been heard for three heartbeats."""
        limit = self._clock() - 3 * self.heartbeat
        for session in [s for s in self._sessions.values() if s.heard < limit]:
            log.warning("%s has been silent too long", session.name, extra={"site": session.name})
            session.end()
            self.close(session)

    def end_all(self) -> None:
        """Ends every stream: the coordinator stops."""
        for session in self._sessions.values():
            session.end()
