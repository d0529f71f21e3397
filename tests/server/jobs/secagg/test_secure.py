"""Secure aggregation in the service: a real coordinator and real agents, and what each of them can lose."""

from __future__ import annotations

import json
import sqlite3
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from secure_federation import QUIET, SECURE, Federation, unit
from service import Operator

from roundtable.client.policy.config import PolicyTable
from roundtable.core.models import open_model
from roundtable.proto import agent_pb2, common_pb2, operator_pb2
from roundtable.server.door.from_agents import offer_of
from roundtable.server.storage.blobs import BlobWriter
from roundtable.server.storage.location import Unreachable

COLUMNS = 1500


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.make(tmp_path, "alder", "birch", "cedar")


async def finished_model(federation: Federation, text: str, request: str) -> tuple[torch.Tensor, list[dict]]:
    async with federation.operator() as operator:
        job = await operator.submit(text, rounds=2, vector=torch.zeros(COLUMNS), request=request)
        await operator.watch_until(job.id, "finished")
        detail = await operator.job(job.id)
        data = await operator.fetch(detail.job.model.digest)
    path = federation.folder / f"{request}.safetensors"
    path.write_bytes(data)
    return open_model(path).vector, [json.loads(record) for record in detail.history]


async def test_the_model_is_the_one_that_all_could_see(federation: Federation) -> None:
    async with federation.coordinator(), federation.agents(federation.trainers(COLUMNS)):
        seen, _ = await finished_model(federation, QUIET + "[cohort]\nsize = 3", "plain")
        hidden, history = await finished_model(federation, SECURE + "[cohort]\nsize = 3", "secure")
    # Two rounds, each off by less than clip_norm / levels: 2 · 2.0 / 10922 for silos of weight 1 and up.
    assert (seen - hidden).abs().max() < 1e-5
    assert not torch.equal(seen, hidden)
    record = history[0]
    assert record["weights"] == {}
    assert record["contributors"] == ["alder", "birch", "cedar"]
    assert record["charge"]["examples"] == 10 + 30 + 50
    assert record["training"] == {"loss": [pytest.approx(45.0, abs=1e-3), 90]}


async def test_a_small_ring_travels_in_fewer_bytes_and_gives_nearly_the_same_mean(
    federation: Federation,
) -> None:
    uniform = '[cohort]\nsize = 3\n[aggregation]\nweighting = "uniform"\n'
    async with federation.coordinator(), federation.agents(federation.trainers(COLUMNS)):
        exact, _ = await finished_model(federation, SECURE + uniform, "wide")
        small, history = await finished_model(federation, SECURE + "ring_bits = 12\n" + uniform, "small")
    # Of updates of norm 1, clipped to 2: each of the two rounds is off by 5 · 2 / (2 · 682 √3) at most.
    assert 0 < (exact - small).norm() < 2 * 10 / (2 * 682 * 3**0.5)
    assert history[0]["charge"]["weight"] == 3


async def submit(operator: Operator, text: str = "", rounds: int = 1) -> str:
    job = await operator.submit(SECURE + text, rounds=rounds, vector=torch.zeros(COLUMNS))
    return str(job.id)


async def updates_received(operator: Operator, job: str, count: int) -> None:
    """Returns when so many updates have arrived in all."""
    call = operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
    seen = 0
    async for update in call:
        seen += sum(event.kind == "update_received" for event in update.events)
        if seen >= count:
            call.cancel()
            return
    raise AssertionError(f"the job ended after {seen} updates")


async def shown(operator: Operator, job: str, words: str) -> None:
    """Returns once people see this."""
    call = operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
    async for update in call:
        if words in update.detail.waiting_for:
            call.cancel()
            return
    raise AssertionError(f"{words!r} was never shown")


async def last_record(operator: Operator, job: str) -> dict[str, Any]:
    detail = await operator.job(job)
    return dict(json.loads(detail.history[-1]))


async def check_mean(
    federation: Federation, operator: Operator, job: str, silos: tuple[int, ...], initial: float = 0.0
) -> None:
    """The job's model is the initial one and the mean of these silos' updates, weighted by their examples."""
    data = await operator.fetch((await operator.job(job)).job.model.digest)
    path = federation.folder / "checked.safetensors"
    path.write_bytes(data)
    weights = torch.tensor([10.0 + 20 * place for place in silos])
    rows = torch.stack([unit(place, 1, COLUMNS) for place in silos])
    expected = initial + (weights / weights.sum()) @ rows
    assert (open_model(path).vector - expected).abs().max() < 1e-5


