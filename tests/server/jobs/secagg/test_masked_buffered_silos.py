"""Buffered rounds under masks in the service: a real coordinator and real agents, and what they can lose."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_rot import flip
from secure_federation import SECURE, Federation, GivenTrainer, unit
from secure_process import (
    COLUMNS,
    Deaf,
    ended,
    free_port,
    masked_by,
    note_masks,
    start_coordinator,
    start_silo,
)
from service import Operator

from roundtable.client.agent import secure_attempts as secure
from roundtable.client.policy.config import PolicyTable
from roundtable.core.models import open_model
from roundtable.privacy import Charge, compose
from roundtable.privacy.secagg.framing import Kind
from roundtable.proto import operator_pb2

BUFFERED = '[round]\nmode = "buffered"\nbuffer = 3\n' + SECURE
FAST, SLOW = ("alder", "birch", "cedar"), ("dogwood", "elm", "fir")


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.make(tmp_path, *FAST)


def one_at_a_time(federation: Federation) -> dict[str, GivenTrainer]:
    """Trainers whose gates close again behind each training."""
    made = {}
    for place, name in enumerate(federation.names):

        def delta(round: int, place: int = place, name: str = name) -> torch.Tensor:
            made[name].gate.clear()
            return unit(place, round, COLUMNS)

        made[name] = GivenTrainer(delta, examples=10 + 20 * place)
    return made


async def until(operator: Operator, job: str, kind: str, count: int = 1) -> None:
    """Returns when the job's history has so many events of this kind."""
    call = operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
    async for update in call:
        count -= sum(event.kind == kind for event in update.events)
        if count <= 0:
            call.cancel()
            return
    raise AssertionError(f"the job ended without the event {kind}")


def train(trainers: Mapping[str, GivenTrainer], names: Iterable[str]) -> None:
    for name in names:
        trainers[name].gate.set()


def in_the_clear(names: tuple[str, ...], history: list[dict[str, Any]]) -> torch.Tensor:
    """The model that whoever sees all updates makes of them: FedBuff's, weighed by examples."""
    vector = torch.zeros(COLUMNS, dtype=torch.float64)
    for record in history:
        if not record["contributors"]:
            continue
        (age,) = set(record["staleness"].values())
        places = [names.index(name) for name in record["contributors"]]
        weights = torch.tensor([10.0 + 20 * place for place in places], dtype=torch.float64)
        rows = torch.stack([unit(place, record["round"] - age, COLUMNS) for place in places]).double()
        vector += (weights / weights.sum()) @ rows / (1 + age) ** 0.5
    return vector


async def outcome(federation: Federation, operator: Operator, job: str) -> list[dict[str, Any]]:
    """The history of a job that finishes, whose model is that in the clear to the ring's bound.

    A round of m silos of total weight V is off by m u / V, u = A W / T (docs/secure-aggregation.md,
    "Arithmetic"): here C = A = 2, W = 65,536, T = (2^32 - 1) / 6 and V > 10 m.
    """
    await operator.watch_until(job, "finished")
    detail = await operator.job(job)
    path = federation.folder / "result.safetensors"
    path.write_bytes(await operator.fetch(detail.job.model.digest))
    history = [json.loads(record) for record in detail.history]
    bound = len(history) * (2 * 65536 / (2**32 / 6)) / 10
    assert (open_model(path).vector - in_the_clear(federation.names, history)).abs().max() < bound + 1e-6
    return history


async def test_groups_of_different_models_give_fedbuffs_model(tmp_path: Path) -> None:
    """The coordinator keeps one model only, and those of silos that are at work or ready for older ones."""
    federation = Federation.make(tmp_path, *FAST, *SLOW)
    federation.settings["keep_models"] = 1
    trainers = one_at_a_time(federation)
    async with federation.coordinator(), federation.agents(trainers), federation.operator() as operator:
        job = str((await operator.submit(BUFFERED, rounds=3, vector=torch.zeros(COLUMNS))).id)
        train(trainers, FAST)
        await until(operator, job, "round_committed")
        train(trainers, ["dogwood"])
        await until(operator, job, "update_ready", 4)
        train(trainers, FAST)
        await until(operator, job, "round_committed", 2)
        train(trainers, ["elm", "fir"])
        history = await outcome(federation, operator, job)
    assert [record["contributors"] for record in history] == [list(FAST), list(FAST), list(SLOW)]
    assert [set(record["staleness"].values()) for record in history] == [{0}, {0}, {2}]
    assert history[0]["training"] == {"loss": [pytest.approx(45.0, abs=1e-3), 90]}
    assert [len(trainers[name].steps) for name in federation.names][3:] == [1, 1, 1]


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Deaf:
    monkeypatch.setattr(secure.MaskingAttempt, "mask", note_masks(tmp_path))
    return Deaf(monkeypatch)


