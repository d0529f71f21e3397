"""What an invited silo is given, and an operator's token: secrets that are shown once.

    invitation   rt-invite.BASE64URL of identifier (8 bytes), secret (32), SHA-256 of the root (32)
    token        rt-token.BASE64URL of identifier (8 bytes), secret (32)

Only a digest of a secret is ever stored. Secrets have 256 random bits, so that a plain hash
is enough: nobody can try them all.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from typing_extensions import override

from roundtable.core.errors import ConfigError, IdentityError

_INVITATION, _TOKEN = "rt-invite.", "rt-token."
_IDENTIFIER = 8
_SECRET = 32
_FINGERPRINT = 32


@dataclass(frozen=True)
class Secret:
    """An identifier that may be seen, and a secret that may not."""

    identifier: str
    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Secret:
        """From the operating system's randomness."""
        return cls(secrets.token_bytes(_IDENTIFIER).hex(), secrets.token_bytes(_SECRET))

    @property
    def digest(self) -> str:
        """What is stored: SHA-256 of the secret."""
        return hashlib.sha256(self.secret).hexdigest()

    def fits(self, digest: str) -> bool:
        """Whether the stored digest is this secret's, in a time that tells nothing."""
        return hmac.compare_digest(self.digest, digest)

    def to_token(self) -> str:
        """An operator's token."""
        return _TOKEN + _text(bytes.fromhex(self.identifier) + self.secret)

    @classmethod
    def of_token(cls, text: str) -> Secret:
        """Reads a token's text. Raises IdentityError where it is none."""
        raw = _bytes(text.strip(), _TOKEN, _IDENTIFIER + _SECRET)
        if raw is None:
            raise IdentityError(
                "this is not a token of an operator: it begins with rt-token. and is one word"
            )
        return cls(raw[:_IDENTIFIER].hex(), raw[_IDENTIFIER:])


@dataclass(frozen=True)
class Invitation:
    """What an operator hands to a silo: a secret to enrol with, and which authority to believe."""

    secret: Secret
    fingerprint: bytes

    @override
    def __str__(self) -> str:
        secret = self.secret
        return _INVITATION + _text(bytes.fromhex(secret.identifier) + secret.secret + self.fingerprint)

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Reads an invitation's text. Raises ConfigError where it is none."""
        raw = _bytes(text.strip(), _INVITATION, _IDENTIFIER + _SECRET + _FINGERPRINT)
        if raw is None:
            raise ConfigError(
                "this is not a whole invitation: it is one word that begins with rt-invite., "
                "as `roundtable invite SILO` prints it"
            )
        secret = Secret(raw[:_IDENTIFIER].hex(), raw[_IDENTIFIER : _IDENTIFIER + _SECRET])
        return cls(secret, raw[-_FINGERPRINT:])


def is_token(text: str) -> bool:
    """Whether it looks like an operator's token of ours, rather than one of somebody else."""
    return text.startswith(_TOKEN)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str, prefix: str, size: int) -> bytes | None:
    if not text.startswith(prefix) or len(text) > 200:
        return None
    body = text.removeprefix(prefix)
    try:
        raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except (binascii.Error, ValueError):
        return None
    return raw if len(raw) == size else None
