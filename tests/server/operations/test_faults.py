"""Disk full, database away, a driver that breaks: the job stands still or pauses, and heals."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running
from small_disk import fill, small_disk

from roundtable.engine import RoundEngine
from roundtable.engine import messages as m
from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.jobs import aggregate_action, runner
from roundtable.server.operations import alerts, lasting_work, publication
from roundtable.server.operations.alerts import AlertTable
from roundtable.server.operations.incidents import series_incident
from roundtable.server.store.database import LeaseLost

ONE = torch.ones(4)


@pytest.fixture
def cramped_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; skipped where this user may not mount one."""
    with small_disk(tmp_path / "small", "1m") as disk:
        if disk is None:
            pytest.skip("only root may mount the small file system that this test fills")
        yield disk


@pytest.fixture
async def cramped(settings: Callable[..., ServerConfig], cramped_disk: Path) -> AsyncIterator[Coordinator]:
    """A coordinator whose artifacts have 1 MiB of room."""
    async with running(settings(artifacts=cramped_disk / "artifacts")) as started:
        yield started


async def test_an_upload_to_a_full_disk(cramped: Coordinator, certificates: Path, cramped_disk: Path) -> None:
    async with (
        Operator(cramped.port, certificates / "olga") as operator,
        ScriptedAgent(cramped.port, certificates / "alder") as agent,
    ):
        job = await operator.submit("[cohort]\nsize = 1", rounds=1, vector=torch.zeros(50_000))
        instruction = await agent.expect("instruction")
        filler = await asyncio.to_thread(fill, cramped_disk)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await agent.answer(instruction, torch.ones(50_000))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "is full: free some space" in (caught.value.details() or "")
        waits = (await operator.job(job.id)).waiting_for
        assert waits.startswith("no update can be taken: the disk of ")
        assert "is full" in waits
        filler.unlink()
        receipt = await agent.answer(instruction, torch.ones(50_000))
        assert receipt.status == agent_pb2.UploadReceipt.ACCEPTED
        instruction = await agent.expect("instruction")
        assert "is full" not in (await operator.job(job.id)).waiting_for
        await agent.evaluate(instruction)
        await operator.watch_until(job.id, "finished")


async def test_an_aggregation_on_a_full_disk_waits_and_then_pauses_the_job(
    cramped: Coordinator, certificates: Path, cramped_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate_action, "FULL_DISK_PAUSES", (0.01, 0.01))
    async with (
        Operator(cramped.port, certificates / "olga") as operator,
        ScriptedAgent(cramped.port, certificates / "alder") as agent,
    ):
        # The model and one update fit; the new model does not.
        job = await operator.submit("[cohort]\nsize = 1", rounds=1, vector=torch.zeros(100_000))
        await agent.answer(await agent.expect("instruction"), torch.ones(100_000))
        await operator.watch_until(job.id, "paused")
        detail = await operator.job(job.id)
        assert "is full: free some space" in detail.job.reason
        assert detail.job.rounds_done == 0


async def test_a_database_that_refuses_for_a_while(
    coordinator: Coordinator,
    operator: Operator,
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "FIRST_PAUSE", 0.02)
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'state' / 'coordinator.db'}")
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=1)
        instruction = await agent.expect("instruction")
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE UPDATE ON jobs BEGIN SELECT RAISE(FAIL, 'I/O trouble'); END"
            )
        answer = asyncio.create_task(agent.answer(instruction, ONE))
        async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id), timeout=20):
            if "I/O trouble" in update.detail.waiting_for:
                break
        # Nothing is acknowledged that is not durable.
        assert not answer.done()
        assert (await operator.job(job.id)).job.rounds_done == 0
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER refuse")
        assert (await answer).status == agent_pb2.UploadReceipt.ACCEPTED
        events = await operator.watch_until(job.id, "finished")
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    engine.dispose()


