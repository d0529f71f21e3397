"""The agent-facing service: the control stream, downloads and uploads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import grpc
from typing_extensions import override

from roundtable.core.bounds import is_digest
from roundtable.core.errors import IdentityError, SiteFailure, StorageError
from roundtable.core.observability.logs import belongs_to
from roundtable.core.observability.released import Tells, is_told
from roundtable.core.observability.transfer_figures import ModelArrival
from roundtable.engine import messages as m
from roundtable.proto import PROTOCOL_VERSION, agent_pb2, agent_pb2_grpc, common_pb2
from roundtable.server.auth.access import (
    LINES_A_SECOND,
    LINES_AT_ONCE,
    Context,
    Refusal,
    caller,
    principal,
)
from roundtable.server.auth.rate_limit import RateLimit
from roundtable.server.door import agent_messages as said
from roundtable.server.door import from_agents as door
from roundtable.server.door import to_agents
from roundtable.server.door.from_operators import download_of
from roundtable.server.door.to_agents import CloneSighting
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.sessions import AgentSession
from roundtable.server.services import transfer
from roundtable.server.services.arrivals import Arrivals, Known
from roundtable.server.services.installations import Installations, shown_identity
from roundtable.server.services.job_logs import JobLogs
from roundtable.server.services.lines import Line, line_of, shown_in
from roundtable.server.services.security import Security
from roundtable.server.services.silo_reports import SiloReports
from roundtable.server.services.uploads import Part, Uploads
from roundtable.server.storage.artifact_store import DamagedArtifact
from roundtable.server.store import AgentRow
from roundtable.server.store.agent_rows import drain

log = logging.getLogger("roundtable.server.services.agents")

HELLO_SECONDS = 30.0
GOODBYE_SECONDS = 5.0
BREAKS_NOTICED = 5.0
"""After so many heartbeats at most a connection that has ended is known to have."""
MESSAGES_A_SECOND, MESSAGES_AT_ONCE = 200.0, 5000.0
TROUBLES_A_SECOND, TROUBLES_AT_ONCE = 60 / 3600, 30.0
DRAINS_A_SECOND, DRAINS_AT_ONCE = 10 / 3600, 10.0
CLOCK_TOLERANCE = 60.0
_ANSWERS = {"evaluated": "evaluation", "reply": "message of secure aggregation"}


class AgentService(agent_pb2_grpc.AgentsServicer):
    """`roundtable.v1.Agents`. The caller's name is its certificate's.

    Methods that answer with a stream write to the context: grpc.aio takes those as well as generators.
    """

    def __init__(
        self,
        jobs: JobRegistry,
        uploads: Uploads,
        services: JobServices,
        threads: ThreadPoolExecutor,
        version: str,
        authority: bytes,
        security: Security,
        logs: JobLogs,
        reports: SiloReports,
    ) -> None:
        self._relays = security.relayed
        self._jobs = jobs
        self._uploads = uploads
        self._services = services
        self._threads = threads
        self._version = version
        self._authority = authority
        self._security = security
        self._logs = logs
        self._reports = reports
        self._arrivals = Arrivals(services.database)
        self._installations = Installations(
            services.database, self._arrivals, security.audit, services.alerts, services.clock
        )
        self._messages = RateLimit(MESSAGES_A_SECOND, MESSAGES_AT_ONCE, time.monotonic)
        self._lines = RateLimit(LINES_A_SECOND, LINES_AT_ONCE, time.monotonic)
        self._troubles = RateLimit(TROUBLES_A_SECOND, TROUBLES_AT_ONCE, time.monotonic)
        self._drains = RateLimit(DRAINS_A_SECOND, DRAINS_AT_ONCE, time.monotonic)

    @override
    async def Connect(self, requests: AsyncIterator[agent_pb2.FromAgent], context: Context) -> None:  # type: ignore[override]
        await self.serve(line_of(aiter(requests), context))

    async def serve(self, line: Line) -> None:
        """Serves one agent's control stream from its hello to its end."""
        client, known, problem = await self._greet(line)
        if problem or known is None:
            log.warning("%s is refused: %s", client.name, problem, extra={"site": client.name})
            await line.write(to_agents.refused(problem))
            return
        clone = self._installations.sighting(line.shown.key, known.installations)
        welcome = self._welcome(clone)
        if not client.tasks:
            # A doctor: it has proven nothing, is heard no further, and takes nobody's place.
            await line.write(agent_pb2.ToAgent(welcome=welcome))
            with suppress(StopAsyncIteration, TimeoutError):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await anext(line.requests)
            return
        client = client.with_record(known.client)
        await self._arrivals.remember(client)
        await line.write(agent_pb2.ToAgent(welcome=welcome))
        session = self._services.sessions.open(client, line.shown)
        session.revocations, session.clone = welcome.revocations, clone
        listening = asyncio.get_running_loop().create_task(self._listen(session, line.requests))
        try:
            await self._tell_news(client, known.client)
            while (message := await session.outbox.get()) is not None:
                await line.write(message)
        finally:
            listening.cancel()
            self._services.sessions.close(session)

    @override
    async def Download(self, request: common_pb2.DownloadRequest, context: Context) -> None:  # type: ignore[override]
        wish, served = download_of(request), self._relays.silos_of(principal())
        if not is_digest(wish.digest) or not any(self._jobs.may_read(each, wish.digest) for each in served):
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"no instruction in force for {caller(context)} names the artifact {wish.digest[:12]!r}",
            )
        began = time.monotonic()
        try:
            size = await transfer.send_artifact(context, self._services.artifacts, wish, self._threads)
        except DamagedArtifact as error:
            self._jobs.damaged(error)
            raise
        if principal().source != "relay":
            # What a relay loads is for all of its silos.
            self._jobs.sent(caller(context), wish.digest, ModelArrival(size, time.monotonic() - began))

    @override
    async def UploadStatus(self, request: agent_pb2.UploadHeader, context: Context) -> agent_pb2.UploadState:
        return await self._uploads.status(caller(context), door.offer_of(request))

    @override
    async def Upload(  # type: ignore[override]
        self, requests: AsyncIterator[Part], context: Context
    ) -> agent_pb2.UploadReceipt:
        name, seen = caller(context), transfer.Seen(requests)
        belongs_to(seen.place)
        return await self._uploads.receive(name, seen)

    @override
    async def Renew(self, request: agent_pb2.RenewRequest, context: Context) -> common_pb2.Certificates:
        renewal = door.renewal_of(request)
        own = next(iter(context.auth_context()["x509_pem_cert"]))
        shown = renewal.node if principal().source == "relay" else own
        made = await self._security.enrolment.renew(caller(context), shown, renewal)
        return to_agents.certificates(made.name, made.node, made.identity)

    async def _tell_news(self, client: AgentRow, before: AgentRow | None) -> None:
        """Tells an agent that is here what has come up meanwhile; `before` is how it was last."""
        breaks = BREAKS_NOTICED * self._services.sessions.heartbeat
        since = None if before is None else before.last_seen - breaks
        news = await self._arrivals.news(client.name, since, self._services.clock())
        await self._jobs.tell_what_ended(client, news.ended)
        if news.report is not None:
            self._services.sessions.send(client.name, to_agents.report_wish(news.report))

    async def _greet(self, line: Line) -> tuple[AgentRow, Known | None, str]:
        """Reads the agent's introduction; returns it, with what is stored of it and the reason why it is
        refused, or an empty one."""
        name = line.name
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(line.requests)
        except (TimeoutError, StopAsyncIteration):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "a control stream begins with a hello") from None
        hello, now = door.message_of(first), self._services.clock()
        if not isinstance(hello, said.Introduction):
            problem = f" ({hello.reason})" if isinstance(hello, said.RefusedMessage) else ""
            row = AgentRow(name, "", (), {}, (), now, now)
            return row, None, f"a control stream begins with a hello{problem}"
        client = hello.row(name, now, line.relay)
        if hello.protocol != PROTOCOL_VERSION:
            return (
                client,
                None,
                (
                    f"the agent {hello.version or 'of an unknown version'} speaks protocol {hello.protocol}, "
                    f"this coordinator {self._version} speaks protocol {PROTOCOL_VERSION}: install the same "
                    "version on both"
                ),
            )
        if abs(hello.clock - now) > CLOCK_TOLERANCE:
            log.warning(
                "the clock of %s differs by %.0f s: certificates and logs will not fit together",
                name,
                hello.clock - now,
                extra={"site": name},
            )
        if not client.tasks:
            # It is asked for nothing, and speaks for nobody.
            known = await self._arrivals.known(name, (line.shown.key,), hello)
            return client, known, self._arrivals.forgotten(self._jobs, hello, known)
        try:
            identity = shown_identity(name, hello.identity, self._authority, self._security.principals)
        except IdentityError as error:
            return client, None, str(error)
        keys = [line.shown.key]
        if identity is not None and (own := shown_in(identity.certificate).key) not in keys:
            keys.append(own)
        known = await self._arrivals.known(name, keys, hello)
        if old := self._arrivals.forgotten(self._jobs, hello, known):
            return client, known, old
        if clone := await self._installations.objection(line, hello.installation, keys, known.installations):
            return client, known, clone
        self._services.sessions.know(name, identity)
        return client, known, ""

    def _welcome(self, clone: CloneSighting | None) -> agent_pb2.Welcome:
        return agent_pb2.Welcome(
            version=self._version,
            coordinator=self._services.database.identity,
            heartbeat_seconds=self._services.sessions.heartbeat,
            clock=self._services.clock(),
            identity=self._security.identity.certificate if self._security.identity else b"",
            revocations=self._security.principals.list_for_agents,
            clone=to_agents.clone_seen(clone),
        )

    async def _listen(self, session: AgentSession, requests: AsyncIterator[agent_pb2.FromAgent]) -> None:
        """Handles the agent's messages until its stream ends; then ends the session."""
        try:
            async for message in requests:
                session.heard = time.monotonic()
                if not self._messages.allows(session.name):
                    session.end("too many messages in a short time")
                    return
                match door.message_of(message):
                    case said.MaintenanceNews(reason) if self._drains.allows(session.name):
                        await self._drained(session, reason)
                    case said.MaintenanceNews():
                        # Each is an entry of the histories of jobs; its next hello says how things stand.
                        self._warn(session.name, f"{session.name} is drained and resumed too often")
                        return
                    case said.LinesShared() as shared:
                        await self._keep_lines(session, shared)
                    case said.ReportSaid() as report:
                        await self._keep_report(session, report)
                    case heard:
                        self._hear(session, heard)
        except grpc.aio.UsageError:
            log.debug("the stream of %s is gone", session.name)
        finally:
            session.end()

    def _hear(self, session: AgentSession, message: said.AgentMessage) -> None:
        name = session.name
        match message:
            case said.Beat(state):
                session.state = state
                session.send(to_agents.heartbeat())
                self._hand_on_the_list(session)
                self._tell_of_a_clone(session)
            case said.SelfHelp() if not self._troubles.allows(name):
                # Each is an entry of the job's history.
                self._warn(name, f"a message of {name} is refused: it tells of more troubles than are kept")
            case said.Begun() | said.SelfHelp() | said.Evaluation():
                if runner := self._jobs.runner(message.at.job):
                    runner.instructions.heard(session, message, told=runner.tells_cohorts)
                    runner.inbox.post(message.event(name))
            case said.ProgressReport():
                self._progressed(name, message)
            case said.GivenUp(at):
                if runner := self._jobs.runner(at.job):
                    runner.give_up_on(at.step, message.failure(name))
            case said.ProtocolReply(at, payload):
                if runner := self._jobs.runner(at.job):
                    runner.collection.exchanged(name, at.step, payload)
            case said.Farewell(reason):
                self._goodbye(session, reason)
            case said.RefusedMessage():
                self._refuse(name, message)
            case _:
                self._warn(name, f"{name} says again what only a stream's beginning holds")

    async def _drained(self, session: AgentSession, reason: str) -> None:
        name, site = session.name, {"site": session.name}
        await self._services.together.write(lambda connection: drain(connection, name, reason))
        session.client = replace(session.client, drained=reason)
        said = f"is drained: {reason}" if reason else "takes part again"
        log.info("%s %s", name, said, extra=site)
        self._jobs.held(session.client)

    async def _keep_lines(self, session: AgentSession, shared: said.LinesShared) -> None:
        """Keeps what a silo shares of its log; it sends again what could not be stored."""
        try:
            problem = await self._logs.take(session.name, shared)
        except StorageError as error:
            self._warn(session.name, f"lines of the log of {session.name} are not kept for now: {error}")
            return
        session.send(to_agents.lines_taken(shared.lines[-1].number))
        if problem:
            self._warn(session.name, problem)

    async def _keep_report(self, session: AgentSession, report: said.ReportSaid) -> None:
        """Keeps what a silo says to a request of operators; it says it again where that cannot be stored."""
        try:
            asked = await self._reports.heard(session.name, report)
        except StorageError as error:
            self._warn(session.name, f"a report of {session.name} is not kept for now: {error}")
            return
        if not asked:
            self._warn(session.name, f"{session.name} sends a report that nobody has asked for")
        if report.status != "shown":
            session.send(to_agents.report_taken(report.request))

    def _warn(self, name: str, problem: str) -> None:
        """Logs what is wrong with a silo's message, so many times that it cannot fill the log."""
        if self._lines.allows(name):
            log.warning("%s", problem, extra={"site": name})

    def _progressed(self, name: str, message: said.ProgressReport) -> None:
        runner = self._jobs.runner(message.at.job)
        # What must not be told is not kept: an honest agent does not send it.
        if runner is not None and is_told(runner.job.privacy, Tells.SILO):
            runner.instructions.report(name, message.at.step, message.progress)
            runner.inbox.notify()

    def _refuse(self, name: str, message: said.RefusedMessage) -> None:
        """Drops a message that does not pass. An answer fails the silo's step, and the silo hears why."""
        self._warn(name, f"a message of {name} is refused: {message.reason}")
        at = message.at
        runner = self._jobs.runner(at.job) if at else None
        if at is None or runner is None or message.kind not in _ANSWERS:
            return
        problem = f"its {_ANSWERS[message.kind]} is refused: {message.reason}"
        step = at.step
        if runner.instructions.step_of(name) == step:
            runner.instructions.withdraw(m.Withdraw(name, step, problem))
        runner.give_up_on(
            step, SiteFailure(name, step.round, step.attempt, step.phase, "invalid_update", problem)
        )

    def _hand_on_the_list(self, session: AgentSession) -> None:
        """Sends the root's revocation list if the agent has an older one."""
        newest = self._security.principals.list_for_agents
        if newest != session.revocations:
            session.revocations = newest
            session.send(to_agents.revocations(newest))

    def _tell_of_a_clone(self, session: AgentSession) -> None:
        """Tells the silo's own agent who has come with its credentials since it was told last."""
        newest = self._installations.news(session.shown.key)
        if newest is not None and newest != session.clone:
            session.clone = newest
            session.send(to_agents.clone(newest))

    def _goodbye(self, session: AgentSession, reason: str) -> None:
        """Gives up on what an agent was asked that leaves on purpose."""
        detail = f"the agent has left: {reason or 'no reason given'}"
        for runner in self._jobs.runners():
            step = runner.instructions.step_of(session.name)
            if step is not None:
                failure = SiteFailure(
                    session.name, step.round, step.attempt, step.phase, "node_failure", detail
                )
                runner.give_up_on(step, failure)
        session.end()
