"""How a browser begins a session: by a token, a word for a certificate's holder, or the identity provider."""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from roundtable.core.errors import IdentityError, RoundtableError, UnavailableError
from roundtable.server.auth.access import Refusal
from roundtable.server.auth.oidc_sign_in import BACK, ProviderAnswer
from roundtable.server.auth.principals import Principal, credential_of
from roundtable.server.dashboard import BehindThePage
from roundtable.web.web_files import WebFiles

log = logging.getLogger("roundtable.page.sign_in")

FILES = WebFiles(Path(__file__).parent / "static")
ASKING_SECONDS = 600
"""That signing in at the provider's page may take."""
_LONGEST = 4096
_LONGEST_PATH = 1000


class SignIn:
    """The addresses at which somebody without a session is let in."""

    def __init__(self, behind: BehindThePage, cookie: str, secure: bool) -> None:
        self._behind = behind
        self._cookie = cookie
        self._asking = f"{cookie}-asking"
        self._secure = secure

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/sign-in", self._shown, methods=["GET"]),
            Route("/sign-in", self._by_token, methods=["POST"]),
            Route("/sign-in/provider", self._at_provider, methods=["GET"]),
            Route(BACK, self._back, methods=["GET"]),
            Route("/api/sign-in", self._ways),
        ]

    async def _shown(self, request: Request) -> Response:
        return FILES.answer("sign-in.html")

    async def _ways(self, request: Request) -> Response:
        return JSONResponse({"provider": self._behind.access.has_provider_page})

    async def _by_token(self, request: Request) -> Response:
        """Exchanges a token, of ours or of the identity provider, or a word for a certificate's holder."""
        form = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
        token, onwards = form.get("token", [""])[0].strip(), _onwards(form.get("next", ["/"])[0])
        if not token:
            return _again("empty", onwards)
        # An address of ours never holds the secret: it would be in histories and logs.
        known = credential_of(token)
        digest = hashlib.sha256(known.encode()).hexdigest()
        try:
            who, given = self._behind.sessions.redeem(token) or (None, None)
            if who is None:
                who = await self._behind.access.of_bearer(token, address_of(request))
            kept = {"token": known, "certificate": who.serial}.get(who.source, digest)
            return await self._begun(RedirectResponse(onwards, 303), who, kept, given)
        except (Refusal, IdentityError) as error:
            return _again(_why(error), onwards)

    async def _at_provider(self, request: Request) -> Response:
        """Sends the browser to the identity provider, with a cookie that its answer must come back with."""
        onwards, asking = _onwards(request.query_params.get("next", "/")), secrets.token_urlsafe(32)
        try:
            place = await self._behind.access.provider_address(asking)
        except RoundtableError as error:
            log.info("nobody can sign in by the identity provider: %s", error)
            return _again(_why(error), onwards)
        answer = RedirectResponse(place, 303)
        # Lax, since the way back begins at another site; the path by which to go on is in it, too.
        answer.set_cookie(
            self._asking,
            f"{asking}{onwards}",
            ASKING_SECONDS,
            secure=self._secure,
            httponly=True,
            samesite="lax",
        )
        return answer

    async def _back(self, request: Request) -> Response:
        """The identity provider has sent the browser back."""
        asking, slash, path = request.cookies.get(self._asking, "").partition("/")
        onwards = _onwards(slash + path)
        state, code, issuer = (
            request.query_params.get(name, "")[:_LONGEST] for name in ("state", "code", "iss")
        )
        if not asking or not code:
            return self._forgets(_again("refused" if asking else "lost", onwards))
        try:
            answer = ProviderAnswer(state, code, issuer)
            who = await self._behind.access.of_code(asking, answer, address_of(request))
            # A browser sends no cookie that is `Strict` on a way that has begun at another site: the page at
            # this address goes on from here.
            begun = await self._begun(_again("done", onwards), who, credential_of(code))
        except RoundtableError as error:
            log.info("signing in by the identity provider has failed: %s", error)
            return self._forgets(_again(_why(error), onwards))
        return self._forgets(begun)

    async def _begun(
        self, answer: Response, who: Principal, kept: str, given: float | None = None
    ) -> Response:
        secret = await self._behind.sessions.begin(who, kept, given)
        log.info("%s has signed in to the page", who.label)
        answer.set_cookie(
            self._cookie, secret, secure=self._secure, httponly=True, samesite="strict", path="/"
        )
        return answer

    def _forgets(self, answer: Response) -> Response:
        answer.delete_cookie(self._asking, secure=self._secure, httponly=True, samesite="lax")
        return answer


def address_of(request: Request) -> str:
    """Where a request comes from, as lock-outs and quotas go by it."""
    return request.client.host if request.client else "unknown"


def _again(why: str, onwards: str) -> Response:
    """The page to sign in at, which says why."""
    return RedirectResponse(f"/sign-in?{urlencode({'why': why, 'next': onwards}, safe='/')}", 303)


def _why(error: RoundtableError) -> str:
    """The word by which the page to sign in at says what has failed."""
    if isinstance(error, Refusal):
        return "wait" if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED else "wrong"
    return "away" if isinstance(error, UnavailableError) else "role"


def _onwards(wanted: str) -> str:
    """Where to go after signing in: a path of this page, nothing of another site."""
    plain = wanted.isprintable() and wanted.isascii() and "\\" not in wanted and len(wanted) < _LONGEST_PATH
    return wanted if plain and wanted.startswith("/") and not wanted.startswith("//") else "/"
