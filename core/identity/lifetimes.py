"""How long certificates hold, as their files say now: a renewed one counts without a restart."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from roundtable.core.errors import IdentityError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import CA_CERTIFICATE, ISSUING_CERTIFICATE, NODE_CERTIFICATE

log = logging.getLogger("roundtable.core.identity.lifetimes")

SOON_SECONDS = 14 * 86400.0
SOON_SHARE = 1 / 6
"""A certificate ends soon once less than this share of its life is left, and less than two weeks."""


@dataclass(frozen=True)
class Lifetime:
    """From when until when a certificate holds, in Unix time."""

    issued: float
    expires: float

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Lifetime:
        """The certificate's own."""
        issued, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return cls(issued.timestamp(), expires.timestamp())

    def ends_soon(self, now: float) -> bool:
        """Whether somebody has to see to it: what renews itself has done so long before."""
        return self.expires - now < min(SOON_SECONDS, (self.expires - self.issued) * SOON_SHARE)


class Lifetimes:
    """Those of a credentials folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Lifetime] = {}
        self._complaint = ""

    def now(self) -> dict[str, Lifetime]:
        """By whose it is: own, issuing (who certified it, or certifies here; not everybody has one), ca.

        Files that cannot be read are logged once, and what was read last is given again.
        """
        try:
            self._known, self._complaint = self._read(), ""
        except IdentityError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("how long certificates hold cannot be read: %s", error)
        return self._known

    def _read(self) -> dict[str, Lifetime]:
        own, *chain = self._in(NODE_CERTIFICATE)
        if (self._folder / ISSUING_CERTIFICATE).exists():
            chain = self._in(ISSUING_CERTIFICATE)
        parts = {"own": [own], "issuing": chain, "ca": self._in(CA_CERTIFICATE)}
        return {name: _first_to_end(each) for name, each in parts.items() if each}

    def _in(self, name: str) -> list[x509.Certificate]:
        return x.certificates_in(x.read(self._folder / name), self._folder / name)


def _first_to_end(certificates: list[x509.Certificate]) -> Lifetime:
    return min(map(Lifetime.of, certificates), key=lambda lifetime: lifetime.expires)
