"""A whole attempt in one process: the real state machines for simulation, and their sum without masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundtable.core.errors import PrivacyError
from roundtable.privacy.secagg.client import SecAggClient
from roundtable.privacy.secagg.graph import combine_beacon
from roundtable.privacy.secagg.grouped import GroupedServer, Least
from roundtable.privacy.secagg.groups import make_groups
from roundtable.privacy.secagg.keys import Ed25519Signer, Session
from roundtable.privacy.secagg.masks import Ring, VectorSource, piece_length, reduce_ring, ring_dtype
from roundtable.privacy.secagg.parameters import SecAggParameters
from roundtable.privacy.secagg.releases import MemoryReleases
from roundtable.privacy.secagg.server import SecAggServer, ServerPhase


@dataclass(frozen=True)
class SecureSum:
    """The sum over the survivors (their indices, ascending), modulo the ring."""

    total: Ring
    survivors: tuple[int, ...]


@dataclass(frozen=True)
class GroupSums:
    """One sum for each group that is left, with its members' indices by the group's number; and the lost."""

    sums: Mapping[int, SecureSum]
    members: Mapping[int, tuple[int, ...]]
    lost: Mapping[int, str]


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
    silos, directory = _silos(vectors, parameters, session, drops or {})
    server = SecAggServer(session, parameters, directory)
    _drive(server, silos)
    return SecureSum(server.total, _places(server.survivors))


def run_groups_in_memory(
    vectors: Sequence[VectorSource],
    parameters: SecAggParameters,
    nonces: Sequence[bytes],
    least: Least,
    drops: Mapping[int, ServerPhase] | None = None,
) -> GroupSums:
    """The same for parameters with a `group_size`; the groups follow from the silos' `nonces`.

    ProtocolError where less is left than `least` demands.
    """
    session = Session("in-memory", 0, 0, len(vectors[0]))
    silos, directory = _silos(vectors, parameters, session, drops or {}, nonces)
    server = GroupedServer(session, parameters, directory, least)
    _drive(server, silos)
    return GroupSums(
        {number: SecureSum(group.total, _places(group.survivors)) for number, group in server.alive.items()},
        {number: _places(group.cohort.names) for number, group in server.groups.items()},
        server.lost,
    )


def _silos(
    vectors: Sequence[VectorSource],
    parameters: SecAggParameters,
    session: Session,
    drops: Mapping[int, ServerPhase],
    nonces: Sequence[bytes] = (),
) -> tuple[dict[str, _Silo], dict[str, bytes]]:
    signers = [Ed25519Signer() for _ in vectors]
    names = _names(len(vectors))
    directory = {name: signer.public for name, signer in zip(names, signers, strict=True)}
    silos = {}
    for place, (name, signer, source) in enumerate(zip(names, signers, vectors, strict=True)):
        nonce = nonces[place] if nonces else b""
        given = (session, parameters, name, signer, directory, MemoryReleases())
        silos[name] = _Silo(SecAggClient(*given, nonce=nonce), source, drops.get(place))
    return silos, directory


def _names(count: int) -> list[str]:
    return [f"silo-{place:05d}" for place in range(count)]


def _places(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(name.removeprefix("silo-")) for name in names)


def _drive(server: SecAggServer | GroupedServer, silos: dict[str, _Silo]) -> None:
    messages: dict[str, bytes] = dict.fromkeys(silos, b"")
    while server.phase is not ServerPhase.DONE:
        phase = server.phase
        for name, message in messages.items():
            if silos[name].lost_in is phase:
                del silos[name]
            elif name in silos:
                _answer(server, silos[name], phase, message)
        messages = server.advance()


def _answer(server: SecAggServer | GroupedServer, silo: _Silo, phase: ServerPhase, message: bytes) -> None:
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


def plain_groups(
    vectors: Mapping[int, VectorSource], parameters: SecAggParameters, nonces: Sequence[bytes], least: Least
) -> GroupSums:
    """The sums of `run_groups_in_memory` to the bit, without masks; silos without a vector are lost."""
    drawn = make_groups(_names(len(nonces)), parameters.group_size, combine_beacon(nonces))
    members = {number: _places(names) for number, names in enumerate(drawn, start=1)}
    sums, lost = {}, {}
    for number, places in members.items():
        there = [place for place in places if place in vectors]
        needed = parameters.of_group(len(places)).least
        if len(there) < needed:
            lost[number] = f"{len(there)} of {len(places)} silos submitted its vector; {needed} are needed"
        else:
            total = plain_sum([vectors[place] for place in there], parameters.of_group(len(places))).total
            sums[number] = SecureSum(total, tuple(there))
    least.demand([len(found.survivors) for found in sums.values()], lost)
    return GroupSums(sums, members, lost)
