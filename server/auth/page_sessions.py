"""Sessions of the coordinator's page: a browser's secret in the place of a token.

Threat model. The secret is 256 random bits in a cookie that scripts cannot read; the database holds its
SHA-256 alone, so who reads the database, or a backup of it, cannot sign in. A session is good for what its
token or certificate was good for and no longer: each request looks again whether that still holds, so that
revoking the token or its holder, and the root's list, end it; it ends by itself with the token or the
certificate, after `longest`, and after `idle` without use. Who has a certificate gets a word for a browser
over the wire (`invite`): 256 random bits that are good once and for a minute, of which this process keeps
the digest. A session survives a restart of the coordinator and a failover. The secret also keys the token
against forged requests (`forgery_token`): another site can make a browser send the cookie at most where the
browser ignores SameSite, and can never read that token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from pydantic import Field, field_validator, model_validator
from sqlalchemy.engine import Connection

from roundtable.core.errors import IdentityError, ResourceError
from roundtable.core.toml_tables import Seconds, Table
from roundtable.server.auth.permissions import CALLERS, Caller
from roundtable.server.auth.principals import Principal, Source
from roundtable.server.store import Database
from roundtable.server.store import trust_rows as trust
from roundtable.server.store.page_session_rows import (
    PageSessionRow,
    add_session,
    end_session,
    session,
    sessions_of,
    use_session,
)

NOTED_SECONDS = 60.0
WORD_SECONDS = 60.0
_WORD = "rt-page."
_MOST_WORDS = 1000
MOST_SESSIONS = 20
"""Of one party; one more ends the oldest."""
_FORGERY = b"roundtable page: token against forged requests"


class DashboardTable(Table):
    """`[dashboard]`: the page for people, in a browser."""

    listen: str = Field(
        "", description="address and port of the page, for example 0.0.0.0:7445; empty: there is none"
    )
    tls: bool = Field(
        True,
        description="HTTPS; false only behind a proxy that speaks it, at an address of this machine itself",
    )
    certificate: str = Field(
        "", description="PEM of the page's certificate with its chain; default: the coordinator's own"
    )
    key: str = Field("", description="PEM of that certificate's key")
    hosts: list[str] = Field(
        default_factory=list,
        description="names under which browsers reach the page, besides those in its certificate",
    )
    grafana: str = Field(
        "", description="address of the dashboard of metrics in Grafana, which the page links to: https://…"
    )
    idle: Seconds = Field(
        28800.0, ge=60, le=604800, description="after so long without use one has to sign in again"
    )
    longest: Seconds = Field(
        604800.0, ge=60, le=2592000, description="after so long one has to sign in again in any case"
    )

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"{value!r} is not host:port, for example 0.0.0.0:7445")
        return value

    @field_validator("grafana")
    @classmethod
    def _leads_to_a_page(cls, value: str) -> str:
        if value and not (value.startswith(("https://", "http://")) and value.isprintable()):
            raise ValueError(f"{value!r} is no address of a page: it begins with https://")
        return value

    @model_validator(mode="after")
    def _sound(self) -> DashboardTable:
        host = self.listen.rpartition(":")[0].strip("[]")
        if self.listen and not self.tls and host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"without tls the page may listen on this machine itself alone, not on {self.listen!r}: "
                "listen on 127.0.0.1 and let a proxy speak HTTPS"
            )
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key go together: give both, or neither")
        return self

    def below(self, folder: Path) -> DashboardTable:
        """The same with its files' paths below this folder."""
        files = {"certificate": self.certificate, "key": self.key}
        return self.model_copy(update={name: str(folder / file) for name, file in files.items() if file})


@dataclass(frozen=True)
class PageSession:
    """Somebody who has signed in, and the digest by which the session is known."""

    who: Principal
    digest: str


class PageSessions:
    """Sessions as the database keeps them."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        table: DashboardTable,
        is_listed: Callable[[str], bool] = lambda serial: False,
    ) -> None:
        """`is_listed`: whether this serial number is on the root's list of revoked certificates."""
        self._is_listed = is_listed
        self._words: dict[str, tuple[Principal, float]] = {}
        self._database = database
        self._clock = clock
        self._idle = table.idle
        self._longest = table.longest

    def invite(self, who: Principal) -> tuple[str, float]:
        """A word with which a certificate's holder signs in once, and the Unix time at which it is void."""
        now = self._clock()
        self._words = {word: each for word, each in self._words.items() if each[1] > now}
        if len(self._words) >= _MOST_WORDS:
            raise ResourceError("too many words for the page were asked for; try again in a minute")
        word, expires = _WORD + secrets.token_urlsafe(32), now + WORD_SECONDS
        self._words[_digest(word)] = who, expires
        return word, expires

    def redeem(self, word: str) -> tuple[Principal, float] | None:
        """Whose word it is, which is then used up, and when it was given; None for what is none or void."""
        if not word.startswith(_WORD):
            return None
        who, expires = self._words.pop(_digest(word), (None, 0.0))
        return (who, expires - WORD_SECONDS) if who is not None and self._clock() < expires else None

    async def begin(self, who: Principal, credential: str, given: float | None = None) -> str:
        """Signs somebody in; the secret for the browser, which is kept nowhere else.

        IdentityError for who has been revoked since they were `given` a word, or showed a token just now.
        """
        secret, now = secrets.token_urlsafe(32), self._clock()
        expires = min(who.expires, now + self._longest)
        row = PageSessionRow(_digest(secret), who.role, who.name, who.source, credential, now, now, expires)

        def work(connection: Connection) -> None:
            gone = trust.revoked_parties(connection).get(who.party)
            if gone is not None and gone.time >= (now if given is None else given):
                raise IdentityError(f"{who.name!r} has been revoked")
            for old in sessions_of(connection, who.role, who.name)[: -(MOST_SESSIONS - 1) or None]:
                end_session(connection, old.digest)
            add_session(connection, row)

        await self._database.write(work)
        return secret

    async def find(self, secret: str) -> PageSession | None:
        """Whose session it is; None where there is none, or it is over, or its token holds no more."""
        if not secret:
            return None
        digest, now = _digest(secret), self._clock()

        def work(connection: Connection) -> tuple[PageSessionRow | None, trust.TokenRow | None]:
            row = session(connection, digest)
            return row, trust.token(connection, row.credential) if row and row.source == "token" else None

        row, token = await self._database.read(work)
        if row is None or not self._holds(row, token, now):
            return None
        if now - row.used > NOTED_SECONDS:
            await self._database.write(lambda connection: use_session(connection, digest, now))
        role, source = cast(Caller, row.role), cast(Source, row.source)
        return PageSession(Principal(row.name, role, source, row.expires), digest)

    async def end(self, secret: str) -> None:
        """Signs out."""
        await self._database.write(lambda connection: end_session(connection, _digest(secret)))

    def _holds(self, row: PageSessionRow, token: trust.TokenRow | None, now: float) -> bool:
        if row.role not in CALLERS or row.source not in get_args(Source):
            return False
        if row.source == "certificate" and self._is_listed(row.credential):
            return False
        if row.source == "token" and (token is None or token.revoked or token.expires <= now):
            return False
        return now < row.expires and now - row.used <= self._idle


def forgery_token(secret: str) -> str:
    """What a request that changes something must bring besides the cookie, of the same session."""
    return hmac.new(secret.encode(), _FORGERY, hashlib.sha256).hexdigest()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
