"""How an operator shows who it is: with a certificate, or with a token, both kept in a folder."""

from __future__ import annotations

from pathlib import Path

import grpc

from roundtable.core.errors import IdentityError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import (
    IDENTITY_KEY,
    NODE_CERTIFICATE,
    TOKEN,
    SiloIdentity,
    load_credentials,
    load_silo_identity,
)
from roundtable.core.identity.handshake import trusted_root
from roundtable.core.machine.file_access import modes_count


def channel_credentials(folder: Path, address: str) -> grpc.ChannelCredentials:
    """For a channel to a coordinator; IdentityError for a folder that holds nothing to show.

    With a token it connects to the coordinator's `enrolment` address, which wants no certificate. With a
    list of revoked certificates in the folder (crl.pem), the coordinator is looked at first: IdentityError
    if it is on the list, UnavailableError if it does not answer.
    """
    if (folder / TOKEN).exists() and not (folder / NODE_CERTIFICATE).exists():
        secure = grpc.ssl_channel_credentials(trusted_root(address, folder))
        return grpc.composite_channel_credentials(
            secure, grpc.access_token_call_credentials(_token(folder / TOKEN))
        )
    shown = load_credentials(folder)
    return grpc.ssl_channel_credentials(trusted_root(address, folder), shown.key, shown.certificate)


def signing_identity(folder: Path) -> SiloIdentity | None:
    """What an operator signs jobs with; None for one with a token, or with older credentials."""
    return load_silo_identity(folder) if (folder / IDENTITY_KEY).exists() else None


def _token(path: Path) -> str:
    if modes_count() and path.stat().st_mode & 0o077:
        raise IdentityError(f"{path} can be read by others, and holds a secret: chmod 600 {path}")
    return x.read(path).decode(errors="replace").strip()
