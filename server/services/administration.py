"""Who may take part and what was done: invitations, revocation, tokens, the audit log, provenance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import grpc
from sqlalchemy.engine import Connection
from typing_extensions import override

from roundtable.core.identity.credentials import OPERATOR_ROLES, check_name
from roundtable.core.identity.invitation import Secret
from roundtable.proto import administration_pb2 as pb
from roundtable.proto import administration_pb2_grpc
from roundtable.server.auth.access import Access, Context, Refusal, caller
from roundtable.server.auth.audit import AuditLog
from roundtable.server.auth.enrolment import Enrolment
from roundtable.server.auth.principals import Principals
from roundtable.server.auth.provenance import Provenance
from roundtable.server.store import Database
from roundtable.server.store import trust_rows as store

log = logging.getLogger("roundtable.server.services.administration")

LONGEST_TOKEN = 366 * 86400.0
MESSAGE_CHARACTERS = 1 << 20


class AdministrationService(administration_pb2_grpc.AdministrationServicer):
    """`roundtable.v1.Administration`."""

    def __init__(
        self,
        database: Database,
        enrolment: Enrolment,
        principals: Principals,
        access: Access,
        audit: AuditLog,
        provenance: Provenance,
        clock: Callable[[], float],
    ) -> None:
        self._database, self._enrolment, self._principals = database, enrolment, principals
        self._access, self._audit = access, audit
        self._provenance, self._clock = provenance, clock

    @override
    async def Invite(self, request: pb.InviteRequest, context: Context) -> pb.InviteReply:
        found, expires = await self._enrolment.invite(
            request.silo, request.valid_seconds, request.uses, caller(context)
        )
        return pb.InviteReply(invitation=str(found), expires=expires)

    @override
    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeReply:
        """Also of an unknown name: its certificates may have been issued offline."""
        check_name(request.name)
        author, now = caller(context), self._clock()

        def work(connection: Connection) -> None:
            store.revoke(connection, request.name, author, request.reason[:500], now)
            store.void_invitations(connection, request.name, now)

        await self._database.write(work)
        await self._principals.refresh()
        calls = self._access.cut(request.name)
        log.warning("%s is revoked by %s", request.name, author, extra={"site": request.name})
        return pb.RevokeReply(calls=calls)

    @override
    async def CreateToken(self, request: pb.CreateTokenRequest, context: Context) -> pb.CreateTokenReply:
        check_name(request.name)
        if request.role not in OPERATOR_ROLES:
            raise _wrong(f"{request.role[:40]!r} is no role: use one of {', '.join(OPERATOR_ROLES)}")
        if not 60 <= request.valid_seconds <= LONGEST_TOKEN:
            raise _wrong("a token holds between a minute and 366 days")
        secret, now = Secret.fresh(), self._clock()
        row = store.TokenRow(
            request.name,
            secret.identifier,
            secret.digest,
            request.role,
            caller(context),
            now,
            now + request.valid_seconds,
        )
        if any(row.name == other.name and not other.revoked for other in await self._tokens()):
            raise Refusal(
                grpc.StatusCode.ALREADY_EXISTS,
                f"there is a token {row.name!r} already; revoke it first, or choose another name",
            )
        await self._database.write(lambda connection: store.add_token(connection, row))
        return pb.CreateTokenReply(token=secret.to_token(), expires=row.expires)

    @override
    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Context) -> pb.RevokeTokenReply:
        if not await self._database.write(lambda connection: store.revoke_token(connection, request.name)):
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"there is no token {request.name[:100]!r} that holds")
        self._access.cut(f"token:{request.name}")
        return pb.RevokeTokenReply()

    @override
    async def ListTokens(self, request: pb.ListTokensRequest, context: Context) -> pb.ListTokensReply:
        return pb.ListTokensReply(
            tokens=[
                pb.Token(
                    name=row.name,
                    role=row.role,
                    author=row.author,
                    created=row.created,
                    expires=row.expires,
                    revoked=row.revoked,
                )
                for row in await self._tokens()
            ]
        )

    @override
    async def ReadAudit(self, request: pb.ReadAuditRequest, context: Context) -> None:  # type: ignore[override]
        async for page in self._audit.lines(request.from_sequence):
            for lines in _parts(page):
                await context.write(pb.AuditLines(lines=lines))

    @override
    async def GetProvenance(self, request: pb.ProvenanceRequest, context: Context) -> pb.ProvenanceReply:
        return pb.ProvenanceReply(statement=await self._provenance.statement(request.job, request.round))

    async def _tokens(self) -> list[store.TokenRow]:
        return await self._database.read(store.all_tokens)


def _parts(lines: list[str]) -> Iterator[list[str]]:
    """As many lines at a time as a message holds."""
    part: list[str] = []
    size = 0
    for line in lines:
        if part and size + len(line) > MESSAGE_CHARACTERS:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line)
    yield part


def _wrong(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)
