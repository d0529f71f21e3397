"""Operators of an identity provider: JSON Web Tokens, checked against the provider's published keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from roundtable.core.errors import ConfigError, IdentityError
from roundtable.core.identity.credentials import OPERATOR_ROLES, Role
from roundtable.core.toml_tables import Table
from roundtable.server.auth.rate_limit import WrongSecret

ALGORITHMS = ("EdDSA", "ES256", "ES384", "PS256", "RS256", "RS384", "RS512")
"""Signatures only: a secret that both sides hold (HS256) and `none` are never accepted."""
LEEWAY_SECONDS = 30
KEYS_SECONDS = 300


class OidcTable(Table):
    """`[oidc]` of coordinator.toml: operators with a token of an identity provider."""

    issuer: str = Field(description="the provider's name in its tokens (iss)")
    audience: str = Field(description="this coordinator's name in them (aud)")
    jwks: str = Field(description="where the provider's keys are: https://…, or a file")
    name_claim: str = Field("sub", description="who the operator is")
    role_claim: str = Field("roles", description="holds the operator's groups: a word or a list of words")
    roles: dict[str, str] = Field(description="group → viewer, data-scientist, operator or admin")

    @field_validator("jwks")
    @classmethod
    def _place(cls, value: str) -> str:
        if value.startswith("http://") and not value.startswith(("http://localhost:", "http://127.0.0.1:")):
            raise ValueError("keys must come over https://, or from a file")
        return value

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
        jwt, config = self._jwt, self._config
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(token),
                algorithms=list(ALGORITHMS),
                audience=config.audience,
                issuer=config.issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iat", "iss", "aud", config.name_claim]},
            )
            expires = float(claims["exp"]) + LEEWAY_SECONDS
        except _unusable(jwt) as error:
            raise WrongSecret(
                "the identity provider's token is not accepted: it has expired, is for somebody else, or its "
                "key is not known; sign in again"
            ) from error
        return str(claims[config.name_claim])[:150], self._role(claims), expires

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
