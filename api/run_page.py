"""A simulation on the coordinator's page: `roundtable simulate --page`.

The page asks the operators' calls; here they are answered from what the run has told so far. Who opens it is
a viewer: nothing of a simulation is paused or cancelled there.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

import roundtable
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, IdentityError
from roundtable.core.observability.thinning import spread
from roundtable.engine import record_to_plain
from roundtable.engine.messages import RoundRecord
from roundtable.page.application import Application
from roundtable.privacy.protection import hidden, people, protection
from roundtable.proto import common_pb2, operator_pb2
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.oidc_sign_in import ProviderAnswer
from roundtable.server.auth.page_sessions import PageSession
from roundtable.server.auth.principals import Principal
from roundtable.server.dashboard import BehindThePage
from roundtable.simulation.reporting.progress import Progress
from roundtable.web.guard import LOCAL
from roundtable.web.web_server import served_beside

ADDRESS = "127.0.0.1:7445"
RUN = "run"
_KEPT_EVENTS = 1000
_TELL_SECONDS = 0.2
VIEWER = Principal("you", "viewer", "token")


class RunPage:
    """What a run has told; `report` is for `simulate`, everything else for the page's own thread."""

    def __init__(self, job: JobConfig, history: Iterable[RoundRecord] = ()) -> None:
        """`history`: rounds that an earlier process has committed."""
        self._lock = threading.Lock()
        self._config = job.to_json()
        self._promise = operator_pb2.JobPrivacy(
            job=RUN,
            level=job.privacy.level,
            hides=hidden(job),
            people=people(job.privacy),
            protections=[
                operator_pb2.Protection(party=line.party, holds=line.holds, assumption=line.assumption)
                for line in protection(job.privacy)
            ],
            statement="With real silos; the noise of a simulation can be repeated, and hides nobody.",
        )
        self._records = [json.dumps(record_to_plain(record)) for record in history]
        self._events: list[common_pb2.Event] = []
        self._sequence = 0
        self._job = operator_pb2.Job(
            id=RUN,
            name=job.title.replace("/", "."),
            status="running",
            reason="simulated on this machine",
            rounds=job.rounds,
            rounds_done=len(self._records),
            submitted=time.time(),
            submitter="you",
            algorithm=job.algorithm.name,
        )
        self._phase = ""
        self._round = 0
        self._waits = ""

    def report(self, progress: Progress) -> None:
        """Takes what the run says."""
        with self._lock:
            self._round = progress.round
            if progress.kind == "clients":
                self._phase = progress.phase
                self._waits = f"{progress.done} of {progress.total} clients have answered"
            if progress.record is not None:
                self._records.append(json.dumps(record_to_plain(progress.record)))
                self._job.rounds_done = progress.record.round
                self._add("round_committed", f"round {progress.round} is committed", progress.round)
            if progress.note is not None and progress.note.kind != "round_committed":
                note = progress.note
                self._add(note.kind, note.message, note.round, note.attempt, note.client, dict(note.detail))

    def ended(self, status: str, reason: str) -> None:
        """The run is over, in this state."""
        with self._lock:
            self._job.status, self._job.reason = status, reason
            self._phase = self._waits = ""

    async def call(self, who: Principal, address: str, name: str, request: Message) -> Any:
        """Answers as a coordinator with this one job would. Refusal for what a simulation has not."""
        del who, address
        with self._lock:
            match name:
                case "Operators/ListJobs":
                    return operator_pb2.ListJobsReply(jobs=[self._job])
                case "Operators/ListQueue":
                    return operator_pb2.ListQueueReply()
                case "Operators/ListClients":
                    return operator_pb2.ListClientsReply()
                case "Operators/ShowPrivacy":
                    return operator_pb2.PrivacyReply()
                case "Operators/Status":
                    free = shutil.disk_usage(".").free
                    return operator_pb2.StatusReply(
                        version=roundtable.__version__,
                        coordinator="simulation",
                        database="none",
                        disk_free=free,
                    )
                case "Operators/GetJob":
                    assert isinstance(request, operator_pb2.GetJobRequest)
                    self._must_be_run(request.job)
                    return self._detail(history=self._rounds(request))
                case "Operators/ShowJobPrivacy":
                    return self._promise
        raise Refusal(grpc.StatusCode.NOT_FOUND, "a simulation has nothing of that; a coordinator has")

    async def stream(
        self, who: Principal, address: str, name: str, request: Message
    ) -> AsyncIterator[Message]:
        """The run as it goes on, until it is over."""
        if name != "Operators/WatchJob":
            raise Refusal(grpc.StatusCode.NOT_FOUND, "a simulation has nothing of that; a coordinator has")
        del who, address
        self._must_be_run(getattr(request, "job", ""))
        told, before = 0, b""
        while True:
            with self._lock:
                fresh = [event for event in self._events if event.sequence > told]
                update = operator_pb2.JobUpdate(events=fresh, detail=self._detail())
                over = self._job.status != "running"
                told = self._sequence
            if fresh or (said := update.detail.SerializeToString(deterministic=True)) != before:
                before = said if not fresh else update.detail.SerializeToString(deterministic=True)
                yield update
            if over:
                return
            await asyncio.sleep(_TELL_SECONDS)

    def _rounds(self, request: operator_pb2.GetJobRequest) -> list[str]:
        """The records that are asked for; every round has one."""
        found = self._records[max(0, request.first - 1) : request.last or None]
        if not request.rounds:
            return found[-_KEPT_EVENTS:]
        return [found[index] for index in spread(len(found), request.rounds)]

    def _detail(self, *, history: Iterable[str] | None = None) -> operator_pb2.JobDetail:
        detail = operator_pb2.JobDetail(
            job=self._job, round=self._round, attempt=1, phase=self._phase, waiting_for=self._waits
        )
        if history is not None:
            detail.job_config = self._config
            detail.history.extend(history)
        return detail

    def _must_be_run(self, job: str) -> None:
        if job != RUN:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "there is one run here, and this is not it")

    def _add(
        self,
        kind: str,
        message: str,
        round: int,
        attempt: int = 1,
        client: str = "",
        detail: dict[str, Any] | None = None,
    ) -> None:
        self._sequence += 1
        event = common_pb2.Event(
            sequence=self._sequence,
            time=time.time(),
            kind=kind,
            message=message,
            round=round,
            attempt=attempt,
            client=client,
            detail=json.dumps(detail or {}, default=str),
        )
        self._events = [*self._events, event][-_KEPT_EVENTS:]


