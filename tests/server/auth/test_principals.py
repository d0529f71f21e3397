"""Parties are a role and a name: nobody is limited, cut off or revoked as somebody else of the same name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.administration import Administrator
from roundtable.core.errors import IdentityError, RoundtableError
from roundtable.core.identity.credentials import OPERATOR_ROLES, create_ca, issue
from roundtable.proto import operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.auth.permissions import RANKS, outranks
from roundtable.server.auth.rate_limit import RateLimit

ADMINS = ("ada", "bea")


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator, two administrators, an operator of each lesser role, a silo called like the first."""
    folder = tmp_path_factory.mktemp("people")
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", ("localhost",))
    for name in ADMINS:
        issue(folder / "ca", name, "admin", folder / name)
    for role in OPERATOR_ROLES[:-1]:
        issue(folder / "ca", role, role, folder / role)
    issue(folder / "ca", "relay", "relay", folder / "relay", ("localhost",))
    issue(folder / "ca", "ada", "agent", folder / "silo-ada")
    return folder


@pytest.fixture
async def hub(settings: Callable[..., ServerConfig], people: Path) -> AsyncIterator[Coordinator]:
    config = settings(credentials=str(people / "coordinator"), enrolment="127.0.0.1:0")
    async with running(config) as started:
        yield started


async def ask(hub: Coordinator, folders: list[Path], work: Callable[..., Any]) -> Any:
    """What `work` gives, with a connection for each folder."""

    def inside() -> Any:
        with ExitStack() as stack:
            address = f"localhost:{hub.port}"
            return work(*(stack.enter_context(Administrator(address, folder)) for folder in folders))

    return await asyncio.to_thread(inside)


async def audited(hub: Coordinator) -> list[dict[str, Any]]:
    lines = [line async for page in hub.security.audit.lines(1) for line in page]
    return [json.loads(line)["entry"] for line in lines if line.startswith('{"entry"')]


async def test_a_silo_called_like_an_administrator_is_somebody_else(hub: Coordinator, people: Path) -> None:
    quotas = hub.security.quotas
    ample, quotas.rate = quotas.rate, RateLimit(0.001, 5, time.monotonic)
    while quotas.rate.allows("agent/ada"):
        pass
    async with Operator(hub.port, people / "ada") as ada:
        await ada.stub.Status(operator_pb2.StatusRequest())
        silo = ScriptedAgent(hub.port, people / "silo-ada")
        with pytest.raises(grpc.aio.AioRpcError, match="too many calls"):
            await silo.connect()
        await silo.close()
        quotas.rate = ample
        watched = await ada.submit()
        watching = ada.stub.WatchJob(operator_pb2.WatchJobRequest(job=watched.id))
        await watching.read()
        async with ScriptedAgent(hub.port, people / "silo-ada", tasks=("other",)) as silo:
            found = await ask(hub, [people / "operator"], lambda operator: operator.revoke("ada", "stolen"))
            assert found.calls == 1
            with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
                await silo.next()
        # Neither what the administrator has open nor the next call is concerned.
        await ada.stub.PauseJob(operator_pb2.JobRequest(job=watched.id))
        assert (await watching.read()).detail is not None
        watching.cancel()
    revoked = [entry for entry in await audited(hub) if entry["action"] == "revoked"]
    assert [(entry["actor"], entry["object"], entry["detail"]["role"]) for entry in revoked] == [
        ("operator/operator", "ada", "agent")
    ]


def test_nobody_outranks_an_equal() -> None:
    assert [[outranks(one, other) for other in RANKS] for one in RANKS] == [
        [place < rank for place in range(len(RANKS))] for rank in range(len(RANKS))
    ]
    assert not outranks("coordinator", "agent")


@pytest.mark.parametrize("role", RANKS)
async def test_an_operator_revokes_who_ranks_below(hub: Coordinator, people: Path, role: str) -> None:
    allowed = role in ("agent", "relay", "viewer", "data-scientist")
    names = {"agent": "ada", "admin": "ada"}

    def work(operator: Administrator) -> int:
        return operator.revoke(names.get(role, role), "", role).calls

    if allowed:
        await ask(hub, [people / "operator"], work)
    else:
        with pytest.raises(IdentityError, match="only who ranks below: agent, relay, viewer, data-scientist"):
            await ask(hub, [people / "operator"], work)
    folder = {"agent": "silo-ada", "admin": "ada"}.get(role, role)
    if role == "agent":
        return
    async with Operator(hub.port, people / folder) as party:
        if allowed:
            with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
                await party.stub.Status(operator_pb2.StatusRequest())
        else:
            await party.stub.Status(operator_pb2.StatusRequest())