async def submit(operator: Operator, text: str = BUFFERED, rounds: int = 1) -> str:
    text += '[cohort]\nretries = 9\ndeadline = "400s"\n'
    return str((await operator.submit(text, rounds=rounds, vector=torch.zeros(COLUMNS))).id)


def trained(trainers: Mapping[str, GivenTrainer]) -> list[int]:
    return [len(trainer.steps) for trainer in trainers.values()]


def kept(federation: Federation, name: str) -> list[str]:
    """The files of finished updates that a silo keeps."""
    return sorted(path.name for path in (federation.folder / "state" / name / "prepared").iterdir())


def no_mask_twice(federation: Federation) -> None:
    for name in federation.names:
        keys = [key for _, key, _ in masked_by(federation.folder, name)]
        assert keys
        assert len(keys) == len(set(keys))


@pytest.mark.slow
async def test_a_coordinator_and_a_silo_that_begin_again_know_of_finished_updates(
    federation: Federation, deaf: Deaf
) -> None:
    """Two are ready when all processes end; what they have trained is masked once the third has trained."""
    trainers = one_at_a_time(federation)
    async with federation.coordinator(), federation.agents(trainers), federation.operator() as operator:
        job = await submit(operator)
        train(trainers, FAST[:2])
        await until(operator, job, "update_ready", 2)
    assert kept(federation, "alder") == [f"{job}.1.1.prepare.json", f"{job}.1.1.prepare.plain"]
    assert kept(federation, "cedar") == []
    train(trainers, ["cedar"])
    async with federation.coordinator(), federation.agents(trainers), federation.operator() as operator:
        (record,) = await outcome(federation, operator, job)
    assert record["contributors"] == list(FAST)
    # What cedar had not finished when its agent left is asked for anew.
    assert trained(trainers) == [1, 1, 2]
    no_mask_twice(federation)


async def all_at_once(federation: Federation, operator: Operator, job: str) -> int:
    """The one round's attempt, which was over all three silos' updates of the first model."""
    (record,) = await outcome(federation, operator, job)
    assert record["contributors"] == list(FAST)
    no_mask_twice(federation)
    return int(record["attempt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["ready", Kind.ADVERTISE, Kind.PEERS, Kind.INBOX, Kind.ALIVE, Kind.EVIDENCE], ids=str
)
async def test_the_coordinator_is_killed(federation: Federation, deaf: Deaf, place: Any) -> None:
    """Two are ready, or a group of three is in a phase of the protocol: nothing is trained or masked twice"""
    federation.port = free_port()
    trainers = federation.trainers(COLUMNS)
    if place == "ready":
        trainers["cedar"].gate.clear()
    else:
        deaf.keep("cedar", place)
    first = start_coordinator(federation)
    async with AsyncExitStack() as stack:
        stack.enter_context(ended(first))
        await stack.enter_async_context(federation.agents(trainers))
        async with federation.operator() as operator:
            job = await submit(operator)
            async with asyncio.timeout(60):
                if place == "ready":
                    await until(operator, job, "update_ready", 2)
                else:
                    await deaf.heard.wait()
        first.send_signal(signal.SIGKILL)
        first.wait()
        deaf.keep("", Kind.EVIDENCE)
        stack.enter_context(ended(start_coordinator(federation)))
        trainers["cedar"].gate.set()
        operator = await stack.enter_async_context(federation.operator())
        assert await all_at_once(federation, operator, job) == 1
    assert trained(trainers) == [1, 1, 1]


READY = ["*/prepare/update_kept"]
AGAIN = ["before:PEERS", "after:PEERS", "before:INBOX", "after:INBOX", "*/train/masked", "*/train/keys_kept"]
ON = [
    *("*/train/update_described", "*/train/upload_part", "*/train/receipt_here"),
    *("before:ALIVE", "after:ALIVE", "before:EVIDENCE", "after:EVIDENCE"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*READY, *AGAIN, *ON])
async def test_a_silo_is_killed(federation: Federation, deaf: Deaf, fault: str) -> None:
    """What is ready stays so. Before the masked vector is spooled its keys are lost, and a group of three."""
    federation.port = free_port()
    trainers = {name: trainer for name, trainer in federation.trainers(COLUMNS).items() if name != "cedar"}
    first = start_silo(federation, "cedar", fault)
    async with AsyncExitStack() as stack:
        stack.enter_context(ended(first))
        await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(trainers))
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator)
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
        stack.enter_context(ended(start_silo(federation, "cedar")))
        attempt = await all_at_once(federation, operator, job)
    assert attempt > 1 if fault in AGAIN else attempt == 1
    # The others keep what they have trained for the next group.
    assert trained(trainers) == [1, 1]