class _OneToken:
    """Who may look: whoever has the token of this process, in as many browsers as they like."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._sessions: dict[str, PageSession] = {}

    async def of_bearer(self, bearer: str, address: str) -> Principal:
        """Refusal for any other token."""
        del address
        if not hmac.compare_digest(bearer.encode(), self._token.encode()):
            raise Refusal(grpc.StatusCode.UNAUTHENTICATED, "this token is not known here")
        return VIEWER

    @property
    def has_provider_page(self) -> bool:
        return False

    async def provider_address(self, cookie: str) -> str:
        raise IdentityError("nobody signs in here at an identity provider")

    async def of_code(self, cookie: str, answer: ProviderAnswer, address: str) -> Principal:
        raise IdentityError("nobody signs in here at an identity provider")

    def redeem(self, word: str) -> tuple[Principal, float] | None:
        return None

    async def begin(self, who: Principal, credential: str, given: float | None = None) -> str:
        del credential, given
        secret = secrets.token_urlsafe(32)
        self._sessions[secret] = PageSession(who, secret)
        return secret

    async def find(self, secret: str) -> PageSession | None:
        return self._sessions.get(secret)

    async def end(self, secret: str) -> None:
        self._sessions.pop(secret, None)


@contextmanager
def run_page(page: RunPage, listen: str) -> Iterator[str]:
    """Serves the run meanwhile; gives the address that opens it.

    Raises ConfigError for an address that is not this machine's own, ResourceError for one that is taken.
    """
    host = listen.rpartition(":")[0].strip("[]")
    if host not in LOCAL:
        raise ConfigError(
            f"--page: a run is shown on this machine itself alone, not {listen!r}; give {ADDRESS}"
        )
    token = secrets.token_urlsafe(32)
    door = _OneToken(token)
    application = Application(BehindThePage(page, door, door), secure=False)
    with served_beside(application.app, LOCAL, listen, "--page", application.close) as port:
        yield f"http://{listen.rpartition(':')[0]}:{port}/sign-in?next=/jobs/{RUN}#{token}"
