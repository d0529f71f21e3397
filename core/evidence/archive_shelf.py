"""Archives of an audit log as files at hand, laid into the log that they were taken out of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from roundtable.core.errors import AuditError, ResourceError
from roundtable.core.evidence.audit_archive import (
    LogArchive,
    named_archive,
    opened_archive,
    pack,
    statement_line,
    unpack,
)
from roundtable.core.evidence.audit_log import Log, read_log
from roundtable.core.identity.credentials import Role
from roundtable.core.machine.file_access import sync_folder

_STATEMENT = '{"archive"'


def stated_archive(line: str, ca: bytes, role: Role) -> tuple[LogArchive, str]:
    """The archive of a statement's line, and that line as it is written. AuditError for any other."""
    try:
        document = json.loads(line)["archive"]
        return opened_archive(document, ca, role)[0], statement_line(document)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise AuditError("this is not a statement of an archive") from error


def read_archive(lines: Iterable[str], ca: bytes, role: Role) -> tuple[LogArchive, str]:
    """An archive that holds together, and the line of its statement. AuditError for any other."""
    whole = list(lines)
    archive, line = stated_archive(whole[-1] if whole else "", ca, role)
    log = read_log(whole, ca, role, (archive.first - 1, archive.previous))
    if log.absent or not log.entries:
        raise AuditError("it does not hold the entries of its own statement")
    return archive, line


class ArchiveShelf:
    """The archives that somebody has named: files, and folders of them. AuditError names what is wrong."""

    def __init__(self, places: Iterable[Path], ca: bytes, role: Role) -> None:
        self._ca = ca
        self._role = role
        self._files: dict[str, Path] = {}
        self.unused: set[Path] = set()
        for path in [file for place in places for file in _files(place)]:
            try:
                line = read_archive(unpack(path), ca, role)[1]
            except AuditError as error:
                raise AuditError(f"{path}: {error}") from error
            if line in self._files:
                raise AuditError(f"{path} holds the same entries as {self._files[line]}: name one of them")
            self._files[line] = path
            self.unused.add(path)

    def read(self, lines: Iterable[str]) -> Log:
        """The log of these lines, with the archives that they name and that are here."""
        return read_log(self._laid_in(lines), self._ca, self._role)

    def check_all_used(self, names: str) -> None:
        """AuditError where an archive is named by none of the logs that were read."""
        for path in sorted(self.unused):
            raise AuditError(f"{path} is an archive that {names} does not name: it is one of another log")

    def _laid_in(self, lines: Iterable[str]) -> Iterator[str]:
        head = True
        for line in lines:
            if not line.startswith(_STATEMENT):
                head = head and not line.strip()
                yield line
                continue
            path = self._files.get(_normal(line))
            if path is not None:
                self.unused.discard(path)
            # Behind entries the statement is the end of an archive that stands there whole.
            yield from unpack(path) if path is not None and head else (line,)


def keep_archive(folder: Path, lines: list[str], ca: bytes) -> Path:
    """Writes a coordinator's archive under its name, once it is found whole; nothing that is there already.

    AuditError for one that does not hold, ResourceError where it cannot be written.
    """
    archive, _ = read_archive(lines, ca, "coordinator")
    place = folder / archive.name
    write_archive(place, lines)
    return place


def write_archive(place: Path, lines: Iterable[str]) -> None:
    """Writes an archive: whole and synced, or not there. ResourceError where that fails."""
    partial = place.with_name(f".{place.name}.partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with partial.open("wb") as file:
            for block in pack(lines):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place)
        sync_folder(place.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ResourceError(f"{place} cannot be written: {error.strerror}") from error


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    return sorted(path for path in place.iterdir() if named_archive(path.name))


def _normal(line: str) -> str:
    try:
        return statement_line(json.loads(line)["archive"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return line
