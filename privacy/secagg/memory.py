"""A whole attempt in one process: the real state machines for simulation, and their sum without masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundtable.core.errors import PrivacyError
from roundtable.privacy.secagg.client import SecAggClient
from roundtable.privacy.secagg.keys import Ed25519Signer, MemoryReleases, Session
from roundtable.privacy.secagg.masks import Ring, VectorSource, piece_length, reduce_ring, ring_dtype
from roundtable.privacy.secagg.parameters import SecAggParameters
from roundtable.privacy.secagg.server import SecAggServer, ServerPhase


@dataclass(frozen=True)
class SecureSum:
    """The sum over the survivors (their indices, ascending), modulo the ring."""

    total: Ring
    survivors: tuple[int, ...]


@dataclass
class _Silo:
    client: SecAggClient
    source: VectorSource
    lost_in: ServerPhase | None


def run_in_memory(
    vectors: Sequence[VectorSource],
    parameters: SecAggParameters,
    drops: Mapping[int, ServerPhase] | None = None,
    session: Session | None = None,
) -> SecureSum:
    """Run the protocol over one vector for each silo, all silos in this process, with fresh keys.

    `drops` says from which phase on a silo (by its place in `vectors`) is no longer heard of: its
    answer in that phase does not arrive. ProtocolError where too few remain.
    """
    session = session or Session("in-memory", 0, 0, len(vectors[0]))
    signers = [Ed25519Signer() for _ in vectors]
    names = [f"silo-{place:05d}" for place in range(len(vectors))]
    directory = {name: signer.public for name, signer in zip(names, signers, strict=True)}
    server = SecAggServer(session, parameters, directory)
    silos = {}
    for place, (name, signer, source) in enumerate(zip(names, signers, vectors, strict=True)):
        client = SecAggClient(session, parameters, name, signer, directory, MemoryReleases())
        silos[name] = _Silo(client, source, (drops or {}).get(place))
    messages: dict[str, bytes] = dict.fromkeys(names, b"")
    while server.phase is not ServerPhase.DONE:
        phase = server.phase
        for name, message in messages.items():
            if silos[name].lost_in is phase:
                del silos[name]
            elif name in silos:
                _answer(server, silos[name], phase, message)
        messages = server.advance()
    survivors = tuple(names.index(name) for name in server.survivors)
    return SecureSum(server.total, survivors)


def _answer(server: SecAggServer, silo: _Silo, phase: ServerPhase, message: bytes) -> None:
    if phase is ServerPhase.ADVERTISE:
        server.receive(silo.client.advertise())
        return
    answer = silo.client.handle(message)
    if phase is ServerPhase.MASKED:
        body = bytearray()
        for chunk in silo.client.masked_chunks(silo.source):
            body += chunk
        server.fold(silo.client.masked(), body)
    elif answer is not None:
        server.receive(answer)


def plain_sum(
    vectors: Sequence[VectorSource], parameters: SecAggParameters, survivors: Sequence[int] | None = None
) -> SecureSum:
    """The same sum to the bit, without keys, masks or messages: the arithmetic alone."""
    if len(vectors) > parameters.capacity:
        raise PrivacyError(f"{len(vectors)} silos where the ring has room for {parameters.capacity}")
    chosen = tuple(range(len(vectors)) if survivors is None else sorted(survivors))
    length = len(vectors[0])
    total = np.zeros(length, dtype=ring_dtype(parameters.ring_bits))
    for place in chosen:
        for start in range(0, length, piece_length(parameters.ring_bits)):
            piece = total[start : start + piece_length(parameters.ring_bits)]
            block = vectors[place].block(start, start + len(piece))
            np.add(piece, block.astype(total.dtype, copy=False), out=piece)
    reduce_ring(total, parameters.ring_bits)
    return SecureSum(total, chosen)
