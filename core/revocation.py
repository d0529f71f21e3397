"""Certificates that are no longer good although they have not expired: a signed list, `crl.pem`.

The list of the root's authority is made offline with `roundtable ca revoke` and copied into the
coordinator's credentials folder, where it counts from the next call on. What the coordinator itself
revokes is in its database; it needs no list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from roundtable.core import certificates as x
from roundtable.core.errors import IdentityError
from roundtable.core.identity import CRL, Authority

DAYS = 3650


def revoke(ca_folder: Path, certificate: Path) -> Path:
    """Adds a certificate to the list in the authority's folder; returns the list's path."""
    root = Authority.root(ca_folder)
    gone = x.certificates_in(x.read(certificate), certificate)[0]
    if not x.issued_by(gone, root.certificate):
        raise IdentityError(f"{certificate} was not issued by the root of {ca_folder}: nothing was revoked")
    path, now = ca_folder / CRL, datetime.now(UTC)
    known = list(_list(x.read(path), path)) if path.exists() else []
    entries = [entry for entry in known if entry.serial_number != gone.serial_number]
    entries.append(
        x509.RevokedCertificateBuilder().serial_number(gone.serial_number).revocation_date(now).build()
    )
    made = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.certificate.subject)
        .last_update(now)
        .next_update(now + timedelta(days=DAYS))
    )
    for entry in entries:
        made = made.add_revoked_certificate(entry)
    signed = made.sign(root.key, hashes.SHA256())
    x.replace(path, signed.public_bytes(serialization.Encoding.PEM))
    return path


def revoked_serials(path: Path, authorities: Sequence[x509.Certificate]) -> frozenset[int]:
    """Serial numbers on the list in a file; IdentityError for one that no authority of these has signed.

    No file is an empty list.
    """
    if not path.exists():
        return frozenset()
    found = _list(x.read(path), path)
    for authority in authorities:
        key = authority.public_key()
        with contextlib.suppress(UnsupportedAlgorithm):
            if isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key):
                return frozenset(entry.serial_number for entry in found)
    raise IdentityError(f"{path} is not signed by the authority of ca.crt beside it; copy the right list")


def _list(pem: bytes, path: Path) -> x509.CertificateRevocationList:
    try:
        return x509.load_pem_x509_crl(pem)
    except ValueError as error:
        raise IdentityError(f"{path} is not a PEM list of revoked certificates: {error}") from error
