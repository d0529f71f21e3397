"""Who is calling: a certificate that still holds, an operator's token, or a token of an identity provider."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Literal, TypeVar

from cryptography import x509
from typing_extensions import override

from roundtable.core.errors import IdentityError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import CRL, REMEMBERED, identity_of
from roundtable.core.identity.invitation import Secret, is_token
from roundtable.core.identity.revocation import LARGEST, NOTHING, newer, parse_list
from roundtable.server.auth.oidc import OidcTable, Provider
from roundtable.server.auth.oidc_sign_in import ProviderAnswer, ProviderSignIn
from roundtable.server.auth.permissions import Caller
from roundtable.server.auth.rate_limit import WrongSecret
from roundtable.server.store import Database
from roundtable.server.store import trust_rows as store

log = logging.getLogger("roundtable.server.auth.principals")

UNKNOWN_TOKEN = "this token is not known here"
NO_PROVIDER = "nobody signs in here at an identity provider: [oidc] of the coordinator has no client"
ASKED_AT_ONCE = 4
"""Questions to an identity provider."""
Result = TypeVar("Result")
Source = Literal["certificate", "relay", "token", "oidc", "none"]


@dataclass(frozen=True)
class Principal:
    """Who calls: a role and a name. `expires` is the Unix time at which what they have shown ends."""

    name: str
    role: Caller
    source: Source
    expires: float = inf
    serial: str = field(default="", compare=False)
    """Of the certificate that was shown, in hexadecimal."""

    @property
    def party(self) -> store.Party:
        """What limits, revocations and calls under way are kept by."""
        return self.role, self.name

    @property
    def label(self) -> str:
        """The party in one word, as the audit log names it."""
        return label_of(self.role, self.name)


def label_of(role: str, name: str) -> str:
    """`admin/alice`; neither part can hold a slash of its own, but for names of an identity provider."""
    return f"{role}/{name}"


NOBODY = Principal("nobody", "nobody", "none")


class CertifiedCallers:
    """Identifies callers by certificates that TLS has verified; what is revoked is read from `crl.pem`."""

    def __init__(self, folder: Path, authority: bytes, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._roots = x.certificates_in(authority, "ca.crt")
        self._crl = folder / CRL
        self._crl_read = 0.0
        self._revoked: Mapping[store.Party, store.Revoked] = {}
        self._listed = NOTHING

    @property
    def list_for_agents(self) -> bytes:
        """The root's list as agents get it, PEM; empty where there is none."""
        return self._listed.pem if len(self._listed.pem) <= LARGEST else b""

    def now(self) -> float:
        """Unix time, by the clock that certificates and tokens are judged by."""
        return self._clock()

    async def refresh(self) -> None:
        """Reads what is revoked.

        IdentityError for a list that the authority has not signed, or that is older than the one before. A
        list that is gone counts until the process is started again.
        """
        modified = self._crl.stat().st_mtime if self._crl.exists() else 0.0
        if modified not in (0.0, self._crl_read):
            self.learn(x.read(self._crl), self._crl)
            self._crl_read = modified

    def learn(self, pem: bytes, source: Path | str) -> None:
        """Takes a list from elsewhere; IdentityError as for `refresh`."""
        self._listed = newer(parse_list(pem, self._roots, source), self._listed, source)

    def of_certificate(self, pem: bytes) -> Principal:
        """The holder of a certificate that TLS has verified; IdentityError if void or too weak for the role.

        `pem` begins with the certificate; what it builds upon follows, and may be revoked as well.
        """
        name, role, serials, from_root, issued, expires = _read(pem, tuple(self._roots))
        if expires <= self._clock():
            raise IdentityError(f"the certificate of {name!r} has expired while it was in use; renew it")
        if role != "agent" and not from_root:
            raise IdentityError(
                f"the certificate of {name!r} as {role} was not issued by the root; "
                "ask for one made with `roundtable ca issue`"
            )
        gone = self._revoked.get((role, name))
        # Issued anew: here, by invitation, or by the root, which is offline and its operator's own decision.
        anew = gone and (format(serials[0], "x") in gone.reissued or (from_root and issued > gone.time))
        if (gone and not anew) or not self._listed.serials.isdisjoint(serials):
            raise IdentityError(
                f"the certificate of {name!r} has been revoked; "
                "ask the coordinator's operator for a new invitation or certificate"
            )
        return Principal(name, role, "certificate", expires, format(serials[0], "x"))

    def is_listed(self, serial: str) -> bool:
        """Whether the root's list of what is revoked holds this serial number, in hexadecimal."""
        return any(format(each, "x") == serial for each in self._listed.serials)

    async def of_bearer(self, text: str) -> Principal:
        """The holder of a token; WrongSecret for one that is not valid, without saying why."""
        raise WrongSecret(f"{UNKNOWN_TOKEN}: show it to the coordinator")

    @property
    def has_provider_page(self) -> bool:
        """Whether people sign in to the page at their identity provider."""
        return False

    async def provider_address(self, cookie: str) -> str:
        """Where the browser with this cookie signs in; IdentityError where there is no provider for it."""
        raise IdentityError(NO_PROVIDER)

    async def of_code(self, cookie: str, answer: ProviderAnswer) -> Principal:
        """Who comes back from the provider; raises as `ProviderSignIn.finish`."""
        raise IdentityError(NO_PROVIDER)