NOISE = BUFFERED[: BUFFERED.index("[privacy]")] + (
    "[aggregation]\nweighting = 'uniform'\n[privacy]\nlevel = 'distributed'\nclip_norm = 2.0\n"
    "noise_multiplier = 2.0\ndelta = 1e-5\n"
)


async def test_each_group_is_one_release_in_both_ledgers(federation: Federation, deaf: Deaf) -> None:
    """As in a simulation: without amplification at the coordinator, and in each silo's own account."""
    trainers = federation.trainers(COLUMNS)
    deaf.keep("cedar", Kind.EVIDENCE, round=2)
    own = PolicyTable(epsilon=100.0, delta=1e-5)
    async with (
        federation.coordinator(),
        federation.agents(trainers, policy=own),
        federation.operator() as operator,
    ):
        job = await submit(operator, NOISE, rounds=2)
        async with asyncio.timeout(60):
            await deaf.heard.wait()
        # The second is charged before anybody is asked for a share, and stays so when the job is cancelled.
        assert charged(federation) == [(1, 1, 1), (2, 1, 1)]
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, "cancelled")
        made, closed = [json.loads(record) for record in (await operator.job(job)).history]
    assert "cancelled while it was unmasked" in closed["closed"]
    charge = Charge.from_json(made["charge"]["charge"])
    assert charge.sampling == "none"
    assert made["charge"]["epsilon"] == pytest.approx(compose([charge], 1e-5))
    assert closed["charge"]["epsilon"] == pytest.approx(compose([charge] * 2, 1e-5))
    assert charged(federation) == [(1, 1, 1), (2, 1, 1)]
    for name in FAST:
        account = json.loads((federation.folder / "state" / name / "privacy" / "client.json").read_text())
        assert len(account["entries"]) == 2


def charged(federation: Federation) -> list[tuple[int, int, int]]:
    """(round, attempt, released) of everything in the coordinator's ledger."""
    with sqlite3.connect(federation.folder / "coordinator.db") as database:
        return list(database.execute("SELECT round, attempt, released FROM ledger ORDER BY id"))


@pytest.mark.slow
async def test_who_is_ready_stays_so_where_another_machine_takes_over(federation: Federation) -> None:
    """The first machine's journals are not there, and none is missed: no group was formed."""
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    home = f"file://{federation.folder}/bucket"
    federation.settings = {"bucket": home, "artifacts": str(federation.folder / "first")}
    async with AsyncExitStack() as stack:
        async with federation.coordinator(), federation.operator() as operator:
            await stack.enter_async_context(federation.agents(trainers))
            job = await submit(operator)
            await until(operator, job, "update_ready", 2)
        federation.settings["artifacts"] = str(federation.folder / "second")
        async with federation.coordinator(), federation.operator() as operator:
            trainers["cedar"].gate.set()
            (record,) = await outcome(federation, operator, job)
    assert (record["attempt"], record["contributors"]) == (1, list(FAST))
    assert trained(trainers) == [1, 1, 1]


@pytest.mark.slow
async def test_a_finished_update_that_rots_is_not_masked(federation: Federation) -> None:
    """The silo says so, and trains anew; the others keep what they have for the next group."""
    trainers = federation.trainers(COLUMNS)
    trainers["cedar"].gate.clear()
    async with federation.coordinator(), federation.agents(trainers), federation.operator() as operator:
        job = await submit(operator)
        await until(operator, job, "update_ready", 2)
        flip(federation.folder / "state" / "alder" / "prepared" / f"{job}.1.1.prepare.plain", 9)
        trainers["cedar"].gate.set()
        failed = await operator.watch_for(job, "client_failed")
        (record,) = await outcome(federation, operator, job)
    assert "damaged on the silo's own disk before it was masked" in failed.message
    assert (record["attempt"], record["contributors"]) == (2, list(FAST))
    assert trained(trainers) == [2, 1, 1]


@pytest.mark.slow
async def test_a_silo_that_cannot_sign_trains_for_no_group(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, *FAST, "dogwood")
    for name in ("identity.key", "identity.crt"):
        (federation.folder / "dogwood" / name).unlink()
    trainers = federation.trainers(COLUMNS)
    async with federation.coordinator(), federation.agents(trainers), federation.operator() as operator:
        job = await submit(operator)
        (record,) = await outcome(federation, operator, job)
        # The others were a group, perhaps before it came.
        events = await operator.watch_until(job, "finished")
    assert (record["attempt"], record["contributors"]) == (1, list(FAST))
    assert trained(trainers) == [1, 1, 1, 0]
    said = [event.message for event in events if event.kind == "client_failed"]
    assert all("dogwood" in each and "no signing identity" in each for each in said)
