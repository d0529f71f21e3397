"""X.509 and PEM, as far as Roundtable needs them: what a certificate holds, and files that hold one.

Keys of nodes are ECDSA P-256, files of keys are readable by their owner only and may be sealed with a
passphrase, which comes from the environment and never from a command line. Every mistake is an
IdentityError that names the file, what is wrong with it, and what to do.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from roundtable.core.errors import IdentityError

PublicKey: TypeAlias = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
PASSPHRASE = "ROUNDTABLE_PASSPHRASE"
PASSPHRASE_FILE = "ROUNDTABLE_PASSPHRASE_FILE"
SECRET_VARIABLES = (
    PASSPHRASE,
    PASSPHRASE_FILE,
    "ROUNDTABLE_TOKEN",
    "ROUNDTABLE_DATABASE",
    "ROUNDTABLE_BACKUP_PASSPHRASE",
)
"""Variables of the environment that no child process which runs a task, or a command of people's, may see."""
_READ = 64
_CLOCK_TOLERANCE = timedelta(minutes=5)
"""How much earlier than it was issued a certificate begins to hold."""


def builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, issuer_key: PublicKey, start: datetime, days: float
) -> x509.CertificateBuilder:
    """A certificate that is in force for `days` from `start`, without its usage."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _CLOCK_TOLERANCE)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def for_authority(
    certificate: x509.CertificateBuilder, path_length: int, purposes: Iterable[ObjectIdentifier] = ()
) -> x509.CertificateBuilder:
    """Lets it sign certificates, with at most so many authorities below it, for these purposes or any."""
    certificate = certificate.add_extension(
        x509.BasicConstraints(ca=True, path_length=path_length), critical=True
    ).add_extension(_key_usage(ca=True), critical=True)
    return _for_purposes(certificate, purposes)


def for_node(
    certificate: x509.CertificateBuilder, purposes: Sequence[ObjectIdentifier], hosts: Iterable[str] = ()
) -> x509.CertificateBuilder:
    """Lets it authenticate and sign, and nothing else."""
    certificate = certificate.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    ).add_extension(_key_usage(ca=False), critical=True)
    certificate = _for_purposes(certificate, purposes)
    names = [_general_name(host) for host in hosts]
    return (
        certificate.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if names
        else certificate
    )


def subject(name: str, unit: str) -> x509.Name:
    """Common name and organisational unit."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, name),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
        ]
    )


def common_name(name: x509.Name) -> str:
    """The common name; empty if there is none."""
    names = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


@lru_cache(maxsize=_READ)
def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority's key has signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def issued_at(certificate: x509.Certificate) -> float:
    """When it was issued, to the second, if `builder` has made it."""
    return (certificate.not_valid_before_utc + _CLOCK_TOLERANCE).timestamp()


class Period(NamedTuple):
    """From when until when a certificate is in force."""

    since: datetime
    until: datetime


