"""Client-level privacy on the coordinator: the ledger is charged with the commit and ends the job in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.core import parse_job
from roundtable.core.models import open_model
from roundtable.privacy import Banded, Budget, Charge, compose, levels
from roundtable.proto import operator_pb2
from roundtable.server import ServerConfig
from roundtable.server.operations.populations import Populations
from roundtable.server.store import Database
from roundtable.server.store.ledger import entries, set_budget

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
        job = await operator.submit(TABLE + "noise_multiplier = 1.2\nepsilon = 4.5", rounds=50)
        events = await operator.watch_until(job.id, "finished")
        work.cancel()
        detail = await operator.job(job.id)
    assert "budget_spent" in [event.kind for event in events]
    rounds = detail.job.rounds_done
    assert rounds == 2
    database = Database.open(config.database)
    rows = await database.read(lambda connection: entries(connection, "t"))
    database.close()
    assert [(row.round, row.attempt, row.released) for row in rows] == [
        (number, 1, True) for number in range(1, rounds + 1)
    ]
    charges = [Charge.from_json(row.charge) for row in rows]
    assert compose(charges, 1e-3, "pld") <= 4.5 < compose([*charges, charges[0]], 1e-3, "pld")
    records = [json.loads(record) for record in detail.history]
    assert all(record["charge"]["level"] == "client" for record in records)
    told = [event.detail for event in events if event.kind == "round_committed"]
    assert [json.loads(detail)["epsilon"] for detail in told] == [
        pytest.approx(compose([charge.repeated(n)], 1e-3, "pld")) for n, charge in enumerate(charges, 1)
    ]


async def test_what_an_attempt_reserved_is_given_back(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(TABLE + "noise_multiplier = 1.2\nepsilon = 4.5", rounds=5)
        await agent.expect("instruction")
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=job.id))
    database = Database.open(config.database)
    assert await database.read(lambda connection: entries(connection, "t")) == []
    database.close()


async def test_jobs_of_one_population_share_its_account(
    settings: Callable[..., ServerConfig], certificates: Path, tmp_path: Path
) -> None:
    config = settings()
    noisy = TABLE + "noise_multiplier = 1.2\nepsilon = 4.5"
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(torch.ones(4)))
        first = await operator.submit(noisy, rounds=2)
        await operator.watch_until(first.id, "finished")
        done = await operator.job(first.id)
        (tmp_path / "model").write_bytes(await operator.fetch(done.job.model.digest))
        with pytest.raises(grpc.aio.AioRpcError, match=r"above its budget of 4\.5") as refused:
            await operator.submit(noisy, rounds=2, request="r2")
        work.cancel()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    text = open_model(tmp_path / "model").metadata["privacy"]
    assert "over 2 releases of 1 job" in text
    assert "The coordinator sees each silo's update" in text
    database = Database.open(config.database)
    populations = [row.population for row in await database.read(entries)]
    database.close()
    assert populations == ["t", "t"]


async def test_an_operators_budget_binds_every_job(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    database = Database.open(config.database)
    await database.write(lambda connection: set_budget(connection, Budget("t", 3.0, 1e-3), "olga", 0.0))
    database.close()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(torch.ones(4)))
        job = await operator.submit(TABLE + "noise_multiplier = 1.2", rounds=9)
        await operator.watch_until(job.id, "finished")
        work.cancel()
        detail = await operator.job(job.id)
    assert detail.job.rounds_done == 1
    assert "above its budget of 3" in detail.job.reason


UNSEEN = [
    ("", "it has no guarantee"),
    (
        '[evaluation]\nevery = 0\n[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0',
        "it has no guarantee",
    ),
    (
        '[aggregation]\nweighting = "uniform"\n[evaluation]\nevery = 0\n[algorithm]\nsteps = 1\n[privacy]\n'
        'level = "example"\nclip_norm = 1.0\ndelta = 1e-3\nnoise_multiplier = 1.0',
        "the silos alone keep its account",
    ),
]


@pytest.mark.parametrize(("table", "why"), UNSEEN)
async def test_no_job_passes_a_budget_unseen(
    settings: Callable[..., ServerConfig], certificates: Path, table: str, why: str
) -> None:
    """By leaving privacy out, by another level, or by another name of a task over the same data."""
    budget = operator_pb2.PrivacyBudget(population="ward", epsilon=3.0, delta=1e-3)
    async with (
        running(settings(populations={"ward": ["other", "t.py"]})) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        table = "[cohort]\nsize = 5\n" + table
        early = await operator.submit(table)
        with pytest.raises(grpc.aio.AioRpcError, match=f"cancel job {early.id}.*pass it unseen: {why}"):
            await operator.stub.SetPrivacyBudget(budget)
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=early.id))
        await operator.watch_until(early.id, "cancelled")
        await operator.stub.SetPrivacyBudget(budget)
        with pytest.raises(grpc.aio.AioRpcError, match=f"pass it unseen: {why}"):
            await operator.submit(table, request="r2")
        named = '{"task": "t", "privacy": {"level": "client", "clip_norm": 1, "delta": 1e-3, '
        named += '"noise_multiplier": 1, "population_name": "another"}}'
        request = operator_pb2.SubmitJobRequest(request_id="r3", job_config=named, model=early.model)
        with pytest.raises(grpc.aio.AioRpcError, match="population_name: unknown key"):
            await operator.stub.SubmitJob(request)


@pytest.mark.parametrize("task", ["t", "t.py", "t.py:Task", "./t.py:T", "deep/t.py", "t.v2", "t.v2.py:T"])
def test_every_spelling_of_a_task_spends_from_one_account(task: str) -> None:
    job = parse_job(f'task = "{task}"')
    assert Populations({"ward": ["t"]}).of(job) == "ward"
    assert Populations().of(job) == "t"
    with pytest.raises(ValueError, match="data belong to one population"):
        Populations({"ward": ["t"], "home": [task]})


@pytest.mark.parametrize("keys", ["bands = 3", "buffers = 2"])
async def test_correlated_noise_survives_a_restart(
    settings: Callable[..., ServerConfig], certificates: Path, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the coefficients that it began with, wherever an optimiser would end by now."""
    config = settings()
    table = TABLE.replace('"client"', '"dp_ftrl"') + f"noise_multiplier = 1.0\n{keys}\nseparation = 1"
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(torch.ones(4)))
        job = await operator.submit(table, rounds=4)
        await operator.watch_for(job.id, "round_committed")
        work.cancel()
    monkeypatch.setattr(levels, "best_factorisation", lambda *given: Banded((1.0, 0.9)))
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(torch.ones(4)))
        await operator.watch_until(job.id, "finished")
        work.cancel()
        detail = await operator.job(job.id)
    assert detail.job.rounds_done == 4
    database = Database.open(config.database)
    rows = await database.read(lambda connection: entries(connection, "t"))
    database.close()
    assert [row.round for row in rows if row.released] == [1, 2, 3, 4]