async def test_a_store_that_is_away_when_the_model_is_made_changes_nothing_of_it(
    federation: Federation,
) -> None:
    """The sum is unmasked once, and may be combined several times: each time from the same mean."""
    async with (
        federation.coordinator() as coordinator,
        federation.agents(federation.trainers(COLUMNS)),
        federation.operator() as operator,
    ):
        artifacts = coordinator.jobs._services.artifacts
        creating, failures = artifacts.creating, [Unreachable("the bucket is away")]

        def away_once() -> AbstractContextManager[BlobWriter]:
            if failures:
                raise failures.pop()
            return creating()

        artifacts.creating = away_once
        job = await operator.submit(SECURE + "[cohort]\nsize = 3", rounds=1, vector=torch.ones(COLUMNS))
        await operator.watch_until(job.id, "finished")
        await check_mean(federation, operator, job.id, (0, 1, 2), initial=1.0)
        assert not failures


async def test_a_silo_that_comes_back_after_its_upload_helps_to_unmask(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in trainers.items()
        }
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, "[cohort]\nsize = 3")
        await updates_received(operator, job, 2)
        await federation.kill(running["alder"])
        sealed = list((federation.folder / "state" / "alder" / "secure").glob("*.sealed"))
        assert len(sealed) == 1
        trainers["cedar"].gate.set()
        await updates_received(operator, job, 3)
        await stack.enter_async_context(federation.agent("alder", trainers["alder"]))
        await operator.watch_until(job, "finished")
        assert (await last_record(operator, job))["attempt"] == 1
        assert len(trainers["alder"].steps) == 1
        await check_mean(federation, operator, job, (0, 1, 2))


async def test_a_silo_that_stays_away_after_its_upload_costs_the_attempt(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in trainers.items()
        }
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, '[cohort]\nsize = 3\nretries = 9\ndeadline = "6s"')
        await updates_received(operator, job, 2)
        await federation.kill(running["alder"])
        trainers["cedar"].gate.set()
        failed = await operator.watch_for(job, "attempt_failed")
        assert "secure aggregation: 2 silos confirmed the survivor set, 3 must" in failed.message
        await stack.enter_async_context(federation.agent("alder", trainers["alder"]))
        await operator.watch_until(job, "finished")
        assert (await last_record(operator, job))["attempt"] > 1
        await check_mean(federation, operator, job, (0, 1, 2))


async def test_counts_beside_a_masked_update_are_refused(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(trainers))
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, "[cohort]\nsize = 3")
        await updates_received(operator, job, 2)
        runner = coordinator.jobs.runner(job)
        assert runner is not None
        step = common_pb2.Step(job=job, round=1, attempt=1, phase="train")
        content = common_pb2.Artifact(digest="0" * 64, size=4 * (COLUMNS + 10))
        for changes, reason in (
            ({"encoding": "float32"}, "takes masked ones only"),
            ({"examples": 5}, "travel inside a masked update"),
            ({"metrics": [common_pb2.Metric(name="loss", sum=1.0, count=1)]}, "travel inside"),
            ({"content": common_pb2.Artifact(digest="0" * 64, size=8)}, "has 8 bytes, not 6040"),
            ({"announcement": b"nonsense"}, "cannot be one of this protocol"),
            ({"step": common_pb2.Step(job=job, round=1, attempt=9, phase="train")}, "is not known here"),
        ):
            header = {"step": step, "content": content, "encoding": "masked", **changes}
            assert reason in runner.collection.problem(
                "cedar", offer_of(agent_pb2.UploadHeader(**header)), "float32"
            )


async def test_below_three_survivors_the_attempt_fails_and_new_keys_are_made(
    federation: Federation,
) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in trainers.items()
        }
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, '[cohort]\nsize = 3\nretries = 9\ndeadline = "5s"')
        await updates_received(operator, job, 2)
        await federation.kill(running["cedar"])
        failed = await operator.watch_for(job, "attempt_failed")
        assert "2 of at least 3 updates" in failed.message
        trainers["cedar"].gate.set()
        await stack.enter_async_context(federation.agent("cedar", trainers["cedar"]))
        await operator.watch_until(job, "finished")
        assert (await last_record(operator, job))["attempt"] > 1
        await check_mean(federation, operator, job, (0, 1, 2))


