"""How a silo that was invited gets its certificates, and new ones before they expire.

The silo makes its keys; what it sends are requests signed with them. The invitation names the silo:
a request cannot choose another name. The issuing authority certifies agents and nobody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ed25519
from sqlalchemy.engine import Connection

from roundtable.core.errors import IdentityError
from roundtable.core.evidence.audit_log import entry
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import (
    ISSUING_KEY,
    Authority,
    check_name,
    check_node,
    fingerprint_of,
    verify_identity,
)
from roundtable.core.identity.invitation import Invitation, Secret
from roundtable.core.identity.signing import check_signature, renewal_values
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.principals import Principals, label_of
from roundtable.server.auth.quotas import DAY, Quotas
from roundtable.server.auth.rate_limit import WrongSecret
from roundtable.server.door.agent_messages import KeyRequests, RenewalRequest
from roundtable.server.store import Database
from roundtable.server.store import audit as audit_store
from roundtable.server.store import trust_rows as store

RENEWAL_SECONDS = 600.0
_WRONG = "this invitation does not hold: it was used, has expired or was withdrawn; ask for a new one"


@dataclass(frozen=True)
class _Keys:
    """The keys to certify: the connection's, and the one to sign with."""

    node: x.PublicKey
    identity: x.PublicKey

    @property
    def digest(self) -> str:
        return hashlib.sha256(x.public_bytes(self.node) + x.public_bytes(self.identity)).hexdigest()


@dataclass(frozen=True)
class MadeCertificates:
    """A silo's new certificates (PEM): the connection's, and the one to sign with."""

    name: str
    node: bytes
    identity: bytes


