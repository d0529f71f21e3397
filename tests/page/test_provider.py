"""Signing in at an identity provider's own page: a provider of our own, a browser, and who is no browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from page_world import Answer, Browser, PageWorld, page_world

from roundtable.core.errors import ConfigError
from roundtable.server import ServerConfig

jwt = pytest.importorskip("jwt")
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SECRET = "s3 cret:%"


class IdentityProvider:
    """Lets everybody in as ada; `changes` are what it says otherwise than it should."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.changes: dict[str, Any] = {}
        self.asked: dict[str, dict[str, str]] = {}
        self.published: dict[str, Any] = {}
        self.asked_for, self.answers = threading.Semaphore(0), threading.Event()
        self.answers.set()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked_for.release()
                provider.answers.wait()
                place = urlsplit(self.path)
                if place.path == "/authorize":
                    asked = {name: value[0] for name, value in parse_qs(place.query).items()}
                    self._answer(303, b"", location=provider.approved(asked))
                else:
                    published = provider.documents().get(place.path)
                    self._answer(200 if published else 404, json.dumps(published).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                form = {name: value[0] for name, value in parse_qs(body).items()}
                status, found = provider.token(form, self.headers.get("authorization", ""))
                self._answer(status, json.dumps(found).encode())

            def _answer(self, status: int, body: bytes, **headers: str) -> None:
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *values: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def documents(self) -> dict[str, Any]:
        """What is published, by path."""
        key = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        known = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize?realm=x",
            "token_endpoint": f"{self.issuer}/token",
        }
        return {
            "/keys": {"keys": [{**key, "kid": "k1", "alg": "ES256", "use": "sig"}]},
            "/.well-known/openid-configuration": {**known, **self.published},
        }

    def approved(self, asked: dict[str, str]) -> str:
        """Where the browser goes with a code."""
        code = f"code-{len(self.asked)}"
        self.asked[code] = asked
        answer = {"code": code, "state": asked["state"], "iss": self.issuer}
        return f"{asked['redirect_uri']}?{urlencode(answer)}"

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """What a code is good for, once, with the verifier of its challenge and the client's secret."""
        asked = self.asked.pop(form.get("code", ""), None)
        known = base64.b64encode(b"roundtable-page:s3+cret%3A%25").decode()
        challenge = hashlib.sha256(form["code_verifier"].encode()).digest()
        if (
            asked is None
            or authorization != f"Basic {known}"
            or form["redirect_uri"] != asked["redirect_uri"]
            or base64.urlsafe_b64encode(challenge).rstrip(b"=").decode() != asked["code_challenge"]
            or asked["code_challenge_method"] != "S256"
        ):
            return 400, {"error": "invalid_grant"}
        now = time.time()
        claims = {
            "iss": self.issuer,
            "aud": "roundtable-page",
            "sub": "ada",
            "iat": now,
            "exp": now + 60,
            "roles": ["operators"],
            "nonce": asked["nonce"],
            **self.changes,
        }
        return 200, {"id_token": jwt.encode(claims, self.key, "ES256", headers={"kid": "k1"})}


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    made = IdentityProvider()
    yield made
    made.server.shutdown()


@asynccontextmanager
async def world_with(
    provider: IdentityProvider, settings: Callable[..., ServerConfig], folder: Path
) -> AsyncIterator[PageWorld]:
    from roundtable.server.auth.oidc import OidcTable

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "secret").write_text(f"{SECRET}\n")
    table = OidcTable(
        issuer=provider.issuer,
        audience="roundtable",
        jwks=f"{provider.issuer}/keys",
        roles={"operators": "operator"},
        client="roundtable-page",
        client_secret=str(folder / "secret"),
        page=f"https://localhost:{port}/",
        session=600,
    )
    config = settings(listen=f"127.0.0.1:{port}").model_copy(update={"oidc": table})
    async with page_world(config) as world:
        yield world


