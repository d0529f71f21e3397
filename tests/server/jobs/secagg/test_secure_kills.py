"""SIGKILL in the middle of secure aggregation: it goes on, or begins anew with fresh keys; no mask twice.

The coordinator, or one silo, is a process of its own and is killed at a stated place; the others run here.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from secure_federation import QUIET, SECURE, Federation, unit
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

from roundtable.client.agent import secure_attempts as secure
from roundtable.core.models import open_model
from roundtable.privacy.secagg.framing import Kind
from roundtable.proto import operator_pb2

NAMES = ("alder", "birch", "cedar")
# A tenth of it is what a silo has to come back in, in a new process on a machine that may be busy.
TABLE = '[cohort]\nsize = 3\nretries = 9\ndeadline = "400s"\n'
NOISY = (
    QUIET
    + """
[aggregation]
weighting = "uniform"
[privacy]
level = "distributed"
clip_norm = 2.0
noise_multiplier = 0.5
delta = 1e-3
"""
)


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    made = Federation.make(tmp_path, *NAMES)
    made.port = free_port()
    return made


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Deaf:
    monkeypatch.setattr(secure.MaskingAttempt, "mask", note_masks(tmp_path))
    return Deaf(monkeypatch)


async def submit(operator: Any, text: str = SECURE) -> str:
    job = await operator.submit(TABLE + text, rounds=1, vector=torch.zeros(COLUMNS))
    return str(job.id)


async def ends_well(federation: Federation, operator: Any, job: str) -> int:
    """The job finishes with the mean of all silos; the attempt that it took."""
    await operator.watch_until(job, "finished")
    detail = await operator.job(job)
    path = federation.folder / "result.safetensors"
    path.write_bytes(await operator.fetch(detail.job.model.digest))
    weights = torch.tensor([10.0, 30.0, 50.0])
    rows = torch.stack([unit(place, 1, COLUMNS) for place in range(3)])
    assert (open_model(path).vector - (weights / weights.sum()) @ rows).abs().max() < 1e-5
    return int(json.loads(detail.history[-1])["attempt"])


def no_mask_twice(federation: Federation) -> None:
    """Every vector was masked under a key of its own, in every attempt, at every silo."""
    for name in NAMES:
        masked = masked_by(federation.folder, name)
        assert masked, f"{name} has masked nothing"
        keys = [key for _, key, _ in masked]
        assert len(set(keys)) == len(keys)
        attempts = [attempt for attempt, _, _ in masked]
        assert len(set(attempts)) == len(attempts)


def charged(federation: Federation) -> list[tuple[int, int]]:
    """(attempt, released) of everything in the ledger."""
    with sqlite3.connect(federation.folder / "coordinator.db") as database:
        return list(database.execute("SELECT attempt, released FROM ledger ORDER BY id"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.ADVERTISE, Kind.PEERS, Kind.INBOX, Kind.ALIVE, Kind.EVIDENCE])
async def test_the_coordinator_is_killed(federation: Federation, deaf: Deaf, kind: Kind) -> None:
    """In each phase: cedar does not answer, the others have, and then nobody is there to ask."""
    trainers = federation.trainers(COLUMNS)
    deaf.keep("cedar", kind)
    first = start_coordinator(federation)
    async with AsyncExitStack() as stack:
        stack.enter_context(ended(first))
        await stack.enter_async_context(federation.agents(trainers))
        async with federation.operator() as operator:
            job = await submit(operator)
            async with asyncio.timeout(60):
                await deaf.heard.wait()
        first.send_signal(signal.SIGKILL)
        first.wait()
        deaf.keep("", kind)
        stack.enter_context(ended(start_coordinator(federation)))
        operator = await stack.enter_async_context(federation.operator())
        assert await ends_well(federation, operator, job) == 1
    assert [len(trainer.steps) for trainer in trainers.values()] == [1, 1, 1]
    no_mask_twice(federation)


AGAIN = ["before:PEERS", "after:PEERS", "before:INBOX", "after:INBOX", "*/train/masked", "*/train/keys_kept"]
UPLOAD = ["*/train/update_described", "*/train/upload_part", "*/train/receipt_here"]
ON = [*UPLOAD, "before:ALIVE", "after:ALIVE", "before:EVIDENCE", "after:EVIDENCE"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*AGAIN, *ON])
async def test_a_silo_is_killed(federation: Federation, deaf: Deaf, fault: str) -> None:
    """Before its masked vector is spooled, its keys and the attempt of three are lost; else it goes on."""
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
        attempt = await ends_well(federation, operator, job)
    assert attempt == 1 if fault in ON else attempt > 1
    no_mask_twice(federation)


async def test_what_can_be_seen_is_charged_before_it_is_asked_for(federation: Federation, deaf: Deaf) -> None:
    """A job cancelled while its sum is unmasked has spent its privacy, and leaves nobody waiting."""
    deaf.keep("cedar", Kind.EVIDENCE)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(federation.trainers(COLUMNS)))
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, NOISY)
        async with asyncio.timeout(60):
            await deaf.heard.wait()
        assert charged(federation) == [(1, 1)]
        runner = coordinator.jobs.runner(job)
        assert runner is not None
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, "cancelled")
        async with asyncio.timeout(60):
            await runner._actions._tasks.finished()
        (record,) = history(await operator.job(job))
        assert "the job was cancelled while it was unmasked" in record["closed"]
    assert charged(federation) == [(1, 1)]


async def test_a_job_cancelled_before_it_can_be_seen_has_spent_nothing(
    federation: Federation, deaf: Deaf
) -> None:
    deaf.keep("cedar", Kind.ALIVE)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(federation.trainers(COLUMNS)))
        operator = await stack.enter_async_context(federation.operator())
        job = await submit(operator, NOISY)
        async with asyncio.timeout(60):
            await deaf.heard.wait()
        assert charged(federation) == [(1, 0)]
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, "cancelled")
    assert charged(federation) == []


@pytest.mark.slow
@pytest.mark.parametrize("then", ["cancelled", "finished"])
async def test_a_coordinator_killed_while_it_unmasks_has_charged(
    federation: Federation, deaf: Deaf, then: str
) -> None:
    deaf.keep("cedar", Kind.EVIDENCE)
    first = start_coordinator(federation)
    async with AsyncExitStack() as stack:
        stack.enter_context(ended(first))
        await stack.enter_async_context(federation.agents(federation.trainers(COLUMNS)))
        async with federation.operator() as operator:
            job = await submit(operator, NOISY)
            async with asyncio.timeout(60):
                await deaf.heard.wait()
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert charged(federation) == [(1, 1)]
        if then == "finished":
            deaf.keep("", Kind.EVIDENCE)
        stack.enter_context(ended(start_coordinator(federation)))
        operator = await stack.enter_async_context(federation.operator())
        if then == "cancelled":
            await operator.stub.CancelJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, then)
    assert charged(federation) == [(1, 1)]


def history(detail: Any) -> list[dict[str, Any]]:
    return [json.loads(record) for record in detail.history]


def each_round_had_keys_of_its_own(federation: Federation, job: str, rounds: int) -> None:
    """No key masked two vectors, and every silo remembers that the last round was unmasked."""
    for name in NAMES:
        keys = [key for _, key, _ in masked_by(federation.folder, name)]
        assert len(keys) == len(set(keys)) == rounds
        text = (federation.folder / "state" / name / "releases.jsonl").read_text()
        released = [json.loads(line) for line in text.splitlines()]
        last = [entry for entry in released if entry["kind"] == "unmasked"][-1]
        assert (last["job"], last["round"], last["attempt"]) == (job, rounds, 1)


async def test_a_round_that_may_have_been_seen_is_closed_and_the_next_goes_well(
    federation: Federation, deaf: Deaf
) -> None:
    """One of three gives no share, two may have: no other sum of that round is made."""
    deaf.keep("cedar", Kind.EVIDENCE, round=1)
    deaf.gives_up = True
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(federation.trainers(COLUMNS)))
        operator = await stack.enter_async_context(federation.operator())
        job = str((await operator.submit(TABLE + SECURE, rounds=2, vector=torch.zeros(COLUMNS))).id)
        events = await operator.watch_until(job, "finished")
        detail = await operator.job(job)
        path = federation.folder / "result.safetensors"
        path.write_bytes(await operator.fetch(detail.job.model.digest))
    (said,) = [event for event in events if event.kind == "round_closed"]
    assert "cedar: its disk broke" in said.message
    assert "went on with the next" in json.loads(said.detail)["incident"]["action"]
    assert "all 2 rounds are done, 1 of them without a model" in detail.job.reason
    closed, made = history(detail)
    assert "cedar: its disk broke" in closed["closed"]
    assert (closed["round"], closed["attempt"], closed["contributors"]) == (1, 1, [])
    assert (made["round"], made["attempt"], made["contributors"]) == (2, 1, sorted(NAMES))
    assert closed["model"] != made["model"]
    weights = torch.tensor([10.0, 30.0, 50.0])
    rows = torch.stack([unit(place, 2, COLUMNS) for place in range(3)])
    assert (open_model(path).vector - (weights / weights.sum()) @ rows).abs().max() < 1e-5
    each_round_had_keys_of_its_own(federation, job, 2)


async def test_a_job_paused_while_it_unmasks_goes_on_with_the_next_round(
    federation: Federation, deaf: Deaf
) -> None:
    deaf.keep("cedar", Kind.EVIDENCE, round=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(federation.trainers(COLUMNS)))
        operator = await stack.enter_async_context(federation.operator())
        job = str((await operator.submit(TABLE + NOISY, rounds=2, vector=torch.zeros(COLUMNS))).id)
        async with asyncio.timeout(60):
            await deaf.heard.wait()
        await operator.stub.PauseJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, "paused")
        (record,) = history(await operator.job(job))
        assert "the job was paused while it was unmasked" in record["closed"]
        assert record["charge"]["epsilon"] > 0
        assert charged(federation) == [(1, 1)]
        await operator.stub.ResumeJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, "finished")
        first, second = history(await operator.job(job))
    assert second["charge"]["epsilon"] > first["charge"]["epsilon"]
    assert charged(federation) == [(1, 1), (1, 1)]
    each_round_had_keys_of_its_own(federation, job, 2)


async def test_a_job_paused_before_it_unmasks_does_the_round_again(
    federation: Federation, deaf: Deaf
) -> None:
    """Nobody was asked for a share, and nothing is charged until somebody is."""
    deaf.keep("cedar", Kind.ALIVE, round=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        await stack.enter_async_context(federation.agents(federation.trainers(COLUMNS)))
        operator = await stack.enter_async_context(federation.operator())
        job = str((await operator.submit(TABLE + NOISY, rounds=1, vector=torch.zeros(COLUMNS))).id)
        async with asyncio.timeout(60):
            await deaf.heard.wait()
        await operator.stub.PauseJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, "paused")
        assert not (await operator.job(job)).history
        assert charged(federation) == [(1, 0)]
        deaf.keep("", Kind.ALIVE)
        await operator.stub.ResumeJob(operator_pb2.JobRequest(job=job))
        await operator.watch_until(job, "finished")
        (record,) = history(await operator.job(job))
    assert (record["attempt"], record["closed"]) == (2, "")
    assert charged(federation) == [(2, 1)]


@pytest.mark.slow
async def test_what_was_heard_is_lost_while_it_unmasks(federation: Federation, deaf: Deaf) -> None:
    """The coordinator is killed and its journal of the attempt is gone: the round is closed all the same."""
    deaf.keep("cedar", Kind.EVIDENCE, round=1)
    first = start_coordinator(federation)
    async with AsyncExitStack() as stack:
        stack.enter_context(ended(first))
        await stack.enter_async_context(federation.agents(federation.trainers(COLUMNS)))
        async with federation.operator() as operator:
            job = str((await operator.submit(TABLE + NOISY, rounds=2, vector=torch.zeros(COLUMNS))).id)
            async with asyncio.timeout(60):
                await deaf.heard.wait()
        first.send_signal(signal.SIGKILL)
        first.wait()
        for journal in (federation.folder / "artifacts" / "secure").iterdir():
            journal.unlink()
        stack.enter_context(ended(start_coordinator(federation)))
        operator = await stack.enter_async_context(federation.operator())
        await operator.watch_until(job, "finished")
        closed, made = history(await operator.job(job))
    assert "what it had heard is lost" in closed["closed"]
    assert (made["round"], made["closed"]) == (2, "")
    assert charged(federation) == [(1, 1), (1, 1)]
    each_round_had_keys_of_its_own(federation, job, 2)