class Enrolment:
    """Invites and certifies. Without an issuing key in the coordinator's folder both are refused."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        authority: bytes,
        principals: Principals,
        quotas: Quotas,
        clock: Callable[[], float],
        days: float,
    ) -> None:
        self._database = database
        self._folder = folder
        self._authority = authority
        self._principals = principals
        self._quotas = quotas
        self._clock = clock
        self._days = days

    async def invite(self, silo: str, seconds: float, uses: int, author: str) -> tuple[Invitation, float]:
        """A new invitation and when it ends; IdentityError for what cannot name a silo."""
        self._issuer()
        check_name(silo)
        if not (60 <= seconds <= 90 * 86400 and 1 <= uses <= 100):
            raise IdentityError("an invitation holds between a minute and 90 days, for 1 to 100 uses")
        secret, now = Secret.fresh(), self._clock()
        row = store.InvitationRow(secret.identifier, silo, secret.digest, uses, 0, author, now, now + seconds)
        await self._database.write(lambda connection: store.add_invitation(connection, row))
        return Invitation(secret, fingerprint_of(self._authority)), row.expires

    async def enroll(self, secret: Secret, requests: KeyRequests) -> MadeCertificates:
        """Certificates for an invitation; WrongSecret where it does not hold."""
        issuer, keys = self._issuer(), _keys(requests)
        made = await self._database.write(lambda connection: self._enroll(connection, issuer, secret, keys))
        await self._principals.refresh()
        return made

    async def renew(self, name: str, shown: bytes, request: RenewalRequest) -> MadeCertificates:
        """New certificates of the same two keys, for a silo that proves that it holds both.

        `shown` is the certificate of the connection, PEM. IdentityError for any other key: a silo gets new
        keys by a new invitation, which is an operator's decision.
        """
        issuer, keys = self._issuer(), _keys(request.requests)
        self._check_renewal(name, shown, keys, request)
        made = await self._database.write(
            lambda connection: self._certify(connection, issuer, name, keys, "")
        )
        await self._principals.refresh()
        return made

    def _check_renewal(self, name: str, shown: bytes, keys: _Keys, request: RenewalRequest) -> None:
        """IdentityError unless who asks holds the keys of both certificates that the silo has."""
        holder, key = verify_identity(request.identity, self._authority)
        self._principals.of_certificate(request.identity)
        if shown == request.node:
            check_node(shown, self._authority, name)
        node = x.certificates_in(shown, "the connection's certificate")[0].public_key()
        same = x.public_bytes(keys.node) == x.public_bytes(node) and x.raw_bytes(keys.identity) == key
        if holder != name or not same:
            raise IdentityError(
                f"certificates are renewed for the keys that {name!r} has, and the request is for others; a "
                "new key needs a new invitation: `roundtable invite`"
            )
        if not abs(request.time - self._clock()) <= RENEWAL_SECONDS:
            raise IdentityError(
                "the request for a renewal was signed at another time than now; check the clocks"
            )
        requests = request.requests
        values = renewal_values(requests.node, requests.identity, request.time)
        check_signature(key, "renewal", values, request.signature, name)

    def _enroll(
        self, connection: Connection, issuer: Authority, secret: Secret, keys: _Keys
    ) -> MadeCertificates:
        row, now = store.invitation(connection, secret.identifier), self._clock()
        if row is None or not secret.fits(row.digest) or row.expires <= now:
            raise WrongSecret(_WRONG)
        # Whose answer was lost asks again with the same keys; that is no second use.
        again = store.has_enrolled(connection, row.identifier, keys.digest)
        if not again and not store.use_invitation(connection, row.identifier, now):
            raise WrongSecret(_WRONG)
        return self._certify(connection, issuer, row.silo, keys, row.identifier)

    def _certify(
        self, connection: Connection, issuer: Authority, name: str, keys: _Keys, invitation: str
    ) -> MadeCertificates:
        now = self._clock()
        self._check_quota(connection, name, keys, now)
        start = datetime.fromtimestamp(now, UTC)
        made = [
            issuer.certify(key, name, "agent", days=self._days, start=start)
            for key in (keys.node, keys.identity)
        ]
        found = [x.certificates_in(pem, "the new certificate")[0] for pem in made]
        rows = [
            store.CertificateRow(
                format(one.serial_number, "x"),
                name,
                keys.digest,
                invitation,
                now,
                one.not_valid_after_utc.timestamp(),
            )
            for one in found
        ]
        store.add_certificates(connection, *rows)
        detail = {"serials": [row.serial for row in rows], "key": keys.digest, "invitation": invitation}
        action = "enrolled" if invitation else "renewed"
        audit_store.append(connection, entry(now, label_of("agent", name), action, name, detail))
        return MadeCertificates(name, *made)

    def _check_quota(self, connection: Connection, name: str, keys: _Keys, now: float) -> None:
        """QuotaExceeded where these keys were certified often of late.

        It goes by keys, not by name: whoever has copied a silo's keys cannot use up what an invitation gives.
        """
        most = self._quotas.table.certificates
        times = store.issue_times(connection, name, keys.digest, now - DAY)
        if len(times) >= most:
            again = datetime.fromtimestamp(times[-most] + DAY, UTC).strftime("%Y-%m-%d %H:%M UTC")
            raise self._quotas.exceeded(
                label_of("agent", name),
                "certificates",
                f"the keys of {name!r} were certified {len(times)} times within a day; the next time can be "
                f"after {again}",
            )

    def _issuer(self) -> Authority:
        if not (self._folder / ISSUING_KEY).exists():
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this coordinator does not enrol silos: its credentials have no issuing key "
                "(`roundtable ca issue NAME --role coordinator --enrols` makes one); without it a silo "
                "is given credentials that `roundtable ca issue NAME --role agent` has made",
            )
        return Authority.issuing(self._folder)


def _keys(requests: KeyRequests) -> _Keys:
    node, identity = x.key_in_request(requests.node), x.key_in_request(requests.identity)
    if isinstance(node, ed25519.Ed25519PublicKey) or not isinstance(identity, ed25519.Ed25519PublicKey):
        raise IdentityError("a silo connects with an ECDSA P-256 key and signs with an Ed25519 key")
    return _Keys(node, identity)
