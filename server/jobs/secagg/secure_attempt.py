"""One attempt of secure aggregation: the protocol's state machine with its journal; no network, no clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from roundtable.aggregation import FileMatrix
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, ProtocolError, StorageError
from roundtable.engine import GroupMeans, Mean
from roundtable.engine import messages as m
from roundtable.engine.validation.secure_feasibility import least_of_groups
from roundtable.privacy import SecureMean, SecureRound
from roundtable.privacy.secagg import GroupedServer, SecAggServer, ServerPhase, Session
from roundtable.privacy.secagg.framing import Kind, unseal
from roundtable.privacy.secagg.masks import Ring, ring_dtype
from roundtable.server.jobs.secagg.journal import Journal
from roundtable.server.jobs.sessions import Identity

Body = Callable[[str], bytes]
"""Loads a masked vector by its digest, checked."""
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
    """The coordinator's state of one attempt.

    `outgoing` is the last message to each silo that still takes part.
    """

    def __init__(
        self,
        round: SecureRound,
        server: SecAggServer | GroupedServer,
        identities: Mapping[str, Identity],
        journal: Journal,
    ) -> None:
        self.round = round
        self.server = server
        self.identities = identities
        self.journal = journal
        self.inside = frozenset(identities)
        self.outgoing: dict[str, bytes] = {}
        self._adverts: dict[str, bytes] = {}
        self._heard: set[bytes] = set()
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
        subject: bytes,
    ) -> SecureAttempt:
        """A new attempt among these silos, which train by `subject`. PrivacyError where they are too few."""
        round = SecureRound.of(job, columns, len(identities), step.round)
        journal = Journal(path)
        record = {name: [held.certificate.decode(), held.key.hex()] for name, held in identities.items()}
        journal.add("silos", json.dumps({"subject": subject.hex(), "silos": record}).encode())
        journal.sync()
        session = round.session(job_id, step.round, step.attempt, subject)
        return cls(round, _server(round, session, job, identities, path), identities, journal)

    @classmethod
    def resume(
        cls, job_id: str, job: JobConfig, columns: int, step: m.Step, path: Path, body: Body
    ) -> SecureAttempt:
        """The attempt of a journal, as it was; `body` finds the masked vectors by their digests.

        Raises StorageError for a journal without a beginning, and what the protocol raised then.
        """
        journal = Journal(path)
        if not journal.entries or journal.entries[0][0] != "silos":
            journal.close(forget=True)
            raise StorageError(f"the journal {path.name} of the attempt has no beginning")
        record = json.loads(journal.entries[0][1])
        silos = record["silos"].items()
        identities = {name: Identity(pem.encode(), bytes.fromhex(key)) for name, (pem, key) in silos}
        round = SecureRound.of(job, columns, len(identities), step.round)
        session = round.session(job_id, step.round, step.attempt, bytes.fromhex(record["subject"]))
        attempt = cls(round, _server(round, session, job, identities, path), identities, journal)
        for kind, data in journal.entries[1:]:
            attempt._again(kind, data, body)
        return attempt

    @property
    def phase(self) -> ServerPhase:
        return self.server.phase

    @property
    def irrevocable(self) -> bool:
        """Whether silos are asked now for what each gives for one attempt of a round only.

        That is their shares; on a sparse graph it is their consent already (see `Releases.unmask`).
        """
        if self.phase is not ServerPhase.CONSENT:
            return self.phase is ServerPhase.UNMASK
        if isinstance(self.server, GroupedServer):
            cohorts = [group.cohort for group in self.server.alive.values()]
        else:
            cohorts = [self.server.cohort]
        return not all(cohort.parameters.full_graph for cohort in cohorts)

    def receive(self, message: bytes) -> str:
        """Takes a silo's message and returns its name; one that was taken before changes nothing.

        ProtocolError where it is refused.
        """
        if blake3(message).digest() in self._heard:
            return unseal(message).sender  # Said again after a reconnection, perhaps in a later phase.
        client = self._take(message)
        self.journal.add("message", message)
        return client

    def began_anew(self, client: str, message: bytes) -> bool:
        """Whether a silo advertises other keys than before: it has lost those of this attempt."""
        if self._adverts.get(client, message) == message:
            return False
        try:
            return unseal(message).kind is Kind.ADVERTISE
        except ProtocolError:
            return False

    def problem(self, client: str, digest: str, announcement: bytes) -> str:
        """What is wrong with an upload's announcement; empty if nothing is. May raise ProtocolError."""
        if client not in self.outgoing or self.phase is not ServerPhase.MASKED:
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
        """Goes on without a silo that will not answer any more."""
        if self.server.lose(client, reason):
            self.journal.add("lost", json.dumps([client, reason]).encode())

    def fold(self, digests: Mapping[str, str], body: Body) -> None:
        """Adds up the masked vectors of exactly these silos. Blocks. ProtocolError for a false one.

        One at a time is in memory: what is added are the very bytes that were hashed.
        """
        for client in sorted(digests):
            self.server.fold(self._announced[client], body(digests[client]))
            self.journal.add("fold", self._announced[client])

    def fold_sum(self, clients: Sequence[str], digest: str, body: Body) -> None:
        """Adds what a relay has made of the masked vectors of exactly these silos. Blocks."""
        announcements = [self._announced[client] for client in clients]
        self._add_sum(announcements, body(digest))
        entry = {"sum": digest, "of": [each.hex() for each in announcements]}
        self.journal.add("fold sum", json.dumps(entry).encode())

    def advance(self) -> dict[str, str]:
        """Closes the phase; returns the silos that it drops, with reasons. Sync before anything follows.

        ProtocolError: too few are left, and the attempt is over.
        """
        out = self._advance()
        self.journal.add("advance", b"")
        return out

    def decode(self, delivered: Collection[str] = ()) -> Mean | GroupMeans:
        """The mean, or the means of groups, once the phase is DONE.

        `delivered` are the silos whose updates were taken: those of lost groups are named. Blocks.
        """
        protocol = self.round.parameters.summary()
        if isinstance(self.server, GroupedServer):
            means = self._decode_groups(self.server, delivered)
            return replace(means, account={**means.account, "protocol": protocol})
        mean = self.round.decode(self.server.total, len(self.server.survivors), len(self.identities))
        return Mean.of_secure_sum(replace(mean, account={**mean.account, "protocol": protocol}))

    def close(self, *, forget: bool) -> None:
        """Closes the journal; with `forget` deletes everything of the attempt."""
        self.journal.close(forget=forget)
        if forget:
            for path in self.journal.path.parent.glob(f"{self.journal.path.name}.row*"):
                path.unlink()

    def _decode_groups(self, server: GroupedServer, delivered: Collection[str]) -> GroupMeans:
        """Decodes each group's mean into a file of its own: all together may be larger than memory."""
        decoded: list[tuple[tuple[str, ...], SecureMean | str]] = []
        paths: list[Path] = []
        digests: list[str] = []
        for number, group in server.alive.items():
            members = group.cohort.names
            path = self.journal.path.with_name(f"{self.journal.path.name}.row{number}")
            outcome: SecureMean | str
            try:
                mean = self.round.decode(group.total, len(group.survivors), len(members))
                row, outcome = mean.vector, replace(mean, vector=torch.empty(0))
            except AggregationError as error:
                row, outcome = torch.full((self.round.columns,), torch.nan), str(error)
            data = row.numpy().astype("<f4", copy=False)
            data.tofile(path)
            decoded.append((members, outcome))
            paths.append(path)
            digests.append(blake3(data.data.cast("B")).hexdigest())
        lost = {name: f"its group was lost: {why}" for name in delivered if (why := server.why_lost(name))}
        return GroupMeans.of(FileMatrix(paths, self.round.columns, digests=digests), decoded, lost)

    def progress(self) -> str:
        """The phase of the protocol and how many have answered, in words."""
        if self.phase not in WORDS:
            return ""
        members = len(self.outgoing) or len(self.identities)
        groups = self.server.alive if isinstance(self.server, GroupedServer) else {}
        where = f" in {len(groups)} groups" if groups else ""
        return f"{WORDS[self.phase]}: {members - len(self.server.missing)} of {members}{where}"

    def _take(self, message: bytes) -> str:
        first = self.phase is ServerPhase.ADVERTISE
        client = self.server.receive(message)
        self._heard.add(blake3(message).digest())
        if first and client not in self.server.aborted:
            self._adverts[client] = message
        return client

    def _add_sum(self, announcements: Sequence[bytes], body: bytes) -> None:
        if isinstance(self.server, GroupedServer):
            raise ProtocolError("a relay's sum tells nothing of groups, and this attempt has some")
        self.server.fold_sum(announcements, body)

    def _advance(self) -> dict[str, str]:
        word = WORDS.get(self.phase, "")
        self.outgoing = self.server.advance()
        out = sorted(self.inside - self.outgoing.keys()) if self.phase is not ServerPhase.DONE else []
        self.inside = frozenset(self.outgoing)
        return {name: self._why_out(name) or f"no answer in time while {word}" for name in out}

    def _why_out(self, client: str) -> str:
        server = self.server
        why = server.why_lost(client) if isinstance(server, GroupedServer) else ""
        return server.aborted.get(client, "") or (f"its group was lost: {why}" if why else "")

    def _again(self, kind: str, data: bytes, body: Body) -> None:
        match kind:
            case "message":
                self._take(data)
            case "announcement":
                self._announced[self.server.announced(data)[0]] = data
            case "lost":
                self.server.lose(*json.loads(data))
            case "fold":
                self.server.fold(data, body(self.server.announced(data)[1]))
            case "fold sum":
                entry = json.loads(data)
                self._add_sum([bytes.fromhex(each) for each in entry["of"]], body(entry["sum"]))
            case "advance":
                self._advance()


def _server(
    round: SecureRound,
    session: Session,
    job: JobConfig,
    identities: Mapping[str, Identity],
    path: Path,
) -> SecAggServer | GroupedServer:
    directory = {name: held.key for name, held in identities.items()}
    if not round.grouped:
        return SecAggServer(session, round.parameters, directory)

    def workspace(number: int) -> Ring:
        """An unnamed file for a group's sum: all of them may be more than memory holds."""
        with tempfile.TemporaryFile(dir=path.parent) as file:
            return np.memmap(file, ring_dtype(round.parameters.ring_bits), "w+", shape=(round.length,))

    least = least_of_groups(job, len(identities))
    return GroupedServer(session, round.parameters, directory, least, workspace)
