"""One attempt of secure aggregation: the protocol's state machine with its journal; no network, no clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from roundtable.core.config import JobConfig
from roundtable.core.errors import StorageError
from roundtable.engine import messages as m
from roundtable.privacy import SecureMean, SecureRound
from roundtable.privacy.secagg import SecAggServer, ServerPhase
from roundtable.server.journal import Journal
from roundtable.server.sessions import Identity

KEYS = (ServerPhase.ADVERTISE, ServerPhase.REVEAL, ServerPhase.SHARES)
WORDS = {
    ServerPhase.ADVERTISE: "exchanging keys",
    ServerPhase.REVEAL: "drawing the graph",
    ServerPhase.SHARES: "sharing keys",
    ServerPhase.MASKED: "adding up masked updates",
    ServerPhase.CONSENT: "agreeing on the survivors",
    ServerPhase.UNMASK: "unmasking",
}


class SecureAttempt:
    """What the coordinator knows of an attempt. `told` is the last message to each silo that is still in."""

    def __init__(
        self, round: SecureRound, server: SecAggServer, identities: Mapping[str, Identity], journal: Journal
    ) -> None:
        self.round, self.server, self.identities, self.journal = round, server, identities, journal
        self.inside = frozenset(identities)
        self.told: dict[str, bytes] = {}
        self._adverts: dict[str, bytes] = {}
        self._announced: dict[str, bytes] = {}

    @classmethod
    def begin(
        cls,
        job_id: str,
        job: JobConfig,
        columns: int,
        step: m.Step,
        path: Path,
        identities: Mapping[str, Identity],
    ) -> SecureAttempt:
        """A new attempt among these silos. PrivacyError where they are too few."""
        round = SecureRound.of(job, columns, len(identities), step.round)
        journal = Journal(path)
        record = {name: [held.certificate.decode(), held.key.hex()] for name, held in identities.items()}
        journal.add("silos", json.dumps(record).encode())
        journal.sync()
        return cls(round, _server(round, job_id, step, identities), identities, journal)

    @classmethod
    def resume(
        cls, job_id: str, job: JobConfig, columns: int, step: m.Step, path: Path, body: Callable[[str], Path]
    ) -> SecureAttempt:
        """The attempt of a journal, as it was; `body` finds the masked vectors by their digests.

        Raises StorageError for a journal without a beginning, and what the protocol raised then.
        """
        journal = Journal(path)
        if not journal.entries or journal.entries[0][0] != "silos":
            journal.close(forget=True)
            raise StorageError(f"the journal {path.name} of the attempt has no beginning")
        record = json.loads(journal.entries[0][1])
        identities = {name: Identity(pem.encode(), bytes.fromhex(key)) for name, (pem, key) in record.items()}
        round = SecureRound.of(job, columns, len(identities), step.round)
        attempt = cls(round, _server(round, job_id, step, identities), identities, journal)
        for kind, data in journal.entries[1:]:
            attempt._again(kind, data, body)
        return attempt

    @property
    def phase(self) -> ServerPhase:
        return self.server.phase

    def receive(self, message: bytes) -> str:
        """Takes a silo's message and returns its name. ProtocolError where it is refused."""
        client = self._take(message)
        self.journal.add("message", message)
        return client

    def began_anew(self, client: str, message: bytes) -> bool:
        """Whether a silo advertises other keys than before: it has lost those of this attempt."""
        return client in self._adverts and self._adverts[client] != message

    def problem(self, client: str, digest: str, announcement: bytes) -> str:
        """What is wrong with an upload's announcement; empty if nothing is. May raise ProtocolError."""
        if client not in self.told or self.phase is not ServerPhase.MASKED:
            return f"{client} has no part in this attempt's secure aggregation"
        if self.server.announced(announcement) != (client, digest):
            return "the masked update is not the one that the silo signed"
        return ""

    def announce(self, client: str, announcement: bytes) -> None:
        """Keeps the signed announcement of a masked vector that has arrived."""
        if client not in self._announced:
            self._announced[client] = announcement
            self.journal.add("announcement", announcement)

    def lose(self, client: str, reason: str) -> None:
        """The silo will not answer any more."""
        if client in self.identities and client not in self.server.aborted:
            self.server.aborted[client] = reason
            self.journal.add("lost", json.dumps([client, reason]).encode())

    def fold(self, bodies: Mapping[str, Path]) -> None:
        """Adds up the masked vectors of exactly these silos. Blocks. ProtocolError for a false one."""
        for client in sorted(bodies):
            self.server.fold(self._announced[client], np.memmap(bodies[client], dtype=np.uint8, mode="r"))
            self.journal.add("fold", self._announced[client])

    def advance(self) -> list[str]:
        """Closes the phase; returns who is out by that. Nothing may follow before the journal is synced.

        ProtocolError: too few are left, and the attempt is over.
        """
        out = self._advance()
        self.journal.add("advance", b"")
        return out

    def decode(self) -> SecureMean:
        """The mean, once the phase is DONE."""
        return self.round.decode(self.server.total, len(self.server.survivors), len(self.identities))

    def progress(self) -> str:
        """Where the protocol is, in words."""
        there = len(self.told) or len(self.identities)
        return (
            f"{WORDS[self.phase]}: {there - len(self.server.missing)} of {there}"
            if self.phase in WORDS
            else ""
        )

    def _take(self, message: bytes) -> str:
        first = self.phase is ServerPhase.ADVERTISE
        client = self.server.receive(message)
        if first and client not in self.server.aborted:
            self._adverts[client] = message
        return client

    def _advance(self) -> list[str]:
        self.told = self.server.advance()
        out = sorted(self.inside - self.told.keys()) if self.phase is not ServerPhase.DONE else []
        self.inside = frozenset(self.told)
        return out

    def _again(self, kind: str, data: bytes, body: Callable[[str], Path]) -> None:
        match kind:
            case "message":
                self._take(data)
            case "announcement":
                self._announced[self.server.announced(data)[0]] = data
            case "lost":
                client, reason = json.loads(data)
                self.server.aborted[client] = reason
            case "fold":
                path = body(self.server.announced(data)[1])
                self.server.fold(data, np.memmap(path, dtype=np.uint8, mode="r"))
            case "advance":
                self._advance()


def _server(
    round: SecureRound, job_id: str, step: m.Step, identities: Mapping[str, Identity]
) -> SecAggServer:
    session = round.session(job_id, step.round, step.attempt)
    return SecAggServer(session, round.parameters, {name: held.key for name, held in identities.items()})
