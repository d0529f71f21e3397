"""Certificates that are no longer good although they have not expired: a signed list, `crl.pem`.

The root's list is made offline with `roundtable ca revoke`. Copied into a credentials folder it counts for
whoever uses that folder, a coordinator, an agent or an operator, from the next look at it on. A coordinator
hands its list on to its agents, who need not believe it for that: the root has signed the list, and
lists are numbered, so that an older one replaces no newer one. What the coordinator itself revokes is in
its database; it needs no list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from roundtable.core.errors import IdentityError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import CA_CERTIFICATE, CRL, ISSUING_CERTIFICATE, Authority

DAYS = 3650
LARGEST = 2 << 20
"""Bytes of the largest list that is handed on to agents; some 40,000 certificates."""


@dataclass(frozen=True)
class RevocationList:
    """Serial numbers of what was revoked. `number` grows with each list of an authority; 0: it has none."""

    number: int
    serials: frozenset[int]
    pem: bytes = field(repr=False)

    def check(self, chain: Sequence[x509.Certificate], who: str) -> None:
        """IdentityError if the first certificate, or one that it builds upon, is on the list."""
        for certificate in chain:
            if certificate.serial_number in self.serials:
                what = f"the certificate of {who}"
                if certificate is not chain[0]:
                    what = f"the authority {x.common_name(certificate.subject)!r} that issued {what}"
                raise IdentityError(f"{what} has been revoked (list number {self.number} of the root)")


NOTHING = RevocationList(0, frozenset(), b"")


def revoke(ca_folder: Path, certificate: Path) -> Path:
    """Adds a certificate to the list in the authority's folder; returns the list's path.

    The certificate is one of the root's, the issuing authority's own among them, or one of a silo that the
    issuing authority has certified.
    """
    root = Authority.root(ca_folder)
    gone = x.certificates_in(x.read(certificate), certificate)[0]
    issuer = next((one for one in _authorities(ca_folder, root) if x.issued_by(gone, one)), None)
    if issuer is None:
        raise IdentityError(
            f"{certificate} was not issued by an authority of {ca_folder}: nothing was revoked"
        )
    path, now = ca_folder / CRL, datetime.now(UTC)
    known = _read(x.read(path), path) if path.exists() else None
    entries = [entry for entry in known or () if entry.serial_number != gone.serial_number]
    entry = x509.RevokedCertificateBuilder().serial_number(gone.serial_number).revocation_date(now)
    if issuer is not root.certificate:
        entry = entry.add_extension(
            x509.CertificateIssuer([x509.DirectoryName(issuer.subject)]), critical=True
        )
    made = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.certificate.subject)
        .last_update(now)
        .next_update(now + timedelta(days=DAYS))
        .add_extension(x509.CRLNumber(1 if known is None else _number(known) + 1), critical=False)
    )
    for one in (*entries, entry.build()):
        made = made.add_revoked_certificate(one)
    signed = made.sign(root.key, hashes.SHA256())
    x.replace(path, signed.public_bytes(serialization.Encoding.PEM))
    return path


def load_list(folder: Path) -> RevocationList:
    """The list in a credentials folder, signed by its ca.crt; no file is an empty list.

    IdentityError for a list that none of those authorities has signed.
    """
    path = folder / CRL
    if not path.exists():
        return NOTHING
    roots = x.certificates_in(x.read(folder / CA_CERTIFICATE), folder / CA_CERTIFICATE)
    return parse_list(x.read(path), roots, path)


def parse_list(pem: bytes, authorities: Sequence[x509.Certificate], source: Path | str) -> RevocationList:
    """A list that one of these authorities has signed; IdentityError otherwise."""
    revoked = _read(pem, source)
    if not any(_signed(revoked, authority) for authority in authorities):
        raise IdentityError(
            f"{source} is not signed by the authority of ca.crt beside it; copy the right list"
        )
    return RevocationList(_number(revoked), frozenset(entry.serial_number for entry in revoked), pem)


def newer(offered: RevocationList, known: RevocationList, source: Path | str) -> RevocationList:
    """The list to go by from now on; IdentityError for one that is older than what is known."""
    lacks = known.serials - offered.serials
    if offered.number < known.number or (offered.number == known.number and lacks):
        raise IdentityError(
            f"{source} is list number {offered.number} of what the root has revoked, and number "
            f"{known.number} is known, with more on it: the newer one counts. Copy the newest list; whoever "
            "makes lists needs it in the authority's folder before the next `roundtable ca revoke`"
        )
    return offered


def _authorities(folder: Path, root: Authority) -> list[x509.Certificate]:
    issuing = folder / ISSUING_CERTIFICATE
    online = x.certificates_in(x.read(issuing), issuing)[:1] if issuing.exists() else []
    return [root.certificate, *online]


def _signed(revoked: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    try:
        key = authority.public_key()
        return isinstance(key, ec.EllipticCurvePublicKey) and revoked.is_signature_valid(key)
    except (UnsupportedAlgorithm, ValueError):
        return False


def _number(revoked: x509.CertificateRevocationList) -> int:
    try:
        return revoked.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        return 0


def _read(pem: bytes, source: Path | str) -> x509.CertificateRevocationList:
    try:
        revoked = x509.load_pem_x509_crl(pem)
        # The library reads these late; whoever asks for them later may rely on their being sound.
        _ = revoked.extensions, [entry.serial_number for entry in revoked]
        return revoked
    except (ValueError, x509.DuplicateExtension) as error:
        raise IdentityError(f"{source} is not a PEM list of revoked certificates: {error}") from error
