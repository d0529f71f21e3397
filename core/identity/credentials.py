"""Who is who: a certificate authority in a folder, and the credentials that it issues.

    CA folder             ca.crt  ca.key                 the root; its key belongs offline
                          issuing.crt  issuing.key       may certify silos that were invited, and nobody else
    credentials' folder   ca.crt  node.crt  node.key  identity.crt  identity.key
                          issuing.crt  issuing.key       besides, at a coordinator that enrols silos
                          crl.pem                        besides, where certificates were revoked offline
    with a token          ca.crt  token                  an operator without a certificate

The Ed25519 key `identity.key` signs what must be provable later: what a silo says to other silos in
secure aggregation, an operator's jobs, the coordinator's receipts and audit log. Its certificate carries
the holder's name and role: whoever knows the root can check it, and nobody needs to be believed about it.

A certificate's common name is the party's name, its organisational unit the role. Only the root makes
coordinators and operators: a stolen issuing key cannot pose as either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from roundtable.core.errors import IdentityError
from roundtable.core.identity import certificates as x

Role = Literal["coordinator", "relay", "agent", "viewer", "data-scientist", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
SERVING: tuple[Role, ...] = ("coordinator", "relay")
"""What agents connect to."""
OPERATOR_ROLES: tuple[Role, ...] = ("viewer", "data-scientist", "operator", "admin")

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
ISSUING_CERTIFICATE, ISSUING_KEY = "issuing.crt", "issuing.key"
NODE_CERTIFICATE, NODE_KEY = "node.crt", "node.key"
IDENTITY_CERTIFICATE, IDENTITY_KEY = "identity.crt", "identity.key"
TOKEN = "token"
CRL = "crl.pem"
CA_DAYS = 3650
ISSUING_DAYS = 730
NODE_DAYS = 365
ISSUING = "the issuing certificate"
REMEMBERED, SHORT = 32_768, 4096
"""Certificates of which a process remembers who has signed them, the silos of its largest federation; and
bytes of the longest: PEM may have any text around it, with which one silo could fill gigabytes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Credentials:
    """What a party shows and trusts: PEM bytes, and what its certificate says. `key` is not sealed."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    name: str
    role: Role
    fingerprint: str
    issued: datetime
    expires: datetime


@dataclass(frozen=True)
class SiloIdentity:
    """What a party signs with: its certificate as PEM and the key to it."""

    certificate: bytes
    key: ed25519.Ed25519PrivateKey = field(repr=False)


@dataclass(frozen=True)
class Authority:
    """Something that certifies: `chain` is the PEM that follows each certificate it makes."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    chain: bytes = b""

    @classmethod
    def root(cls, folder: Path) -> Authority:
        """The authority itself; IdentityError where its folder is incomplete."""
        return cls._load(folder, CA_CERTIFICATE, CA_KEY)

    @classmethod
    def issuing(cls, folder: Path) -> Authority:
        """The online authority for silos that were invited."""
        issuer = cls._load(folder, ISSUING_CERTIFICATE, ISSUING_KEY)
        return cls(issuer.certificate, issuer.key, x.pem_of(issuer.certificate))

    @classmethod
    def _load(cls, folder: Path, certificate: str, key: str) -> Authority:
        own = x.certificates_in(x.read(folder / certificate), folder / certificate)[0]
        private = x.load_key(folder / key)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or x.public_bytes(
            private.public_key()
        ) != x.public_bytes(own.public_key()):
            raise IdentityError(f"{folder / key} is not the key of {folder / certificate}")
        return cls(own, private)

    def certify(
        self,
        key: x.PublicKey,
        name: str,
        role: Role,
        hosts: Iterable[str] = (),
        *,
        days: float = NODE_DAYS,
        start: datetime | None = None,
    ) -> bytes:
        """A certificate of that key, PEM, with what a verifier needs to get from it to the root."""
        purposes = {"coordinator": (x.SERVER,), "relay": (x.SERVER, x.CLIENT)}.get(role, (x.CLIENT,))
        own = self.key.public_key()
        made = x.builder(
            x.subject(name, role), self.certificate.subject, key, own, start or datetime.now(UTC), days
        )
        return x.pem_of(x.for_node(made, purposes, hosts).sign(self.key, hashes.SHA256())) + self.chain