def period_of(certificate: x509.Certificate) -> Period:
    """When it is in force."""
    return Period(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def check_time(certificate: x509.Certificate, source: Path | str, now: datetime) -> None:
    """Raises IdentityError for a certificate that is not valid yet, or not any more."""
    check_period(period_of(certificate), source, now)


def check_period(period: Period, source: Path | str, now: datetime) -> None:
    """As `check_time`, of the certificate's period."""
    since, until = period
    if now > until:
        raise IdentityError(
            f"{source} expired on {until:%Y-%m-%d %H:%M} UTC (now {now:%Y-%m-%d %H:%M}); "
            "issue a new one with `roundtable ca issue`"
        )
    if now < since:
        raise IdentityError(
            f"{source} is valid only from {since:%Y-%m-%d %H:%M} UTC (now {now:%Y-%m-%d %H:%M}); "
            "check this machine's clock"
        )


def certificates_in(pem: bytes, source: Path | str) -> list[x509.Certificate]:
    """All certificates of a PEM text, in its order; at least one."""
    try:
        return list(_parsed(pem))
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise IdentityError(f"{source} is not a PEM certificate: {error}; copy the file anew") from error


# Whoever shows a certificate has it looked at by several within a moment.
@lru_cache(maxsize=_READ)
def _parsed(pem: bytes) -> tuple[x509.Certificate, ...]:
    certificates = x509.load_pem_x509_certificates(pem)
    for certificate in certificates:
        # The library reads these late; whoever asks for them later may rely on their being sound.
        _ = certificate.public_key(), certificate.extensions, certificate.subject
    return tuple(certificates)


def load_key(path: Path) -> PrivateKey:
    """The private key in a file; sealed ones are opened with the passphrase of the environment."""
    pem = read(path)
    sealed = b"ENCRYPTED" in pem
    try:
        key = serialization.load_pem_private_key(pem, passphrase() if sealed else None)
    except TypeError as error:
        raise IdentityError(
            f"{path} is sealed: give its passphrase in {PASSPHRASE} or the file {PASSPHRASE_FILE}"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        mistake = "the passphrase of {} is wrong" if sealed else "{} is not a PEM private key; copy it anew"
        raise IdentityError(mistake.format(path)) from error
    if not isinstance(key, (ec.EllipticCurvePrivateKey, ed25519.Ed25519PrivateKey)):
        raise IdentityError(f"{path} is no ECDSA or Ed25519 key; issue one with `roundtable ca issue`")
    return key


def passphrase() -> bytes | None:
    """What seals this process's keys: of ROUNDTABLE_PASSPHRASE, or of the file that …_FILE names."""
    if place := os.environ.get(PASSPHRASE):
        return place.encode()
    name = os.environ.get(PASSPHRASE_FILE)
    return read(Path(name)).strip() or None if name else None


def public_bytes(key: object) -> bytes:
    """A public key as DER, to compare two of them."""
    if not isinstance(key, (ec.EllipticCurvePublicKey, ed25519.Ed25519PublicKey)):
        return b""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def raw_bytes(key: PublicKey) -> bytes:
    """The 32 bytes of an Ed25519 key; empty for another one."""
    return key.public_bytes_raw() if isinstance(key, ed25519.Ed25519PublicKey) else b""


def pem_of(certificate: x509.Certificate) -> bytes:
    """The certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def pem_of_key(key: PrivateKey, seal: bytes | None = None) -> bytes:
    """The key as PEM, sealed with a passphrase if there is one."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(seal) if seal else serialization.NoEncryption(),
    )


def signing_request(key: PrivateKey, name: str = "silo") -> bytes:
    """A PKCS #10 request, PEM. Whoever answers it decides on the name; what counts here is the key."""
    blank = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    request = x509.CertificateSigningRequestBuilder().subject_name(blank).sign(key, algorithm)
    return request.public_bytes(serialization.Encoding.PEM)


def key_in_request(pem: bytes) -> PublicKey:
    """The public key of a request whose sender holds the private one; IdentityError otherwise."""
    try:
        request = x509.load_pem_x509_csr(pem)
        key, sound = request.public_key(), request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"the certificate request cannot be read: {error}") from error
    accepted = isinstance(key, ed25519.Ed25519PublicKey) or (
        isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    )
    if not sound or not accepted:
        raise IdentityError("a certificate request must hold an ECDSA P-256 or Ed25519 key and its signature")
    return cast(PublicKey, key)


def read(path: Path) -> bytes:
    """A file of a credentials folder."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        remedy = (
            "make a certificate authority with `roundtable ca init`"
            if path.name == "ca.key"
            else "create credentials with `roundtable ca issue NAME --role …`, or name their folder with "
            "--credentials (it holds ca.crt, node.crt and node.key)"
        )
        raise IdentityError(f"there is no file {path}; {remedy}") from None
    except OSError as error:
        raise IdentityError(
            f"{path} cannot be read: {error.strerror}; it must be readable by the user who runs this"
        ) from error


def write_new(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes all files or none; an existing one stops it, unless it already holds the same certificate."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {
            folder / name: data
            for name, data in files.items()
            if not (name == "ca.crt" and _holds(folder / name, data))
        }
        for path in wanted:
            if path.exists():
                raise IdentityError(
                    f"{path} already exists and is not overwritten; "
                    "choose another folder, or move the old files away"
                )
        for path, data in wanted.items():
            _write(path, data)
    except OSError as error:
        raise _unwritable(folder, error) from error


def replace(path: Path, data: bytes) -> None:
    """The file holds these bytes from now on; at no moment is it half written."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        _write(fresh, data)
        fresh.replace(path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _write(path: Path, data: bytes) -> None:
    mode = 0o644 if path.name.removesuffix(".new").endswith((".crt", ".pem")) else 0o600
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unwritable(folder: Path, error: OSError) -> IdentityError:
    where = error.filename or folder
    return IdentityError(f"{where} cannot be written: {error.strerror}; choose another folder")


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _for_purposes(
    certificate: x509.CertificateBuilder, purposes: Iterable[ObjectIdentifier]
) -> x509.CertificateBuilder:
    wanted = list(purposes)
    return certificate.add_extension(x509.ExtendedKeyUsage(wanted), critical=False) if wanted else certificate


def _key_usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise IdentityError(
            f"{host!r} is neither an IP address nor an ASCII DNS name; write an international name as xn--…"
        ) from error
