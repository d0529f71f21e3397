"""Who is who: a certificate authority in a folder, and the credentials that it issues.

    CA folder             ca.crt  ca.key
    credentials' folder   ca.crt  node.crt  node.key
    an agent's, besides   identity.crt  identity.key

The Ed25519 key `identity.key` signs what a silo says to other silos in secure aggregation; whoever
knows the authority can check its certificate, so nobody needs to be believed about it.

A certificate's common name is the party's name, its organisational unit the role. Keys of nodes are ECDSA
P-256, files of keys are readable by their owner only, and no existing file is ever overwritten.
Every mistake is an IdentityError that names the file, what is wrong with it, and what to do.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from roundtable.core.errors import IdentityError

Role = Literal["coordinator", "agent", "operator"]
PublicKey: TypeAlias = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey

CA_CERTIFICATE = "ca.crt"
CA_KEY = "ca.key"
NODE_CERTIFICATE = "node.crt"
NODE_KEY = "node.key"
IDENTITY_CERTIFICATE = "identity.crt"
IDENTITY_KEY = "identity.key"
CA_DAYS = 3650
NODE_DAYS = 365
_CLOCK_TOLERANCE = timedelta(minutes=5)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Credentials:
    """What a party shows and trusts: PEM bytes, and what its certificate says."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    name: str
    role: Role
    fingerprint: str
    expires: datetime


@dataclass(frozen=True)
class SiloIdentity:
    """What a silo signs with: its certificate as PEM and the key to it."""

    certificate: bytes
    key: ed25519.Ed25519PrivateKey = field(repr=False)