def create_ca(
    folder: Path, name: str = "Roundtable CA", *, days: int = CA_DAYS, seal: bytes | None = None
) -> Path:
    """Makes a root authority and its issuing one in `folder`; returns the path of the root's certificate.

    `seal` is a passphrase for the root's key.
    """
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x.builder(who, who, key.public_key(), key.public_key(), now, days)
    root = Authority(x.for_authority(made, 1).sign(key, hashes.SHA256()), key)
    files = {CA_KEY: x.pem_of_key(key, seal), CA_CERTIFICATE: x.pem_of(root.certificate)}
    x.write_new(folder, {**files, **_issuing(root, name, min(days, ISSUING_DAYS))})
    return folder / CA_CERTIFICATE


def renew_issuing(ca_folder: Path, *, days: int = ISSUING_DAYS) -> Path:
    """Makes a new issuing authority in the place of the one that ends; returns its certificate's path.

    What the old one has certified holds as long as that does.
    """
    root, old = Authority.root(ca_folder), ca_folder / ISSUING_CERTIFICATE
    for file, data in _issuing(root, x.common_name(root.certificate.subject), days).items():
        x.replace(ca_folder / file, data)
    return old


def issue(
    ca_folder: Path,
    name: str,
    role: Role,
    out_folder: Path,
    hosts: Iterable[str] = (),
    *,
    days: int = NODE_DAYS,
    start: datetime | None = None,
    enrols: bool = False,
) -> Path:
    """Makes a key and a certificate for `name` in `out_folder`, and returns that folder.

    `hosts` are the DNS names and IP addresses under which agents reach a coordinator or a relay: it needs
    at least one, the other roles need none. With `enrols` the coordinator gets the issuing key too.
    """
    hosts = tuple(hosts)
    _check_wish(name, role, hosts, enrols)
    root = Authority.root(ca_folder)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = root.certify(key.public_key(), name, role, hosts, days=days, start=start)
    seal = x.passphrase()
    files = {
        NODE_KEY: x.pem_of_key(key, seal),
        NODE_CERTIFICATE: certificate,
        CA_CERTIFICATE: x.read(ca_folder / CA_CERTIFICATE),
    }
    signing = ed25519.Ed25519PrivateKey.generate()
    signed = root.certify(signing.public_key(), name, role, days=days, start=start)
    files |= {IDENTITY_KEY: x.pem_of_key(signing, seal), IDENTITY_CERTIFICATE: signed}
    if enrols:
        files |= {file: x.read(ca_folder / file) for file in (ISSUING_CERTIFICATE, ISSUING_KEY)}
    x.write_new(out_folder, files)
    return out_folder


def load_credentials(folder: Path, *, now: datetime | None = None) -> Credentials:
    """The credentials in `folder`, checked.

    Raises IdentityError for a file that is missing or unreadable, a certificate that has expired or
    is not valid yet, a key that does not fit it, and a certificate that ca.crt has not issued.
    """
    now = now or datetime.now(UTC)
    paths = {name: folder / name for name in (CA_CERTIFICATE, NODE_CERTIFICATE, NODE_KEY)}
    ca_pem, node_pem = x.read(paths[CA_CERTIFICATE]), x.read(paths[NODE_CERTIFICATE])
    authorities = x.certificates_in(ca_pem, paths[CA_CERTIFICATE])
    chain = x.certificates_in(node_pem, paths[NODE_CERTIFICATE])
    key, certificate = x.load_key(paths[NODE_KEY]), chain[0]
    if x.public_bytes(key.public_key()) != x.public_bytes(certificate.public_key()):
        raise IdentityError(
            f"{paths[NODE_KEY]} is not the key of {paths[NODE_CERTIFICATE]}; "
            "copy both from the same folder that `roundtable ca issue` made"
        )
    if check_chain(chain, authorities, now) is None:
        raise IdentityError(
            f"{paths[NODE_CERTIFICATE]} was not issued by {paths[CA_CERTIFICATE]} "
            f"({x.common_name(authorities[0].subject)}); ask that authority for a certificate, "
            "or put the right ca.crt beside it"
        )
    x.check_time(certificate, paths[NODE_CERTIFICATE], now)
    for authority in authorities:
        x.check_time(authority, paths[CA_CERTIFICATE], now)
    name, role = identity_of(node_pem)
    return Credentials(
        ca_pem,
        node_pem,
        x.pem_of_key(key),
        name,
        role,
        certificate.fingerprint(hashes.SHA256()).hex(),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )


