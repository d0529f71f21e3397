"""Operators with an address of their own: each door answers its own services, and names the other one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from definite import definite
from scripted_agent import ScriptedAgent, secure_channel
from service import Operator, running

from roundtable.administration import Administrator
from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.identity.credentials import create_ca, issue, load_credentials
from roundtable.operator import OperatorClient
from roundtable.proto import agent_pb2, agent_pb2_grpc, operator_pb2, operator_pb2_grpc
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.auth.permissions import PERMISSIONS
from roundtable.server.auth.separate_doors import OF_AGENTS
from roundtable.server.leadership.standby import standing_by

ROLES = ("agent", "relay", "admin")
CALLS = 200


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator, and one of each role that calls."""
    folder = tmp_path_factory.mktemp("doors")
    create_ca(folder / "ca")
    issue(folder / "ca", "hub", "coordinator", folder / "hub", ("localhost",), enrols=True)
    for role in ROLES:
        issue(folder / "ca", role, role, folder / role, ("localhost",) if role == "relay" else ())
    return folder


@pytest.fixture
async def hub(settings: Callable[..., ServerConfig], parties: Path) -> AsyncIterator[Coordinator]:
    doors = {"operators": "127.0.0.1:0", "enrolment": "127.0.0.1:0", "announce": "hub:7443"}
    async with running(settings(credentials=str(parties / "hub"), **doors)) as started:
        yield started


def plain_channel(port: int, credentials: Path) -> grpc.Channel:
    """A channel that is connected, and whose calls need no event loop."""
    own = load_credentials(credentials)
    secure = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    channel = grpc.secure_channel(f"localhost:{port}", secure)
    grpc.channel_ready_future(channel).result()
    return channel


async def refusal(channel: grpc.aio.Channel, name: str) -> tuple[grpc.StatusCode, str]:
    """What an empty message to a method is answered with, of whatever kind the method is."""
    method = channel.stream_stream(f"/roundtable.v1.{name}")

    async def made() -> None:
        async for _ in method(iter([b""])):
            pass

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await definite(made)
    return refused.value.code(), refused.value.details() or ""


@pytest.mark.parametrize("role", ROLES)
async def test_each_door_refuses_what_is_the_others_and_names_it(
    hub: Coordinator, parties: Path, role: str
) -> None:
    mine = [name for name, permission in PERMISSIONS.items() if role in permission.callers]
    to_agents, to_operators = (
        [name for name in mine if (name.partition("/")[0] in OF_AGENTS) == of_agents]
        for of_agents in (True, False)
    )
    assert (role == "admin") != bool(to_agents)
    named = "connect to the one that coordinator.toml names as"
    elsewhere = f"operators {named} `operators` (127.0.0.1:{hub.operators_port})"
    async with secure_channel(hub.port, parties / role) as channel:
        for name in to_operators:
            code, said = await refusal(channel, name)
            assert code is grpc.StatusCode.FAILED_PRECONDITION, (name, said)
            assert said == f"this address of the coordinator is for agents and relays: {elsewhere}"
    elsewhere = f"agents and relays {named} `listen` (hub:7443)"
    async with secure_channel(hub.operators_port, parties / role) as channel:
        for name in to_agents:
            code, said = await refusal(channel, name)
            assert code is grpc.StatusCode.FAILED_PRECONDITION, (name, said)
            assert said == f"this address of the coordinator is for operators: {elsewhere}"


async def test_a_call_at_the_wrong_door_changes_nothing_and_is_no_change_in_the_audit_log(
    hub: Coordinator, parties: Path
) -> None:
    def ask() -> None:
        with (
            Administrator(f"localhost:{hub.port}", parties / "admin") as admin,
            pytest.raises(ConfigError, match="is for agents and relays: operators connect to"),
        ):
            admin.create_token("second-self", "admin", 3600)

    await asyncio.to_thread(ask)
    pages = [json.loads(line) async for page in hub.security.audit.lines(1) for line in page]
    assert "Administration/CreateToken" not in [each["entry"]["action"] for each in pages if "entry" in each]
    async with Operator(hub.operators_port, parties / "admin") as admin:
        status = await admin.stub.Status(operator_pb2.StatusRequest())
        assert status.caller == "admin/admin"
    assert hub.security.access.refusals["Administration/CreateToken", "FAILED_PRECONDITION"] == 1