async def test_an_operator_cannot_fetch_what_a_single_silo_sent(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    table = "[cohort]\nsize = 2\nminimum = 2\ndeadline = 60\n[evaluation]\nevery = 0"
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch"),
    ):
        await operator.submit(table, rounds=1)
        update = torch.arange(4.0)
        instruction = await alder.expect("instruction")
        receipt = await alder.answer(instruction, update)
        assert receipt.status == receipt.ACCEPTED
        digest = blake3(update.numpy().tobytes()).hexdigest()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await operator.fetch(digest)
        with pytest.raises(grpc.aio.AioRpcError) as nowhere:
            await operator.fetch("0" * 64)
        assert refusal.value.code() == nowhere.value.code() == grpc.StatusCode.NOT_FOUND
        assert str(refusal.value.details()).replace(digest, "0" * 64) == nowhere.value.details()
        assert await operator.fetch(instruction.train.model.digest)


async def test_noise_is_never_drawn_twice_and_epsilon_never_falls(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    """The same job, seed and updates give other noise; a restart in the middle forgets no spending."""
    config = settings()
    table = TABLE + "noise_multiplier = 5.0"
    models, told = [], []
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(torch.ones(4)))
        for request in ("r1", "r2"):
            job = await operator.submit(table, rounds=1, request=request)
            await operator.watch_until(job.id, "finished")
            models.append((await operator.job(job.id)).job.model.digest)
        job = await operator.submit(table, rounds=40, request="r3")
        await operator.watch_for(job.id, "round_committed")
        work.cancel()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(torch.ones(4)))
        await operator.watch_until(job.id, "finished")
        work.cancel()
        detail = await operator.job(job.id)
        told = [json.loads(record)["charge"]["epsilon"] for record in detail.history]
        reply = await operator.stub.ShowPrivacy(operator_pb2.PrivacyRequest())
    assert models[0] != models[1]
    assert len(told) == 40
    assert told == sorted(told)
    assert len(set(told)) == 40
    assert reply.accounts[0].epsilon == told[-1]
    assert reply.accounts[0].releases >= 42


DRAWN = """
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
accountant = "rdp"
noise_multiplier = 2.0
"""


async def test_silos_that_are_known_no_more_make_no_other_be_drawn_oftener_than_charged(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config, rounds, asked = settings(), 16, 0

    async def take_part(agent: ScriptedAgent) -> None:
        nonlocal asked
        while (message := await agent.call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "instruction":
                asked += 1
                await agent.answer(message.instruction, torch.ones(4))

    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        for name in AGENTS:
            async with ScriptedAgent(coordinator.port, certificates / name):
                pass
        job = await operator.submit(DRAWN, rounds=rounds)
        for name in AGENTS[1:]:
            # Its people have given the task another name, or taken it away.
            async with ScriptedAgent(coordinator.port, certificates / name, tasks=("other",)):
                pass
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / AGENTS[0]) as agent,
    ):
        work = asyncio.create_task(take_part(agent))
        await operator.watch_until(job.id, "finished")
        work.cancel()
    assert asked < rounds, "the last silo was in every round, and each is charged for one of three"