def create_ca(folder: Path, name: str = "Roundtable CA", *, days: int = CA_DAYS) -> Path:
    """Makes a new certificate authority in `folder` and returns the path of its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, subject, key.public_key(), key.public_key(), datetime.now(UTC), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_new(folder, {CA_KEY: _pem_of_key(key), CA_CERTIFICATE: _pem_of(certificate)})
    return folder / CA_CERTIFICATE


def issue(
    ca_folder: Path,
    name: str,
    role: Role,
    out_folder: Path,
    hosts: Iterable[str] = (),
    *,
    days: int = NODE_DAYS,
    start: datetime | None = None,
) -> Path:
    """Makes a key and a certificate for `name` in `out_folder`, and returns that folder.

    An agent gets a signing identity besides, for secure aggregation.
    `hosts` are the DNS names and IP addresses under which agents reach a coordinator: it needs at
    least one, the other roles need none.
    """
    if role not in get_args(Role):
        raise IdentityError(f"unknown role {role!r}; use one of {', '.join(get_args(Role))}")
    if not _NAME.fullmatch(name):
        raise IdentityError(
            f"{name!r} cannot be a name: use up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    hosts = tuple(hosts)
    if role == "coordinator" and not hosts:
        raise IdentityError(
            f"the coordinator {name!r} needs the host names or addresses under which agents reach it; "
            "name each with --host"
        )
    ca_pem = _read(ca_folder / CA_CERTIFICATE)
    ca = _certificates(ca_pem, ca_folder / CA_CERTIFICATE)[0]
    ca_key = _private_key(ca_folder / CA_KEY)
    if _public_bytes(ca_key.public_key()) != _public_bytes(ca.public_key()):
        raise IdentityError(f"{ca_folder / CA_KEY} is not the key of {ca_folder / CA_CERTIFICATE}")
    key, start = ec.generate_private_key(ec.SECP256R1()), start or datetime.now(UTC)
    certificate = _node_certificate(ca, ca_key, key.public_key(), name, role, hosts, days, start)
    files = {NODE_KEY: _pem_of_key(key), NODE_CERTIFICATE: _pem_of(certificate), CA_CERTIFICATE: ca_pem}
    if role == "agent":
        signing = ed25519.Ed25519PrivateKey.generate()
        signed = _node_certificate(ca, ca_key, signing.public_key(), name, role, (), days, start)
        files |= {IDENTITY_KEY: _pem_of_key(signing), IDENTITY_CERTIFICATE: _pem_of(signed)}
    _write_new(out_folder, files)
    return out_folder


def load_credentials(folder: Path, *, now: datetime | None = None) -> Credentials:
    """The credentials in `folder`, checked.

    Raises IdentityError for a file that is missing or unreadable, a certificate that has expired or
    is not valid yet, a key that does not fit it, and a certificate that ca.crt has not issued.
    """
    now = now or datetime.now(UTC)
    paths = {name: folder / name for name in (CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY)}
    ca_pem, node_pem = _read(paths[CA_CERTIFICATE]), _read(paths[NODE_CERTIFICATE])
    authorities = _certificates(ca_pem, paths[CA_CERTIFICATE])
    certificate = _certificates(node_pem, paths[NODE_CERTIFICATE])[0]
    key = _private_key(paths[NODE_KEY])
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        raise IdentityError(
            f"{paths[NODE_KEY]} is not the key of {paths[NODE_CERTIFICATE]}; "
            "copy both from the same folder that `roundtable ca issue` made"
        )
    if not any(_issued_by(certificate, authority) for authority in authorities):
        raise IdentityError(
            f"{paths[NODE_CERTIFICATE]} was not issued by {paths[CA_CERTIFICATE]} "
            f"({_common_name(authorities[0].subject)}); ask that authority for a certificate, "
            "or put the right ca.crt beside it"
        )
    _check_time(certificate, paths[NODE_CERTIFICATE], now)
    for authority in authorities:
        _check_time(authority, paths[CA_CERTIFICATE], now)
    name, role = identity_of(node_pem)
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
    expires = certificate.not_valid_after_utc
    return Credentials(ca_pem, node_pem, _read(paths[NODE_KEY]), name, role, fingerprint, expires)


def identity_of(pem: bytes) -> tuple[str, Role]:
    """(name, role) that a certificate states; IdentityError if it states none that we know."""
    subject = _certificates(pem, "the certificate")[0].subject
    name = _common_name(subject)
    units = [str(unit.value) for unit in subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)]
    if not _NAME.fullmatch(name) or len(units) != 1 or units[0] not in get_args(Role):
        raise IdentityError(
            f"the certificate of {name!r} names the role {', '.join(units) or 'none'}; it must name one of "
            f"{', '.join(get_args(Role))}: make it with `roundtable ca issue`"
        )
    return name, cast(Role, units[0])


def load_silo_identity(folder: Path) -> SiloIdentity:
    """The signing identity in an agent's credentials folder, checked against its ca.crt.

    Raises IdentityError for files that are missing, do not fit together or have expired.
    """
    path, missing = folder / IDENTITY_KEY, f"{folder} has no {IDENTITY_KEY} and {IDENTITY_CERTIFICATE}"
    if not path.exists() or not (folder / IDENTITY_CERTIFICATE).exists():
        raise IdentityError(
            f"{missing}, with which a silo signs in secure aggregation; "
            "issue the agent's credentials anew with `roundtable ca issue`"
        )
    pem = _read(folder / IDENTITY_CERTIFICATE)
    _, public = verify_identity(pem, _read(folder / CA_CERTIFICATE))
    key = _load_key(path)
    if not isinstance(key, ed25519.Ed25519PrivateKey) or key.public_key().public_bytes_raw() != public:
        raise IdentityError(
            f"{path} is not the key of {IDENTITY_CERTIFICATE} beside it; "
            "copy both from the same folder that `roundtable ca issue` made"
        )
    return SiloIdentity(pem, key)


def verify_identity(pem: bytes, ca: bytes, *, now: datetime | None = None) -> tuple[str, bytes]:
    """(silo's name, 32-byte Ed25519 key) of an identity certificate that somebody shows.

    Raises IdentityError unless one of the authorities in `ca` (PEM) issued it to an agent and it is in force.
    """
    source = "the identity certificate"
    name, role = identity_of(pem)
    certificate = _certificates(pem, source)[0]
    if not any(_issued_by(certificate, authority) for authority in _certificates(ca, CA_CERTIFICATE)):
        raise IdentityError(f"{source} of {name!r} was not issued by the authority of {CA_CERTIFICATE}")
    _check_time(certificate, f"{source} of {name!r}", now or datetime.now(UTC))
    key = certificate.public_key()
    if role != "agent" or not isinstance(key, ed25519.Ed25519PublicKey):
        raise IdentityError(f"{source} of {name!r} is not an agent's Ed25519 certificate")
    return name, key.public_bytes_raw()


def _node_certificate(
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    key: PublicKey,
    name: str,
    role: Role,
    hosts: tuple[str, ...],
    days: int,
    start: datetime,
) -> x509.Certificate:
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, name),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
        ]
    )
    usage = ExtendedKeyUsageOID.SERVER_AUTH if role == "coordinator" else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(subject, ca.subject, key, ca_key.public_key(), start, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: PublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    start: datetime,
    days: int,
) -> x509.CertificateBuilder:
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


def _issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_time(certificate: x509.Certificate, path: Path | str, now: datetime) -> None:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > until:
        raise IdentityError(
            f"{path} expired on {until:%Y-%m-%d %H:%M} UTC (now {now:%Y-%m-%d %H:%M}); "
            "issue a new one with `roundtable ca issue`"
        )
    if now < since:
        raise IdentityError(
            f"{path} is valid only from {since:%Y-%m-%d %H:%M} UTC (now {now:%Y-%m-%d %H:%M}); "
            "check this machine's clock"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        remedy = (
            "make a certificate authority with `roundtable ca init`"
            if path.name == CA_KEY
            else "a credentials folder holds ca.crt, node.crt and node.key, as `roundtable ca issue` makes it"
        )
        raise IdentityError(f"there is no file {path}; {remedy}") from None
    except OSError as error:
        raise IdentityError(
            f"{path} cannot be read: {error.strerror}; it must be readable by the user who runs this"
        ) from error


def _certificates(pem: bytes, source: Path | str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise IdentityError(f"{source} is not a PEM certificate: {error}; copy the file anew") from error


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = _load_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{path} is no ECDSA key; issue one with `roundtable ca issue`")
    return key


def _load_key(path: Path) -> object:
    try:
        return serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise IdentityError(
            f"{path} is not an unencrypted PEM private key; copy the file anew or issue a new one"
        ) from error


def _common_name(subject: x509.Name) -> str:
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _public_bytes(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return b""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_new(folder: Path, files: dict[str, bytes]) -> None:
    """Writes all files or none; an existing one stops it, unless it already holds the same certificate."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {
            folder / name: data
            for name, data in files.items()
            if not (name == CA_CERTIFICATE and _holds(folder / name, data))
        }
        for path in wanted:
            if path.exists():
                raise IdentityError(
                    f"{path} already exists and is not overwritten; "
                    "choose another folder, or move the old files away"
                )
        for path, data in wanted.items():
            mode = 0o600 if path.suffix == ".key" else 0o644
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
    except OSError as error:
        raise IdentityError(
            f"{error.filename or folder} cannot be written: {error.strerror}; choose another folder"
        ) from error


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data
