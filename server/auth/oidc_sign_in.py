"""Signing in at an identity provider's own page: OpenID Connect's authorization code flow with PKCE.

Sources: OpenID Connect Core 1.0 section 3.1; PKCE, RFC 7636; the issuer in the answer, RFC 9207; OAuth 2.0
Security Best Current Practice, RFC 9700.

Threat model. A browser that begins gets a cookie with 256 random bits. State, nonce and PKCE's verifier are
derived from it, each by HMAC with its own label, so that nothing is kept here and a restart or a failover in
between costs nobody their sign-in. What comes back counts only with the cookie that the state was derived
from: nobody can sign another's browser in (login forgery), and a code that was seen or slipped in elsewhere
is of no use (the provider holds the challenge, the token holds the nonce). The code is exchanged by this
coordinator itself, at the address that the provider publishes under its issuer's name, over TLS and without
following redirects; of the answer the ID token alone counts, checked as every token of the provider, for the
page's own audience. Whatever the provider or the browser wrote is shown to nobody.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote_plus, urlencode, urlsplit

from typing_extensions import override

from roundtable.core.errors import ConfigError, UnavailableError
from roundtable.core.identity.credentials import Role
from roundtable.server.auth.oidc import KEYS_SECONDS, OidcTable, Provider, safe_address
from roundtable.server.auth.rate_limit import WrongSecret

BACK = "/sign-in/back"
"""Below the page's address: what is registered at the provider."""
WAIT_SECONDS = 5.0
MOST_BYTES = 1 << 20
_LABEL = b"roundtable page: identity provider: "


class ProviderAnswer(NamedTuple):
    """What a browser brings back from the provider: all of it is a stranger's word."""

    state: str
    code: str
    issuer: str
    """"" where the answer does not say."""


class ProviderSignIn:
    """The flow for `[oidc]` with a `client`. Every method may wait for the provider."""

    def __init__(self, config: OidcTable, provider: Provider) -> None:
        self._config = config
        self._provider = provider
        self._known: dict[str, str] = {}
        self._asked = 0.0
        self._secret = _secret_in(config.client_secret)

    def address(self, cookie: str) -> str:
        """Where the browser that holds this cookie signs in. UnavailableError without the provider."""
        asked = {
            "response_type": "code",
            "client_id": self._config.client,
            "redirect_uri": self._back,
            "scope": "openid",
            "state": _derived(cookie, b"state"),
            "nonce": _derived(cookie, b"nonce"),
            "code_challenge": _challenge(_derived(cookie, b"verifier")),
            "code_challenge_method": "S256",
        }
        place = self._published()["authorization_endpoint"]
        return f"{place}{'&' if urlsplit(place).query else '?'}{urlencode(asked)}"

    def finish(self, cookie: str, answer: ProviderAnswer) -> tuple[str, Role]:
        """(name, role) of who comes back with this answer.

        WrongSecret for what does not belong to the cookie or is not accepted, IdentityError for somebody
        without a role here, UnavailableError without the provider.
        """
        ours = hmac.compare_digest(answer.state.encode(), _derived(cookie, b"state").encode())
        if not ours or answer.issuer not in ("", self._config.issuer):
            raise WrongSecret("this is not the answer to what this browser has asked; sign in again")
        claims = self._provider.claims(self._exchanged(cookie, answer.code), self._config.client)
        nonce = str(claims.get("nonce", ""))
        if not hmac.compare_digest(nonce.encode(), _derived(cookie, b"nonce").encode()):
            raise WrongSecret("the identity provider's token is of another sign-in; sign in again")
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if claims.get("azp", "" if several else self._config.client) != self._config.client:
            raise WrongSecret("the identity provider's token was made for another party; sign in again")
        return self._provider.who(claims)

    @property
    def _back(self) -> str:
        return self._config.page.rstrip("/") + BACK

    def _exchanged(self, cookie: str, code: str) -> str:
        """The ID token that the provider gives for a code."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._back,
            "code_verifier": _derived(cookie, b"verifier"),
        }
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        if self._secret:
            # RFC 6749, section 2.3.1: both are encoded as a form's values before they are joined.
            both = f"{quote_plus(self._config.client)}:{quote_plus(self._secret)}"
            headers["authorization"] = f"Basic {base64.b64encode(both.encode()).decode()}"
        else:
            form["client_id"] = self._config.client
        answer = _asked(self._published()["token_endpoint"], urlencode(form).encode(), headers)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise WrongSecret("the identity provider has not accepted the answer; sign in again")
        return token

    def _published(self) -> dict[str, str]:
        """The provider's addresses as it publishes them (OpenID Connect Discovery 1.0, section 4)."""
        if self._known and time.monotonic() - self._asked < KEYS_SECONDS:
            return self._known
        issuer = self._config.issuer
        found = _asked(f"{issuer.rstrip('/')}/.well-known/openid-configuration", None, {})
        wanted = ("authorization_endpoint", "token_endpoint")
        known = {name: found.get(name) for name in wanted}
        places = {
            name: place for name, place in known.items() if isinstance(place, str) and safe_address(place)
        }
        if found.get("issuer") != issuer or len(places) < len(wanted):
            raise UnavailableError(
                f"what the identity provider publishes at {issuer} is for another issuer, or lacks addresses "
                "over https://; [oidc] issuer must be the provider's own word for itself"
            )
        self._known = places
        self._asked = time.monotonic()
        return places


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    @override
    def redirect_request(self, *values: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _asked(address: str, body: bytes | None, headers: dict[str, str]) -> dict[str, Any]:
    """A JSON object; an empty one for what is refused. UnavailableError where nobody answers so."""
    request = urllib.request.Request(address, body, headers)
    try:
        with _OPENER.open(request, timeout=WAIT_SECONDS) as answer:
            found = json.loads(answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (400, 401, 403):
            return {}
        raise UnavailableError(f"the identity provider answers with {error.code}") from error
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise UnavailableError("the identity provider cannot be reached, or answers otherwise") from error
    return found if isinstance(found, dict) else {}


def _derived(cookie: str, label: bytes) -> str:
    """256 bits that follow from the cookie alone, for one use."""
    bits = hmac.new(cookie.encode(), _LABEL + label, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(bits).rstrip(b"=").decode()


def _challenge(verifier: str) -> str:
    """RFC 7636, section 4.2, method S256."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _secret_in(file: str) -> str:
    if not file:
        return ""
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[oidc] client_secret: {file} cannot be read: {error}") from error
    if not secret:
        raise ConfigError(f"[oidc] client_secret: {file} is empty; it must hold the client's secret")
    return secret
