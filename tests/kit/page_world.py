"""A coordinator with a page, and somebody who asks it as a browser would, and as a browser would not."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from service import running

from roundtable.core.identity.invitation import Secret
from roundtable.page.serving import CoordinatorDashboard
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.store import Database
from roundtable.server.store.trust_rows import TokenRow, add_token


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def values(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Browser:
    """Requests over TLS, with the cookie of whoever has signed in."""

    port: int
    cookie: str = ""
    forgery_token: str = ""
    host: str = "localhost"
    secure: bool = True
    seen: list[Answer] = field(default_factory=list)

    async def ask(
        self, method: str, path: str, body: bytes = b"", address: str = "", **headers: str
    ) -> Answer:
        """One request; names of headers with underscores for dashes."""

        def run() -> Answer:
            context = ssl._create_unverified_context()
            link = (
                http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context)
                if self.secure
                else http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            )
            sent = {"Host": f"{self.host}:{self.port}"}
            if self.cookie:
                sent["Cookie"] = self.cookie
            sent.update({name.replace("_", "-"): value for name, value in headers.items()})
            link.request(method, path, body or None, sent)
            answer = link.getresponse()
            found = Answer(answer.status, {}, answer.read())
            for name in {name.lower() for name, _ in answer.getheaders()}:
                found.headers[name] = answer.getheader(name, "")
            link.close()
            return found

        found = await asyncio.to_thread(run)
        self.seen.append(found)
        return found

    async def listen(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream whose answer has begun."""
        context = ssl._create_unverified_context()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
        lines = (f"GET {path} HTTP/1.1", f"Host: {self.host}:{self.port}", f"Cookie: {self.cookie}", "", "")
        writer.write("\r\n".join(lines).encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        return reader, writer

    async def sign_in(self, token: str, onwards: str = "/") -> Answer:
        """Signs in as the form does, and learns the token that changes need."""
        body = urlencode({"token": token, "next": onwards}).encode()
        answer = await self.ask("POST", "/sign-in", body, Content_Type="application/x-www-form-urlencoded")
        if cookie := answer.headers.get("set-cookie", ""):
            self.cookie = cookie.partition(";")[0]
            self.forgery_token = (await self.ask("GET", "/api/session")).values["forgery_token"]
        return answer

    async def change(self, change: str, /, **values: Any) -> Answer:
        """A change as the page's own scripts make it."""
        body = json.dumps(values).encode()
        return await self.ask("POST", f"/api/change/{change}", body, X_Roundtable_Token=self.forgery_token)


@dataclass
class PageWorld:
    """A running coordinator, its page, and tokens by role."""

    coordinator: Coordinator
    dashboard: CoordinatorDashboard
    tokens: dict[str, str]

    def browser(self) -> Browser:
        """One that has not signed in."""
        return Browser(self.dashboard.port)


@asynccontextmanager
async def page_world(config: ServerConfig) -> AsyncIterator[PageWorld]:
    """A coordinator with a page while the block lasts; the same tokens each time on the same database."""
    dashboard = CoordinatorDashboard(config)
    async with running(config, dashboard=dashboard) as coordinator:
        tokens = {}
        for role in ("viewer", "data-scientist", "operator", "admin"):
            tokens[role] = await _token(coordinator._database, Path(config.state), role)
        yield PageWorld(coordinator, dashboard, tokens)


async def _token(database: Database, folder: Path, role: str) -> str:
    kept = folder / f"{role}.token"
    if not kept.exists():
        secret, now = Secret.fresh(), time.time()
        row = TokenRow(f"t-{role}", secret.identifier, secret.digest, role, "test", now, now + 3600.0)
        await database.write(lambda connection: add_token(connection, row))
        kept.write_text(secret.to_token())
    return kept.read_text()
