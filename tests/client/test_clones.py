"""A copy of a silo's credentials on a second machine: its own agent goes on, and its people are told."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from processes import free_port
from prometheus_client.parser import text_string_to_metric_families
from service import running

from roundtable.client import Refused
from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.worker.script_trainer import ScriptTrainer
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.doctor.doctor_agent import examine_agent
from roundtable.server import ServerConfig

WARNING = "somebody else came with this silo's certificate"


@contextmanager
def lines() -> Iterator[asyncio.Queue[str]]:
    """What agents log."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: heard.put_nowait(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("roundtable.agent")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


async def until(heard: asyncio.Queue[str], words: str) -> list[str]:
    """Lines up to the first one with these words."""
    found = [""]
    async with asyncio.timeout(60):
        while words not in found[-1]:
            found.append(await heard.get())
    return found


def agent_of(config: AgentConfig) -> Agent:
    """A real agent; nobody asks it for work."""
    return Agent(config, ScriptTrainer(config.state / "jobs", None))


@asynccontextmanager
async def present(config: AgentConfig) -> AsyncIterator[Agent]:
    agent = agent_of(config)
    task = asyncio.create_task(agent.run())
    yield agent
    agent.stop()
    await task


async def steal(config: AgentConfig) -> None:
    """A second machine with the same credentials is refused."""
    with pytest.raises(Refused, match="belongs to another installation"):
        await agent_of(replace(config, state=config.folder / "thief")).run()


async def seen(agent: Agent) -> float:
    """When the agent's page of metrics says that a clone was seen."""

    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{agent.metrics_port}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    text = await asyncio.to_thread(page)
    (sample,) = (
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "roundtable_agent_clone_seen_timestamp_seconds"
    )
    return float(sample.value)


async def test_a_silos_own_agent_is_told_of_each_clone_once_and_goes_on(tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", hosts=("127.0.0.1",))
    issue(tmp_path / "ca", "elm", "agent", tmp_path / "elm")
    server = ServerConfig(
        listen=f"127.0.0.1:{free_port()}",
        state=str(tmp_path / "server"),
        database=f"sqlite:///{tmp_path / 'hub.db'}",
        artifacts=str(tmp_path / "artifacts"),
        credentials=str(tmp_path / "hub"),
        heartbeat=0.5,
    )
    own = AgentConfig(
        coordinator=server.listen,
        credentials=tmp_path / "elm",
        state=tmp_path / "own",
        tasks={"toy": "script"},
        folder=tmp_path,
        metrics="127.0.0.1:0",
    )
    with lines() as heard:
        async with running(server):
            async with present(own) as agent:
                await until(heard, "connected")
                assert await seen(agent) == 0
            await steal(own)
        # The coordinator was started again, and the agent was away: it hears of it as it comes.
        async with running(server):
            async with present(own) as agent:
                warning = (await until(heard, WARNING))[-1]
                assert "from ipv4:127.0.0.1 as the coordinator saw it" in warning
                assert "client revoke" in warning
                first = await seen(agent)
                # While it is connected: with the next heartbeat. The connection stands.
                await steal(own)
                assert "connected" not in " ".join(await until(heard, WARNING))
                second = await seen(agent)
                assert 0 < first < second
            async with present(own) as agent:
                # Known already: no line, and what watches still sees it.
                told = await until(heard, "connected")
                assert await seen(agent) == second
                assert heard.empty()
                assert WARNING not in " ".join(told)
            file = tmp_path / "agent.toml"
            folders = 'credentials = "elm"\nstate = "own"'
            file.write_text(f'coordinator = "{server.listen}"\n{folders}\n[tasks]\ntoy = "script"\n')
            (inquiry,) = (each for each in examine_agent(file) if each.name == "clone")
            (check,) = await asyncio.to_thread(inquiry.answer)
            assert check.state == "warn"
            assert "ipv4:127.0.0.1" in check.message
            issue(tmp_path / "ca", "elm", "agent", tmp_path / "new")
            async with present(replace(own, credentials=tmp_path / "new")) as agent:
                await until(heard, "connected")
                assert await seen(agent) == 0