async def test_an_administrator_is_revoked_by_two(hub: Coordinator, people: Path, tmp_path: Path) -> None:
    door = f"localhost:{hub.security.enrolment_port}"

    def alone(ada: Administrator) -> str:
        request = ada.revoke("bea", "gone over", "admin").pending
        assert ada.revoke("bea", "again", "admin").pending == request
        with pytest.raises(IdentityError, match="is your own: another administrator must confirm it"):
            ada.confirm(request)
        second_self = tmp_path / "token"
        second_self.mkdir()
        (second_self / "ca.crt").write_bytes((people / "ca" / "ca.crt").read_bytes())
        (second_self / "token").write_text(ada.create_token("second-self", "admin", 3600).token)
        (second_self / "token").chmod(0o600)
        with (
            Administrator(door, second_self) as other,
            pytest.raises(IdentityError, match="takes two who have certificates of the root"),
        ):
            other.confirm(request)
        return request

    request = await ask(hub, [people / "ada"], alone)
    async with Operator(hub.port, people / "bea") as bea:
        await bea.stub.Status(operator_pb2.StatusRequest())
    third = issue(people / "ca", "cleo", "admin", tmp_path / "cleo")

    def together(cleo: Administrator) -> None:
        (waiting,) = cleo.pending()
        assert (waiting.request_id, waiting.author, waiting.name) == (request, "admin/ada", "bea")
        cleo.confirm(request)
        assert cleo.pending() == []
        with pytest.raises(RoundtableError, match="waits for a second person"):
            cleo.confirm(request)

    await ask(hub, [third], together)
    async with Operator(hub.port, people / "bea") as bea:
        with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
            await bea.stub.Status(operator_pb2.StatusRequest())
    told = [(one["actor"], one["action"]) for one in await audited(hub) if one["object"] == "bea"]
    assert [one for one in told if "/Revoke" not in one[1]] == [
        ("admin/ada", "requested"),
        ("admin/cleo", "confirmed"),
        ("admin/cleo", "revoked"),
    ]


async def test_what_the_root_issues_afterwards_is_the_way_back(
    hub: Coordinator, people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = hub.clock() - 2
    monkeypatch.setattr(hub.security.administration, "_clock", lambda: earlier)
    old = issue(
        people / "ca", "vic", "viewer", tmp_path / "old", start=datetime.fromtimestamp(earlier - 1, UTC)
    )
    await ask(hub, [people / "operator"], lambda operator: operator.revoke("vic", "left", "viewer"))
    fresh = issue(people / "ca", "vic", "viewer", tmp_path / "fresh")
    async with Operator(hub.port, old) as before, Operator(hub.port, fresh) as after:
        with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
            await before.stub.Status(operator_pb2.StatusRequest())
        await after.stub.Status(operator_pb2.StatusRequest())


async def test_an_administrators_token_is_voided_by_its_maker_or_by_two(
    hub: Coordinator, people: Path
) -> None:
    def work(ada: Administrator, bea: Administrator) -> None:
        for name in ("one", "two"):
            ada.create_token(name, "admin", 3600)
        assert not ada.revoke_token("one").pending
        request = bea.revoke_token("two").pending
        assert {token.name: token.revoked for token in bea.tokens()} == {"one": True, "two": False}
        ada.confirm(request)
        assert all(token.revoked for token in bea.tokens())

    await ask(hub, [people / name for name in ADMINS], work)


async def test_a_stream_ends_with_the_token_that_opened_it(
    hub: Coordinator, people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a token for a minute does not watch for a day."""
    token = await ask(hub, [people / "ada"], lambda ada: ada.create_token("short", "viewer", 60).token)
    monkeypatch.setattr(hub.security.principals, "_clock", lambda: hub.clock() + 59.5)
    ca = grpc.ssl_channel_credentials((people / "ca" / "ca.crt").read_bytes())
    both = grpc.composite_channel_credentials(ca, grpc.access_token_call_credentials(token))
    async with (
        Operator(hub.port, people / "ada") as ada,
        grpc.aio.secure_channel(f"localhost:{hub.security.enrolment_port}", both) as channel,
    ):
        job = await ada.submit()
        watching = channel.unary_stream(
            "/roundtable.v1.Operators/WatchJob",
            operator_pb2.WatchJobRequest.SerializeToString,
            operator_pb2.JobUpdate.FromString,
        )(operator_pb2.WatchJobRequest(job=job.id), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError, match="'token:short' has ended"):
            async for _ in watching:
                pass


async def test_wrong_secrets_lock_out_a_credential_before_an_address(hub: Coordinator, people: Path) -> None:
    """Behind one address there may be a whole hospital."""
    good = await ask(hub, [people / "ada"], lambda ada: ada.create_token("good", "viewer", 3600).token)
    other = await ask(hub, [people / "ada"], lambda ada: ada.create_token("other", "viewer", 3600).token)
    ca = grpc.ssl_channel_credentials((people / "ca" / "ca.crt").read_bytes())

    async def status(token: str) -> str:
        both = grpc.composite_channel_credentials(ca, grpc.access_token_call_credentials(token))
        async with grpc.aio.secure_channel(f"localhost:{hub.security.enrolment_port}", both) as channel:
            try:
                await channel.unary_unary("/roundtable.v1.Operators/Status")(b"")
            except grpc.aio.AioRpcError as error:
                return str(error.details())
        return ""

    wrong = other[:-8] + "AAAAAAAA"
    for _ in range(5):
        assert "not known here" in await status(wrong)
    assert "too many wrong tokens" in await status(wrong)
    assert "too many wrong tokens" in await status(other)
    assert await status(good) == ""
