"""The operator-facing service: jobs, clients, artifacts, status."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typing_extensions import override

from roundtable.core.bounds import is_digest
from roundtable.core.errors import StorageError
from roundtable.core.evidence.audit_log import entry
from roundtable.core.identity.credentials import SiloIdentity, identity_of
from roundtable.core.identity.signing import VOUCHED_FOR, check_submission, job_identifier, job_values, vouch
from roundtable.engine import messages as m
from roundtable.proto import EVENTS_AT_ONCE, common_pb2, operator_pb2, operator_pb2_grpc
from roundtable.server.auth.access import Context, Refusal, caller, principal
from roundtable.server.auth.quotas import Quotas
from roundtable.server.door import from_operators as door
from roundtable.server.door import to_operators
from roundtable.server.jobs import privacy_report as reports
from roundtable.server.jobs.job_driver import Submission, stored_plan, with_settled_noise
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.services import transfer
from roundtable.server.services.job_logs import JobLogs
from roundtable.server.services.shown_jobs import ShownJobs
from roundtable.server.services.silo_reports import SiloReports
from roundtable.server.services.storing import Storing
from roundtable.server.services.watching import add_faults_and_setups, detail_of, updates
from roundtable.server.store import FINAL, AgentRow, JobRow, tables
from roundtable.server.store.agent_rows import all_clients, disable
from roundtable.server.store.artifacts import is_readable
from roundtable.server.store.audit import append
from roundtable.server.store.history_rows import history_within
from roundtable.server.store.jobs import UnknownJob, last_sequence
from roundtable.server.store.ledger import Limit, entries, limits, remove_budget, totals
from roundtable.server.store.trust_rows import revoked_silos

log = logging.getLogger("roundtable.server.services.operators")

MAX_HISTORY_BYTES = 3 << 20
SIGNED_SECONDS = 3600.0
"""How far from now a submission may state to have been signed."""


class OperatorService(operator_pb2_grpc.OperatorsServicer):
    """`roundtable.v1.Operators`. The caller's name is its certificate's.

    Methods that answer with a stream write to the context: grpc.aio takes those as well as generators.
    """

    def __init__(
        self,
        jobs: JobRegistry,
        services: JobServices,
        threads: ThreadPoolExecutor,
        version: str,
        storing: Storing,
        quotas: Quotas,
        authority: bytes,
        identity: SiloIdentity | None,
        logs: JobLogs,
        reports: SiloReports,
    ) -> None:
        self._jobs = jobs
        self._services = services
        self._shown = ShownJobs(services.artifacts)
        self._threads = threads
        self._version = version
        self._storing = storing
        self._quotas = quotas
        self._authority = authority
        self._identity = identity
        self._logs = logs
        self._reports = reports
        self._name = identity_of(identity.certificate)[0] if identity else services.database.identity
        self._started = time.monotonic()

    @override
    async def Status(self, request: operator_pb2.StatusRequest, context: Context) -> operator_pb2.StatusReply:
        database = self._services.database
        try:
            await database.read(
                lambda connection: connection.execute(sa.select(tables.coordinator.c.id)).first()
            )
            condition = database.url
        except StorageError as error:
            condition = str(error)
        return operator_pb2.StatusReply(
            version=self._version,
            coordinator=database.identity,
            clock=self._services.clock(),
            uptime_seconds=time.monotonic() - self._started,
            clients_online=len(self._services.sessions),
            jobs_running=self._jobs.running,
            database=condition,
            disk_free=self._services.artifacts.free_bytes(),
            identity=self._identity.certificate if self._identity else b"",
            caller=principal().label,
        )

    @override
    async def PutArtifact(
        self, requests: AsyncIterator[operator_pb2.PutPart], context: Context
    ) -> operator_pb2.PutReply:
        return await self._storing.receive(requests)

    @override
    async def GetArtifact(self, request: common_pb2.DownloadRequest, context: Context) -> None:  # type: ignore[override]
        wish, read = door.download_of(request), self._services.database.read
        # One answer for what is not here and for what is not for operators: nobody learns which it is.
        if not is_digest(wish.digest) or not await read(lambda c: is_readable(c, wish.digest)):
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"there is no artifact {wish.digest!r} here that operators may read: older models "
                "are not kept for ever, updates of silos and states of noise and server optimizers do not "
                "leave the coordinator",
            )
        await transfer.send_artifact(context, self._services.artifacts, wish, self._threads)

    @override
    async def SubmitJob(self, request: operator_pb2.SubmitJobRequest, context: Context) -> operator_pb2.Job:
        submission = self._proven(door.submission_of(request), caller(context))
        label = principal().label
        job = await self._jobs.submit(submission, lambda living: self._quotas.submit(label, living))
        return self._shown.job(job)

    @override
    async def ListJobs(
        self, request: operator_pb2.ListJobsRequest, context: Context
    ) -> operator_pb2.ListJobsReply:
        return operator_pb2.ListJobsReply(jobs=[self._shown.followed(row) for row in await self._jobs.rows()])

    @override
    async def GetJob(self, request: operator_pb2.GetJobRequest, context: Context) -> operator_pb2.JobDetail:
        wish = door.history_of(request)
        row = await self._find(wish.job)
        most = wish.rounds, MAX_HISTORY_BYTES
        records = await self._services.database.read(lambda c: history_within(c, row.id, wish.between, *most))
        detail = detail_of(row, self._jobs.runner(row.id), self._shown.job(row))
        detail.job_config = row.config
        first = common_pb2.Artifact(digest=row.initial_model, size=self._shown.size(row.initial_model))
        detail.initial_model.CopyFrom(first)
        detail.history.extend(records)
        await add_faults_and_setups(detail, self._services, row.id)
        return detail

    @override
    async def WatchJob(self, request: operator_pb2.WatchJobRequest, context: Context) -> None:  # type: ignore[override]
        row = await self._find(door.job_of(request))
        first = door.place_of(request.from_sequence)
        if request.newest:
            known = await self._services.database.read(lambda connection: last_sequence(connection, row.id))
            first = max(1, known + 1 - min(request.newest, EVENTS_AT_ONCE))
        what = self._jobs, self._services, row.id, first, self._shown.followed
        async for update in updates(*what, listed=request.clients):
            await context.write(update)

    @override
    async def ReadJobLog(self, request: operator_pb2.JobLogRequest, context: Context) -> None:  # type: ignore[override]
        wish = door.log_of(request)
        row = await self._find(wish.job)
        self._check_own(row, "reads the logs of")
        async for lines in self._logs.read(row.id, wish):
            await context.write(to_operators.log_page(lines))

    @override
    async def CancelJob(self, request: operator_pb2.JobRequest, context: Context) -> operator_pb2.Job:
        return await self._change(door.job_of(request), m.Cancel(f"cancelled by {caller(context)}"))

    @override
    async def PauseJob(self, request: operator_pb2.JobRequest, context: Context) -> operator_pb2.Job:
        return await self._change(door.job_of(request), m.Pause(f"paused by {caller(context)}"))

    @override
    async def ResumeJob(self, request: operator_pb2.JobRequest, context: Context) -> operator_pb2.Job:
        return await self._change(door.job_of(request), m.Resume(queued=True))

    @override
    async def ListQueue(
        self, request: operator_pb2.ListQueueRequest, context: Context
    ) -> operator_pb2.ListQueueReply:
        places = [to_operators.place_to(self._shown.job(row), place) for row, place in self._jobs.places()]
        return operator_pb2.ListQueueReply(jobs=places)

    @override
    async def MoveJob(self, request: operator_pb2.MoveJobRequest, context: Context) -> operator_pb2.Job:
        job, priority, hold = door.move_of(request)
        return await self._change(job, m.MovedInQueue(priority, hold))

    @override
    async def DeleteJob(self, request: operator_pb2.JobRequest, context: Context) -> operator_pb2.Job:
        row = await self._find(door.job_of(request), own=True)
        self._check_own(row)
        who = principal().label
        if remedy := await self._jobs.delete(row, who):
            message = f"job {row.id} ({row.name}) is {row.status} and was not deleted: {remedy}"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, message)
        log.info("%s deleted job %s", who, row.id, extra={"job": row.id})
        return self._shown.job(await self._jobs.row(row.id))

    @override
    async def ListClients(
        self, request: operator_pb2.ListClientsRequest, context: Context
    ) -> operator_pb2.ListClientsReply:
        read, secret = self._services.database.read, self._jobs.tasks_in_secret()
        rows, gone = await read(lambda c: (all_clients(c), revoked_silos(c)))
        return operator_pb2.ListClientsReply(
            clients=[self._client(row, secret, row.name in gone) for row in rows]
        )

    @override
    async def DisableClient(
        self, request: operator_pb2.DisableClientRequest, context: Context
    ) -> operator_pb2.Client:
        name, reason = door.asking_of(request)
        return await self._hold(name, reason, "client_disabled")

    @override
    async def EnableClient(
        self, request: operator_pb2.EnableClientRequest, context: Context
    ) -> operator_pb2.Client:
        return await self._hold(door.named_of(request), "", "client_enabled")

    @override
    async def AskReport(
        self, request: operator_pb2.AskReportRequest, context: Context
    ) -> operator_pb2.Report:
        silo, reason = door.asking_of(request)
        return to_operators.report_to(await self._reports.ask(silo, reason, principal().label))

    @override
    async def ShowReport(
        self, request: operator_pb2.ShowReportRequest, context: Context
    ) -> operator_pb2.Report:
        return to_operators.report_to(await self._reports.newest(door.named_of(request)))

    @override
    async def ShowPrivacy(
        self, request: operator_pb2.PrivacyRequest, context: Context
    ) -> operator_pb2.PrivacyReply:
        population, delta = door.population_of(request), door.delta_of(request)
        found, kept = await self._services.database.read(lambda c: reports.books(c, population))
        accounts = await asyncio.to_thread(reports.accounts_at, found, delta)
        limits = [each.limit for each in found if each.limit is not None]
        return to_operators.privacy_reply(accounts, limits, kept)

    @override
    async def ShowJobPrivacy(
        self, request: operator_pb2.JobRequest, context: Context
    ) -> operator_pb2.JobPrivacy:
        row = await self._find(door.job_of(request))
        job, layout, plan = await asyncio.to_thread(stored_plan, row, self._services)
        whose = self._services.populations.of(job)
        known, found = await self._services.database.read(lambda c: (totals(c, whose), limits(c)))
        settled = with_settled_noise(job, row.snapshot["noise"])
        told = await asyncio.to_thread(
            reports.job_privacy, row, settled, layout.sent.size, plan, whose, known, found.get(whose)
        )
        return to_operators.job_privacy_to(told)

    @override
    async def SetPrivacyBudget(
        self, request: operator_pb2.PrivacyBudget, context: Context
    ) -> operator_pb2.PrivacyBudget:
        budget = door.budget_of(request)
        limit = Limit(budget, caller(context), self._services.clock())
        await self._jobs.limit(limit)
        log.info("%s set the privacy budget of %r to %s", limit.author, budget.population, budget.epsilon)
        return to_operators.limit_to(limit)

    @override
    async def RemovePrivacyBudget(
        self, request: operator_pb2.PrivacyRequest, context: Context
    ) -> operator_pb2.PrivacyBudget:
        population = door.population_of(request)
        found = await self._services.database.write(lambda c: remove_budget(c, population))
        if found is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no budget is set for {population!r}")
        log.info("%s removed the privacy budget of %r", caller(context), population)
        return to_operators.limit_to(found)

    @override
    async def ExportPrivacy(self, request: operator_pb2.PrivacyRequest, context: Context) -> None:  # type: ignore[override]
        population = door.population_of(request)
        for row in await self._services.database.read(lambda c: entries(c, population or None)):
            await context.write(to_operators.charge_to(row))

    async def _hold(self, name: str, reason: str, action: str) -> operator_pb2.Client:
        """Disables a client for a reason, or enables it with ""; noted in the same transaction."""
        who, now = principal(), self._services.clock()

        def work(connection: Connection) -> AgentRow | None:
            found = disable(connection, name, reason)
            if found is not None and found.disabled != reason:
                detail = {"reason": reason or found.disabled}
                append(connection, entry(now, who.label, action, name, detail))
            return found

        row = await self._services.database.write(work)
        if row is None:
            known = "`roundtable clients list` names those that have connected"
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no agent {name!r} has ever connected; {known}")
        if not reason and not row.disabled:
            said = f"{name!r} is not disabled; nothing was changed"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, said)
        row = replace(row, disabled=reason)
        self._services.sessions.disable(name, reason)
        self._jobs.held(row)
        log.info("%s by %s: %s", action.replace("_", " "), who.label, name, extra={"site": name})
        return self._client(row, self._jobs.tasks_in_secret())

    def _client(self, row: AgentRow, secret: Set[str], revoked: bool = False) -> operator_pb2.Client:
        client = to_operators.client_to(row, self._services.links.of(row.name))
        session = self._services.sessions.get(row.name)
        if session is None:
            client.state = "revoked" if revoked else "offline"
            return client
        # Whether it works would tell that it was drawn.
        client.state = session.state if secret.isdisjoint(row.tasks) else "available"
        client.online, client.certificate_ends = True, session.shown.lifetime.expires
        # A session is heard of by a clock without a date; the row knows when it began.
        client.last_seen = self._services.clock() - (time.monotonic() - session.heard)
        return client

    def _proven(self, asked: door.JobWish, who: str) -> Submission:
        """The submission with what shows silos who asked: for one with a token, our own signature."""
        wish = Submission(
            job_identifier(self._name, who, asked.request_id),
            asked.request_id,
            asked.config,
            asked.model,
            who,
            principal().role,
        )
        vouched = self._identity is not None and who.startswith(VOUCHED_FOR)
        if not asked.signature and not vouched:
            return wish
        signed = asked.time if asked.signature else self._services.clock()
        values = job_values(
            wish.config, wish.model, wish.request_id, submitter=who, coordinator=self._name, time=signed
        )
        if not asked.signature:
            assert self._identity is not None
            proof = vouch(self._identity, who, values), self._identity.certificate
            return replace(
                wish, signature=proof[0], certificate=proof[1], time=signed, coordinator=self._name
            )
        if asked.coordinator != self._name:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the job is signed for the coordinator {asked.coordinator[:64]!r}; this is {self._name!r}",
            )
        if not abs(signed - self._services.clock()) <= SIGNED_SECONDS:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the job is signed for another time than now: check both clocks, and submit it again",
            )
        check_submission(asked.certificate, self._authority, values, asked.signature, who)
        return replace(
            wish,
            signature=asked.signature,
            certificate=asked.certificate,
            time=signed,
            coordinator=self._name,
        )

    async def _find(self, wanted: str, *, own: bool = False) -> JobRow:
        try:
            return await self._jobs.find(wanted, principal().party, own=own)
        except UnknownJob as error:
            raise Refusal(grpc.StatusCode.NOT_FOUND, str(error)) from error

    async def _change(
        self, wanted: str, event: m.Cancel | m.Pause | m.Resume | m.MovedInQueue
    ) -> operator_pb2.Job:
        row = await self._find(wanted, own=True)
        if row.status in FINAL:
            message = f"job {row.id} ({row.name}) is {row.status} already; nothing was changed"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, message)
        self._check_own(row)
        return self._shown.job(await self._jobs.change(row, event))

    def _check_own(self, row: JobRow, does: str = "changes") -> None:
        who = principal()
        if who.role == "data-scientist" and not row.is_of(*who.party):
            message = f"job {row.id} is not yours; a data scientist {does} jobs of their own only"
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message)