async def sent(browser: Browser, onwards: str = "/jobs") -> str:
    """Where our page sends a browser that wants to sign in; it has our cookie then."""
    answer = await browser.ask("GET", f"/sign-in/provider?{urlencode({'next': onwards})}")
    cookie = answer.headers["set-cookie"]
    assert answer.status == 303
    assert {"HttpOnly", "Secure", "SameSite=lax", "Max-Age=600"} <= set(cookie.split("; "))
    browser.cookie = cookie.partition(";")[0]
    return answer.headers["location"]


def way_back(provider: IdentityProvider, place: str) -> str:
    """The path with which the provider sends the browser back."""
    asked = {name: value[0] for name, value in parse_qs(urlsplit(place).query).items()}
    back = urlsplit(provider.approved(asked))
    return f"{back.path}?{back.query}"


def why(answer: Answer) -> str:
    """What the page to sign in at is to say; nobody has a session."""
    assert answer.status == 303
    assert "__Host-roundtable=" not in answer.headers.get("set-cookie", "")
    return parse_qs(urlsplit(answer.headers["location"]).query)["why"][0]


@pytest.mark.skipif(BROWSER is None, reason="no browser here: install chromium")
async def test_somebody_signs_in_by_their_organisation(
    provider: IdentityProvider, settings: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    from playwright.async_api import async_playwright

    async with world_with(provider, settings, tmp_path) as world, async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--ignore-certificate-errors"]
        )
        page = await browser.new_page()
        await page.goto(f"https://localhost:{world.dashboard.port}/silos")
        await page.get_by_role("link", name="Sign in with your organisation").click()
        await page.get_by_role("heading", level=1, name="Silos").wait_for()
        told = await page.evaluate("fetch('/api/session').then((answer) => answer.json())")
        assert (told["name"], told["role"]) == ("oidc:ada", "operator")
        assert 0 < told["expires"] - time.time() <= 600
        cookies = {cookie["name"]: cookie for cookie in await page.context.cookies()}
        assert list(cookies) == ["__Host-roundtable"]
        assert (cookies["__Host-roundtable"]["sameSite"], cookies["__Host-roundtable"]["httpOnly"]) == (
            "Strict",
            True,
        )
        await browser.close()


async def test_what_comes_back_counts_for_the_browser_that_has_asked_alone(
    provider: IdentityProvider, settings: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    async with world_with(provider, settings, tmp_path) as world:
        mine, other = world.browser(), world.browser()
        place = await sent(mine)
        asked = parse_qs(urlsplit(place).query)
        assert (asked["realm"], asked["response_type"], asked["scope"]) == (["x"], ["code"], ["openid"])
        back = way_back(provider, place)
        # Another browser, one that has asked for itself, and one that has asked nothing.
        await sent(other)
        assert why(await other.ask("GET", back)) == "wrong"
        assert why(await world.browser().ask("GET", back)) == "lost"
        assert why(await mine.ask("GET", f"{back}&iss=x".replace("iss=http", "is=http"))) == "wrong"
        assert why(await mine.ask("GET", "/sign-in/back?error=access_denied&state=x")) == "refused"
        assert why(await mine.ask("GET", "/sign-in/back?code=x&state=%F0%9F%92%A9")) == "wrong"
        # Its own answer lets it in, once.
        begun = await mine.ask("GET", back)
        assert begun.headers["location"] == "/sign-in?why=done&next=/jobs"
        assert "__Host-roundtable=" in begun.headers["set-cookie"]
        assert why(await mine.ask("GET", back)) == "wrong"
        # Nowhere else, whatever the address said.
        place = await sent(mine, "//evil.example/x")
        assert (await mine.ask("GET", way_back(provider, place))).headers["location"].endswith("next=/")
        back = way_back(provider, await sent(mine))
        provider.server.shutdown()
        provider.server.server_close()
        assert why(await mine.ask("GET", back)) == "away"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nonce": "of another sign-in"}, "wrong"),
        ({"aud": "another"}, "wrong"),
        ({"aud": "roundtable"}, "wrong"),
        ({"aud": ["roundtable-page", "another"]}, "wrong"),
        ({"azp": "another"}, "wrong"),
        ({"iss": "https://evil.example"}, "wrong"),
        ({"exp": 1000}, "wrong"),
        ({"roles": ["visitors"]}, "role"),
    ],
)
async def test_a_token_that_is_not_for_this_sign_in_is_none(
    changes: dict[str, Any],
    said: str,
    provider: IdentityProvider,
    settings: Callable[..., ServerConfig],
    tmp_path: Path,
) -> None:
    async with world_with(provider, settings, tmp_path) as world:
        browser = world.browser()
        back = way_back(provider, await sent(browser))
        provider.changes = changes
        assert why(await browser.ask("GET", back)) == said


