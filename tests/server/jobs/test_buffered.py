"""Buffered rounds over real connections: silos of different speed, restarts, updates that are too old."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.proto import agent_pb2
from roundtable.proto.common_pb2 import DownloadRequest
from roundtable.server import ServerConfig

Status = agent_pb2.UploadReceipt
TABLE = """
[round]
mode = "buffered"
buffer = 2
max_staleness = 1
[evaluation]
every = 0
"""


async def connected(stack: AsyncExitStack, port: int, certificates: Path) -> list[ScriptedAgent]:
    return [await stack.enter_async_context(ScriptedAgent(port, certificates / name)) for name in AGENTS]


async def download(agent: ScriptedAgent, instruction: Any) -> torch.Tensor:
    """The model that the instruction names."""
    request = DownloadRequest(digest=instruction.train.model.digest)
    data = b"".join([chunk.data async for chunk in agent.stub.Download(request)])
    return load(data)["w"]


async def test_the_slow_enter_later_models_and_count_for_less(
    settings: Callable[..., ServerConfig], database: str, certificates: Path
) -> None:
    """Over a restart of the coordinator too: who is at work is asked again, with the old model."""
    config = settings(database=database, keep_models=1)
    async with running(config) as coordinator, AsyncExitStack() as stack:
        operator = await stack.enter_async_context(Operator(coordinator.port, certificates / "olga"))
        alder, birch, cedar = await connected(stack, coordinator.port, certificates)
        job = await operator.submit(TABLE, rounds=2)
        asked = [await agent.expect("instruction") for agent in (alder, birch, cedar)]
        assert {said.step.round for said in asked} == {1}
        for agent, said, change in ((alder, asked[0], 1.0), (birch, asked[1], 3.0)):
            receipt = await agent.answer(said, torch.full((4,), change))
            assert receipt.status == Status.ACCEPTED
        second = await alder.expect("instruction")
        assert second.step.round == 2
        assert torch.equal(await download(alder, second), torch.full((4,), 2.0))
        assert (await alder.answer(second, torch.full((4,), 4.0))).status == Status.ACCEPTED
    async with running(config) as coordinator, AsyncExitStack() as stack:
        operator = await stack.enter_async_context(Operator(coordinator.port, certificates / "olga"))
        alder, birch, cedar = await connected(stack, coordinator.port, certificates)
        again = await cedar.expect("instruction")
        assert again.step == asked[2].step
        assert torch.equal(await download(cedar, again), torch.zeros(4))
        assert (await alder.answer(second, torch.full((4,), 4.0))).status == Status.ACCEPTED
        assert (await cedar.answer(again, torch.full((4,), 6.0))).status == Status.ACCEPTED
        await operator.watch_until(job.id, "finished")
        detail = await operator.job(job.id)
        model = await operator.fetch(detail.job.model.digest)
    history = [json.loads(record) for record in detail.history]
    assert [record["contributors"] for record in history] == [["alder", "birch"], ["alder", "cedar"]]
    assert [record["staleness"] for record in history] == [{"alder": 0, "birch": 0}, {"alder": 0, "cedar": 1}]
    torch.testing.assert_close(load(model)["w"], torch.full((4,), 2.0 + (4.0 + 6.0 / 2**0.5) / 2))


async def test_an_update_that_is_too_old_is_refused_with_the_reason(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with running(settings()) as coordinator, AsyncExitStack() as stack:
        operator = await stack.enter_async_context(Operator(coordinator.port, certificates / "olga"))
        alder, birch, cedar = await connected(stack, coordinator.port, certificates)
        job = await operator.submit(TABLE, rounds=3)
        late = await cedar.expect("instruction")
        for _ in range(2):
            for agent in (alder, birch):
                said = await agent.expect("instruction")
                await agent.answer(said, torch.ones(4))
        withdrawn = await cedar.expect("withdraw")
        assert withdrawn.step == late.step
        assert "2 rounds old in round 3; round.max_staleness = 1" in withdrawn.reason
        receipt = await cedar.answer(late, torch.ones(4))
        assert receipt.status == Status.STALE
        assert "2 rounds old in round 3" in receipt.reason
        fresh = await cedar.expect("instruction")
        assert fresh.step.round == 3
        await cedar.answer(fresh, torch.ones(4))
        await alder.answer(await alder.expect("instruction"), torch.ones(4))
        await operator.watch_until(job.id, "finished")
        detail = await operator.job(job.id)
    history = [json.loads(record) for record in detail.history]
    assert "rounds old" in history[1]["failures"]["cedar"]
    assert history[2]["contributors"] == ["alder", "cedar"]
