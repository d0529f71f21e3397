"""Who has copied a silo's credentials: refused, told to operators, and no harm to the silo's own agent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from scripted_agent import ScriptedAgent, secure_channel
from service import Operator, running

from roundtable.client.agent.installation import Installation
from roundtable.core.identity.credentials import issue, load_silo_identity
from roundtable.core.identity.signing import passage_values, sign
from roundtable.proto import PROTOCOL_VERSION, agent_pb2, relay_pb2, relay_pb2_grpc
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.store.agent_rows import stored_clients


async def greet(agent: ScriptedAgent, installation: Installation, **changes: Any) -> Any:
    """Says hello as this installation; the coordinator's answer to the proof."""
    challenge = await agent.connect(installation=installation.public_key, **changes)
    assert len(challenge.challenge) == 32
    await agent.say(proof=installation.prove(challenge.challenge))
    return await agent.next()


@pytest.fixture
def own(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "own", "alder")


@pytest.fixture
async def alder(
    coordinator: Coordinator, certificates: Path, own: Installation
) -> AsyncIterator[ScriptedAgent]:
    """The silo's own agent, connected."""
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    identity = (certificates / "alder" / "identity.crt").read_bytes()
    assert (await greet(agent, own, identity=identity)).HasField("welcome")
    yield agent
    await agent.close()


