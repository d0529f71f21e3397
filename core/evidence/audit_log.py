"""An append-only log whose entries are chained by their hashes, and signed up to a point at intervals.

    {"entry": {"sequence": 1, "time": …, "actor": …, "action": …, "object": …, "detail": {…},
               "previous": SHA-256 of the entry before, "hash": SHA-256 of all of this}}
    {"seal":  a signed statement: sequence, hash, time}

The coordinator's log and each agent's own have the same form. Any entry that was changed, removed from
the middle, or moved breaks the chain; entries removed from the end are missed by a seal, by an earlier
export, or by the log of the other side.

A signature is judged by the time that it states, so that it outlives its certificate. That it was made then,
and not later with an old key, is proven by a signature further on whose certificate is in force, or by a
witness: somebody else's signed log that holds the entry's hash (`core/evidence/cross_check.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from roundtable.core.errors import AuditError, IdentityError
from roundtable.core.identity.credentials import Role
from roundtable.core.identity.signing import Signed, canonical, open_envelope

FIRST = "0" * 64
_MAX_NAME = 200


@dataclass(frozen=True)
class AuditEntry:
    """Who did what to which object; `detail` holds digests and figures, never data or secrets."""

    sequence: int
    time: float
    actor: str
    action: str
    object: str
    detail: Mapping[str, Any]
    previous: str = FIRST
    hash: str = ""

    def after(self, previous: AuditEntry | None) -> AuditEntry:
        """The same entry in its place in the chain."""
        sequence, before = (previous.sequence + 1, previous.hash) if previous else (1, FIRST)
        placed = replace(self, sequence=sequence, previous=before)
        return replace(placed, hash=placed.digest())

    def digest(self) -> str:
        """SHA-256 of everything but the hash itself."""
        values = asdict(self)
        del values["hash"]
        return hashlib.sha256(canonical(values)).hexdigest()

    def to_line(self) -> str:
        """One line of an exported log."""
        return canonical({"entry": asdict(self)}).decode()


def entry(
    time: float, actor: str, action: str, target: str = "", detail: Mapping[str, Any] | None = None
) -> AuditEntry:
    """An entry that has no place yet."""
    return AuditEntry(0, time, actor[:_MAX_NAME], action, target[:_MAX_NAME], dict(detail or {}))


@dataclass
class Log:
    """A log that was read and found sound: `sealed` is the last entry that a signature covers, 0 for none."""

    entries: list[AuditEntry] = field(default_factory=list)
    seals: dict[int, Signed] = field(default_factory=dict)

    @property
    def sealed(self) -> int:
        return max(self.seals, default=0)

    @property
    def signers(self) -> set[str]:
        return {seal.signer for seal in self.seals.values()}

    def proven(self, now: float, witnessed: Iterable[int] = ()) -> int:
        """The last entry covered by a signature whose certificate is in force at `now`, or by a witness."""
        in_force = (sequence for sequence, seal in self.seals.items() if seal.ends >= now)
        return max([*in_force, *witnessed], default=0)

    def hash_of(self, sequence: int) -> str:
        """The hash of an entry; empty where the log has none of this number."""
        return self.entries[sequence - 1].hash if 1 <= sequence <= len(self.entries) else ""


def read_log(lines: Iterable[str], ca: bytes, role: Role = "coordinator") -> Log:
    """The whole log, checked entry by entry and seal by seal.

    AuditError names the first line that is wrong and what is wrong with it.
    """
    log, waiting = Log(), []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        kind, value = _parse(line, number)
        if kind == "entry":
            _check(value, log.entries[-1] if log.entries else None, number)
            log.entries.append(value)
        else:
            waiting.append((number, value))
    for number, document in waiting:
        seal, sequence, sealed = _opened(document, ca, role, number)
        if not sealed or log.hash_of(sequence) != sealed:
            raise AuditError(
                f"line {number}: {seal.signer} has signed another entry {sequence} than this log has: "
                "entries were changed or removed"
            )
        log.seals[sequence] = seal
    return log


def check_signed(log: Log) -> None:
    """AuditError where no signature covers anything: anybody can write such a log, or empty one."""
    if not log.entries:
        raise AuditError("this log is empty: a coordinator's begins with its first start; export it again")
    if not log.seals:
        raise AuditError(
            f"nobody has signed any of these {len(log.entries)} entries: signatures were removed, anybody "
            "wrote them, or the coordinator's credentials have no identity.key"
        )


def compare(earlier: Log, later: Log) -> None:
    """AuditError unless the later log goes on where the earlier one ended."""
    known = {item.sequence: item.hash for item in later.entries}
    for item in earlier.entries:
        if known.get(item.sequence) != item.hash:
            raise AuditError(
                f"entry {item.sequence} ({item.action}) of the earlier export is "
                f"{'another' if item.sequence in known else 'missing'} in the later: history was rewritten"
            )


def _parse(line: str, number: int) -> tuple[str, Any]:
    try:
        document = json.loads(line)
        kind, value = next(iter(document.items()))
        if kind == "entry":
            made = AuditEntry(**value)
            if not isinstance(made.detail, dict) or not isinstance(made.sequence, int):
                raise TypeError("an entry's detail is an object and its sequence a number")
            return kind, made
        if kind == "seal":
            return kind, value
    except (ValueError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise AuditError(f"line {number} is no entry of an audit log: {str(error)[:200]}") from error
    raise AuditError(f"line {number} is no entry of an audit log: it begins with {kind[:40]!r}")


def _check(found: AuditEntry, before: AuditEntry | None, number: int) -> None:
    expected = before.sequence + 1 if before else 1
    if found.sequence != expected:
        said = "is missing" if found.sequence > expected else "is out of its place"
        raise AuditError(f"line {number}: entry {expected} {said}: entry {found.sequence} stands there")
    try:
        digest = found.digest()
    except (ValueError, TypeError) as error:
        raise AuditError(f"line {number}: entry {found.sequence} cannot be hashed: {error}") from error
    if digest != found.hash:
        raise AuditError(f"line {number}: entry {found.sequence} ({found.action}) was changed")
    if found.previous != (before.hash if before else FIRST):
        raise AuditError(f"line {number}: entry {found.sequence} does not follow the entry before it")


def _opened(document: Any, ca: bytes, role: Role, number: int) -> tuple[Signed, int, str]:
    try:
        seal = open_envelope(document, ca, role, "seal")
        return seal, int(seal.values["sequence"]), str(seal.values["hash"])
    except (IdentityError, KeyError, TypeError, ValueError) as error:
        raise AuditError(f"line {number}: this signature does not hold: {error}") from error
