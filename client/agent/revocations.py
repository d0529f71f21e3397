"""Keeps the newest list of revoked certificates that the silo has seen, wherever it came from.

A person copies `crl.pem` into the credentials folder, or the coordinator hands on its own. Either way the
root has signed it, and a list that is older than the known one changes nothing. The newest is kept in the
state folder, so that it is not forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from roundtable.core.errors import IdentityError, UnavailableError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import CA_CERTIFICATE, CRL
from roundtable.core.identity.revocation import LARGEST, NOTHING, RevocationList, load_list, newer, parse_list

_log = logging.getLogger("roundtable.agent")
LOOK_SECONDS = 5.0


class Revocations:
    """Cheap to ask before each connection and each step: files are read when they have changed."""

    def __init__(self, credentials: Path, state: Path) -> None:
        self._credentials = credentials
        self._kept = state / CRL
        self._known = NOTHING
        self._seen = (-1, -1)
        self._complaint = ""

    def current(self) -> RevocationList:
        """The newest list; IdentityError for one in the credentials folder that the root has not signed."""
        copied = self._credentials / CRL
        seen = (_changed(copied), _changed(self._kept))
        if seen != self._seen:
            self._known = self._parsed(x.read(self._kept), self._kept) if self._kept.exists() else NOTHING
            if copied.exists():
                self._take(load_list(self._credentials), copied)
            self._seen = seen
        return self._known

    def learn(self, pem: bytes) -> None:
        """Takes the coordinator's list; ignores an empty one, logs one that the root has not signed."""
        source = "the coordinator's list"
        try:
            if len(pem) > LARGEST:
                raise IdentityError(f"{source} has {len(pem)} bytes, and more than {LARGEST} are not taken")
            if pem and pem != self.current().pem:
                self._take(self._parsed(pem, source), source)
        except IdentityError as error:
            _log.error("what is revoked was not learnt from the coordinator: %s", error)

    def check(self, pem: bytes, who: str) -> None:
        """Raises IdentityError if this certificate (PEM, with its chain) is revoked."""
        self.current().check(x.certificates_in(pem, who), who)

    async def watch(self, known: RevocationList) -> None:
        """Raises UnavailableError once another list than the connection was opened under is in force."""
        while True:
            if self.current().serials != known.serials:
                reason = "the list of revoked certificates has changed, and the connection is made anew"
                raise UnavailableError(reason)
            await asyncio.sleep(LOOK_SECONDS)

    def _take(self, found: RevocationList, source: Path | str) -> None:
        try:
            found = newer(found, self._known, source)
        except IdentityError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.warning("%s", error)
            return
        if found != self._known:
            self._known = found
            x.replace(self._kept, found.pem)
            _log.info("%d certificates are revoked, by list number %d", len(found.serials), found.number)

    def _parsed(self, pem: bytes, source: Path | str) -> RevocationList:
        path = self._credentials / CA_CERTIFICATE
        return parse_list(pem, x.certificates_in(x.read(path), path), source)


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
