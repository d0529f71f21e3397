"""Models that travel as what changed: real agents, what they load, and what becomes of it in a crash."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch
from secure_federation import QUIET, Federation, GivenTrainer
from service import Operator

from roundtable.aggregation import TensorMatrix
from roundtable.client.agent.model_cache import ModelCache
from roundtable.core import open_model, parse_job
from roundtable.engine import Rows, combine, initial_server_state, make_plan
from roundtable.engine.messages import RowReference, Update
from roundtable.engine.state import MOST_HOPS
from roundtable.server.store import tables

COLUMNS = 50_000
WHOLE = 4 * COLUMNS
JOB = QUIET + '[cohort]\nsize = 2\ndeadline = 30\n[transfer]\ndown = "int4(block=256)"\n'


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The bytes of each artifact that an agent loads, by its folder's name."""
    sizes: dict[str, list[int]] = defaultdict(list)
    download = ModelCache._download

    async def noted(self, stub, artifact, path, received):
        sizes[path.parent.parent.name].append(artifact.size)
        await download(self, stub, artifact, path, received)

    monkeypatch.setattr(ModelCache, "_download", noted)
    return sizes


class Held(GivenTrainer):
    """Is at work for ever from the third round on."""

    def __init__(self, delta, examples: int) -> None:
        super().__init__(delta, examples)
        self.third = asyncio.Event()

    async def train(self, work, progress):
        if work.step.round == 3:
            self.gate.clear()
            self.third.set()
        else:
            self.gate.set()
        return await super().train(work, progress)


def expected(federation: Federation, rounds: int) -> torch.Tensor:
    """What the engine makes of the same updates, as a simulation does."""
    plan = make_plan(parse_job('task = "t"\n' + JOB), 2)
    model, state = torch.zeros(COLUMNS), initial_server_state(plan, COLUMNS)
    trainers = federation.trainers(COLUMNS)
    for number in range(1, rounds + 1):
        rows = torch.stack([trainer.delta(number) for trainer in trainers.values()])
        updates = [
            Update(name, RowReference(place), trainers[name].examples, loss=0.5)
            for place, name in enumerate(trainers)
        ]
        combined = combine(plan, Rows(TensorMatrix(rows), updates), model, state, round=number, seed=0)
        model, state = combined.vector, combined.state
        assert combined.delta is not None
        assert 0 < (state.exact - model).norm() < 0.3
    return model


async def made(federation: Federation, operator: Operator, job: str) -> torch.Tensor:
    path = federation.folder / f"{job}.safetensors"
    path.write_bytes(await operator.fetch((await operator.job(job)).job.model.digest))
    return open_model(path).vector


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.make(tmp_path, "alder", "birch")


async def test_silos_load_what_changed_and_hold_the_published_model(
    federation: Federation, loaded: dict[str, list[int]]
) -> None:
    async with (
        federation.coordinator() as coordinator,
        federation.agents(federation.trainers(COLUMNS)),
        federation.operator() as operator,
    ):
        job = (await operator.submit(JOB, rounds=11, vector=torch.zeros(COLUMNS))).id
        await operator.watch_until(job, "finished")
        model = await made(federation, operator, job)
        kinds = await coordinator.jobs._services.database.read(
            lambda connection: list(connection.execute(sa.select(tables.artifacts.c.kind)).scalars())
        )
    assert torch.equal(model, expected(federation, 11))
    # Older changes are deleted: their models are loaded whole by whoever is so far behind.
    assert kinds.count("delta") <= MOST_HOPS + 1
    for name in federation.names:
        first, *later = loaded[name]
        assert first > WHOLE
        assert len(later) == 10
        assert max(later) < WHOLE / 7


async def test_a_coordinator_that_comes_back_goes_on_with_the_same_bits(
    federation: Federation, loaded: dict[str, list[int]]
) -> None:
    """The exact model and the changes are durable with the commit."""
    held = {
        name: Held(trainer.delta, trainer.examples) for name, trainer in federation.trainers(COLUMNS).items()
    }
    async with federation.coordinator(), federation.operator() as operator:
        job = (await operator.submit(JOB, rounds=4, vector=torch.zeros(COLUMNS))).id
        async with federation.agents(held):
            await asyncio.gather(*(trainer.third.wait() for trainer in held.values()))
    async with (
        federation.coordinator(),
        federation.agents(federation.trainers(COLUMNS)),
        federation.operator() as operator,
    ):
        await operator.watch_until(job, "finished")
        model = await made(federation, operator, job)
    assert torch.equal(model, expected(federation, 4))
    for name in federation.names:
        assert sum(size > WHOLE for size in loaded[name]) == 1


async def test_a_newcomer_loads_the_model_whole(federation: Federation, loaded: dict[str, list[int]]) -> None:
    alone = JOB.replace("size = 2", "size = 1").replace("deadline = 30", "deadline = 2")
    held = {name: Held(t.delta, t.examples) for name, t in federation.trainers(COLUMNS).items()}
    async with federation.coordinator(), federation.operator() as operator:
        await operator.submit(alone, rounds=5, vector=torch.zeros(COLUMNS))
        async with federation.agent("alder", held["alder"]):
            await held["alder"].third.wait()
        async with federation.agent("birch", held["birch"]):
            await held["birch"].third.wait()
    assert [size > WHOLE for size in loaded["alder"]] == [True, False, False]
    assert [size > WHOLE for size in loaded["birch"]] == [True]
    folder = federation.folder / "state" / "alder" / "models"
    assert not [path for path in folder.iterdir() if path.suffix != ".safetensors"]


async def test_a_damaged_change_costs_a_whole_model_and_nothing_else(
    federation: Federation, loaded: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that leads elsewhere is noticed by the digest."""
    from roundtable.client.agent import model_cache

    apply = model_cache.apply_delta

    def wrong(encoding, base, delta, out):
        apply(encoding, base, delta, out)
        return "0" * 64

    monkeypatch.setattr(model_cache, "apply_delta", wrong)
    async with (
        federation.coordinator(),
        federation.agents(federation.trainers(COLUMNS)),
        federation.operator() as operator,
    ):
        job = (await operator.submit(JOB, rounds=3, vector=torch.zeros(COLUMNS))).id
        await operator.watch_until(job, "finished")
        model = await made(federation, operator, job)
    assert torch.equal(model, expected(federation, 3))
    assert [size > WHOLE for size in loaded["alder"]] == [True, False, True, False, True]