async def test_a_driver_that_breaks_pauses_its_job(
    coordinator: Coordinator,
    operator: Operator,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=1)
        instruction = await agent.expect("instruction")
        with monkeypatch.context() as broken:
            broken.setattr(publication, "record_to_plain", None)
            assert (await agent.answer(instruction, ONE)).status == agent_pb2.UploadReceipt.ACCEPTED
            await operator.watch_until(job.id, "paused")
        reason = (await operator.job(job.id)).job.reason
        assert "failed at this job in round 1, attempt 1, at " in reason
        assert "TypeError: 'NoneType' object is not callable; its log says why" in reason
        event = await operator.watch_for(job.id, "job_paused")
        assert (event.message, json.loads(event.detail)["incident"]["kind"]) == (reason, "coordinator")
        assert any("failed" in record.message for record in caplog.records if record.levelno == logging.ERROR)
        resumed = await operator.stub.ResumeJob(operator_pb2.JobRequest(job=job.id))
        assert resumed.status in ("running", "finished")
        await operator.watch_until(job.id, "finished")
        assert (await operator.job(job.id)).job.rounds_done == 1


async def test_a_silo_at_whose_word_the_driver_breaks_is_left_out_and_the_job_goes_on(
    coordinator: Coordinator, operator: Operator, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = RoundEngine.handle

    def breaks(engine: RoundEngine, event: Any, now: float) -> Any:
        if isinstance(event, m.UpdateArrived) and event.update.client == "birch":
            raise OverflowError("int too large to convert to float: 9e999")
        return handle(engine, event, now)

    monkeypatch.setattr(RoundEngine, "handle", breaks)
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as honest,
        ScriptedAgent(coordinator.port, certificates / "birch") as hostile,
    ):
        table = "[cohort]\nsize = 2\nminimum = 1\n[evaluation]\nevery = 0"
        job = await operator.submit(table, rounds=1)
        asked = await honest.expect("instruction"), await hostile.expect("instruction")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hostile.answer(asked[1], ONE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the job's driver has failed and begins anew" in (caught.value.details() or "")
        event = await operator.watch_for(job.id, "client_failed")
        assert (event.client, event.round) == ("birch", 1)
        assert "at UpdateArrived of birch: OverflowError: int too large to convert" in event.message
        # It comes again and again: the answer is final, and the driver does not see it.
        assert (await hostile.answer(asked[1], ONE)).status == agent_pb2.UploadReceipt.STALE
        assert (await honest.answer(asked[0], ONE)).status == agent_pb2.UploadReceipt.ACCEPTED
        await operator.watch_until(job.id, "finished")
        record = json.loads((await operator.job(job.id)).history[0])
        assert record["contributors"] == ["alder"]


async def _to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_an_unexpected_failure_tells_nothing_of_our_insides(
    coordinator: Coordinator, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(coordinator.jobs, "rows", broken)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await operator.stub.ListJobs(operator_pb2.ListJobsRequest())
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")


async def test_nobody_waits_for_ever_when_the_coordinator_stops(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with running(settings()) as coordinator:
        operator = Operator(coordinator.port, certificates / "olga")
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        await agent.connect()
        job = await operator.submit("")
        watching = operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id))
        await watching.read()
    async with asyncio.timeout(20):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _to_the_end(watching)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "is stopping" in (caught.value.details() or "")
        await _to_the_end(agent.call)
    await agent.close()
    await operator.channel.close()


async def test_alerts_outlive_a_webhook_that_speaks_no_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "PAUSE_SECONDS", 0.0)
    calls: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.put_nowait(await reader.readuntil(b"}"))
        writer.write(b"garbage\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(60):
        port = server.sockets[0].getsockname()[1]
        told = alerts.Alerts(AlertTable(webhook=f"http://127.0.0.1:{port}/"))
        running_on = asyncio.create_task(told.run())
        for message in ("one", "two"):
            told.tell(series_incident(), message, 0.0)
            for _ in range(alerts.TRIES):
                assert f'"message": "{message}"'.encode() in await calls.get()
        running_on.cancel()


async def test_work_that_breaks_off_begins_anew_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lasting_work, "PAUSE_SECONDS", 0.0)
    ends: list[Exception | None] = [KeyError("odd"), OSError(5, "odd"), None]

    async def work() -> None:
        if (end := ends.pop(0)) is not None:
            raise end

    await lasting_work.lasting("housekeeping", work)
    assert [record.getMessage() for record in caplog.records] == [
        "housekeeping broke off; it begins anew in 0 s"
    ] * 2
    ends += [LeaseLost("another one is active"), None]
    await lasting_work.lasting("housekeeping", work)
    assert ends == [None], "the other one does it from now on"


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://host/x", "data:,x", "host/x"])
def test_a_webhook_is_an_address_of_the_web(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        AlertTable(webhook=address)
    assert AlertTable(webhook="https://host/x").webhook == "https://host/x"
