"""Who has copied a silo's credentials: refused, told to operators, and no harm to the silo's own agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_agent import ScriptedAgent
from service import running

from roundtable.client.agent.installation import Installation
from roundtable.core.identity.credentials import issue
from roundtable.proto import agent_pb2
from roundtable.server import Coordinator, ServerConfig


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
    agent = ScriptedAgent(coordinator.port, fresh)
    assert (await greet(agent, Installation(tmp_path / "moved", "alder"))).HasField("welcome")
    await agent.close()


def test_the_key_is_for_its_owner_alone(own: Installation, tmp_path: Path) -> None:
    assert (tmp_path / "own" / "installation.key").stat().st_mode & 0o077 == 0
