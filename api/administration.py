"""What an operator asks of a coordinator about who may take part, and what was done."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from roundtable.core.paths import AnyPath
from roundtable.operator import OperatorClient
from roundtable.proto import administration_pb2 as pb
from roundtable.proto import administration_pb2_grpc

_SECONDS = 30.0


class Administrator(OperatorClient):
    """An operator's connection with the calls of `roundtable.v1.Administration` besides."""

    def __init__(self, address: str, credentials: AnyPath) -> None:
        super().__init__(address, credentials)
        self._admin = administration_pb2_grpc.AdministrationStub(self._channel)

    def invite(self, silo: str, seconds: float, uses: int) -> pb.InviteReply:
        """A new invitation; its secret is shown this once."""
        request = pb.InviteRequest(silo=silo, valid_seconds=seconds, uses=uses)
        with self._translated():
            return self._admin.Invite(request, timeout=_SECONDS)

    def revoke(self, name: str, reason: str, role: str = "agent") -> pb.RevokeReply:
        """Voids every certificate of this party at once; an administrator's once a second one confirms it."""
        request = pb.RevokeRequest(name=name, reason=reason, role=role)
        with self._translated():
            return self._admin.Revoke(request, timeout=_SECONDS)

    def open_page(self) -> pb.OpenPageReply:
        """A word with which a browser signs in to the page once, as the holder of these credentials."""
        with self._translated():
            return self._admin.OpenPage(pb.OpenPageRequest(), timeout=_SECONDS)

    def confirm(self, request_id: str) -> pb.RevokeReply:
        """Does what another administrator has asked for."""
        with self._translated():
            return self._admin.Confirm(pb.ConfirmRequest(request_id=request_id), timeout=_SECONDS)

    def pending(self) -> list[pb.Pending]:
        """What waits for a second administrator, the oldest first."""
        with self._translated():
            return list(self._admin.ListPending(pb.ListPendingRequest(), timeout=_SECONDS).pending)

    def create_token(self, name: str, role: str, seconds: float) -> pb.CreateTokenReply:
        """A new operator's token; its secret is shown this once."""
        request = pb.CreateTokenRequest(name=name, role=role, valid_seconds=seconds)
        with self._translated():
            return self._admin.CreateToken(request, timeout=_SECONDS)

    def tokens(self) -> list[pb.Token]:
        """Every token, without its secret."""
        with self._translated():
            return list(self._admin.ListTokens(pb.ListTokensRequest(), timeout=_SECONDS).tokens)

    def revoke_token(self, name: str) -> pb.RevokeTokenReply:
        """Voids a token at once; another administrator's once a second person confirms it."""
        with self._translated():
            return self._admin.RevokeToken(pb.RevokeTokenRequest(name=name), timeout=_SECONDS)

    def audit(self, first: int = 1, live: bool = False) -> Iterator[str]:
        """The audit log's lines from an entry on, signed up to its end; of a `live` one without archives."""
        with self._translated():
            for part in self._admin.ReadAudit(pb.ReadAuditRequest(from_sequence=first, live=live)):
                yield from part.lines

    def audit_archives(self) -> Iterator[str]:
        """The lines of the statements of all archives of the audit log."""
        return takewhile(lambda line: line.startswith('{"archive"'), self.audit(live=True))

    def provenance(self, job: str, round_number: int = 0) -> str:
        """The coordinator's signed statement of where a job's model comes from."""
        with self._translated():
            request = pb.ProvenanceRequest(job=job, round=round_number)
            return self._admin.GetProvenance(request, timeout=_SECONDS).statement
