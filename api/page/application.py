"""The page's addresses: files, signing in, what operators' calls read and change, the live stream."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import grpc
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from roundtable.core.errors import ConfigError, IdentityError, ResourceError, RoundtableError
from roundtable.core.foreign_text import printable
from roundtable.page.live import LiveTopics, topics_of
from roundtable.page.page_calls import CHANGES, READS, PageCall
from roundtable.page.shown_analyses import answers_in, bytes_of, check_answered
from roundtable.page.shown_rounds import MOST_ROUNDS, NEWEST, measured_of, rounds_of, silos_of
from roundtable.page.sign_in import FILES, SignIn, address_of
from roundtable.page.values import message_of, values_of
from roundtable.proto import administration_pb2, common_pb2, operator_pb2
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.page_sessions import PageSession, forgery_token
from roundtable.server.auth.permissions import PERMISSIONS
from roundtable.server.dashboard import BehindThePage
from roundtable.web.job_settings import settings_of

log = logging.getLogger("roundtable.page")

GATHER_SECONDS = 0.1
APART_SECONDS = 0.25
"""Between two writes to a browser: where much happens, each costs more than what it says."""
QUIET_SECONDS = 15.0
LOOK_AGAIN_SECONDS = 2.0
WRITE_SECONDS = 30.0
MOST_STREAMS = 32
"""Of one party: a browser needs one."""
MOST_AUDIT = 2000
"""Newest entries of the audit log that are shown."""
_HTTP = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.UNAVAILABLE: 503,
}


class Application:
    """The page of one active coordinator."""

    def __init__(self, behind: BehindThePage, secure: bool, grafana: str = "") -> None:
        """`grafana`: where the metrics' dashboard is, if there is one."""
        self._behind = behind
        self._secure = secure
        self._grafana = grafana
        self._cookie = "__Host-roundtable" if secure else "roundtable"
        self._live = LiveTopics(behind.calls)
        self._streams: Counter[str] = Counter()
        self._looked: dict[str, tuple[float, asyncio.Future[PageSession | None]]] = {}
        pages = ["/", "/jobs", "/jobs/{job}", "/silos", "/privacy", "/audit", "/compare"]
        pages += ["/analyses", "/analyses/{job}"]
        self.app = Starlette(
            routes=[
                *(Route(path, self._page) for path in pages),
                *SignIn(behind, self._cookie, secure).routes(),
                Route("/sign-out", self._sign_out, methods=["POST"]),
                Route("/static/{name}", self._static),
                Route("/api/session", self._session),
                Route("/api/read/{name}", self._read),
                Route("/api/job/{job}", self._job),
                Route("/api/job/{job}/rounds", self._rounds),
                Route("/api/analysis/{job}", self._analysis),
                Route("/api/audit", self._audit),
                Route("/api/change/{name}", self._change, methods=["POST"]),
                Route("/api/live", _Stream(self._stream)),
            ],
            exception_handlers={RoundtableError: _refused, ClientDisconnect: _gone},
        )

    async def close(self) -> None:
        """Ends every stream."""
        await self._live.close()

    async def _page(self, request: Request) -> Response:
        if await self._who(request) is None:
            return RedirectResponse(f"/sign-in?next={quote(request.url.path, safe='/')}", 303)
        return FILES.answer("index.html")

    async def _sign_out(self, request: Request) -> Response:
        session = await self._must_be(request)
        await self._behind.sessions.end(request.cookies[self._cookie])
        log.info("%s has signed out of the page", session.who.label)
        answer = JSONResponse({})
        answer.delete_cookie(self._cookie, path="/", secure=self._secure, httponly=True, samesite="strict")
        answer.headers["clear-site-data"] = '"cache", "storage"'
        return answer

    async def _static(self, request: Request) -> Response:
        return FILES.answer(request.path_params["name"])

    async def _session(self, request: Request) -> Response:
        """Who is signed in, what they may call, and the token that changes need."""
        who = (await self._must_be(request)).who
        may = sorted(name for name, permission in PERMISSIONS.items() if who.role in permission.callers)
        values = {"role": who.role, "name": who.name, "may": may, "expires": _finite(who.expires)}
        values["grafana"] = self._grafana
        return JSONResponse({**values, "forgery_token": forgery_token(request.cookies[self._cookie])})

    async def _read(self, request: Request) -> Response:
        session = await self._must_be(request)
        call = _call(READS, request.path_params["name"])
        return await self._answer(session, request, call, dict(request.query_params))

    async def _change(self, request: Request) -> Response:
        session = await self._must_be(request, changes=True)
        call = _call(CHANGES, request.path_params["name"])
        try:
            values = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise ConfigError("the request's body is not JSON") from error
        if not isinstance(values, dict):
            raise ConfigError("the request's body is no JSON object")
        return await self._answer(session, request, call, values)

    async def _job(self, request: Request) -> Response:
        """A job with its configuration and its incidents, its rounds thinned out, its newest silo by silo."""
        session = await self._must_be(request)
        detail = await self._detail(session, request, rounds=MOST_ROUNDS)
        rounds = await asyncio.to_thread(rounds_of, list(detail.history), detail.job_config)
        del detail.history[:]
        values = {
            **values_of(detail),
            "rounds": rounds,
            "newest": await self._newest(session, request, rounds),
        }
        values["settings"] = settings_of(values.pop("job_config"))
        return JSONResponse(values)

    async def _rounds(self, request: Request) -> Response:
        """Rounds of a job between two, thinned out, and its newest silo by silo."""
        session = await self._must_be(request)
        first, last = (_whole(request.query_params.get(name, "0"), name) for name in ("first", "last"))
        detail = await self._detail(session, request, rounds=MOST_ROUNDS, first=first, last=last)
        rounds = await asyncio.to_thread(rounds_of, list(detail.history), detail.job_config)
        return JSONResponse({"rounds": rounds, "newest": await self._newest(session, request, rounds)})

    async def _newest(
        self, session: PageSession, request: Request, rounds: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        last = rounds[-1]["round"] if rounds else 0
        detail = await self._detail(
            session, request, rounds=NEWEST, first=max(1, last + 1 - NEWEST), last=last
        )
        records, config = list(detail.history), detail.job_config
        silos = await asyncio.to_thread(silos_of, records)
        return {**silos, "measured": await asyncio.to_thread(measured_of, records, config)}

    async def _detail(self, session: PageSession, request: Request, **wish: int) -> operator_pb2.JobDetail:
        wanted = operator_pb2.GetJobRequest(job=request.path_params["job"], **wish)
        detail = await self._behind.calls.call(session.who, address_of(request), "Operators/GetJob", wanted)
        assert isinstance(detail, operator_pb2.JobDetail)
        return detail

    async def _analysis(self, request: Request) -> Response:
        """The answers of an analysis that is finished, by the calls that `roundtable analyse --job` makes."""
        session = await self._must_be(request)
        detail = await self._detail(session, request, rounds=1)
        check_answered(detail)
        wanted = common_pb2.DownloadRequest(digest=detail.job.model.digest)
        call, address = "Operators/GetArtifact", address_of(request)
        model = await bytes_of(self._behind.calls.stream(session.who, address, call, wanted))
        return JSONResponse(await asyncio.to_thread(answers_in, model, detail))

    async def _audit(self, request: Request) -> Response:
        """The newest entries of the audit log, with their seals, as the operators' call gives them."""
        session = await self._must_be(request)
        wanted = administration_pb2.ReadAuditRequest(from_sequence=1, live=True)
        lines: list[str] = []
        stream = self._behind.calls.stream(
            session.who, address_of(request), "Administration/ReadAudit", wanted
        )
        async for part in stream:
            assert isinstance(part, administration_pb2.AuditLines)
            lines = [*lines, *part.lines][-MOST_AUDIT:]
        return JSONResponse({"lines": lines})

    async def _answer(
        self, session: PageSession, request: Request, call: PageCall, values: dict[str, Any]
    ) -> Response:
        wanted = message_of(call.request, values)
        reply = await self._behind.calls.call(session.who, address_of(request), call.name, wanted)
        return JSONResponse(values_of(reply))

    async def _stream(self, request: Request, send: Send) -> None:
        """Server-sent events of the topics that the address names, until the session or the service ends."""
        session = await self._must_be(request)
        label = session.who.label
        topics = topics_of(request.query_params.get("topics", ""))
        if self._streams[label] >= MOST_STREAMS:
            raise ResourceError(
                f"{label} has {MOST_STREAMS} streams open, the most of one party: close a page"
            )
        self._streams[label] += 1
        reader = self._live.join(session.who, address_of(request), topics)
        try:
            await _begin(send)
            await self._write(request, send, reader)
        finally:
            self._live.leave(reader)
            self._streams[label] -= 1

    async def _write(self, request: Request, send: Send, reader: Any) -> None:
        loop = asyncio.get_running_loop()
        last, looked = loop.time(), loop.time()
        try:
            while not self._live.closing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                        await reader.woken.wait()
                if loop.time() - looked >= LOOK_AGAIN_SECONDS:
                    looked = loop.time()
                    if await request.is_disconnected():
                        return
                    if not await self._still(request):
                        await _send(send, b"event: ended\ndata: {}\n\n")
                        break
                if reader.woken.is_set():
                    await asyncio.sleep(max(GATHER_SECONDS, last + APART_SECONDS - loop.time()))
                    last = loop.time()
                    await _send(send, reader.take())
                elif loop.time() - last > QUIET_SECONDS:
                    last = loop.time()
                    await _send(send, b": quiet\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log.info("a browser reads nothing of its stream; it is closed")

    async def _who(self, request: Request) -> PageSession | None:
        return await self._behind.sessions.find(request.cookies.get(self._cookie, ""))

    async def _still(self, request: Request) -> bool:
        """Whether a stream's session holds; looked up once for all streams of a session."""
        secret, now = request.cookies.get(self._cookie, ""), asyncio.get_running_loop().time()
        self._looked = {key: each for key, each in self._looked.items() if now - each[0] < LOOK_AGAIN_SECONDS}
        if secret not in self._looked:
            self._looked[secret] = now, asyncio.ensure_future(self._behind.sessions.find(secret))
        return await asyncio.shield(self._looked[secret][1]) is not None

    async def _must_be(self, request: Request, *, changes: bool = False) -> PageSession:
        """Who is signed in. Refusal where nobody is, or a change comes without this session's own token."""
        session = await self._who(request)
        if session is None:
            raise Refusal(
                grpc.StatusCode.UNAUTHENTICATED, "sign in first: there is no session, or it has ended"
            )
        changes = changes or request.method != "GET"
        wanted = forgery_token(request.cookies[self._cookie])
        shown = request.headers.get("x-roundtable-token", "")
        if changes and not _equal(shown, wanted):
            raise IdentityError("the request does not come from this page: load it again")
        return session


class _Stream:
    """An ASGI application, so that no framework gathers what is written."""

    def __init__(self, stream: Callable[[Request, Send], Any]) -> None:
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method != "GET":
            return await Response(status_code=405)(scope, receive, send)
        try:
            await self._stream(request, send)
        except RoundtableError as error:
            await (await _refused(request, error))(scope, receive, send)


async def _begin(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _send(send, b"retry: 2000\n\n")


async def _send(send: Send, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _refused(request: Request, error: Exception) -> Response:
    """Our own errors as status and sentence."""
    status = 400
    if isinstance(error, Refusal):
        status = _HTTP.get(error.code, 400)
    elif isinstance(error, IdentityError):
        status = 403
    elif isinstance(error, ResourceError):
        status = 429
    return JSONResponse({"error": printable(error, 2000)}, status)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


def _call(table: dict[str, PageCall], name: str) -> PageCall:
    if name not in table:
        raise Refusal(grpc.StatusCode.NOT_FOUND, f"the page asks nothing called {printable(name, 40)!r}")
    return table[name]


def _whole(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise ConfigError(f"{name}={printable(text, 20)!r} is no number of a round")
    return int(text)


def _equal(shown: str, wanted: str) -> bool:
    return hmac.compare_digest(shown.encode(), wanted.encode())


def _finite(value: float) -> float | None:
    return value if value < 1e300 else None