async def test_four_silos_can_do_without_one(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, "alder", "birch", "cedar", "dogwood")
    trainers = federation.trainers(COLUMNS)
    trainers["dogwood"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in trainers.items()
        }
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, '[cohort]\nsize = 4\ngrace = "0.2s"')
        await updates_received(operator, job, 3)
        await federation.kill(running["dogwood"])
        await operator.watch_until(job, "finished")
        record = await last_record(operator, job)
        assert (record["attempt"], record["contributors"]) == (1, ["alder", "birch", "cedar"])
        assert record["charge"] | {"weight": 90, "silos": 3, "cohort": 4} == record["charge"]
        await check_mean(federation, operator, job, (0, 1, 2))


async def test_a_restarted_coordinator_goes_on_with_the_same_attempt(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        async with federation.coordinator():
            for name, trainer in trainers.items():
                await stack.enter_async_context(federation.agent(name, trainer))
            async with federation.operator() as operator:
                job = await submit(operator, "[cohort]\nsize = 3")
                await updates_received(operator, job, 2)
        async with federation.coordinator():
            trainers["cedar"].gate.set()
            async with federation.operator() as operator:
                await operator.watch_until(job, "finished")
                assert (await last_record(operator, job))["attempt"] == 1
                assert [len(trainer.steps) for trainer in trainers.values()] == [1, 1, 1]
                await check_mean(federation, operator, job, (0, 1, 2))
        assert not list((federation.folder / "artifacts" / "secure").iterdir())
        async with federation.coordinator():
            pass


async def test_an_attempt_that_began_on_another_machine_is_begun_anew(federation: Federation) -> None:
    """The bucket has the masked updates; the attempt's journal was in the first machine's folder."""
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    home = f"file://{federation.folder}/bucket"
    async with AsyncExitStack() as stack:
        federation.settings = {"bucket": home, "artifacts": str(federation.folder / "first")}
        async with federation.coordinator():
            for name, trainer in trainers.items():
                await stack.enter_async_context(federation.agent(name, trainer))
            async with federation.operator() as operator:
                job = await submit(operator, "[cohort]\nsize = 3")
                await updates_received(operator, job, 2)
        federation.settings = {"bucket": home, "artifacts": str(federation.folder / "second")}
        async with federation.coordinator():
            trainers["cedar"].gate.set()
            async with federation.operator() as operator:
                failed = await operator.watch_for(job, "attempt_failed")
                assert "not on this machine" in failed.message
                await operator.watch_until(job, "finished")
                assert (await last_record(operator, job))["attempt"] == 2
                await check_mean(federation, operator, job, (0, 1, 2))


async def test_a_coordinator_restarted_before_the_survivors_agree(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        async with federation.coordinator():
            running = {
                name: await stack.enter_async_context(federation.agent(name, trainer))
                for name, trainer in trainers.items()
            }
            async with federation.operator() as operator:
                job = await submit(operator, "[cohort]\nsize = 3")
                await updates_received(operator, job, 2)
                await federation.kill(running["alder"])
                trainers["cedar"].gate.set()
                await shown(operator, job, "agreeing on the survivors")
        async with federation.coordinator(), federation.operator() as operator:
            await stack.enter_async_context(federation.agent("alder", trainers["alder"]))
            await operator.watch_until(job, "finished")
            assert (await last_record(operator, job))["attempt"] == 1
            await check_mean(federation, operator, job, (0, 1, 2))


async def test_a_silo_restarted_in_training_waits_for_fresh_keys(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in trainers.items()
        }
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, "[cohort]\nsize = 3")
        await updates_received(operator, job, 2)
        await federation.kill(running["cedar"])
        trainers["cedar"].gate.set()
        await stack.enter_async_context(federation.agent("cedar", trainers["cedar"]))
        failed = await operator.watch_for(job, "client_failed")
        assert "restarted" in failed.message
        await operator.watch_until(job, "finished")
        assert (await last_record(operator, job))["attempt"] == 2


async def test_a_silo_can_demand_secure_aggregation(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        for name, trainer in trainers.items():
            demands = {"policy": PolicyTable(secure_aggregation=True)} if name == "birch" else {}
            await stack.enter_async_context(federation.agent(name, trainer, **demands))
        operator = await stack.enter_async_context(federation.operator())
        plain = await operator.submit(QUIET, rounds=1, vector=torch.zeros(COLUMNS))
        await operator.watch_until(plain.id, "finished")
        record = await last_record(operator, plain.id)
        assert record["contributors"] == ["alder", "cedar"]
        assert "[policy] secure_aggregation = true" in record["failures"]["birch"]


async def test_a_silo_can_demand_company(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        for name, trainer in trainers.items():
            demands = {"policy": PolicyTable(minimum_cohort=4)} if name == "birch" else {}
            await stack.enter_async_context(federation.agent(name, trainer, **demands))
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, "[cohort]\nsize = 3\nretries = 0")
        events = await operator.watch_until(job, "paused")
        assert any("at least 4 ([policy] minimum_cohort)" in event.message for event in events)


def files_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_the_coordinator_holds_no_update_that_can_be_read(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(trainers))
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, "[cohort]\nsize = 3")
        await updates_received(operator, job, 2)
        masked = [data for data in files_of(federation.folder / "artifacts" / "objects") if data[8:9] != b"{"]
        assert len(masked) == 2
        for data in masked:
            # Uniform bytes: the mean of 6,000 of them is 127.5 within five standard errors.
            values = np.frombuffer(data, dtype=np.uint8)
            assert abs(values.mean() - 127.5) < 5 * 73.9 / len(values) ** 0.5
        everything = b"".join(files_of(federation.folder / "artifacts"))
        everything += b"".join(path.read_bytes() for path in federation.folder.glob("coordinator.db*"))
        for place in (0, 1):
            assert unit(place, 1, COLUMNS)[:8].numpy().tobytes() not in everything
        assert b"secret" not in everything
        trainers["cedar"].gate.set()
        await operator.watch_until(job, "finished")


async def test_people_see_what_the_protocol_waits_for(federation: Federation) -> None:
    trainers = federation.trainers(COLUMNS)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {
            name: await stack.enter_async_context(federation.agent(name, trainer))
            for name, trainer in trainers.items()
        }
        trainers["cedar"].gate.clear()
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, "[cohort]\nsize = 3")
        await updates_received(operator, job, 2)
        await federation.kill(running["alder"])
        trainers["cedar"].gate.set()
        await shown(operator, job, "secure aggregation, agreeing on the survivors: 2 of 3")
        await stack.enter_async_context(federation.agent("alder", trainers["alder"]))
        await operator.watch_until(job, "finished")