async def test_an_agent_learns_where_to_connect_and_works_there(hub: Coordinator, parties: Path) -> None:
    lost = ScriptedAgent(hub.operators_port, parties / "agent")
    with pytest.raises(grpc.aio.AioRpcError, match=re.escape("names as `listen` (hub:7443)")):
        await lost.connect()
    await lost.close()
    async with (
        ScriptedAgent(hub.port, parties / "agent"),
        Operator(hub.operators_port, parties / "admin") as admin,
    ):
        assert (await admin.stub.Status(operator_pb2.StatusRequest())).clients_online == 1


async def test_a_token_counts_at_the_door_without_certificates(
    hub: Coordinator, parties: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    (tmp_path / "ca.crt").write_bytes((parties / "ca" / "ca.crt").read_bytes())

    def ask() -> str:
        with Administrator(f"localhost:{hub.operators_port}", parties / "admin") as admin:
            token.write_text(admin.create_token("nina", "viewer", 3600).token)
        with OperatorClient(f"localhost:{hub.security.enrolment_port}", tmp_path) as nina:
            return nina.status().caller

    assert await asyncio.to_thread(ask) == "viewer/token:nina"


@pytest.mark.parametrize("apart", [True, False])
async def test_an_operator_does_not_stand_behind_agents_calls(
    settings: Callable[..., ServerConfig], parties: Path, apart: bool
) -> None:
    """By count: how many of the agent's calls that came before are answered first.

    gRPC's own threads send them while this one holds the coordinator's event loop.
    """
    doors = {"operators": "127.0.0.1:0"} if apart else {}
    async with running(settings(credentials=str(parties / "hub"), **doors)) as hub:
        with (
            plain_channel(hub.port, parties / "agent") as agents,
            plain_channel(hub.operators_port or hub.port, parties / "admin") as operators,
        ):
            ask = agent_pb2_grpc.AgentsStub(agents).UploadStatus
            calls = [ask.future(agent_pb2.UploadHeader()) for _ in range(CALLS)]
            status = operator_pb2_grpc.OperatorsStub(operators).Status.future(operator_pb2.StatusRequest())
            await asyncio.to_thread(status.result)
            before = sum(call.done() for call in calls)
            await asyncio.to_thread(lambda: [call.exception() for call in calls])
    assert (before < CALLS // 2) == apart


async def test_one_that_stands_by_does_so_at_both_doors(parties: Path) -> None:
    own = load_credentials(parties / "hub")
    async with standing_by("127.0.0.1:0", "127.0.0.1:0", own, lambda: "hub:7443") as addresses:
        for address, role in zip(addresses, ("agent", "admin"), strict=True):
            async with secure_channel(int(address.rpartition(":")[2]), parties / role) as channel:
                code, said = await refusal(channel, "Operators/Status")
                assert code is grpc.StatusCode.UNAVAILABLE
                assert said.startswith("standby: the active coordinator is the one at hub:7443 (for agents")


async def test_an_address_that_is_taken_is_named_with_its_setting(
    hub: Coordinator, settings: Callable[..., ServerConfig], parties: Path, tmp_path: Path
) -> None:
    taken = f"127.0.0.1:{hub.operators_port}"
    another = Coordinator(
        settings(credentials=str(parties / "hub"), state=str(tmp_path / "b"), operators=taken)
    )
    with pytest.raises(ResourceError, match=f"cannot listen on {taken}: .* with --operators host:port"):
        await another.start()
    with pytest.raises(ConfigError, match="'7445' is not host:port"):
        settings(operators="7445")


async def test_who_starts_it_is_told_both_addresses(hub: Coordinator) -> None:
    assert hub.addresses == f"127.0.0.1:{hub.port}, for operators on 127.0.0.1:{hub.operators_port}"
