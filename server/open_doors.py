"""The coordinator's gRPC servers: one for all callers, or one for agents and relays and one for operators.

A server of gRPC takes calls in one after the other, about one in two turns of the event loop. So an
operator's call at the server that agents use stands behind a thousand uploads that have come before it; at
one of its own behind none.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc

from roundtable.core.evidence.release import release
from roundtable.core.identity.credentials import Credentials
from roundtable.proto import agent_pb2_grpc, operator_pb2_grpc, relay_pb2_grpc
from roundtable.proto.channel import SERVER_OPTIONS
from roundtable.proto.pieces import PieceHandlers
from roundtable.server.auth.access import Gate
from roundtable.server.auth.separate_doors import Door, agents_door, operators_door
from roundtable.server.config import ServerConfig
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.services.agents import AgentService
from roundtable.server.services.incoming_sums import IncomingSums
from roundtable.server.services.job_logs import JobLogs
from roundtable.server.services.local_calls import LocalCalls
from roundtable.server.services.operators import OperatorService
from roundtable.server.services.relays import AboveAll, RelayService
from roundtable.server.services.security import Security
from roundtable.server.services.silo_reports import SiloReports
from roundtable.server.services.storing import Storing
from roundtable.server.services.upload_receipts import Receipts
from roundtable.server.services.uploads import Uploads


class OpenDoors:
    """All addresses of a coordinator that is active, but those of its pages; they are served from `start` on.

    `port` and `operators_port` are those that were opened; the second is 0 where operators have no address of
    their own.
    """

    def __init__(
        self,
        config: ServerConfig,
        jobs: JobRegistry,
        services: JobServices,
        security: Security,
        credentials: Credentials,
        logs: JobLogs,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._config = config
        self._security = security
        self._servers: list[grpc.aio.Server] = []
        self.port = self.operators_port = 0
        version = release().version
        reports = SiloReports(services)
        receipts = Receipts(security.identity, lambda: security.audit.sealed, services.clock)
        uploads = Uploads(jobs, services, threads, credentials.ca, receipts)
        self._agents = AgentService(
            jobs, uploads, services, threads, version, credentials.ca, security, logs, reports
        )
        sums = IncomingSums(uploads, services, security.relayed, receipts, threads, credentials.ca)
        above = AboveAll(self._agents, services)
        self._relays = RelayService(
            above, security.access, security.relayed, security.principals, version, sums
        )
        storing = Storing(services, threads, config.max_artifact_bytes, security.quotas)
        self._operators = OperatorService(
            jobs,
            services,
            threads,
            version,
            storing,
            security.quotas,
            credentials.ca,
            security.identity,
            logs,
            reports,
        )
        named = {"Operators": self._operators, "Administration": security.administration}
        self.calls = LocalCalls(security.access, named)

    def listen(self, address: str, operators: str) -> None:
        """Opens the addresses, host:port; `operators` is "" where operators use the one of agents.

        ResourceError if one is taken.
        """
        security = self._security
        if not operators:
            server = self._serve(None)
            self.port = security.listen(server, address)
            security.listen_without_certificates(server)
            return
        agents = self._serve(agents_door(lambda: _with_port(operators, self.operators_port)))
        self.port = security.listen(agents, address)
        apart = self._serve(operators_door(lambda: self._config.announce or _with_port(address, self.port)))
        self.operators_port = security.listen(apart, operators, "operators")
        security.listen_without_certificates(apart)

    async def start(self) -> None:
        """Answers from now on."""
        for server in self._servers:
            await server.start()

    def end_streams(self) -> None:
        """Ends the streams of relays: the coordinator stops."""
        self._relays.end_all()

    async def stop(self, seconds: float) -> None:
        """Takes no more calls, and ends those that go on for longer than this."""
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))

    def _serve(self, door: Door | None) -> grpc.aio.Server:
        """A server of all services; what has its place at the other door is refused there by name."""
        most = (("grpc.max_allowed_incoming_connections", self._config.quotas.connections),)
        access = self._security.access
        gate = access if door is None else Gate(access, door)
        server = grpc.aio.server(interceptors=[gate], options=SERVER_OPTIONS + most)
        server.add_generic_rpc_handlers((PieceHandlers(self._agents, self._operators),))
        agent_pb2_grpc.add_AgentsServicer_to_server(self._agents, server)
        operator_pb2_grpc.add_OperatorsServicer_to_server(self._operators, server)
        relay_pb2_grpc.add_RelaysServicer_to_server(self._relays, server)
        self._security.add_services(server)
        self._servers.append(server)
        return server


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