def identity_of(pem: bytes) -> tuple[str, Role]:
    """(name, role) that a certificate states; IdentityError if it states none that we know."""
    return _stated(x.certificates_in(pem, "the certificate")[0])


def check_chain(
    chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate], now: datetime
) -> int | None:
    """How many authorities stand between chain[0] and a root: 0 or 1, None if it leads to no root of these.

    An issuing authority vouches for agents only; IdentityError for any other role below one.
    """
    depth = _depth(chain, authorities)
    if depth:
        x.check_time(chain[1], ISSUING, now)
    return depth


def _depth(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> int | None:
    """`check_chain` at whatever time."""
    leaf = chain[0]
    if any(x.issued_by(leaf, root) for root in authorities):
        return 0
    for between in chain[1:2]:
        known = any(x.issued_by(between, root) for root in authorities)
        if known and _is_authority(between) and x.issued_by(leaf, between):
            name, role = _stated(leaf)
            if role != "agent":
                raise IdentityError(
                    f"the certificate of {name!r} as {role} comes from the issuing authority, which may "
                    "certify agents only; the root must issue it: `roundtable ca issue`"
                )
            return 1
    return None


def load_silo_identity(folder: Path) -> SiloIdentity:
    """The signing identity in a credentials folder, checked against its ca.crt.

    Raises IdentityError for files that are missing, do not fit together or have expired.
    """
    path, missing = folder / IDENTITY_KEY, f"{folder} has no {IDENTITY_KEY} and {IDENTITY_CERTIFICATE}"
    if not path.exists() or not (folder / IDENTITY_CERTIFICATE).exists():
        raise IdentityError(
            f"{missing}, to sign with: for secure aggregation, jobs and receipts; "
            "issue the credentials anew with `roundtable ca issue`"
        )
    pem = x.read(folder / IDENTITY_CERTIFICATE)
    _, public = verify_identity(pem, x.read(folder / CA_CERTIFICATE), role=identity_of(pem)[1])
    key = x.load_key(path)
    if not isinstance(key, ed25519.Ed25519PrivateKey) or key.public_key().public_bytes_raw() != public:
        raise IdentityError(
            f"{path} is not the key of {IDENTITY_CERTIFICATE} beside it; "
            "copy both from the same folder that `roundtable ca issue` made"
        )
    return SiloIdentity(pem, key)


def verify_identity(
    pem: bytes, ca: bytes, *, now: datetime | None = None, role: Role = "agent", from_root: bool = False
) -> tuple[str, bytes]:
    """(name, 32-byte Ed25519 key) of an identity certificate that somebody shows.

    Raises IdentityError unless the authorities in `ca` (PEM) vouch for it in this role and it is in
    force; with `from_root` the root itself must have issued it.
    """
    source, now = "the identity certificate", now or datetime.now(UTC)
    found = (_vouched if len(pem) <= SHORT else _vouched.__wrapped__)(pem, ca)
    name = found.name
    if found.depth is None:
        raise IdentityError(f"{source} of {name!r} was not issued by the authority of {CA_CERTIFICATE}")
    for what, period in found.periods:
        x.check_period(period, what or f"{source} of {name!r}", now)
    if from_root and found.depth:
        raise IdentityError(
            f"{source} of {name!r} comes from the issuing authority, not from the root; "
            "issue it offline with `roundtable ca issue`"
        )
    if found.role != role or found.key is None:
        raise IdentityError(f"{source} of {name!r} is not an {role}'s Ed25519 certificate")
    return name, found.key


class _Vouched(NamedTuple):
    """What holds of an identity certificate whenever it is shown: whom it names, how many authorities stand
    between it and the root, its key, and when it and what it builds upon are in force."""

    name: str
    role: Role
    depth: int | None
    key: bytes | None
    periods: tuple[tuple[str, x.Period], ...]


@lru_cache(maxsize=REMEMBERED)
def _vouched(pem: bytes, ca: bytes) -> _Vouched:
    """Whether signatures of certificates hold does not change, so the same bytes are looked at once; what
    does change, time and revocation, is judged by the caller each time."""
    name, role = identity_of(pem)
    chain = x.certificates_in(pem, "the identity certificate")
    depth = _depth(chain, x.certificates_in(ca, CA_CERTIFICATE))
    key = chain[0].public_key()
    raw = key.public_bytes_raw() if isinstance(key, ed25519.Ed25519PublicKey) else None
    between = [(ISSUING, x.period_of(chain[1]))] if depth else []
    return _Vouched(name, role, depth, raw, (*between, ("", x.period_of(chain[0]))))


def check_node(pem: bytes, ca: bytes, name: str) -> None:
    """IdentityError unless this is a node certificate of the agent `name`, in force: no TLS has."""
    chain, now = x.certificates_in(pem, "the node certificate"), datetime.now(UTC)
    if check_chain(chain, x.certificates_in(ca, CA_CERTIFICATE), now) is None:
        raise IdentityError(f"the node certificate of {name!r} was not issued by the authority here")
    x.check_time(chain[0], f"the node certificate of {name!r}", now)
    if _stated(chain[0]) != (name, "agent"):
        raise IdentityError(f"the node certificate that {name!r} shows is another party's")


def fingerprint_of(pem: bytes) -> bytes:
    """SHA-256 of the first certificate in a PEM text: what an invitation pins."""
    return x.certificates_in(pem, CA_CERTIFICATE)[0].fingerprint(hashes.SHA256())


def _issuing(root: Authority, name: str, days: int) -> dict[str, bytes]:
    key, who = ec.generate_private_key(ec.SECP256R1()), f"{name} issuing"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, who)])
    now, own = datetime.now(UTC), root.key.public_key()
    made = x.builder(subject, root.certificate.subject, key.public_key(), own, now, days)
    # The purpose limits it in every TLS library: no server's certificate below it is accepted.
    signed = x.for_authority(made, 0, [x.CLIENT]).sign(root.key, hashes.SHA256())
    return {ISSUING_KEY: x.pem_of_key(key), ISSUING_CERTIFICATE: x.pem_of(signed)}


def _check_wish(name: str, role: Role, hosts: Sequence[str], enrols: bool) -> None:
    if role not in ROLES:
        raise IdentityError(f"unknown role {role!r}; use one of {', '.join(ROLES)}")
    check_name(name)
    if role in SERVING and not hosts:
        raise IdentityError(
            f"the {role} {name!r} needs the host names or addresses under which agents reach it; "
            "name each with --host"
        )
    if enrols and role != "coordinator":
        raise IdentityError("only a coordinator enrols silos: leave --enrols out")


def check_name(name: str) -> None:
    """IdentityError for what cannot name a party."""
    if not _NAME.fullmatch(name):
        raise IdentityError(
            f"{name[:80]!r} cannot be a name: use up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def _stated(certificate: x509.Certificate) -> tuple[str, Role]:
    subject = certificate.subject
    name = x.common_name(subject)
    units = [str(unit.value) for unit in subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)]
    if not _NAME.fullmatch(name) or len(units) != 1 or units[0] not in ROLES:
        raise IdentityError(
            f"the certificate of {name!r} names the role {', '.join(units) or 'none'}; it must name one of "
            f"{', '.join(ROLES)}: make it with `roundtable ca issue`"
        )
    return name, units[0]


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
