"""An append-only log whose entries are chained by their hashes, and signed up to a point at intervals.

    {"entry": {"sequence": 1, "time": …, "actor": …, "action": …, "object": …, "detail": {…},
               "previous": SHA-256 of the entry before, "hash": SHA-256 of all of this}}
    {"seal":  a signed statement: sequence, hash, time}
    {"archive": a signed statement, in the place of entries that are a file of their own, and at its end}

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
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roundtable.core.errors import AuditError, IdentityError
from roundtable.core.evidence.audit_archive import LinesDigest, LogArchive, opened_archive
from roundtable.core.identity.credentials import Role
from roundtable.core.identity.signing import Signed, canonical, open_envelope

Result = TypeVar("Result")
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
        values = {**vars(self)}
        del values["hash"]
        return hashlib.sha256(canonical(values)).hexdigest()

    def to_line(self) -> str:
        """One line of an exported log."""
        return canonical({"entry": vars(self)}).decode()


def entry(
    time: float, actor: str, action: str, target: str = "", detail: Mapping[str, Any] | None = None
) -> AuditEntry:
    """An entry that has no place yet."""
    return AuditEntry(0, time, actor[:_MAX_NAME], action, target[:_MAX_NAME], dict(detail or {}))


@dataclass
class Log:
    """A log that was read and found sound: `sealed` is the last entry that a signature covers, 0 for none.

    `absent` are archived parts of which the statement is here and the file is not: the chain passes them.
    """

    entries: list[AuditEntry] = field(default_factory=list)
    seals: dict[int, Signed] = field(default_factory=dict)
    absent: list[LogArchive] = field(default_factory=list)
    archived_by: set[str] = field(default_factory=set)

    @property
    def sealed(self) -> int:
        return max(self.seals, default=0)

    @property
    def signers(self) -> set[str]:
        return {seal.signer for seal in self.seals.values()} | self.archived_by

    @property
    def end(self) -> int:
        """The number of the last entry, 0 in an empty log."""
        here = self.entries[-1].sequence if self.entries else 0
        return max([here, *(archive.last for archive in self.absent)])

    def proven(self, now: float, witnessed: Iterable[int] = ()) -> int:
        """The last entry covered by a signature whose certificate is in force at `now`, or by a witness."""
        in_force = (sequence for sequence, seal in self.seals.items() if seal.ends >= now)
        return max([*in_force, *witnessed], default=0)

    def hash_of(self, sequence: int) -> str:
        """The hash of an entry; empty where the log has none of this number, or its archive is absent."""
        place = bisect_left(self.entries, sequence, key=_number)
        if place < len(self.entries) and self.entries[place].sequence == sequence:
            return self.entries[place].hash
        return next((archive.hash for archive in self.absent if archive.last == sequence), "")

    def is_absent(self, sequence: int) -> bool:
        """Whether the entry is archived, and the archive not at hand."""
        return any(archive.first <= sequence <= archive.last for archive in self.absent)

    def until(self, sequence: int) -> list[AuditEntry]:
        """The entries at hand up to this one."""
        return self.entries[: bisect_right(self.entries, sequence, key=_number)]

    def after(self, sequence: int) -> list[AuditEntry]:
        """The entries at hand behind this one."""
        return self.entries[bisect_right(self.entries, sequence, key=_number) :]


def read_log(
    lines: Iterable[str], ca: bytes, role: Role = "coordinator", after: tuple[int, str] = (0, FIRST)
) -> Log:
    """The whole log, checked entry by entry, seal by seal and archive by archive.

    `after` are number and hash of the entry that it goes on from. AuditError names the first line that is
    wrong and what is wrong with it.
    """
    log, chain, waiting = Log(), _Chain(*after), []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        kind, value = _parse(line, number)
        if kind == "archive":
            archive, signed = _at_line(number, opened_archive, value, ca, role)
            log.archived_by.add(signed.signer)
            if not _at_line(number, chain.passes, archive):
                log.absent.append(archive)
            continue
        chain.lines.add(line.rstrip("\r\n"))
        if kind == "entry":
            chain.goes_on(value, number)
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


class _Chain:
    """Where the chain stands while a log is read, and what was read since the last archive ended."""

    def __init__(self, sequence: int, digest: str) -> None:
        self._end = self._boundary = (sequence, digest)
        self.lines = LinesDigest()

    def goes_on(self, found: AuditEntry, number: int) -> None:
        """AuditError unless the entry is the next one."""
        _check(found, self._end, number)
        self._end = found.sequence, found.hash

    def passes(self, archive: LogArchive) -> bool:
        """Whether the archive's entries have just been read; else the chain goes on behind it.

        AuditError where it belongs neither here nor there.
        """
        enters = archive.first - 1, archive.previous
        leaves = archive.last, archive.hash
        if enters != self._boundary or (self._end not in (self._boundary, leaves)):
            raise AuditError(
                f"the archive of entries {archive.first} to {archive.last} does not belong here, where the "
                f"log has come to entry {self._end[0]}: an archive is missing, was altered, stands twice or "
                "out of order"
            )
        is_here = self._end == leaves
        if is_here and archive.digest != self.lines.hex():
            raise AuditError(
                f"the archive of entries {archive.first} to {archive.last} was signed with other lines"
            )
        self._end = self._boundary = leaves
        self.lines = LinesDigest()
        return is_here


def check_signed(log: Log) -> None:
    """AuditError where no signature covers anything: anybody can write such a log, or empty one."""
    if not log.end:
        raise AuditError("this log is empty: a coordinator's begins with its first start; export it again")
    if not log.seals:
        raise AuditError(
            f"nobody has signed any of these {log.end} entries: signatures were removed, anybody "
            "wrote them, or the coordinator's credentials have no identity.key"
        )


def compare(earlier: Log, later: Log) -> None:
    """AuditError unless the later log goes on where the earlier one ended."""
    known = {item.sequence: item.hash for item in later.entries}
    known |= {archive.last: archive.hash for archive in later.absent}
    shared = [(item.sequence, item.hash) for item in earlier.entries]
    shared += [(archive.last, archive.hash) for archive in earlier.absent]
    for sequence, digest in sorted(shared):
        if later.is_absent(sequence) and sequence not in known:
            # The archive's last entry, whose hash is compared below, follows from all before it.
            if earlier.end >= next(each.last for each in later.absent if each.last >= sequence):
                continue
            raise AuditError(
                f"entry {sequence} of the earlier export is archived since: name the archive with --archive"
            )
        if known.get(sequence) != digest:
            raise AuditError(
                f"entry {sequence} of the earlier export is "
                f"{'another' if sequence in known else 'missing'} in the later: history was rewritten"
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
        if kind in ("seal", "archive"):
            return kind, value
    except (ValueError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise AuditError(f"line {number} is not an entry of an audit log: {str(error)[:200]}") from error
    raise AuditError(f"line {number} is not an entry of an audit log: it begins with {kind[:40]!r}")


def _check(found: AuditEntry, before: tuple[int, str], number: int) -> None:
    expected, previous = before[0] + 1, before[1]
    if found.sequence != expected:
        said = "is missing" if found.sequence > expected else "is out of its place"
        raise AuditError(f"line {number}: entry {expected} {said}: entry {found.sequence} stands there")
    try:
        digest = found.digest()
    except (ValueError, TypeError) as error:
        raise AuditError(f"line {number}: entry {found.sequence} cannot be hashed: {error}") from error
    if digest != found.hash:
        raise AuditError(f"line {number}: entry {found.sequence} ({found.action}) was changed")
    if found.previous != previous:
        raise AuditError(f"line {number}: entry {found.sequence} does not follow the entry before it")


def _number(item: AuditEntry) -> int:
    return item.sequence


def _at_line(number: int, read: Callable[..., Result], *values: Any) -> Result:
    try:
        return read(*values)
    except AuditError as error:
        raise AuditError(f"line {number}: {error}") from error


def _opened(document: Any, ca: bytes, role: Role, number: int) -> tuple[Signed, int, str]:
    try:
        seal = open_envelope(document, ca, role, "seal")
        return seal, int(seal.values["sequence"]), str(seal.values["hash"])
    except (IdentityError, KeyError, TypeError, ValueError) as error:
        raise AuditError(f"line {number}: this signature does not hold: {error}") from error