@pytest.mark.parametrize("how", ["its own key", "no key", "the key without its secret"])
async def test_a_clone_is_refused_and_the_agent_goes_on(
    coordinator: Coordinator,
    certificates: Path,
    alder: ScriptedAgent,
    own: Installation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    told: list[Any] = []
    alerts = coordinator.jobs._services.alerts
    monkeypatch.setattr(alerts, "tell", lambda incident, message, moment: told.append((incident, message)))
    session = coordinator._sessions.get("alder")
    signing = coordinator._sessions.identities["alder"]
    for _ in range(2):
        clone, thief = ScriptedAgent(coordinator.port, certificates / "alder"), tmp_path / "thief"
        if how == "no key":
            answer = await clone.connect()
        elif how == "its own key":
            answer = await greet(clone, Installation(thief, "alder"))
        else:
            await clone.connect(installation=own.public_key)
            await clone.say(proof=Installation(thief, "alder").prove(bytes(32)))
            answer = await clone.next()
        await clone.close()
        expected = "is not right" if how.endswith("secret") else "belongs to another installation"
        assert expected in answer.refused.reason
    await alder.say(heartbeat=agent_pb2.Heartbeat(state="available"))
    await alder.expect("heartbeat")
    # Its own agent is told with that, and once.
    clone = await alder.expect("clone")
    assert clone.address in ("ipv4:127.0.0.1", "ipv6:%5B::1%5D")
    assert 0 < clone.time <= coordinator.clock()
    await alder.say(heartbeat=agent_pb2.Heartbeat(state="available"))
    await alder.say(heartbeat=agent_pb2.Heartbeat(state="available"))
    await alder.expect("heartbeat")
    await alder.expect("heartbeat")
    assert coordinator._sessions.get("alder") is session
    assert coordinator._sessions.identities["alder"] is signing
    # Once an hour: a clone that comes again and again is no flood of alerts.
    ((incident, message),) = told
    assert (incident.kind, incident.severity, incident.site) == ("clone", "critical", "alder")
    assert "ipv4:127.0.0.1" in message or "ipv6:" in message
    lines = [line async for page in coordinator.security.audit.lines(1) for line in page]
    entries = [json.loads(line)["entry"] for line in lines if line.startswith('{"entry"')]
    refused = [entry for entry in entries if entry["object"] == "Agents/Connect"]
    assert [(entry["actor"], entry["action"]) for entry in refused] == [("agent/alder", "refused")] * 2


async def test_a_wrong_proof_binds_nothing(
    coordinator: Coordinator, certificates: Path, own: Installation
) -> None:
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    await agent.connect(installation=own.public_key)
    await agent.say(proof=own.prove(bytes(32)))
    assert "is not right" in (await agent.next()).refused.reason
    await agent.close()
    async with ScriptedAgent(coordinator.port, certificates / "alder") as other:
        assert other.welcome is not None


async def test_a_line_that_breaks_before_the_proof_is_no_clone(
    coordinator: Coordinator, certificates: Path, alder: ScriptedAgent, own: Installation
) -> None:
    broken = ScriptedAgent(coordinator.port, certificates / "alder")
    await broken.connect(installation=own.public_key)
    await broken.call.done_writing()
    assert "did not prove" in (await broken.next()).refused.reason
    await broken.close()
    again = ScriptedAgent(coordinator.port, certificates / "alder")
    assert not (await greet(again, own)).welcome.HasField("clone")
    await again.close()


async def test_the_same_installation_comes_back_also_to_a_coordinator_that_was_started_again(
    settings: Callable[..., ServerConfig], certificates: Path, own: Installation, tmp_path: Path
) -> None:
    config = settings()
    for _ in range(2):
        async with running(config) as coordinator:
            first, second = (ScriptedAgent(coordinator.port, certificates / "alder") for _ in range(2))
            assert (await greet(first, own)).HasField("welcome")
            # A connection that hangs is replaced by the next one of the same installation.
            assert (await greet(second, Installation(tmp_path / "own", "alder"))).HasField("welcome")
            assert "has taken the place" in (await first.expect("refused")).reason
            await asyncio.gather(first.close(), second.close())


async def test_new_credentials_bind_anew(
    coordinator: Coordinator, certificates: Path, alder: ScriptedAgent, tmp_path: Path
) -> None:
    fresh = issue(certificates / "ca", "alder", "agent", tmp_path / "fresh")
    agent, moved = ScriptedAgent(coordinator.port, fresh), Installation(tmp_path / "moved", "alder")
    shown = {"identity": (fresh / "identity.crt").read_bytes()}
    assert (await greet(agent, moved, **shown)).HasField("welcome")
    await agent.close()


class ByRelay:
    """A relay's stream on which one silo at a time speaks."""

    def __init__(self, trunk: Any) -> None:
        self.trunk = trunk

    async def say(self, **message: Any) -> Any:
        """What the silo is told when it has said this."""
        said = relay_pb2.SaidBySilo(silo="alder", message=agent_pb2.FromAgent(**message))
        await self.trunk.write(relay_pb2.FromRelay(said=said))
        while (heard := await self.trunk.read()).WhichOneof("message") != "said":
            pass
        return heard.said.message

    async def greet(self, silo: Path, installation: Installation) -> Any:
        """Says hello as this installation with these credentials; the answer to its proof."""
        identity, key = load_silo_identity(silo), installation.public_key
        signature = sign(identity, "passage", passage_values("alder", "south", key))
        hello = agent_pb2.Hello(
            version="test",
            protocol=PROTOCOL_VERSION,
            tasks=["t"],
            clock=time.time(),
            identity=identity.certificate,
            installation=key,
            passage=agent_pb2.Passage(relay="south", signature=signature),
        )
        challenge = (await self.say(hello=hello)).challenge
        return await self.say(proof=installation.prove(challenge))


@pytest.fixture
async def by_relay(coordinator: Coordinator, certificates: Path) -> AsyncIterator[ByRelay]:
    if not (certificates / "south").exists():
        issue(certificates / "ca", "south", "relay", certificates / "south", hosts=("localhost",))
    channel = secure_channel(coordinator.port, certificates / "south")
    stub: Any = relay_pb2_grpc.RelaysStub(channel)
    trunk = stub.Trunk()
    hello = relay_pb2.RelayHello(version="test", protocol=PROTOCOL_VERSION, clock=time.time())
    await trunk.write(relay_pb2.FromRelay(hello=hello))
    assert (await trunk.read()).HasField("welcome")
    yield ByRelay(trunk)
    await channel.close()


async def test_a_clone_comes_by_no_relay_either_and_the_agent_goes_on(
    coordinator: Coordinator,
    certificates: Path,
    alder: ScriptedAgent,
    own: Installation,
    by_relay: ByRelay,
    tmp_path: Path,
) -> None:
    session = coordinator._sessions.get("alder")
    thief = Installation(tmp_path / "thief", "alder")
    answer = await by_relay.greet(certificates / "alder", thief)
    assert "belongs to another installation" in answer.refused.reason
    assert coordinator._sessions.get("alder") is session
    await alder.say(heartbeat=agent_pb2.Heartbeat(state="available"))
    await alder.expect("heartbeat")
    assert "by the relay south" in (await alder.expect("clone")).address
    # It is the agent's own way as well, and new credentials are known there.
    assert (await by_relay.greet(certificates / "alder", own)).HasField("welcome")
    fresh = issue(certificates / "ca", "alder", "agent", tmp_path / "fresh")
    assert (await by_relay.greet(fresh, thief)).HasField("welcome")


@pytest.mark.parametrize("shows", ["its identity", "no identity"])
async def test_a_clone_of_a_silo_behind_a_relay_does_not_come_beside_it(
    coordinator: Coordinator,
    certificates: Path,
    own: Installation,
    by_relay: ByRelay,
    tmp_path: Path,
    shows: str,
) -> None:
    assert (await by_relay.greet(certificates / "alder", own)).HasField("welcome")
    session = coordinator._sessions.get("alder")
    clone, thief = (
        ScriptedAgent(coordinator.port, certificates / "alder"),
        Installation(tmp_path / "thief", "alder"),
    )
    certificate = (certificates / "alder" / "identity.crt").read_bytes()
    answer = await greet(clone, thief, identity=certificate if shows == "its identity" else b"")
    await clone.close()
    expected = "another installation" if shows == "its identity" else "must hold identity.crt"
    assert expected in answer.refused.reason
    assert coordinator._sessions.get("alder") is session
    assert (await by_relay.say(heartbeat=agent_pb2.Heartbeat())).HasField("heartbeat")


async def test_who_offers_nothing_takes_no_place_and_is_not_heard(
    coordinator: Coordinator, certificates: Path, operator: Operator, alder: ScriptedAgent
) -> None:
    """A doctor proves no installation: with copied credentials it would speak for an agent that is away."""
    async with ScriptedAgent(coordinator.port, certificates / "birch"):
        job = await operator.submit('[cohort]\nsize = 2\nwait = "60s"\n[evaluation]\nevery = 0')
        asked = await alder.expect("instruction")
        await alder.close()
        await operator.watch_for(job.id, "client_offline")
        before = await coordinator._database.read(lambda c: stored_clients(c, ["alder"]))
        thief = ScriptedAgent(coordinator.port, certificates / "alder", tasks=())
        assert (await thief.connect()).HasField("welcome")
        await thief.say(failure=agent_pb2.Failure(step=asked.step, kind="task_error", detail="by the thief"))
        assert await thief.next() is None
        await thief.close()
        assert coordinator._sessions.get("alder") is None
        assert await coordinator._database.read(lambda c: stored_clients(c, ["alder"])) == before
        (shown,) = (each for each in (await operator.job(job.id)).clients if each.client == "alder")
        assert (shown.state, shown.note) == ("offline", "")


def test_the_key_is_for_its_owner_alone(own: Installation, tmp_path: Path) -> None:
    assert (tmp_path / "own" / "installation.key").stat().st_mode & 0o077 == 0


async def test_who_holds_the_key_of_a_connection_alone_uploads_nothing_before_the_silo_is_back(
    settings: Callable[..., ServerConfig], certificates: Path, own: Installation
) -> None:
    """A coordinator that was started again does not know the silo's identity until it says hello."""
    config, shown = settings(), {"identity": (certificates / "alder" / "identity.crt").read_bytes()}
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        alder = ScriptedAgent(coordinator.port, certificates / "alder")
        assert (await greet(alder, own, **shown)).HasField("welcome")
        await operator.submit("[cohort]\nsize = 1\nminimum = 1\n[evaluation]\nevery = 0")
        asked = await alder.expect("instruction")
        await alder.close()
    async with running(config) as coordinator:
        thief = ScriptedAgent(coordinator.port, certificates / "alder")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await thief.answer(asked, torch.ones(4))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await thief.close()
        alder = ScriptedAgent(coordinator.port, certificates / "alder")
        assert (await greet(alder, own, **shown)).HasField("welcome")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await alder.answer(asked, torch.ones(4))
        assert "is not signed by the silo's identity" in (refused.value.details() or "")
        await alder.close()
