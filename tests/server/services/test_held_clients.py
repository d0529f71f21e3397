"""Silos that operators have disabled, and those that are drained, as the coordinator knows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig

ONE = torch.ones(4)
BOTH = "[cohort]\nsize = 2\nminimum = 2\n[evaluation]\nevery = 0\n"


async def disable(operator: Operator, name: str, reason: str = "") -> Any:
    return await operator.stub.DisableClient(operator_pb2.DisableClientRequest(name=name, reason=reason))


async def enable(operator: Operator, name: str) -> Any:
    return await operator.stub.EnableClient(operator_pb2.EnableClientRequest(name=name))


async def clients(operator: Operator) -> dict[str, Any]:
    reply = await operator.stub.ListClients(operator_pb2.ListClientsRequest())
    return {client.name: client for client in reply.clients}


async def waits_for(operator: Operator, job: str, words: str) -> None:
    """Follows the job until it waits with these words."""
    call = operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
    async for update in call:
        if words in update.detail.waiting_for:
            call.cancel()
            return
    raise AssertionError(f"the job ended without waiting for {words!r}")


async def test_a_disabled_silo_is_told_why_and_asked_for_nothing_over_restarts_until_it_is_enabled(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch"),
    ):
        found = await disable(olga, "alder", "its GPU\nis being replaced")
        assert (found.disabled, found.online) == ("its GPU is being replaced", True)
        said = await alder.expect("standing")
        assert (said.disabled, said.reason) == (True, "its GPU is being replaced")
        job = await olga.submit(BOTH, rounds=1)
        await waits_for(olga, job.id, "1 of 2 is disabled by operators: alder")
    async with running(settings()) as coordinator, Operator(coordinator.port, certificates / "olga") as olga:
        assert (await clients(olga))["alder"].disabled == "its GPU is being replaced"
        alder = ScriptedAgent(coordinator.port, certificates / "alder")
        async with alder, ScriptedAgent(coordinator.port, certificates / "birch") as birch:
            assert (await alder.expect("standing")).disabled
            await waits_for(olga, job.id, "1 of 2 is disabled by operators: alder")
            await enable(olga, "alder")
            assert not (await alder.expect("standing")).disabled
            for agent in (alder, birch):
                await agent.answer(await agent.expect("instruction"), ONE)
            await olga.watch_until(job.id, "finished")
        noted = await coordinator_log(coordinator)
        assert [each["action"] for each in noted] == ["client_disabled", "client_enabled"]
        assert noted[0]["detail"] == {"reason": "its GPU is being replaced"}


async def coordinator_log(coordinator: Coordinator) -> list[dict[str, Any]]:
    """The entries of the audit log about clients that were disabled and enabled."""
    lines = [line async for page in coordinator.security.audit.lines(1) for line in page]
    entries = [json.loads(line).get("entry", {}) for line in lines]
    return [each for each in entries if str(each.get("action")).startswith("client_")]


async def test_a_name_that_is_unknown_and_one_that_is_not_disabled(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no agent 'alder' has ever connected") as caught:
        await disable(operator, "alder")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    async with ScriptedAgent(coordinator.port, certificates / "alder"):
        with pytest.raises(grpc.aio.AioRpcError, match="'alder' is not disabled; nothing was changed"):
            await enable(operator, "alder")
        assert (await disable(operator, "alder")).disabled == "no reason given"


async def test_a_drained_silo_finishes_its_round_and_others_take_its_place(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    agents = {
        name: ScriptedAgent(coordinator.port, certificates / name) for name in ("alder", "birch", "cedar")
    }
    async with agents["alder"] as alder, agents["birch"] as birch:
        job = await operator.submit(BOTH.replace("size", 'strategy = "round_robin"\nsize'), rounds=2)
        first = [await alder.expect("instruction"), await birch.expect("instruction")]
        drained = agent_pb2.Maintenance(drained=True, reason="new racks \x1b[2J")
        await alder.say(maintenance=drained)
        await operator.watch_for(job.id, "client_held")
        for agent, instruction in zip((alder, birch), first, strict=True):
            await agent.answer(instruction, ONE)
        await waits_for(operator, job.id, "1 of 2 is drained by its silo: alder")
        assert (await clients(operator))["alder"].drained == r"new racks \x1b[2J"
        await alder.connect(maintenance=drained)
        async with agents["cedar"] as cedar:
            for agent in (birch, cedar):
                await agent.answer(await agent.expect("instruction"), ONE)
            await operator.watch_until(job.id, "finished")


async def test_a_silo_that_drains_and_resumes_without_end_loses_its_connection(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    """Each is an entry of the histories of jobs. What it said last counts once it is back."""
    async with ScriptedAgent(coordinator.port, certificates / "alder") as alder:
        for turn in range(11):
            await alder.say(maintenance=agent_pb2.Maintenance(drained=turn % 2 == 0))
        assert await alder.next() is None
        assert (await clients(operator))["alder"].drained == ""
