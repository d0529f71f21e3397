"""Client-level privacy on the coordinator: the ledger is charged with the commit and ends the job in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.privacy import Charge, compose
from roundtable.proto import operator_pb2
from roundtable.server import ServerConfig
from roundtable.server.store import Database
from roundtable.server.store.ledger import entries

TABLE = """
[cohort]
size = 1
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "client"
clip_norm = 1.0
delta = 1e-3
population = 20
"""


async def test_the_budget_ends_the_job(settings: Callable[..., ServerConfig], certificates: Path) -> None:
    config = settings()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(torch.ones(4)))
        job = await operator.submit(TABLE + "noise_multiplier = 0.6\nepsilon = 18.0", rounds=50)
        events = await operator.watch_until(job.id, "finished")
        work.cancel()
        detail = await operator.job(job.id)
    assert "budget_spent" in [event.kind for event in events]
    rounds = detail.job.rounds_done
    assert rounds == 2
    database = Database.open(config.database)
    rows = await database.read(lambda connection: entries(connection, job.id))
    database.close()
    assert [(row.round, row.attempt, row.released) for row in rows] == [
        (number, 1, True) for number in range(1, rounds + 1)
    ]
    charges = [Charge.from_json(row.charge) for row in rows]
    assert compose(charges, 1e-3, "pld") <= 18.0 < compose([*charges, charges[0]], 1e-3, "pld")
    records = [json.loads(record) for record in detail.history]
    assert all(record["charge"]["level"] == "client" for record in records)


async def test_what_an_attempt_reserved_is_given_back(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(TABLE + "noise_multiplier = 0.6\nepsilon = 18.0", rounds=5)
        await agent.expect("instruction")
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=job.id))
    database = Database.open(config.database)
    assert await database.read(lambda connection: entries(connection, job.id)) == []
    database.close()
