"""The durable form of a silo's state after masking; before that there is none, on purpose.

A snapshot holds no key of the silo's own: those were erased when the vector was masked. It is
impossible to mask a second vector after a restart; all that can be resumed is the upload of bytes
that were stored already, and the unmasking. The caller encrypts it: it holds shares of others' secrets.
"""

from __future__ import annotations

import struct

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg.custody import PAIR_BYTES, Cohort, Custody
from roundtable.privacy.secagg.framing import Kind, Reader, seal, unseal
from roundtable.privacy.secagg.keys import KEY_BYTES, Session
from roundtable.privacy.secagg.parameters import PARAMETERS_BYTES, SecAggParameters
from roundtable.privacy.secagg.payloads import (
    DIGEST_BYTES,
    members_from_bytes,
    members_size,
    members_to_bytes,
)

_SESSION = struct.Struct("<HQQQ")


def to_snapshot(custody: Custody) -> bytes:
    """Everything that `from_snapshot` needs to go on with the attempt."""
    cohort, n = custody.cohort, len(custody.cohort.names)
    job = cohort.session.job.encode()
    session = cohort.session
    parts = [_SESSION.pack(len(job), session.round, session.attempt, session.length), job]
    parts += [bytes([len(session.subject)]), session.subject]
    parts += [cohort.parameters.to_bytes(), struct.pack("<HH", custody.index, custody.minimum_cohort)]
    for name, identity in zip(cohort.names, cohort.identities, strict=True):
        parts += [bytes([len(name.encode())]), name.encode(), identity]
    parts += [
        bytes([len(cohort.beacon)]),
        cohort.beacon,
        members_to_bytes(custody.members, n),
        custody.upload,
    ]
    parts.append(b"\0" if custody.survivors is None else b"\1" + members_to_bytes(custody.survivors, n))
    return seal(Kind.SNAPSHOT, cohort.sid, b"".join([*parts, bytes(custody.held)]))


def from_snapshot(snapshot: bytes) -> Custody:
    """Read a snapshot; ProtocolError where it is damaged."""
    envelope = unseal(snapshot)
    if envelope.kind is not Kind.SNAPSHOT or envelope.sender:
        raise ProtocolError("these bytes are not a snapshot of a secure aggregation")
    reader = Reader(envelope.payload)
    job, round, attempt, length = _SESSION.unpack(reader.take(_SESSION.size))
    session = Session(reader.text(job), round, attempt, length, reader.take(reader.number(1)))
    parameters = SecAggParameters.from_bytes(reader.take(PARAMETERS_BYTES))
    index, minimum_cohort, n = reader.number(2), reader.number(2), parameters.n
    silos = [(reader.text(reader.number(1)), reader.take(KEY_BYTES)) for _ in range(n)]
    names, identities = tuple(name for name, _ in silos), tuple(key for _, key in silos)
    beacon = reader.take(reader.number(1))
    cohort = Cohort(session, parameters, names, identities, envelope.binding, beacon)
    members = members_from_bytes(reader.take(members_size(n)), n)
    upload = reader.take(DIGEST_BYTES)
    agreed = reader.number(1)
    survivors = members_from_bytes(reader.take(members_size(n)), n) if agreed else None
    if index not in members:
        raise ProtocolError("the snapshot belongs to no silo of its cohort")
    held = bytearray(reader.take(PAIR_BYTES * len(cohort.peers_held_by(index, members))))
    reader.end()
    return Custody(cohort, index, members, minimum_cohort, upload, held, survivors)
