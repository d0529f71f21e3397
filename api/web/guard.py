"""What every request to the page passes first: which site it was meant for, who may show what comes back.

Threat model. The page's user is signed in; everybody else on the network, and every site that the user
visits, is not. Other sites cannot read or send anything here (cookie `SameSite=Strict`, the forgery token,
`Sec-Fetch-Site`), frame it, or have it run what they wrote: scripts come from this origin's files alone,
and texts of others enter the page as text. A name that another site's owner points at this machine (DNS
rebinding) is not one of ours and is refused. Nothing is kept in caches.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roundtable.core.foreign_text import printable

LOCAL = ("localhost", "127.0.0.1", "::1")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "worker-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types rt",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
}
MOST_BODY = 64 << 10


class Guard:
    """An ASGI application around the page's own."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], secure: bool) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                if self._secure:
                    headers["strict-transport-security"] = "max-age=31536000"
            await send(message)

        if refusal := self._refusal(scope):
            return await refusal(scope, receive, guarded)
        return await self._app(scope, _bounded(receive), guarded)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        host = hostname(headers.get("host", ""))
        if host not in self._hosts:
            text = (
                f"this page is not known as {printable(host, 80)!r}; its operator can add the name to "
                "`hosts` of [dashboard] in coordinator.toml\n"
            )
            return PlainTextResponse(text, 421)
        if scope["method"] in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            return PlainTextResponse("another site's request changes nothing here\n", 403)
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return PlainTextResponse("another site's request changes nothing here\n", 403)
        if int(headers.get("content-length", "0") or 0) > MOST_BODY:
            return PlainTextResponse("this is longer than anything that the page asks\n", 413)
        return None


def hostname(authority: str) -> str:
    """The name in a Host header, without its port; empty for what is none."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").lower()
    except ValueError:
        return ""


def _bounded(receive: Receive) -> Receive:
    """The body of a request, cut off where it is longer than any that the page asks for."""
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MOST_BODY:
            return {"type": "http.disconnect"}
        return message

    return bounded