class Principals(CertifiedCallers):
    """Takes tokens too; what is revoked is kept in memory, read from the database and `crl.pem`."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        authority: bytes,
        clock: Callable[[], float],
        oidc: OidcTable | None = None,
    ) -> None:
        """ConfigError where `oidc` cannot be used here."""
        super().__init__(folder, authority, clock)
        self._database = database
        self._oidc = oidc
        self._threads = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="identity provider")
        self._provider = Provider(oidc) if oidc else None
        self._page = ProviderSignIn(oidc, self._provider) if oidc and self._provider and oidc.client else None

    @override
    async def refresh(self) -> None:
        self._revoked = await self._database.read(store.revoked_parties)
        await super().refresh()

    @override
    async def of_bearer(self, text: str) -> Principal:
        if not is_token(text):
            if self._provider is None:
                raise WrongSecret(UNKNOWN_TOKEN)
            name, role, expires = await self._asking(self._provider.check, text)
            return Principal(f"oidc:{name}", role, "oidc", expires)
        try:
            secret = Secret.of_token(text)
        except IdentityError:
            raise WrongSecret(UNKNOWN_TOKEN) from None
        row = await self._database.read(lambda connection: store.token(connection, secret.identifier))
        if row is None or not secret.fits(row.digest) or row.revoked or row.expires <= self._clock():
            raise WrongSecret(f"{UNKNOWN_TOKEN}, has expired or was revoked; ask for a new one")
        return Principal(f"token:{row.name}", row.role, "token", row.expires)  # type: ignore[arg-type]

    @property
    @override
    def has_provider_page(self) -> bool:
        return self._page is not None

    @override
    async def provider_address(self, cookie: str) -> str:
        if self._page is None:
            return await super().provider_address(cookie)
        return await self._asking(self._page.address, cookie)

    @override
    async def of_code(self, cookie: str, answer: ProviderAnswer) -> Principal:
        if self._page is None or self._oidc is None:
            return await super().of_code(cookie, answer)
        name, role = await self._asking(self._page.finish, cookie, answer)
        return Principal(f"oidc:{name}", role, "oidc", self._clock() + self._oidc.session)

    async def _asking(self, ask: Callable[..., Result], *values: object) -> Result:
        """Asks the provider in a thread of its own.

        Strangers cause these questions. Where the provider hangs they wait for each other, and nobody else.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, ask, *values)


def credential_of(bearer: str) -> str:
    """What of a bearer's token may be seen: the identifier of one of ours, a digest of somebody else's."""
    try:
        return Secret.of_token(bearer).identifier
    except IdentityError:
        return hashlib.sha256(bearer.encode()).hexdigest()


@lru_cache(maxsize=REMEMBERED)
def _read(
    pem: bytes, roots: tuple[x509.Certificate, ...]
) -> tuple[str, Caller, tuple[int, ...], bool, float, float]:
    name, role = identity_of(pem)
    chain = x.certificates_in(pem, "the certificate")
    from_root = any(x.issued_by(chain[0], root) for root in roots)
    serials = tuple(certificate.serial_number for certificate in chain)
    times = x.issued_at(chain[0]), chain[0].not_valid_after_utc.timestamp()
    return name, role, serials, from_root, *times
