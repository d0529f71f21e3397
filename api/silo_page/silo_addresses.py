"""The addresses of the silo's page: files for anybody, everything else for who has the page's token.

Threat model. The page runs on the silo's machine and listens on that machine alone. Other users of the
machine, other servers on it, and every site that the page's user visits are strangers. The token, 256 random
bits, is in a file of the agent's account alone. A browser gets it in the part of an address that is never
sent, keeps it for one tab and one origin with its port (a cookie would be shown to every server of this
machine), and sends it in a header, which another site's form or image cannot do. A name that somebody points
at this machine (DNS rebinding) is refused by `Guard`. What the coordinator, operators and jobs have written
enters the page as text.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roundtable.core.errors import ConfigError, IdentityError, RoundtableError
from roundtable.core.foreign_text import printable
from roundtable.silo_page.shown_state import ShownState
from roundtable.web.web_files import WebFiles

log = logging.getLogger("roundtable.silo_page")

PAGES = ("/", "/left", "/policy", "/try")
_FILES = WebFiles(Path(__file__).parent / "static")


class SiloApplication:
    """The page of one silo."""

    def __init__(self, state: ShownState, token: str) -> None:
        self._state = state
        self._token = token.encode()
        self.app = Starlette(
            routes=[
                *(Route(path, self._page) for path in PAGES),
                Route("/jobs/{job}", self._page),
                Route("/static/{name}", self._static),
                Route("/api/overview", self._overview),
                Route("/api/left", self._left),
                Route("/api/jobs/{job}", self._job),
                Route("/api/reports/{request}", self._report),
                Route("/api/verified", self._verified),
                Route("/api/change/{name}", self._change, methods=["POST"]),
            ],
            exception_handlers={RoundtableError: _refused, OSError: _troubled, ClientDisconnect: _gone},
        )

    async def _page(self, request: Request) -> Response:
        return _FILES.answer("silo.html")

    async def _static(self, request: Request) -> Response:
        return _FILES.answer(request.path_params["name"])

    async def _overview(self, request: Request) -> Response:
        self._must_be(request)
        digest, text = await asyncio.to_thread(self._state.overview)
        if request.query_params.get("known") == digest:
            return Response(status_code=204)
        return Response(text, media_type="application/json", headers={"x-roundtable-digest": digest})

    async def _left(self, request: Request) -> Response:
        self._must_be(request)
        before = request.query_params.get("before", "0")
        if not (before.isascii() and before.isdigit() and len(before) < 16):
            raise ConfigError("before: the number of an entry of the log")
        return JSONResponse(await asyncio.to_thread(self._state.left, int(before)))

    async def _job(self, request: Request) -> Response:
        self._must_be(request)
        job = request.path_params["job"]
        return JSONResponse(await asyncio.to_thread(lambda: self._state.jobs().detail(job)))

    async def _report(self, request: Request) -> Response:
        self._must_be(request)
        return JSONResponse(await asyncio.to_thread(self._state.report, request.path_params["request"]))

    async def _verified(self, request: Request) -> Response:
        self._must_be(request)
        return JSONResponse(await asyncio.to_thread(self._state.verified))

    async def _change(self, request: Request) -> Response:
        self._must_be(request)
        name = request.path_params["name"]
        change = _CHANGES.get(name)
        if change is None:
            raise ConfigError(f"the page changes nothing called {printable(name, 40)!r}")
        try:
            values = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise ConfigError("the request's body is not JSON") from error
        words = _texts(values)
        log.info("%s by somebody with the page's token", name)
        return JSONResponse(await asyncio.to_thread(change, self._state, words) or {})

    def _must_be(self, request: Request) -> None:
        """IdentityError for whoever has not the token."""
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(shown.encode(), self._token):
            raise IdentityError("this is for who has the page's token")


def _texts(values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ConfigError("the request's body is no JSON object of texts")
    return values


_CHANGES: dict[str, Callable[[ShownState, dict[str, str]], dict[str, Any] | None]] = {
    "approve": lambda state, of: state.jobs().approve(of.get("job", ""), of.get("digest", "")),
    "refuse": lambda state, of: state.jobs().refuse(
        of.get("job", ""), of.get("digest", ""), of.get("reason", "")
    ),
    "drain": lambda state, of: state.drain(of.get("reason", "")),
    "resume": lambda state, of: state.resume(),
    "send-report": lambda state, of: state.answer_report(
        of.get("request", ""), of.get("report", ""), True, ""
    ),
    "deny-report": lambda state, of: state.answer_report(
        of.get("request", ""), of.get("report", ""), False, of.get("reason", "")
    ),
    "try": lambda state, of: state.jobs().tried(of.get("text", ""), of.get("submitter", "")),
}
"""`POST /api/change/NAME`; `try` changes nothing, and its text is too long for an address."""


async def _refused(request: Request, error: Exception) -> Response:
    status = 401 if isinstance(error, IdentityError) else 400
    return JSONResponse({"error": printable(error, 4000)}, status)


async def _troubled(request: Request, error: Exception) -> Response:
    log.error("the page could not answer %s: %s", request.url.path, error)
    return JSONResponse({"error": printable(f"the state folder cannot be used: {error}", 400)}, 500)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)
