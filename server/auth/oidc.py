"""Operators of an identity provider: JSON Web Tokens, checked against the provider's published keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from roundtable.core.errors import ConfigError, IdentityError
from roundtable.core.identity.credentials import OPERATOR_ROLES, Role
from roundtable.core.toml_tables import Seconds, Table
from roundtable.server.auth.rate_limit import WrongSecret

ALGORITHMS = ("EdDSA", "ES256", "ES384", "PS256", "RS256", "RS384", "RS512")
"""Signatures only: a secret that both sides hold (HS256) and `none` are never accepted."""
LEEWAY_SECONDS = 30
KEYS_SECONDS = 300


def safe_address(address: str) -> bool:
    """Whether what comes from there comes over TLS, or from this machine itself."""
    return address.startswith(("https://", "http://localhost:", "http://127.0.0.1:"))


class OidcTable(Table):
    """`[oidc]` of coordinator.toml: operators with a token of an identity provider."""

    issuer: str = Field(description="the provider's name in its tokens (iss)")
    audience: str = Field(description="this coordinator's name in them (aud)")
    jwks: str = Field(description="where the provider's keys are: https://…, or a file")
    name_claim: str = Field("sub", description="who the operator is")
    role_claim: str = Field("roles", description="holds the operator's groups: a word or a list of words")
    roles: dict[str, str] = Field(description="group → viewer, data-scientist, operator or admin")
    client: str = Field(
        "", description="the page's name at the provider (client_id); empty: no signing in at its page"
    )
    client_secret: str = Field(
        "", description="file with the client's secret; empty: a public client, which PKCE protects alone"
    )
    page: str = Field(
        "",
        description="under which browsers reach our page, https://…; register it there with /sign-in/back",
    )
    session: Seconds = Field(
        3600.0, ge=60, le=86400, description="after so long the provider is asked again who somebody is"
    )

    @field_validator("jwks")
    @classmethod
    def _place(cls, value: str) -> str:
        if value.startswith("http://") and not safe_address(value):
            raise ValueError("keys must come over https://, or from a file")
        return value

    @model_validator(mode="after")
    def _signs_in(self) -> OidcTable:
        if bool(self.client) != bool(self.page):
            raise ValueError("client and page go together: give both, or neither")
        if self.client_secret and not self.client:
            raise ValueError("client_secret is of no use without client")
        for name, value in {"issuer": self.issuer, "page": self.page}.items() if self.client else ():
            if not safe_address(value):
                raise ValueError(
                    f"to sign in at the provider's page, {name} must be https://…, not {value!r}"
                )
        return self

    def below(self, folder: Path) -> OidcTable:
        """The same with the secret's file below this folder."""
        secret = self.client_secret
        return self.model_copy(update={"client_secret": str(folder / secret)}) if secret else self

    @field_validator("roles")
    @classmethod
    def _known(cls, value: dict[str, str]) -> dict[str, str]:
        for role in value.values():
            if role not in OPERATOR_ROLES:
                raise ValueError(f"{role!r} is not a role; use one of {', '.join(OPERATOR_ROLES)}")
        return value


class Provider:
    """Checks tokens. Keys are fetched when a token names one that is not known, and kept for minutes."""

    def __init__(self, config: OidcTable) -> None:
        try:
            import jwt
        except ImportError as error:
            raise ConfigError(
                "[oidc] needs PyJWT: pip install 'roundtable-fl[oidc]', or leave the table out"
            ) from error
        self._jwt = jwt
        self._config = config
        self._remote = (
            jwt.PyJWKClient(config.jwks, lifespan=KEYS_SECONDS, timeout=5)
            if config.jwks.startswith(("https://", "http://"))
            else None
        )

    def check(self, token: str) -> tuple[str, Role, float]:
        """(name, role, end) of whom the token names; WrongSecret otherwise. May wait for the provider."""
        claims = self.claims(token, self._config.audience)
        name, role = self.who(claims)
        return name, role, float(claims["exp"]) + LEEWAY_SECONDS

    def claims(self, token: str, audience: str) -> dict[str, Any]:
        """What a token for this audience says; WrongSecret for any other. May wait for the provider."""
        jwt, config = self._jwt, self._config
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(token),
                algorithms=list(ALGORITHMS),
                audience=audience,
                issuer=config.issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iat", "iss", "aud", config.name_claim]},
            )
            float(claims["exp"])
        except _unusable(jwt) as error:
            raise WrongSecret(
                "the identity provider's token is not accepted: it has expired, is for somebody else, or its "
                "key is not known; sign in again"
            ) from error
        return claims

    def who(self, claims: dict[str, Any]) -> tuple[str, Role]:
        """Name and role of whom a token's claims name; IdentityError where they give no role here."""
        return str(claims[self._config.name_claim])[:150], self._role(claims)

    def _key(self, token: str) -> Any:
        if self._remote is not None:
            return self._remote.get_signing_key_from_jwt(token).key
        keys = self._jwt.PyJWKSet.from_dict(json.loads(Path(self._config.jwks).read_text()))
        return keys[self._jwt.get_unverified_header(token).get("kid", "")].key

    def _role(self, claims: dict[str, Any]) -> Role:
        """The strongest role that the operator's groups give."""
        groups = claims.get(self._config.role_claim, [])
        # Providers also send numbers, objects and null: those are no groups of ours.
        groups = groups if isinstance(groups, list) else [groups]
        words = [name for name in groups if isinstance(name, str)]
        found = [self._config.roles[name] for name in words if name in self._config.roles]
        for role in reversed(OPERATOR_ROLES):
            if role in found:
                return role
        raise IdentityError(
            f"the identity provider gives {str(claims[self._config.name_claim])[:80]!r} no role here; "
            f"its groups must be in [oidc.roles] of the coordinator"
        )


def _unusable(jwt: Any) -> tuple[type[Exception], ...]:
    """The errors that the library and JSON raise for malformed tokens and keys."""
    shapes = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
    return (jwt.PyJWTError, OSError, *shapes)
