"""What a coordinator shows to those who watch over it: pages over real HTTP, beside a real job."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import torch
from postgresql import PostgreSQL
from processes import free_port
from prometheus_client.parser import text_string_to_metric_families
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.administration import Administrator
from roundtable.core.errors import ResourceError
from roundtable.core.identity.credentials import issue
from roundtable.proto import agent_pb2, common_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.coordinator import until_it_answers
from roundtable.server.leadership.election import Sight
from roundtable.server.store.database import DatabaseUnreachable

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def get(port: int, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def figures(port: int) -> Values:
    status, text = await get(port, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Values, name: str, /, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


async def test_a_job_is_counted_and_timed(
    settings: Callable[..., ServerConfig], database: str, certificates: Path
) -> None:
    config = settings(database=database, metrics="127.0.0.1:0")
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            work = [asyncio.create_task(agent.take_part(torch.ones(4))) for agent in agents]
            job = await operator.submit("[cohort]\nsize = 3\nminimum = 2", rounds=3)
            await operator.watch_until(job.id, "finished")
            assert len(await operator.fetch(job.model.digest)) > 144
            found = await figures(coordinator.metrics_port)
            for task in work:
                task.cancel()
    assert value(found, "roundtable_coordinator_active") == 1
    assert value(found, "roundtable_database_up") == 1
    assert value(found, "roundtable_jobs", status="finished") == 1
    assert value(found, "roundtable_jobs", status="running") == 0
    assert value(found, "roundtable_rounds_total", outcome="committed") == 3
    assert value(found, "roundtable_round_seconds_count") == 3
    for phase in ("train", "aggregate", "evaluate", "commit"):
        assert value(found, "roundtable_phase_seconds_count", phase=phase) == 3
    assert value(found, "roundtable_updates_total", result="accepted") == 9
    assert value(found, "roundtable_silos", status="offline") == 0
    assert (
        sum(value(found, "roundtable_silos", status=s) for s in ("available", "training", "uploading")) == 3
    )
    assert value(found, "roundtable_silos_silent") == 0
    assert value(found, "roundtable_transfer_bytes_total", direction="in") >= 9 * 16
    assert value(found, "roundtable_transfer_bytes_total", direction="out") >= 9 * 16
    assert value(found, "roundtable_queue_length", queue="events") == 0
    assert value(found, "roundtable_disk_free_bytes", folder="artifacts") > 0
    for certificate in ("own", "ca"):
        assert (
            value(found, "roundtable_certificate_expires_timestamp_seconds", certificate=certificate) > 1.7e9
        )
    assert value(found, "process_resident_memory_bytes") > 1e7
    assert value(found, "roundtable_event_loop_lag_seconds_count") >= 0


async def test_a_running_job_shows_who_is_there_and_who_is_needed(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        running(settings(metrics="127.0.0.1:0")) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder"),
    ):
        job = await operator.submit("[cohort]\nsize = 3\nminimum = 2", rounds=1)
        with pytest.raises(grpc.aio.AioRpcError):
            await operator.job("no such job")
        found = await figures(coordinator.metrics_port)
    labels = {"job_id": job.id}
    assert value(found, "roundtable_job_silos_online", **labels) == 1
    assert value(found, "roundtable_job_silos_needed", **labels) == 2
    assert value(found, "roundtable_job_rounds_wanted", **labels) == 1
    assert value(found, "roundtable_job_rounds_done", **labels) == 0
    # [cohort] wait, deadline and grace, and the evaluation's deadline.
    assert value(found, "roundtable_job_round_deadline_seconds", **labels) == 30 + 600 + 30 + 120
    refused = {"call": "Operators/GetJob", "status": "NOT_FOUND"}
    assert value(found, "roundtable_calls_refused_total", **refused) == 1


async def test_a_round_began_with_its_first_attempt_and_the_next_one_with_its_commit(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async def began() -> float:
        found = await figures(coordinator.metrics_port)
        return value(found, "roundtable_job_round_began_timestamp_seconds", job_id=job.id)

    async with (
        running(settings(metrics="127.0.0.1:0")) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=2)
        first = await alder.expect("instruction")
        times = [await began()]
        await alder.say(failure=agent_pb2.Failure(step=first.step, kind="task_error", detail="once"))
        second = await alder.expect("instruction")
        assert (second.step.round, second.step.attempt) == (1, 2)
        times.append(await began())
        await alder.answer(second, torch.ones(4))
        assert (await alder.expect("instruction")).step.round == 2
        times.append(await began())
        await operator.stub.PauseJob(operator_pb2.JobRequest(job=job.id))
        await operator.watch_until(job.id, "paused")
        await operator.stub.ResumeJob(operator_pb2.JobRequest(job=job.id))
        await operator.watch_until(job.id, "running")
        times.append(await began())
    assert times[0] == times[1] < times[2] < times[3] <= time.time()


async def test_silos_whose_certificate_ends_soon_are_counted(
    settings: Callable[..., ServerConfig], certificates: Path, tmp_path: Path
) -> None:
    def ending(name: str, days: int, old: float) -> Path:
        start = datetime.now(UTC) - timedelta(days=old)
        return issue(certificates / "ca", name, "agent", tmp_path / name, days=days, start=start)

    folders = [certificates / "alder", ending("year", 365, 352), ending("week", 7, 5), ending("last", 7, 6.5)]
    async with running(settings(metrics="127.0.0.1:0")) as coordinator, AsyncExitStack() as connected:
        for folder, count in zip(folders, (0, 1, 1, 2), strict=True):
            await connected.enter_async_context(ScriptedAgent(coordinator.port, folder))
            # A silo is greeted before it is counted.
            async with asyncio.timeout(60):
                while (
                    value(await figures(coordinator.metrics_port), "roundtable_silos_certificate_ending")
                    < count
                ):
                    pass
            found = await figures(coordinator.metrics_port)
            assert value(found, "roundtable_silos_certificate_ending") == count, folder


async def test_a_silo_that_was_revoked_is_not_waited_for(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundtable.server.metrics_page.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("roundtable.server.metrics_page.SILENT_SECONDS", -1.0)

    def revoke() -> list[str]:
        with Administrator(f"localhost:{coordinator.port}", certificates / "olga") as operator:
            operator.revoke("alder", "its project is over")
            return [client.state for client in operator.clients()]

    async with running(settings(metrics="127.0.0.1:0")) as coordinator:
        async with ScriptedAgent(coordinator.port, certificates / "alder"):
            assert value(await figures(coordinator.metrics_port), "roundtable_silos_silent") == 0
        async with asyncio.timeout(20):
            while value(await figures(coordinator.metrics_port), "roundtable_silos_silent") == 0:
                pass
        assert await asyncio.to_thread(revoke) == ["revoked"]
        found = await figures(coordinator.metrics_port)
    assert value(found, "roundtable_silos_silent") == 0


async def test_a_silos_figures_are_shown_to_operators_and_no_name_on_the_page_of_metrics(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        running(settings(metrics="127.0.0.1:0")) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch"),
    ):
        job = await operator.submit('name = "a-rare-illness"\n[cohort]\nsize = 2', rounds=1)
        instruction = await alder.expect("instruction")
        told = {"step": 3, "steps": 9, "tokens_per_second": 512.0, "waiting_seconds": 0.0}
        step = common_pb2.StepFigures(**told)
        progress = agent_pb2.Progress(step=instruction.step, done=24, loss=1.5, figures=step)
        await alder.say(progress=progress)
        shown = []
        async with asyncio.timeout(30):
            while not shown:
                clients = (await operator.job(job.id)).clients
                shown = [client for client in clients if client.HasField("figures")]
        await alder.say(heartbeat=agent_pb2.Heartbeat(state="alder is <here>"))
        await alder.expect("heartbeat")
        _, page = await get(coordinator.metrics_port, "/metrics")
    assert [(silo.client, silo.loss, silo.figures) for silo in shown] == [("alder", 1.5, step)]
    # For those who show a certificate. Whoever reaches the page of metrics learns no name of a silo or a job.
    assert job.id in page
    assert not [name for name in ("alder", "birch", "rare-illness", "olga", " 512") if name in page]


async def test_what_a_population_has_spent_and_may_spend(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    privacy = (
        '[evaluation]\nevery = 0\n[aggregation]\nweighting = "uniform"\n[cohort]\nsize = 3\n'
        '[privacy]\nlevel = "client"\nepsilon = 8.0\ndelta = 1e-5\nclip_norm = 1.0\npopulation = 1000\n'
        "noise_multiplier = 4.0"
    )
    async with (
        running(settings(metrics="127.0.0.1:0", populations={"ward": ["t", "u"]})) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            work = [asyncio.create_task(agent.take_part(torch.ones(4))) for agent in agents]
            job = await operator.submit(privacy, rounds=1)
            await operator.watch_until(job.id, "finished")
            found = await figures(coordinator.metrics_port)
            for task in work:
                task.cancel()
    spent = value(found, "roundtable_privacy_epsilon_spent", population="ward")
    assert 0 < spent < 8
    assert value(found, "roundtable_privacy_epsilon_budget", population="ward") == 8
    assert value(found, "roundtable_privacy_epsilon_left", population="ward") == pytest.approx(8 - spent)


async def test_health_and_readiness(settings: Callable[..., ServerConfig]) -> None:
    async with running(settings(metrics="127.0.0.1:0")) as coordinator:
        port = coordinator.metrics_port
        assert await get(port, "/healthz") == (200, "ok\n")
        assert await get(port, "/readyz") == (200, "active\n")
        assert (await get(port, "/else"))[0] == 404


@pytest.mark.slow
async def test_a_database_that_is_gone_is_told(
    settings: Callable[..., ServerConfig], postgresql: PostgreSQL
) -> None:
    async with running(settings(database=postgresql.fresh(), metrics="127.0.0.1:0")) as coordinator:
        postgresql.stop()
        try:
            status, said = await get(coordinator.metrics_port, "/readyz")
        finally:
            postgresql.start()
        assert status == 503
        assert said.startswith("the database does not answer")


async def test_a_database_that_stays_away_is_told_until_it_answers(
    settings: Callable[..., ServerConfig], postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundtable.server.coordinator.RETURN_SECONDS", 0.1)
    port = free_port()
    config = settings(database=postgresql.fresh(), metrics=f"127.0.0.1:{port}")
    stopping = asyncio.create_task(asyncio.Event().wait())
    postgresql.stop()
    try:
        waiting = asyncio.create_task(
            until_it_answers(config, stopping, "the database is away", DatabaseUnreachable)
        )
        async with asyncio.timeout(60):
            while not await listens(port):
                assert not waiting.done()
        assert await get(port, "/readyz") == (503, "the database is away\n")
        assert await get(port, "/healthz") == (200, "ok\n")
        found = await figures(port)
        assert value(found, "roundtable_database_up") == 0
        assert value(found, "roundtable_coordinator_active") == 0
        assert not waiting.done()
    finally:
        postgresql.start()
    async with asyncio.timeout(60):
        await waiting
    stopping.cancel()


async def test_one_that_stands_by_tells_whether_it_could_take_over(
    settings: Callable[..., ServerConfig], postgresql: PostgreSQL
) -> None:
    database, port = postgresql.fresh(), free_port()
    second = Coordinator(settings(database=database, metrics=f"127.0.0.1:{port}", lease=1.0, state="second"))
    async with running(settings(database=database, lease=60.0)) as active:
        starting = asyncio.create_task(second.start())
        try:
            _, said = await until_ready(port, 200)
            assert said.startswith("standing by, the lease read ")
            found = await figures(port)
            assert value(found, "roundtable_database_up") == 1
            assert 0 <= value(found, "roundtable_standby_lag_seconds") < 1
            assert value(found, "roundtable_coordinator_active") == 0
            postgresql.stop()
            _, said = await until_ready(port, 503)
            assert said.startswith("standing by, and the database does not answer: database postgresql")
            assert value(await figures(port), "roundtable_database_up") == 0
            postgresql.start()
            _, said = await until_ready(port, 200)
            assert said.startswith("standing by, the lease read ")
            assert value(await figures(port), "roundtable_database_up") == 1
            assert not starting.done()
            assert not active.deposed.is_set()
        finally:
            starting.cancel()
            await asyncio.wait([starting])


def test_a_lease_that_cannot_be_read_for_its_length_is_trouble() -> None:
    """A database that takes the question and never answers raises nothing."""
    assert Sight("hub:1", time.monotonic(), 6.0).trouble == ""
    assert Sight("hub:1", time.monotonic() - 9.0, 6.0).trouble == "no answer for 9 s"


async def until_ready(port: int, wanted: int) -> tuple[int, str]:
    """Asks until the page of readiness has this status."""
    async with asyncio.timeout(60):
        while not await listens(port):
            pass
        while (answer := await get(port, "/readyz"))[0] != wanted:
            pass
    return answer


async def listens(port: int) -> bool:
    """Whether a connection is taken there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_a_port_that_is_taken_is_named(settings: Callable[..., ServerConfig]) -> None:
    async with running(settings(metrics="127.0.0.1:0")) as coordinator:
        address = f"127.0.0.1:{coordinator.metrics_port}"
        other = Coordinator(settings(metrics=address, state="elsewhere"))
        with pytest.raises(ResourceError, match=f"metrics = '{address}'.*Address already in use"):
            await other.start()
