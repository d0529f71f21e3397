"""The page against strangers, against roles that may less, and against other sites in a user's browser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from page_world import PageWorld, page_world

from roundtable.administration import Administrator
from roundtable.page import application
from roundtable.server import ServerConfig


@pytest.fixture
async def world(settings: Callable[..., ServerConfig]) -> AsyncIterator[PageWorld]:
    async with page_world(settings()) as found:
        yield found


async def test_a_stranger_sees_the_sign_in_alone(world: PageWorld) -> None:
    stranger = world.browser()
    for path in ("/", "/jobs", "/jobs/abc", "/audit"):
        answer = await stranger.ask("GET", path)
        assert answer.status == 303
        assert answer.headers["location"].startswith("/sign-in?next=/")
    for path in ("/api/session", "/api/read/jobs", "/api/job/abc", "/api/audit", "/api/live?topics=overview"):
        assert (await stranger.ask("GET", path)).status == 401, path
    assert (await stranger.change("pause", job="abc")).status == 401
    for answer in stranger.seen:
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


async def test_a_session_is_a_cookie_that_scripts_and_other_sites_do_not_get(world: PageWorld) -> None:
    viewer = world.browser()
    answer = await viewer.sign_in(world.tokens["viewer"], "/silos")
    assert answer.status == 303
    assert answer.headers["location"] == "/silos"
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-roundtable=")
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= {
        part.strip().lower() for part in cookie.split(";")
    }
    assert world.tokens["viewer"] not in cookie
    told = (await viewer.ask("GET", "/api/session")).values
    assert told["role"] == "viewer"
    assert "Operators/PauseJob" not in told["may"]


@pytest.mark.parametrize(
    "onwards", ["//evil.example", "https://evil.example", "/\\evil", "javascript:x", "/a\nb"]
)
async def test_signing_in_leads_nowhere_else(world: PageWorld, onwards: str) -> None:
    answer = await world.browser().sign_in(world.tokens["viewer"], onwards)
    assert answer.headers["location"] == "/"


async def test_a_role_may_on_the_page_what_it_may_at_the_wire(world: PageWorld) -> None:
    viewer, operator = world.browser(), world.browser()
    await viewer.sign_in(world.tokens["viewer"])
    await operator.sign_in(world.tokens["operator"])
    refused = await viewer.change("disable", name="alder", reason="mine")
    assert refused.status == 403
    assert "needs one who is operator or admin" in refused.values["error"]
    assert (await viewer.ask("GET", "/api/audit")).status == 403
    # It gets as far as the service, which knows no such silo.
    assert (await operator.change("disable", name="alder", reason="mine")).status == 404
    lines = "".join((await operator.ask("GET", "/api/audit")).values["lines"])
    assert "Operators/DisableClient" in lines
    assert "operator/token:t-operator" in lines


async def test_another_sites_request_changes_nothing(world: PageWorld) -> None:
    operator = world.browser()
    await operator.sign_in(world.tokens["operator"])
    token = operator.forgery_token
    body = b'{"name": "alder", "reason": "forged"}'
    path = "/api/change/disable"
    without = await operator.ask("POST", path, body)
    wrong = await operator.ask("POST", path, body, X_Roundtable_Token="0" * 64)
    origin = await operator.ask("POST", path, body, X_Roundtable_Token=token, Origin="https://evil.example")
    site = await operator.ask("POST", path, body, X_Roundtable_Token=token, Sec_Fetch_Site="cross-site")
    assert [each.status for each in (without, wrong, origin, site)] == [403] * 4
    for method in ("GET", "PUT", "DELETE"):
        assert (await operator.ask(method, path, X_Roundtable_Token=token)).status == 405
    # The token of one session is no good in another.
    other = world.browser()
    await other.sign_in(world.tokens["operator"])
    other.forgery_token = token
    assert (await other.change("disable", name="alder", reason="x")).status == 403


async def test_a_name_that_is_not_ours_is_refused(world: PageWorld) -> None:
    browser = world.browser()
    browser.host = "rebound.example"
    answer = await browser.ask("GET", "/sign-in")
    assert answer.status == 421
    assert b"`hosts` of [dashboard]" in answer.body


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2fapplication.py",
        "/static/%2e%2e/app.js",
        "/static/app.js%00",
        "/static/../../x",
        "/static/",
    ],
)
async def test_files_are_those_of_the_page_alone(world: PageWorld, path: str) -> None:
    answer = await world.browser().ask("GET", path)
    assert answer.status in (303, 404)
    assert b"import" not in answer.body
    assert (await world.browser().ask("GET", "/static/app.js")).status == 200


async def test_wrong_tokens_are_slowed_down(world: PageWorld) -> None:
    browser = world.browser()
    places = [(await browser.sign_in("a-wrong-token")).headers["location"] for _ in range(7)]
    assert places[0].startswith("/sign-in?why=wrong")
    assert places[-1].startswith("/sign-in?why=wait")
    assert not browser.cookie


async def test_hostile_bodies_and_names_are_refused(world: PageWorld) -> None:
    operator = world.browser()
    await operator.sign_in(world.tokens["operator"])
    for body in (b"", b"[1]", b"{", b"\xff", b'{"job": {}}', b"[" * 5000):
        answer = await operator.ask(
            "POST", "/api/change/pause", body, X_Roundtable_Token=operator.forgery_token
        )
        assert answer.status == 400, body[:20]
    large = await operator.ask(
        "POST", "/api/change/pause", b"x" * 70_000, X_Roundtable_Token=operator.forgery_token
    )
    assert large.status == 413
    unknown = await operator.ask("GET", "/api/read/<script>")
    assert unknown.status == 404
    assert unknown.headers["content-type"] == "application/json"
    for topics in ("", "nonsense", "job:../x", ",".join(f"job:{n}" for n in range(9))):
        assert (await operator.ask("GET", f"/api/live?topics={topics}")).status == 400


async def test_a_session_ends_with_its_token_and_at_sign_out(world: PageWorld) -> None:
    operator, admin = world.browser(), world.browser()
    await operator.sign_in(world.tokens["operator"])
    await admin.sign_in(world.tokens["admin"])
    stream = asyncio.create_task(operator.ask("GET", "/api/live?topics=overview"))
    assert (await admin.change("revoke-token", name="t-operator")).status == 200
    assert (await operator.ask("GET", "/api/read/jobs")).status == 401
    assert b"event: ended" in (await stream).body
    left = await admin.ask("POST", "/sign-out", X_Roundtable_Token=admin.forgery_token)
    assert left.status == 200
    assert "Max-Age=0" in left.headers["set-cookie"]
    assert (await admin.ask("GET", "/api/session")).status == 401


async def test_sessions_outlive_a_restart_and_are_kept_as_digests(
    settings: Callable[..., ServerConfig],
) -> None:
    config = settings()
    async with page_world(config) as world:
        browser = world.browser()
        await browser.sign_in(world.tokens["viewer"])
    async with page_world(config) as world:
        browser.port = world.dashboard.port
        assert (await browser.ask("GET", "/api/session")).values["role"] == "viewer"
        secret = browser.cookie.partition("=")[2]
        stored = [path.read_bytes() for path in _files(config)]
        assert stored
        assert not any(secret.encode() in data for data in stored)


async def test_a_certificates_holder_signs_in_once_by_a_word_until_it_is_revoked(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with page_world(settings()) as world:
        pages = world.coordinator.security.pages
        with Administrator(f"127.0.0.1:{world.coordinator.port}", certificates / "olga") as olga:
            reply = await asyncio.to_thread(olga.open_page)
            assert (reply.host, reply.port, reply.tls) == ("127.0.0.1", 0, True)
            browser, thief = world.browser(), world.browser()
            await browser.sign_in(reply.word)
            assert (await browser.ask("GET", "/api/session")).values["name"] == "olga"
            await thief.sign_in(reply.word)
            late = await asyncio.to_thread(olga.open_page)
            pages._clock = lambda: time.time() + 61.0
            await thief.sign_in(late.word)
            assert thief.cookie == ""
            stored = b"".join(path.read_bytes() for path in _files(world.coordinator.config))
            assert reply.word.encode() not in stored
        # The root's list, which is offline: by the certificate's serial number.
        pages._is_listed = bool
        assert (await browser.ask("GET", "/api/session")).status == 401
        pages._is_listed = world.coordinator.security.principals.is_listed
        assert (await browser.ask("GET", "/api/session")).status == 200
        pages._clock = time.time
        with Administrator(f"127.0.0.1:{world.coordinator.port}", certificates / "olga") as olga:
            kept = await asyncio.to_thread(olga.open_page)
        admin = world.browser()
        await admin.sign_in(world.tokens["admin"])
        with Administrator(f"127.0.0.1:{world.coordinator.port}", certificates / "ada") as ada:
            await asyncio.to_thread(ada.revoke, "olga", "has left", "operator")
        assert (await browser.ask("GET", "/api/session")).status == 401
        assert (await admin.ask("GET", "/api/session")).status == 200
        # A word that was given before is good for nobody any more.
        late_thief = world.browser()
        assert "why=role" in (await late_thief.sign_in(kept.word)).headers["location"]
        assert late_thief.cookie == ""


async def test_one_party_has_so_many_streams_and_they_end_with_the_service(
    world: PageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer = world.browser()
    await viewer.sign_in(world.tokens["viewer"])
    monkeypatch.setattr(application, "MOST_STREAMS", 1)
    reader, writer = await viewer.listen("/api/live?topics=overview")
    assert (await viewer.ask("GET", "/api/live?topics=overview")).status == 429
    await world.dashboard.close()
    async with asyncio.timeout(20):
        assert await reader.read() != b""
    writer.close()


def _files(config: ServerConfig) -> list[Path]:
    return [path for path in Path(config.state).glob("coordinator.db*") if path.is_file()]
