"""What a coordinator does about damage, lost answers, and clocks; whom it tells, and what it keeps."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.core.errors import ConfigError, ResourceError, StorageError
from roundtable.core.observability.released import public
from roundtable.engine import messages as m
from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig, clock
from roundtable.server.operations.incidents import incident_of
from roundtable.server.storage.artifact_store import ArtifactStore, DamagedArtifact
from roundtable.server.store import Database
from roundtable.server.store import jobs as store

Settings = Callable[..., ServerConfig]
ONE = "[cohort]\nsize = 1\n[evaluation]\nevery = 0"


async def until(condition: Callable[[], bool]) -> None:
    """Looks now and then until files, or another thread, show what is waited for."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("waited in vain")


def artifact(folder: Path, digest: str) -> Path:
    return folder / digest[:2] / digest


async def test_a_model_that_was_damaged_on_disk_comes_back_from_a_copy(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    config = settings(copies=[str(tmp_path / "second")])
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(ONE, rounds=2)
        await agent.answer(await agent.expect("instruction"), torch.ones(4))
        second = await agent.expect("instruction")
        digest = second.train.model.digest
        await until(artifact(tmp_path / "second", digest).exists)
        place = artifact(tmp_path / "state" / "artifacts" / "objects", digest)
        data = await asyncio.to_thread(place.read_bytes)
        await asyncio.to_thread(place.write_bytes, data[:-1] + bytes([data[-1] ^ 1]))
        assert await agent.download(digest) == data
        await agent.answer(second, torch.ones(4))
        await operator.watch_until(job.id, "finished")


async def test_a_model_that_is_damaged_for_good_pauses_the_job(
    coordinator: Coordinator, operator: Operator, certificates: Path, tmp_path: Path
) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit(ONE, rounds=1)
        told = await agent.expect("instruction")
        place = artifact(tmp_path / "state" / "artifacts" / "objects", told.train.model.digest)
        await asyncio.to_thread(place.write_bytes, b"x" * place.stat().st_size)
        assert (await agent.answer(told, torch.ones(4))).status == agent_pb2.UploadReceipt.ACCEPTED
        events = await operator.watch_until(job.id, "paused")
        assert "is damaged" in (await operator.job(job.id)).job.reason
        assert not any(event.kind == "round_committed" for event in events)


async def test_a_damaged_model_that_a_silo_asks_for_pauses_the_job_until_it_is_brought_back(
    coordinator: Coordinator, operator: Operator, certificates: Path, tmp_path: Path
) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit(ONE, rounds=1)
        digest = (await agent.expect("instruction")).train.model.digest
        place = artifact(tmp_path / "state" / "artifacts" / "objects", digest)
        data = await asyncio.to_thread(place.read_bytes)
        await asyncio.to_thread(place.write_bytes, b"x" * len(data))
        with pytest.raises(grpc.aio.AioRpcError, match="is damaged"):
            await agent.download(digest)
        events = await operator.watch_until(job.id, "paused")
        assert json.loads(events[-1].detail)["incident"]["kind"] == "data_corruption"
        await agent.expect("withdraw")
        await asyncio.to_thread(place.write_bytes, data)
        await operator.stub.ResumeJob(operator_pb2.JobRequest(job=job.id))
        again = await agent.expect("instruction")
        assert (again.step.round, again.step.attempt) == (1, 2)
        assert await agent.download(digest) == data
        await agent.answer(again, torch.ones(4))
        await operator.watch_until(job.id, "finished")


def test_a_file_is_hashed_again_once_it_was_changed(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path, "1" * 32)
    digest, _ = artifacts.create([b"abc"])
    place = artifacts.path(digest)
    place.write_bytes(b"abd")
    with pytest.raises(DamagedArtifact, match="is damaged"):
        artifacts.path(digest)
    place.unlink()
    with pytest.raises(DamagedArtifact, match="is missing"):
        artifacts.path(digest)


def test_copies_at_an_address_that_nobody_understands_are_refused(settings: Settings) -> None:
    async def start() -> None:
        async with running(settings(copies=["strange://x"])):
            pass

    with pytest.raises(ConfigError, match="'strange://x' cannot be used"):
        asyncio.run(start())


async def test_a_submission_whose_answer_was_lost_is_driven_when_it_is_repeated(
    coordinator: Coordinator, operator: Operator, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = store.insert_job

    def stored_and_lost(*arguments: Any) -> None:
        insert(*arguments)
        arguments[0].commit()
        raise sa.exc.OperationalError("COMMIT", None, Exception("the connection was lost"))

    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        with monkeypatch.context() as broken:
            broken.setattr(store, "insert_job", stored_and_lost)
            with pytest.raises(Exception, match="the connection was lost"):
                await operator.submit(ONE, rounds=1)
        job = await operator.submit(ONE, rounds=1)
        await agent.answer(await agent.expect("instruction"), torch.ones(4))
        await operator.watch_until(job.id, "finished")


async def test_two_coordinators_on_one_sqlite_file_with_folders_of_their_own(
    settings: Settings, tmp_path: Path
) -> None:
    database = f"sqlite:///{tmp_path / 'one.db'}"
    async with running(settings(database=database)):
        second = Coordinator(settings(database=database, artifacts=str(tmp_path / "other")))
        with pytest.raises(ResourceError, match="in use by another coordinator"):
            await second.start()
    assert not (tmp_path / "other" / "coordinator").exists()


@pytest.mark.parametrize("wrong", ["artifacts", "revision"])
async def test_what_does_not_belong_together_is_refused_before_anything_is_written(
    settings: Settings, tmp_path: Path, wrong: str
) -> None:
    config = settings(database=f"sqlite:///{tmp_path / 'one.db'}")
    async with running(config):
        pass
    if wrong == "artifacts":
        config = settings(database=f"sqlite:///{tmp_path / 'two.db'}")
        async with running(settings(database=config.database, artifacts=str(tmp_path / "b"))):
            pass
    else:
        with sa.create_engine(config.database).begin() as connection:
            connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    file = Path(config.database.removeprefix("sqlite:///"))
    before = contents(file)
    with pytest.raises(StorageError, match=r"belongs to coordinator|newer version"):
        await Coordinator(config).start()
    assert contents(file) == before


def contents(file: Path) -> list[str]:
    """Every row and every table of a database."""
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.connect() as connection:
        lines = list(connection.connection.driver_connection.iterdump())  # type: ignore[union-attr]
    engine.dispose()
    return lines


async def test_a_new_database_beside_an_old_artifact_folder_is_refused(
    settings: Settings, tmp_path: Path
) -> None:
    async with running(settings()):
        pass
    new = settings(database=f"sqlite:///{tmp_path / 'new.db'}")
    with pytest.raises(StorageError, match=r"belongs to coordinator .* the database to none yet"):
        await Coordinator(new).start()
    database = Database.connect(new.database)
    assert database.look() == ("", False)
    database.close()


class Hook(BaseHTTPRequestHandler):
    """Takes alerts."""

    taken: list[dict[str, Any]]

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.taken.append(json.loads(self.rfile.read(length)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


async def test_faults_are_events_with_advice_and_alerts_by_webhook_and_command(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    Hook.taken = []
    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    out = tmp_path / "alerts"
    script = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read() + '\\n')"
    alerts = {
        "webhook": f"http://127.0.0.1:{server.server_port}/",
        "command": [sys.executable, "-c", script],
        "severity": "error",
    }
    async with (
        running(settings(alerts=alerts)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(ONE.replace("size = 1", "size = 1\nretries = 0"), rounds=1)
        step = (await agent.expect("instruction")).step
        await agent.say(failure=agent_pb2.Failure(step=step, kind="out_of_memory", detail="no room"))
        events = await operator.watch_until(job.id, "paused")
        shown = (await operator.job(job.id)).incidents
        assert [event.kind for event in shown] == ["client_failed", "attempt_failed", "job_paused"]
        incidents = {event.kind: json.loads(event.detail).get("incident") for event in events if event.detail}
        await until(lambda: len(Hook.taken) == 3 and out.exists() and out.read_text().count("\n") == 3)
    server.shutdown()
    assert incidents["client_failed"] == {
        "kind": "out_of_memory",
        "severity": "error",
        "site": "alder",
        "round": 1,
        "attempt": 1,
        "phase": "train",
        "advice": "give the silo's training more memory, or set a smaller batch_size in the job",
        "action": "the round goes on without this silo; the next draw may choose another",
    }
    assert incidents["attempt_failed"]["kind"] == incidents["job_paused"]["kind"] == "quorum_missed"
    assert [alert["severity"] for alert in Hook.taken] == ["error", "error", "critical"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == Hook.taken
    assert Hook.taken[0]["message"].startswith("alder failed in round 1")


def test_an_operators_pause_is_no_fault() -> None:
    assert incident_of(public(m.Note("job_paused", "paused by olga"))) is None
    assert incident_of(public(m.Note("round_started", "round 1"))) is None


def test_a_clock_that_was_set_is_noticed_and_moves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    before = clock.steady_time()
    with caplog.at_level(logging.WARNING):
        known = clock.note_jump(0.0)
        assert clock.note_jump(known) == known
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "set forward by 3600 s" in caplog.text
    assert abs(clock.steady_time() - before) < 60


async def test_every_kth_model_is_kept_and_what_is_left_over_goes(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    config = settings(keep_models=1, keep_every=2)
    objects = tmp_path / "state" / "artifacts" / "objects"
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(ONE, rounds=5)
        for number in range(5):
            await agent.answer(await agent.expect("instruction"), torch.full((4,), float(number + 1)))
        await operator.watch_until(job.id, "finished")
        models = [json.loads(record)["model"] for record in (await operator.job(job.id)).history]
    stray = objects / "ab" / ("ab" * 32)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"a crash between two steps left this behind")
    async with running(config) as coordinator:
        await until(lambda: not stray.exists())
        async with Operator(coordinator.port, certificates / "olga") as operator:
            assert (await operator.stub.Status(operator_pb2.StatusRequest())).jobs_running == 0
    kept = [artifact(objects, digest).exists() for digest in models]
    assert kept == [False, True, False, True, True]
