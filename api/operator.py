"""What an operator or a data scientist asks of a coordinator, as plain blocking calls."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc
from blake3 import blake3

from roundtable.client.durable_files import digest_of
from roundtable.core.bounds import is_digest
from roundtable.core.errors import ResourceError, RoundtableError, TransferError, UnavailableError
from roundtable.core.identity.credentials import CA_CERTIFICATE, SiloIdentity, identity_of, verify_identity
from roundtable.core.identity.handshake import check_connection, split_address
from roundtable.core.identity.signing import job_values, sign
from roundtable.core.paths import AnyPath
from roundtable.operator_credentials import channel_credentials, signing_identity
from roundtable.proto import CHUNK_BYTES, operator_pb2, operator_pb2_grpc
from roundtable.proto.channel import CLIENT_OPTIONS
from roundtable.proto.common_pb2 import Artifact, Chunk, DownloadRequest
from roundtable.rpc_errors import PAUSE_SECONDS, Patience, Told, translated

if TYPE_CHECKING:
    from roundtable.core.config import JobConfig

Progress = Callable[[int, int], None]
_REPLY_LIMIT = 64 << 20
_CALL_SECONDS = 30.0
_RETRIES = 5


class OperatorClient:
    """A connection to a coordinator under an operator's certificate or token.

    `credentials` is a folder as `roundtable ca issue` or `roundtable token create` makes it. Every method
    raises a RoundtableError that says what to do; transfers go on where they were interrupted.
    """

    def __init__(self, address: str, credentials: AnyPath) -> None:
        split_address(address)
        self.address = address
        self.folder = Path(credentials)
        self._channel = grpc.secure_channel(
            address,
            channel_credentials(self.folder, address),
            options=[*CLIENT_OPTIONS, ("grpc.max_receive_message_length", _REPLY_LIMIT)],
        )
        self._stub = operator_pb2_grpc.OperatorsStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; calls in flight are given up."""
        self._channel.close()

    def status(self) -> operator_pb2.StatusReply:
        """The coordinator's version, state and load."""
        with self._translated():
            return self._stub.Status(operator_pb2.StatusRequest(), timeout=_CALL_SECONDS)

    def clients(self) -> list[operator_pb2.Client]:
        """Every agent that the coordinator knows, by name."""
        with self._translated():
            reply = self._stub.ListClients(operator_pb2.ListClientsRequest(), timeout=_CALL_SECONDS)
        return sorted(reply.clients, key=lambda client: client.name)

    def disable_client(self, name: str, reason: str) -> operator_pb2.Client:
        """Lets no job ask this agent for anything new, and tells it why."""
        request = operator_pb2.DisableClientRequest(name=name, reason=reason)
        with self._translated():
            return self._stub.DisableClient(request, timeout=_CALL_SECONDS)

    def enable_client(self, name: str) -> operator_pb2.Client:
        """Lets jobs ask this agent again."""
        with self._translated():
            return self._stub.EnableClient(operator_pb2.EnableClientRequest(name=name), timeout=_CALL_SECONDS)

    def ask_report(self, silo: str, reason: str) -> operator_pb2.Report:
        """Asks a silo's people for a report of it; gives the request that is open already, where one is."""
        request = operator_pb2.AskReportRequest(name=silo, reason=reason)
        with self._translated():
            return self._stub.AskReport(request, timeout=_CALL_SECONDS)

    def report(self, silo: str) -> operator_pb2.Report:
        """The last request to a silo, with the report once it is there."""
        with self._translated():
            return self._stub.ShowReport(operator_pb2.ShowReportRequest(name=silo), timeout=_CALL_SECONDS)

    def jobs(self) -> list[operator_pb2.Job]:
        """Every job, the newest first."""
        with self._translated():
            reply = self._stub.ListJobs(operator_pb2.ListJobsRequest(), timeout=_CALL_SECONDS)
        return sorted(reply.jobs, key=lambda job: (-job.submitted, job.id))

    def job(self, job: str) -> operator_pb2.JobDetail:
        """A job by its identifier, a unique prefix of it, or its name: your own so called comes first."""
        with self._translated():
            return self._stub.GetJob(operator_pb2.GetJobRequest(job=job), timeout=_CALL_SECONDS)

    def privacy(self, population: str = "", delta: float = 0.0) -> operator_pb2.PrivacyReply:
        """What has been spent on a population and its silos, over all jobs; on all of them by default."""
        request = operator_pb2.PrivacyRequest(population=population, delta=delta)
        with self._translated():
            return self._stub.ShowPrivacy(request, timeout=_CALL_SECONDS)

    def set_privacy_budget(
        self, population: str, epsilon: float, delta: float, accountant: str = "pld"
    ) -> operator_pb2.PrivacyBudget:
        """Limits what all jobs together may spend on a population, from the next round on."""
        wanted = operator_pb2.PrivacyBudget(
            population=population, epsilon=epsilon, delta=delta, accountant=accountant
        )
        with self._translated():
            return self._stub.SetPrivacyBudget(wanted, timeout=_CALL_SECONDS)

    def remove_privacy_budget(self, population: str) -> operator_pb2.PrivacyBudget:
        """Lets jobs spend what their own epsilon allows, from the next round on; gives what was in force."""
        request = operator_pb2.PrivacyRequest(population=population)
        with self._translated():
            return self._stub.RemovePrivacyBudget(request, timeout=_CALL_SECONDS)

    def privacy_charges(self, population: str = "") -> Iterator[operator_pb2.PrivacyCharge]:
        """The ledger itself, oldest charge first."""
        with self._translated():
            yield from self._stub.ExportPrivacy(operator_pb2.PrivacyRequest(population=population))

    def job_privacy(self, job: str) -> operator_pb2.JobPrivacy:
        """What a job's privacy promises against whom, what is spent, and what will be at its end."""
        with self._translated():
            return self._stub.ShowJobPrivacy(operator_pb2.JobRequest(job=job), timeout=_CALL_SECONDS)

    def cancel(self, job: str) -> operator_pb2.Job:
        """Stops a job for good."""
        with self._translated():
            return self._stub.CancelJob(operator_pb2.JobRequest(job=job), timeout=_CALL_SECONDS)

    def pause(self, job: str) -> operator_pb2.Job:
        """Stops a job for now; the round that runs is given up."""
        with self._translated():
            return self._stub.PauseJob(operator_pb2.JobRequest(job=job), timeout=_CALL_SECONDS)

    def resume(self, job: str) -> operator_pb2.Job:
        """Goes on with a paused job."""
        with self._translated():
            return self._stub.ResumeJob(operator_pb2.JobRequest(job=job), timeout=_CALL_SECONDS)

    def queue(self) -> list[operator_pb2.QueuedJob]:
        """Jobs that have their turn, then those that wait, in their order."""
        with self._translated():
            return list(self._stub.ListQueue(operator_pb2.ListQueueRequest(), timeout=_CALL_SECONDS).jobs)

    def move(self, job: str, priority: int | None = None, hold: str | None = None) -> operator_pb2.Job:
        """Gives a job another priority; `hold` says why it gets no turn, "" that it may have it again."""
        with self._translated():
            request = operator_pb2.MoveJobRequest(job=job, priority=priority, hold=hold)
            return self._stub.MoveJob(request, timeout=_CALL_SECONDS)

    def delete(self, job: str) -> operator_pb2.Job:
        """Deletes a job that is over: its models, rounds and events. What it has spent of privacy stays."""
        with self._translated():
            return self._stub.DeleteJob(operator_pb2.JobRequest(job=job), timeout=_CALL_SECONDS)

    def submit(
        self,
        job: JobConfig,
        model: AnyPath,
        request_id: str | None = None,
        progress: Progress | None = None,
    ) -> operator_pb2.Job:
        """Stores the initial model at `model` and starts the job.

        The same `request_id` twice gives the same job, so a submission that was interrupted can be
        repeated; by default each call is a new job.
        """
        model = Path(model)
        digest = self.put_artifact(model, progress)
        return self.start(job, Artifact(digest=digest, size=model.stat().st_size), request_id)

    def start(self, job: JobConfig, model: Artifact, request_id: str | None = None) -> operator_pb2.Job:
        """Starts the job from a model that the coordinator has already, such as another job's first one."""
        request = operator_pb2.SubmitJobRequest(
            request_id=request_id or uuid.uuid4().hex, job_config=job.to_json(), model=model
        )
        if (identity := signing_identity(self.folder)) is not None:
            self._sign(request, identity)
        for attempt in range(1, _RETRIES + 1):
            try:
                with self._translated():
                    return self._stub.SubmitJob(request, timeout=_CALL_SECONDS)
            except UnavailableError:
                if attempt == _RETRIES:
                    raise
                time.sleep(PAUSE_SECONDS)
        raise AssertionError("the loop returns or raises")

    def _sign(self, request: operator_pb2.SubmitJobRequest, identity: SiloIdentity) -> None:
        """Signs a submission for this coordinator, by the name that the root has certified; now."""
        shown = self.status().identity
        if not shown:
            return
        ca = (self.folder / CA_CERTIFICATE).read_bytes()
        request.coordinator, _ = verify_identity(shown, ca, role="coordinator")
        request.time = time.time()
        values = job_values(
            request.job_config,
            request.model.digest,
            request.request_id,
            submitter=identity_of(identity.certificate)[0],
            coordinator=request.coordinator,
            time=request.time,
        )
        request.signature, request.certificate = sign(identity, "job", values), identity.certificate

    def watch(
        self, job: str, from_sequence: int = 1, patience: float = 300.0, away: Told = lambda _: None
    ) -> Iterator[operator_pb2.JobUpdate]:
        """The job's events from a number onwards, and those to come, until it ends.

        A coordinator that goes away is waited for, which `away` is told once each time; after `patience`
        seconds without an answer the UnavailableError comes through.
        """
        waits = Patience(patience, away)
        while True:
            try:
                with self._translated():
                    request = operator_pb2.WatchJobRequest(job=job, from_sequence=from_sequence)
                    for update in self._stub.WatchJob(request, wait_for_ready=False):
                        waits.answered()
                        if update.events:
                            from_sequence = update.events[-1].sequence + 1
                        # By its identifier from now on: a later job may be called the same.
                        job = update.detail.job.id
                        yield update
                    return
            except UnavailableError as error:
                waits.wait(error)

    def job_log(
        self,
        job: str,
        first: int = 1,
        *,
        follow: bool = False,
        silo: str = "",
        level: str = "",
        round_number: int = 0,
        patience: float = 300.0,
        away: Told = lambda _: None,
    ) -> Iterator[operator_pb2.JobLogLine]:
        """The coordinator's log lines of a job and those that silos share, from a place on.

        `silo`, `level` ("warning" and above) and `round_number` narrow them. With `follow` also those to come
        until the job ends; a coordinator that goes away is waited for as by `watch`.
        """
        waits = Patience(patience, away)
        while True:
            try:
                with self._translated():
                    request = operator_pb2.JobLogRequest(
                        job=job,
                        from_sequence=first,
                        follow=follow,
                        silo=silo,
                        level=level,
                        round=round_number,
                    )
                    for page in self._stub.ReadJobLog(request):
                        waits.answered()
                        for line in page.lines:
                            first = line.sequence + 1
                            yield line
                    return
            except UnavailableError as error:
                if not follow:
                    raise
                waits.wait(error)

    def put_artifact(self, path: AnyPath, progress: Progress | None = None) -> str:
        """Stores the file's bytes at the coordinator and returns their digest.

        What has already arrived is not sent again.
        """
        path = Path(path)
        content = Artifact(digest=digest_of(path), size=path.stat().st_size)
        for attempt in range(1, _RETRIES + 1):
            try:
                with self._translated():
                    known = self._stub.PutArtifact(iter([_put_header(content, 0)]), timeout=_CALL_SECONDS)
                    if not known.complete:
                        parts = _put_parts(path, content, known.offset, progress)
                        known = self._stub.PutArtifact(parts)
                if known.complete:
                    return content.digest
            except UnavailableError:
                if attempt == _RETRIES:
                    raise
                time.sleep(PAUSE_SECONDS)
        raise TransferError(
            f"{path} did not arrive whole at {self.address}: {known.offset} of {content.size} bytes"
        )

    def get_artifact(self, digest: str, size: int, path: AnyPath, progress: Progress | None = None) -> None:
        """Fetches an artifact to `path` and verifies its digest; a fetch that was interrupted goes on."""
        if not is_digest(digest):  # The coordinator's word, of which a file's name is made.
            raise TransferError(f"{self.address} names a model {digest[:64]!r}, which is no digest")
        path = Path(path)
        partial = partly_fetched(path, digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, _RETRIES + 1):
                try:
                    found = self._fetch(digest, size, partial, progress)
                    break
                except UnavailableError:
                    if attempt == _RETRIES:
                        raise
                    time.sleep(PAUSE_SECONDS)
            if found != digest:
                partial.unlink()
                raise TransferError(
                    f"the bytes of {digest[:12]} from {self.address} do not have that digest; "
                    "they were discarded, fetch again"
                )
            partial.replace(path)
        except OSError as error:
            raise ResourceError(f"{error.filename or path} cannot be written: {error.strerror}") from error

    def _fetch(self, digest: str, size: int, partial: Path, progress: Progress | None) -> str:
        """Appends what is missing; the digest of all that is there, hashed as it came."""
        hasher = blake3()
        with partial.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)
            elif file.tell():
                hasher.update_mmap(partial)
            request = DownloadRequest(digest=digest, offset=file.tell())
            with self._translated():
                for chunk in self._stub.GetArtifact(request):
                    if chunk.offset != file.tell():
                        raise TransferError(
                            f"{self.address} sent bytes at {chunk.offset}, not at {file.tell()}"
                        )
                    file.write(chunk.data)
                    hasher.update(chunk.data)
                    if progress:
                        progress(file.tell(), size)
            file.flush()
            os.fsync(file.fileno())
        return hasher.hexdigest()

    def _translated(self) -> AbstractContextManager[None]:
        return translated(self._unreachable)

    def _unreachable(self, detail: str) -> RoundtableError:
        try:
            check_connection(self.address, self.folder)
        except RoundtableError as error:
            return error
        return UnavailableError(f"the coordinator at {self.address} cannot be reached for now: {detail}")


def partly_fetched(path: Path, digest: str) -> Path:
    """Where what has arrived of an artifact waits that is to be at `path`."""
    return path.with_name(f"{path.name}.{digest[:12]}.partial")


def _put_header(content: Artifact, offset: int) -> operator_pb2.PutPart:
    return operator_pb2.PutPart(header=operator_pb2.PutHeader(content=content, offset=offset))


def _put_parts(
    path: Path, content: Artifact, offset: int, progress: Progress | None
) -> Iterator[operator_pb2.PutPart]:
    yield _put_header(content, offset)
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK_BYTES):
            yield operator_pb2.PutPart(chunk=Chunk(offset=offset, data=data))
            offset += len(data)
            if progress:
                progress(offset, content.size)
