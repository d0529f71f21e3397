"""Who may take part and what was done: invitations, revocation, tokens, the audit log, provenance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import grpc
from sqlalchemy.engine import Connection
from typing_extensions import override

from roundtable.core.evidence.audit_log import entry
from roundtable.core.identity.credentials import OPERATOR_ROLES, Role
from roundtable.core.identity.invitation import Secret
from roundtable.proto import administration_pb2 as pb
from roundtable.proto import administration_pb2_grpc
from roundtable.server.auth.access import Access, Context, Refusal, caller, principal
from roundtable.server.auth.audit import AuditLog
from roundtable.server.auth.enrolment import Enrolment
from roundtable.server.auth.page_sessions import DashboardTable, PageSessions
from roundtable.server.auth.permissions import RANKS, outranks
from roundtable.server.auth.principals import Principal, Principals
from roundtable.server.auth.provenance import Provenance
from roundtable.server.auth.second_person import SecondPerson
from roundtable.server.door import from_operators as door
from roundtable.server.store import Database
from roundtable.server.store import audit as audit_store
from roundtable.server.store import trust_rows as store
from roundtable.server.store.page_session_rows import end_sessions_of

log = logging.getLogger("roundtable.server.services.administration")

_ANY = ("", "0.0.0.0", "[::]")
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
        second_person: SecondPerson,
        pages: PageSessions,
        dashboard: DashboardTable,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._enrolment = enrolment
        self._principals = principals
        self._access = access
        self._audit = audit
        self._provenance = provenance
        self._second_person = second_person
        self._pages = pages
        self._dashboard = dashboard
        self._clock = clock

    @override
    async def Invite(self, request: pb.InviteRequest, context: Context) -> pb.InviteReply:
        wish = door.invitation_of(request)
        found, expires = await self._enrolment.invite(wish.silo, wish.seconds, wish.uses, caller(context))
        return pb.InviteReply(invitation=str(found), expires=expires)

    @override
    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeReply:
        """Revokes a name, also one that is unknown here: its certificates may have been issued offline."""
        wish, who = door.revocation_of(request), principal()
        role = _role(wish.role)
        if role == who.role == "admin":
            row = await self._second_person.ask(who, "revoke", role, wish.name, wish.reason)
            return pb.RevokeReply(pending=row.identifier)
        if not outranks(who.role, role):
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{who.name!r} is here as {who.role}, and revokes only who ranks below: "
                f"{', '.join(RANKS[: RANKS.index(who.role)])}",
            )
        party = role, wish.name
        await self._database.write(lambda connection: self._void(connection, who, party, wish.reason))
        return pb.RevokeReply(calls=await self._cut_off(party, who))

    @override
    async def OpenPage(self, request: pb.OpenPageRequest, context: Context) -> pb.OpenPageReply:
        who, table = principal(), self._dashboard
        if not table.listen:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this coordinator serves no page: set `listen` of [dashboard] in its coordinator.toml",
            )
        if who.source != "certificate":
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this is for holders of a certificate: with a token, type that token at the page",
            )
        word, expires = self._pages.invite(who)
        host, _, port = table.listen.rpartition(":")
        host = table.hosts[0] if table.hosts else "" if host in _ANY else host
        return pb.OpenPageReply(word=word, host=host, port=int(port), tls=table.tls, expires=expires)

    @override
    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.RevokeReply:
        who, identifier = principal(), door.confirmation_of(request)

        def work(connection: Connection) -> store.Party:
            row = self._second_person.confirmed(connection, who, identifier)
            if row.action == "revoke":
                self._void(connection, who, (row.role, row.name), row.reason)
                return row.role, row.name
            if (token := store.token_named(connection, row.name)) is not None:
                self._void_token(connection, who, token)
            return row.role, f"token:{row.name}"

        party = await self._database.write(work)
        return pb.RevokeReply(calls=await self._cut_off(party, who))

    @override
    async def ListPending(self, request: pb.ListPendingRequest, context: Context) -> pb.ListPendingReply:
        return pb.ListPendingReply(
            pending=[
                pb.Pending(
                    request_id=row.identifier,
                    action=row.action,
                    role=row.role,
                    name=row.name,
                    reason=row.reason,
                    author=row.author,
                    created=row.created,
                    expires=row.expires,
                )
                for row in await self._second_person.waiting()
            ]
        )

    @override
    async def CreateToken(self, request: pb.CreateTokenRequest, context: Context) -> pb.CreateTokenReply:
        wish = door.token_of(request)
        if wish.role not in OPERATOR_ROLES:
            raise _wrong(f"{wish.role!r} is not a role: use one of {', '.join(OPERATOR_ROLES)}")
        if not 60 <= wish.seconds <= LONGEST_TOKEN:
            raise _wrong("a token holds between a minute and 366 days")
        secret, now = Secret.fresh(), self._clock()
        row = store.TokenRow(
            wish.name,
            secret.identifier,
            secret.digest,
            wish.role,
            principal().label,
            now,
            now + wish.seconds,
        )
        if any(row.name == other.name and not other.revoked for other in await self._tokens()):
            raise Refusal(
                grpc.StatusCode.ALREADY_EXISTS,
                f"there is a token {row.name!r} already; revoke it first, or choose another name",
            )

        def work(connection: Connection) -> None:
            store.add_token(connection, row)
            detail = {
                "identifier": row.identifier,
                "digest": row.digest,
                "role": row.role,
                "expires": row.expires,
            }
            audit_store.append(connection, entry(now, row.author, "token_created", row.name, detail))

        await self._database.write(work)
        return pb.CreateTokenReply(token=secret.to_token(), expires=row.expires)

    @override
    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Context) -> pb.RevokeTokenReply:
        """An administrator's token is voided by who made it, or by two administrators."""
        who, name = principal(), door.token_name_of(request)
        row = await self._database.read(lambda connection: store.token_named(connection, name))
        if row is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"there is no token {name!r} that holds")
        if row.role == "admin" and row.author != who.label:
            wish = await self._second_person.ask(who, "revoke_token", row.role, row.name)
            return pb.RevokeTokenReply(pending=wish.identifier)
        await self._database.write(lambda connection: self._void_token(connection, who, row))
        self._access.cut((row.role, f"token:{row.name}"))
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
        async for page in self._audit.lines(door.place_of(request.from_sequence), request.live):
            for lines in _parts(page):
                await context.write(pb.AuditLines(lines=lines))

    @override
    async def GetProvenance(self, request: pb.ProvenanceRequest, context: Context) -> pb.ProvenanceReply:
        job, round = door.job_of(request), door.round_of(request)
        statement = await self._provenance.statement(job, principal().party, round)
        return pb.ProvenanceReply(statement=statement)

    def _void(self, connection: Connection, who: Principal, party: store.Party, reason: str) -> None:
        """Revokes a party, and notes it in the same transaction."""
        (role, name), now = party, self._clock()
        store.revoke(connection, party, who.label, reason, now)
        end_sessions_of(connection, role, name)
        if role == "agent":
            store.void_invitations(connection, name, now)
        detail = {"role": role, "reason": reason}
        audit_store.append(connection, entry(now, who.label, "revoked", name, detail))

    def _void_token(self, connection: Connection, who: Principal, row: store.TokenRow) -> None:
        """Revokes a token, and notes it in the same transaction."""
        store.revoke_token(connection, row.identifier)
        detail = {"identifier": row.identifier, "role": row.role}
        audit_store.append(connection, entry(self._clock(), who.label, "token_revoked", row.name, detail))

    async def _cut_off(self, party: store.Party, who: Principal) -> int:
        """Ends the calls of a party that has been revoked; how many there were."""
        await self._principals.refresh()
        log.warning("%s %s is revoked by %s", *party, who.label, extra={"site": party[1]})
        return self._access.cut(party)

    async def _tokens(self) -> list[store.TokenRow]:
        return await self._database.read(store.all_tokens)


def _parts(lines: list[str]) -> Iterator[list[str]]:
    """Splits lines into parts that each fit into one message."""
    part: list[str] = []
    size = 0
    for line in lines:
        if part and size + len(line) > MESSAGE_CHARACTERS:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line)
    yield part


def _role(stated: str) -> Role:
    for role in RANKS:
        if role == stated:
            return role
    raise _wrong(f"{stated!r} cannot be revoked here: use one of {', '.join(RANKS)}")


def _wrong(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)