async def test_a_provider_that_is_another_lets_nobody_in_and_guessing_is_slowed_down(
    provider: IdentityProvider, settings: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    async with world_with(provider, settings, tmp_path) as world:
        browser = world.browser()
        for published in ({"issuer": "https://evil.example"}, {"token_endpoint": "http://evil.example/"}):
            provider.published = published
            assert why(await browser.ask("GET", "/sign-in/provider")) == "away"
        provider.published = {}
        place = await sent(browser)
        state = parse_qs(urlsplit(place).query)["state"][0]
        answers = [
            why(await browser.ask("GET", f"/sign-in/back?state={state}&code=guess-{number}"))
            for number in range(110)
        ]
        assert answers[0] == "wrong"
        assert answers[-1] == "wait"


async def test_a_provider_that_hangs_holds_up_nothing_else(
    provider: IdentityProvider, settings: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    provider.answers.clear()
    async with world_with(provider, settings, tmp_path) as world:
        loop, context, open_ones = asyncio.get_running_loop(), ssl._create_unverified_context(), []
        loop.set_default_executor(ThreadPoolExecutor(2))
        for _ in range(10):
            _, writer = await asyncio.open_connection("127.0.0.1", world.dashboard.port, ssl=context)
            lines = ("GET /sign-in/provider HTTP/1.1", f"Host: localhost:{world.dashboard.port}", "", "")
            writer.write("\r\n".join(lines).encode())
            await writer.drain()
            open_ones.append(writer)
        with ThreadPoolExecutor(1) as waiting:
            for _ in range(2):
                await loop.run_in_executor(waiting, provider.asked_for.acquire)
        # Threads that everything else in this process shares are free.
        try:
            async with asyncio.timeout(3):
                assert await asyncio.to_thread(int) == 0
        finally:
            provider.answers.set()
        for writer in open_ones:
            writer.close()


async def test_without_a_client_there_is_no_such_way(settings: Callable[..., ServerConfig]) -> None:
    async with page_world(settings()) as world:
        assert (await world.browser().ask("GET", "/api/sign-in")).values == {"provider": False}
        assert why(await world.browser().ask("GET", "/sign-in/provider")) == "role"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client": "x"}, "go together"),
        ({"client_secret": "x"}, "of no use"),
        ({"client": "x", "page": "http://hub.example.org"}, "page must be https"),
        ({"client": "x", "page": "https://hub", "issuer": "http://id"}, "issuer must be https"),
    ],
)
def test_mistakes_are_named(changes: dict[str, str], said: str) -> None:
    from roundtable.server.auth.oidc import OidcTable

    values = {"issuer": "https://id", "audience": "a", "jwks": "x", "roles": {}, **changes}
    with pytest.raises(ValueError, match=said):
        OidcTable.model_validate(values)


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    from roundtable.server.auth.oidc import OidcTable, Provider
    from roundtable.server.auth.oidc_sign_in import ProviderSignIn

    values = {"issuer": "https://id", "audience": "a", "jwks": "x", "roles": {}, "client": "x"}
    table = OidcTable.model_validate({**values, "page": "https://hub", "client_secret": "secret"})
    assert table.below(tmp_path).client_secret == str(tmp_path / "secret")
    with pytest.raises(ConfigError, match="cannot be read"):
        ProviderSignIn(table.below(tmp_path), Provider(table))
    (tmp_path / "secret").write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        ProviderSignIn(table.below(tmp_path), Provider(table))
