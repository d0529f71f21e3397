"""Rules that need more than the round's updates, through the coordinator, with hostile silos."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.aggregation.rows import row_passes
from roundtable.aggregation.rows.row_passes import ShardOrder
from roundtable.aggregation.rules.trust_based import foolsgold_weights
from roundtable.aggregation.shards.shard_processes import ShardProcess
from roundtable.server import Coordinator, ServerConfig, load_server_config
from roundtable.trusted import TrustedData

TASK = """
import torch
from roundtable.core import Task

class Towards(Task):
    def model(self):
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(torch.zeros(4))
        return module
    def data(self, site):
        rows = torch.full((site.options["rows"], 4), site.options["target"])
        return (rows,), None
    def loss(self, model, batch):
        return ((model.w - batch[0]) ** 2).mean()
"""
FLTRUST = """
[algorithm]
learning_rate = 0.5
batch_size = 8
[aggregation]
rule = "fltrust"
[cohort]
size = 3
[evaluation]
every = 0
"""
FOOLSGOLD = """
[aggregation]
rule = "foolsgold"
diagnosis = true
[cohort]
size = 3
minimum = 3
[evaluation]
every = 0
"""


async def one_round(agents: list[ScriptedAgent], vectors: list[torch.Tensor]) -> None:
    """All agents answer the instruction that is next."""
    told = [await agent.expect("instruction") for agent in agents]
    for agent, instruction, vector in zip(agents, told, vectors, strict=True):
        await agent.answer(instruction, vector)


async def history_of(operator: Operator, job: str, rounds: int) -> list[dict[str, Any]]:
    """The records of a job as soon as there are so many."""
    while len(found := (await operator.job(job)).history) < rounds:
        await operator.watch_for(job, "round_committed")
    return [json.loads(record) for record in found]


@pytest.fixture
def trusting(settings: Callable[..., ServerConfig], tmp_path: Path) -> tuple[ServerConfig, TrustedData]:
    """Settings as a file would give them, and the trusted data that they name."""
    (tmp_path / "towards.py").write_text(TASK)
    file = tmp_path / "coordinator.toml"
    file.write_text('[root_data.t]\ntask = "towards.py:Towards"\ndata = { rows = 8, target = 3.0 }\n')
    tables = load_server_config(file).root_data
    return settings(root_data=tables), TrustedData(tables)


async def test_fltrust_stands_a_hostile_majority(
    trusting: tuple[ServerConfig, TrustedData], certificates: Path
) -> None:
    config, trusted = trusting
    honest, hostile = torch.tensor([1.0, 1.0, 1.0, 0.9]), torch.full((4,), -50.0)
    async with (
        running(config, trusted) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            job = await operator.submit(FLTRUST, rounds=1)
            await one_round(agents, [honest, hostile, hostile])
            await operator.watch_until(job.id, "finished")
        detail = await operator.job(job.id)
        model = await operator.fetch(detail.job.model.digest)
    record = json.loads(detail.history[0])
    assert record["weights"] == {"alder": 1.0, "birch": 0.0, "cedar": 0.0}
    # One step from 0 towards 3: learning rate · gradient = 0.5 · 2 · 3 / 4 in each coordinate.
    step = honest / honest.norm() * torch.full((4,), 0.75).norm()
    torch.testing.assert_close(torch.frombuffer(bytearray(model[-16:]), dtype=torch.float32), step)


async def test_fltrust_without_trusted_data_is_refused_at_submission(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=r"\[root_data.NAME\]"):
            await operator.submit(FLTRUST)


async def test_trusted_data_that_fail_fail_the_attempt_and_say_why(
    trusting: tuple[ServerConfig, TrustedData], certificates: Path, tmp_path: Path
) -> None:
    (tmp_path / "towards.py").write_text(TASK.replace('site.options["rows"]', 'site.options["lines"]'))
    config, trusted = trusting
    async with (
        running(config, trusted) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            job = await operator.submit(FLTRUST, rounds=1)
            await one_round(agents, [torch.ones(4)] * 3)
            event = await operator.watch_for(job.id, "attempt_failed")
    assert "training on the coordinator's trusted data failed: KeyError: 'lines'" in event.message


async def test_foolsgold_compares_pasts_over_a_restart(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    """In round 2 alone nobody resembles another; over both rounds birch and cedar do, and count for less."""
    config = settings()
    first = [torch.tensor(v) for v in ([1.0, 0.0, 0.0, 0.0], [0.0, 40.0, 1.0, 0.0], [0.0, 40.0, 0.0, 1.0])]
    second = [torch.tensor(v) for v in ([0.0, 1.0, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0])]

    async def part(coordinator: Coordinator, vectors: list[torch.Tensor], job: str) -> tuple[str, list[Any]]:
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with Operator(coordinator.port, certificates / "olga") as operator:
            async with agents[0], agents[1], agents[2]:
                job = job or (await operator.submit(FOOLSGOLD, rounds=2)).id
                rounds = len((await operator.job(job)).history) + 1
                work = asyncio.create_task(one_round(agents, vectors))
                records = await history_of(operator, job, rounds)
                await work
            return job, records

    async with running(config) as coordinator:
        job, _ = await part(coordinator, first, "")
    async with running(config) as coordinator:
        _, records = await part(coordinator, second, job)
    sums = np.stack([(a + b).numpy() for a, b in zip(first, second, strict=True)]).astype(float)
    unit = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    trust = foolsgold_weights(unit @ unit.T, 1.0)
    assert [records[1]["weights"][name] for name in AGENTS] == pytest.approx(trust / trust.sum())
    assert records[1]["weights"]["alder"] > 0.99


async def test_custom_weights(settings: Callable[..., ServerConfig], certificates: Path) -> None:
    table = '[aggregation]\nweighting = "custom"\nweights = { alder = 3, birch = 1, cedar = 0 }\n'
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            job = await operator.submit(table + "[cohort]\nsize = 3\n[evaluation]\nevery = 0", rounds=1)
            await one_round(agents, [torch.full((4,), v) for v in (1.0, 5.0, 99.0)])
            await operator.watch_until(job.id, "finished")
        model = await operator.fetch((await operator.job(job.id)).job.model.digest)
    assert torch.frombuffer(bytearray(model[-16:]), dtype=torch.float32).tolist() == [2.0] * 4


async def test_processes_beside_the_coordinator_combine_its_rounds_and_end_with_it(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_passes, "WORTH_SHARDING", 1)
    table = '[aggregation]\nrule = "median"\n[cohort]\nsize = 3\n[evaluation]\nevery = 0'
    original, orders = ShardProcess.ask, []

    def ask(self: ShardProcess, lane: int, order: ShardOrder, block: torch.Tensor) -> np.ndarray:
        answer = original(self, lane, order, block)
        orders.append((self.process, tuple(block.shape)))
        return answer

    monkeypatch.setattr(ShardProcess, "ask", ask)
    async with (
        running(settings(combine="processes", combine_workers=1)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            job = await operator.submit(table, rounds=1)
            await one_round(agents, [torch.full((4,), v) for v in (1.0, 5.0, 99.0)])
            await operator.watch_until(job.id, "finished")
        model = await operator.fetch((await operator.job(job.id)).job.model.digest)
    assert torch.frombuffer(bytearray(model[-16:]), dtype=torch.float32).tolist() == [5.0] * 4
    ((process, shape),) = orders
    assert shape == (3, 4)
    assert process.poll() is not None
