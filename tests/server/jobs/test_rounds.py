"""Whole jobs over real connections, on both databases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.server import ServerConfig


async def test_a_whole_job(settings: Callable[..., ServerConfig], database: str, certificates: Path) -> None:
    changes = {"alder": 1.0, "birch": 2.0, "cedar": 6.0}
    async with (
        running(settings(database=database)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            work = [
                asyncio.create_task(agent.take_part(torch.full((4,), changes[name])))
                for agent, name in zip(agents, AGENTS, strict=True)
            ]
            job = await operator.submit("[cohort]\nsize = 3", rounds=3)
            events = await operator.watch_until(job.id, "finished")
            for task in work:
                task.cancel()
        detail = await operator.job(job.id)
        model = await operator.fetch(detail.job.model.digest)
    assert torch.equal(load(model)["w"], torch.full((4,), 9.0))
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    history = [json.loads(record) for record in detail.history]
    assert [record["round"] for record in history] == [1, 2, 3]
    assert history[0]["contributors"] == list(AGENTS)
    assert history[0]["training"]["loss"] == [30.0, 30]
