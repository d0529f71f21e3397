"""An attempt whose messages a test can look at, hold back or replace between any two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from roundtable.privacy.secagg import (
    ArraySource,
    Ed25519Signer,
    MemoryReleases,
    SecAggClient,
    SecAggParameters,
    SecAggServer,
    ServerPhase,
    Session,
    choose_parameters,
)
from roundtable.privacy.secagg.framing import Envelope, Kind, seal, unseal

NOBODY: frozenset[int] = frozenset()


class Attempt:
    """n silos and a coordinator, everything fresh but what is given."""

    def __init__(
        self,
        n: int,
        plan: SecAggParameters | None = None,
        *,
        dropout: float = 0.2,
        corruption: float = 0.2,
        session: Session | None = None,
        vectors: list[np.ndarray] | None = None,
        signers: list[Ed25519Signer] | None = None,
        releases: list[MemoryReleases] | None = None,
    ) -> None:
        self.session = session or Session("job", 1, 0, 6)
        self.plan = plan or choose_parameters(n, dropout, corruption)
        self.names = [f"silo-{index:03d}" for index in range(n)]
        self.signers = signers or [Ed25519Signer() for _ in range(n)]
        self.releases = releases or [MemoryReleases() for _ in range(n)]
        self.directory = {name: signer.public for name, signer in zip(self.names, self.signers, strict=True)}
        random = np.random.default_rng(7)
        self.vectors = vectors or [
            random.integers(0, 1 << self.plan.ring_bits, self.session.length, dtype=np.uint32)
            for _ in range(n)
        ]
        self.server = SecAggServer(self.session, self.plan, self.directory)
        self.clients = [self.client(index) for index in range(n)]
        self.messages: dict[str, bytes] = dict.fromkeys(self.names, b"")
        self.received: list[tuple[bytes, bytes | None]] = []

    def client(self, index: int, **changed: object) -> SecAggClient:
        given = {
            "session": self.session,
            "plan": self.plan,
            "name": self.names[index],
            "signer": self.signers[index],
            "directory": self.directory,
            "releases": self.releases[index],
            **changed,
        }
        return SecAggClient(**given)  # type: ignore[arg-type]

    def masked(self, index: int) -> tuple[bytes, bytes]:
        """The header and the body of a silo's masked vector."""
        client = self.clients[index]
        body = b"".join(bytes(chunk) for chunk in client.masked_chunks(ArraySource(self.vectors[index])))
        return client.masked(), body

    def answer(self, index: int) -> None:
        """Let a silo take its message and the coordinator take the answer."""
        phase, client = self.server.phase, self.clients[index]
        if phase is ServerPhase.ADVERTISE:
            self.take(client.advertise())
            return
        answer = client.handle(self.messages[self.names[index]])
        if phase is ServerPhase.MASKED:
            self.take(*self.masked(index))
        else:
            assert answer is not None
            self.take(answer)

    def take(self, message: bytes, body: bytes | None = None) -> None:
        self.received.append((message, body))
        if body is None:
            self.server.receive(message)
        else:
            self.server.fold(message, body)

    def step(self, silent: Iterable[int] = ()) -> None:
        """One phase: all silos that are still in answer, but the silent ones; then it is closed."""
        quiet = set(silent)
        for index, name in enumerate(self.names):
            if name in self.messages and index not in quiet:
                self.answer(index)
        self.messages = self.server.advance()

    def until(self, phase: ServerPhase, drops: dict[int, ServerPhase] | None = None) -> Attempt:
        """Run up to the beginning of a phase; `drops` says in which phase a silo falls silent."""
        gone: set[int] = set()
        while self.server.phase is not phase:
            gone |= {index for index, lost in (drops or {}).items() if lost is self.server.phase}
            self.step(gone)
        return self

    def forge(self, index: int, kind: Kind, payload: bytes, binding: bytes | None = None) -> bytes:
        """A message that a malicious silo signs itself."""
        bound = self.server.cohort.binding if binding is None else binding
        return seal(kind, bound, payload, self.names[index], self.signers[index])

    def expected(self, survivors: Iterable[int]) -> np.ndarray:
        """The plain sum of some silos' vectors, computed with Python's integers."""
        rows = [self.vectors[index].tolist() for index in survivors]
        modulus = 1 << self.plan.ring_bits
        return np.array([sum(column) % modulus for column in zip(*rows, strict=True)], dtype=np.uint64)


def altered(message: bytes, change: Callable[[Envelope], bytes]) -> bytes:
    """A coordinator's message with another payload in the same frame."""
    envelope = unseal(message)
    return seal(envelope.kind, envelope.binding, change(envelope))


@pytest.fixture(scope="session")
def attempt() -> type[Attempt]:
    return Attempt


@pytest.fixture(scope="session")
def alter() -> Callable[[bytes, Callable[[Envelope], bytes]], bytes]:
    return altered
