"""The service for silos that were invited and have no certificate yet."""

from __future__ import annotations

import logging

from typing_extensions import override

from roundtable.proto import administration_pb2, administration_pb2_grpc, common_pb2
from roundtable.server.auth.access import Context, address_of, check_lockout
from roundtable.server.auth.enrolment import Enrolment
from roundtable.server.auth.rate_limit import Lockouts, WrongSecret
from roundtable.server.door.from_operators import enrolment_of
from roundtable.server.door.to_agents import certificates

log = logging.getLogger("roundtable.server.services.enrolling")


class EnrolmentService(administration_pb2_grpc.EnrolmentServicer):
    """`roundtable.v1.Enrolment`, for those who have no certificate yet."""

    def __init__(self, enrolment: Enrolment, lockouts: Lockouts, authority: bytes) -> None:
        self._enrolment = enrolment
        self._lockouts = lockouts
        self._authority = authority

    @override
    async def Authority(
        self, request: administration_pb2.AuthorityRequest, context: Context
    ) -> administration_pb2.AuthorityReply:
        return administration_pb2.AuthorityReply(certificate=self._authority)

    @override
    async def Enroll(
        self, request: administration_pb2.EnrollRequest, context: Context
    ) -> common_pb2.Certificates:
        address, wish = address_of(context), enrolment_of(request)
        secret = wish.secret
        check_lockout(self._lockouts, address, secret.identifier)
        try:
            found = await self._enrolment.enroll(secret, wish.requests)
        except WrongSecret:
            self._lockouts.wrong(address, secret.identifier)
            raise
        self._lockouts.right(address, secret.identifier)
        log.info("%s has enrolled", found.name, extra={"site": found.name})
        return certificates(found.name, found.node, found.identity)