async def test_an_agent_without_an_identity_is_told_so(federation: Federation) -> None:
    for name in ("identity.key", "identity.crt"):
        (federation.folder / "birch" / name).unlink()
    trainers = federation.trainers(COLUMNS)
    async with federation.coordinator(), federation.agents(trainers), federation.operator() as operator:
        job = await submit(operator, "[cohort]\nsize = 3\nretries = 0")
        events = await operator.watch_until(job, "paused")
    assert any("birch" in e.message and "no signing identity" in e.message for e in events)


async def test_a_job_that_makes_no_sense_is_refused_at_once(federation: Federation) -> None:
    async with federation.coordinator(), federation.operator() as operator:
        with pytest.raises(grpc.aio.AioRpcError, match="only their mean can be had"):
            await operator.submit(SECURE + '[aggregation]\nrule = "median"')


async def test_noise_in_shares_is_charged_and_hides_even_the_sum(federation: Federation) -> None:
    text = (
        QUIET
        + """
[cohort]
size = 3
[aggregation]
weighting = "uniform"
[privacy]
level = "distributed"
clip_norm = 2.0
noise_multiplier = 0.5
epsilon = 60.0
delta = 1e-3
"""
    )
    async with federation.coordinator(), federation.agents(federation.trainers(COLUMNS)):
        noisy, history = await finished_model(federation, text, "noisy")
    assert [record["charge"]["level"] for record in history] == ["distributed", "distributed"]
    assert history[0]["training"] == {}
    mean = torch.stack([unit(place, r, COLUMNS) for place in range(3) for r in (1, 2)]).sum(0) / 3
    # Two rounds; each sum has the noise of three shares of (0.5 · 2)² / 2, divided by three.
    expected = (2 * 3 / 2) ** 0.5 / 3
    assert (noisy - mean).std().item() == pytest.approx(expected, rel=0.15)
    with sqlite3.connect(federation.folder / "coordinator.db") as database:
        assert database.execute("SELECT count(*) FROM ledger WHERE released").fetchone() == (2,)
