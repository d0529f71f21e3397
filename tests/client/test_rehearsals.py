"""At its start an agent tries its tasks beside its service: rounds go first, and nothing of it is sent."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from dataclasses import replace
from typing import Any

from training_processes import ask, workers

from roundtable.client.agent.agent import Agent


def kinds_heard(silo: Any) -> set[str | None]:
    return {message.WhichOneof("message") for message in silo.coordinator.heard}


def fetch(agent: Agent, page: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.metrics_port}/{page}", timeout=20) as answer:
        return str(answer.read().decode())


async def test_a_task_that_fails_is_told_here_and_another_serves(silo, log, monkeypatch) -> None:
    (silo.config.folder / "absent.py").write_text("import cupboard\n")
    tasks = {"absent": "absent.py", **silo.config.tasks}
    silo.config = replace(silo.config, rehearsal=120.0, tasks=tasks, metrics="127.0.0.1:0")
    agents = []
    begins = Agent._stay_connected

    def watched(agent: Agent, *details: Any) -> Any:
        agents.append(agent)
        return begins(agent, *details)

    monkeypatch.setattr(Agent, "_stay_connected", watched)
    async with silo.agent():
        line = await log.until("would fail")
        assert line.startswith("task absent would fail: it cannot import its code: ")
        assert "No module named 'cupboard'" in line
        assert "It stays offered" in line
        await log.until("task toy was tried and is ready")
        assert kinds_heard(silo) <= {"hello", "heartbeat", None}
        assert not any("loss" in line for line in log.lines)
        ready = await asyncio.to_thread(fetch, agents[0], "readyz")
        assert ready == "connected; failed when tried: absent\n"
        assert "\nroundtable_agent_tasks_failing 1.0\n" in await asyncio.to_thread(
            fetch, agents[0], "metrics"
        )
        assert await ask(silo, 1) is None
    assert (silo.delta() == silo.expected()).all()
    assert workers(os.getpid()) == []


async def test_a_round_goes_first(silo, log) -> None:
    silo.config = replace(silo.config, rehearsal=120.0)
    silo.play("hang")
    async with silo.agent():
        await log.until("task: hanging")
        assert len(workers(os.getpid())) == 2
        silo.play("")
        assert await ask(silo, 1) is None
        await log.until("task toy is not tried: a round came first")
        assert len(workers(os.getpid())) == 1
    assert (silo.delta() == silo.expected()).all()


async def test_an_agent_that_is_stopped_leaves_no_trial_behind(silo, log) -> None:
    silo.config = replace(silo.config, rehearsal=120.0)
    silo.play("hang")
    async with silo.agent():
        await log.until("task: hanging")
    assert workers(os.getpid()) == []
