"""Masked updates that relays add up: the bits of the flat sum, also of who dies once the sum has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from secure_federation import QUIET, SECURE, Federation

from roundtable.core.identity.credentials import issue
from roundtable.core.models import open_model
from roundtable.proto import operator_pb2
from roundtable.relay import Relay, RelayConfig

COLUMNS = 1500
CLIP = 2.0
SILOS = ("alder", "birch", "cedar", "dogwood")
UNIFORM = SECURE + "[aggregation]\nweighting = 'uniform'\n"
VALIDATION = "[aggregation.validation]\nnorm_ratio = 'off'\n"
PLAIN = UNIFORM.replace(SECURE, QUIET) + VALIDATION + "[regions]\nsum = true\n"
SUMS = UNIFORM + "[regions]\nsum = true\n"


def whole(place: int, round: int) -> torch.Tensor:
    """An update of the largest norm in one place: no rounding in it is left to chance."""
    vector = torch.zeros(COLUMNS)
    vector[7 * place + round] = CLIP if place % 2 else -CLIP
    return vector


@asynccontextmanager
async def relay(federation: Federation, name: str, above: int) -> AsyncIterator[Relay]:
    if not (federation.folder / name).exists():
        issue(federation.folder / "ca", name, "relay", federation.folder / name, hosts=("127.0.0.1",))
    folder = federation.folder
    running = Relay(
        RelayConfig(
            f"127.0.0.1:{above}", folder / name, folder / "relays" / name, listen="127.0.0.1:0", heartbeat=1.0
        )
    )
    task = asyncio.create_task(running.run())
    await running.started.wait()
    try:
        yield running
    finally:
        running.stop()
        await task


@asynccontextmanager
async def tree(federation: Federation) -> AsyncIterator[dict[str, Any]]:
    """One silo behind west and east, two behind east, one that connects itself; trainers and tasks."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        east = await stack.enter_async_context(relay(federation, "east", federation.port))
        west = await stack.enter_async_context(relay(federation, "west", east.port))
        trainers = federation.trainers(COLUMNS)
        ways = {"alder": ("west/east", west.port), "birch": ("east", east.port), "cedar": ("east", east.port)}
        tasks = {}
        for place, name in enumerate(SILOS):
            trainers[name].delta = lambda round, place=place: whole(place, round)
            way, port = ways.get(name, ("", federation.port))
            agent = federation.agent(name, trainers[name], coordinator=f"127.0.0.1:{port}", relay=way)
            tasks[name] = await stack.enter_async_context(agent)
        yield {"trainers": trainers, "tasks": tasks}


def summed(federation: Federation, name: str = "east") -> list[tuple[str, list[str]]]:
    """What a relay has made, of whose updates and of which relays' sums, and what became of it."""
    path = federation.folder / "relays" / name / "sums.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        statement = json.loads(line)["sum"]["statement"]
        parts = [*statement["members"], *(relay for relay, _ in statement["sums"])]
        found.append((json.loads(line)["outcome"], parts))
    return found


async def model(
    federation: Federation, text: str, request: str, rounds: int, received: Callable[[int], object] = id
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The job's last model and its rounds; `received` hears how many updates have arrived."""
    async with federation.operator() as operator:
        job = await operator.submit(text, rounds=rounds, vector=torch.zeros(COLUMNS), request=request)
        call = operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id), timeout=60)
        seen = 0
        async for update in call:
            seen += sum(event.kind == "update_received" for event in update.events)
            received(seen)
        assert update.detail.job.status == "finished", update.detail.job.reason
        detail = await operator.job(job.id)
        file = federation.folder / f"{request}.safetensors"
        file.write_bytes(await operator.fetch(detail.job.model.digest))
    return open_model(file).vector, [json.loads(record) for record in detail.history]


async def test_a_tree_of_relays_gives_the_bits_of_the_flat_masked_sum(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, *SILOS)
    async with tree(federation):
        through, rounds = await model(federation, SUMS + "[cohort]\nsize = 4", "sums", 2)
        assert summed(federation) == [("taken", ["birch", "cedar", "west"])] * 2
        assert summed(federation, "west") == [("taken", ["alder"])] * 2
        flat, others = await model(federation, UNIFORM + "[cohort]\nsize = 4", "flat", 2)
        plain, _ = await model(federation, PLAIN + "[cohort]\nsize = 4", "plain", 2)
        assert summed(federation) == [("taken", ["birch", "cedar", "west"])] * 4
    assert torch.equal(through, flat)
    torch.testing.assert_close(plain, flat, rtol=1e-6, atol=1e-6)
    assert through.abs().sum() > CLIP
    assert [each["charge"] for each in rounds] == [each["charge"] for each in others]
    assert all(each["contributors"] == sorted(SILOS) for each in rounds)
    assert rounds[0]["charge"]["examples"] == 10 + 30 + 50 + 70


async def test_who_dies_once_the_sum_has_left_is_in_it(tmp_path: Path) -> None:
    """The sum leaves while dogwood trains; then birch dies, and the others give what unmasks it."""
    federation = Federation.make(tmp_path, *SILOS)
    text = SUMS + "[cohort]\nsize = 4\nminimum = 3\ngrace = '0.1s'\ndeadline = '15s'"
    async with tree(federation) as world:
        gate = world["trainers"]["dogwood"].gate
        gate.clear()

        def received(count: int) -> None:
            if count >= 3 and not gate.is_set():
                world["tasks"]["birch"].cancel()
                gate.set()

        made, rounds = await model(federation, text, "after", 1, received)
        assert summed(federation) == [("taken", ["birch", "cedar", "west"])]
        assert torch.equal(made, torch.stack([whole(place, 1) for place in range(4)]).mean(0))
        assert rounds[0]["contributors"] == sorted(SILOS)


@pytest.mark.slow
async def test_groups_of_buffered_rounds_are_summed_too(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, *SILOS)
    buffered = '[round]\nmode = "buffered"\nbuffer = 4\n'
    async with tree(federation):
        through, rounds = await model(federation, buffered + SUMS, "sums", 2)
        assert summed(federation) == [("taken", ["birch", "cedar", "west"])] * 2
        flat, others = await model(federation, buffered + UNIFORM, "flat", 2)
    assert torch.equal(through, flat)
    assert through.abs().sum() > CLIP
    assert [each["charge"] for each in rounds] == [each["charge"] for each in others]
    assert all(each["contributors"] == sorted(SILOS) for each in rounds)
