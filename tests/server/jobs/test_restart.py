"""Stopped or killed in the middle of a round: it goes on, and what was acknowledged is kept."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa
import torch
from scripted_agent import ScriptedAgent, header_for
from service import AGENTS, Operator, running

from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.store.job_silo_rows import clients_of

Status = agent_pb2.UploadReceipt
TABLE = "[cohort]\nsize = 3\nminimum = 3\n[evaluation]\nevery = 0"
PROCESS = """
import sys
from pathlib import Path
from roundtable.server import load_server_config, run_server
sys.exit(run_server(load_server_config(Path(sys.argv[1]))))
"""


async def test_a_round_goes_on_after_a_restart(
    settings: Callable[..., ServerConfig], database: str, certificates: Path
) -> None:
    config = settings(database=database)
    async with running(config) as coordinator:
        job, held, partial = await _half_a_round(coordinator.port, certificates)
    async with running(config) as coordinator:
        await _the_other_half(coordinator.port, certificates, job, held, partial)


async def test_a_round_goes_on_after_a_kill(
    settings: Callable[..., ServerConfig], certificates: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = settings(listen=f"127.0.0.1:{port}")
    file = tmp_path / "coordinator.toml"
    values = config.model_dump(exclude_unset=True, exclude_none=True)
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    first = _start(file)
    job, held, partial = await _half_a_round(port, certificates)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = _start(file)
    await _the_other_half(port, certificates, job, held, partial)
    second.send_signal(signal.SIGTERM)
    assert second.wait(20) == 0
    # What the engine remembered of each silo from before the kill was counted on, row by row.
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'state' / 'coordinator.db'}")
    with engine.connect() as connection:
        remembered = clients_of(connection, job)
    engine.dispose()
    counts = {name: (each["selected"], each["completed"]) for name, each in remembered.items()}
    assert counts == dict.fromkeys(AGENTS, (2, 2))


def _start(file: Path) -> subprocess.Popen[str]:
    """A coordinator in a process of its own, listening."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert "is listening on" in process.stdout.readline()
    return process


async def _half_a_round(
    port: int, certificates: Path
) -> tuple[str, agent_pb2.Instruction, agent_pb2.UploadHeader]:
    """alder's update is acknowledged, half of birch's has arrived, cedar has not answered."""
    agents = [ScriptedAgent(port, certificates / name) for name in AGENTS]
    async with Operator(port, certificates / "olga") as operator, agents[0], agents[1], agents[2]:
        job = await operator.submit(TABLE, rounds=2, vector=torch.zeros(1000))
        told = [await agent.expect("instruction") for agent in agents]
        assert (await agents[0].answer(told[0], torch.full((1000,), 3.0))).status == Status.ACCEPTED
        data = torch.full((1000,), 6.0).numpy().tobytes()
        header = header_for(told[1], data)
        with pytest.raises(grpc.aio.AioRpcError):
            await agents[1].upload(header, data[:2222])
        assert (await operator.job(job.id)).waiting_for.startswith("1 of 3 updates")
    return job.id, told[0], header


async def _the_other_half(
    port: int,
    certificates: Path,
    job: str,
    held: agent_pb2.Instruction,
    header: agent_pb2.UploadHeader,
) -> None:
    agents = [ScriptedAgent(port, certificates / name) for name in AGENTS]
    async with Operator(port, certificates / "olga") as operator, agents[0], agents[1], agents[2]:
        detail = await operator.job(job)
        assert (detail.job.status, detail.round, detail.attempt, detail.phase) == ("running", 1, 1, "train")
        assert (await agents[0].answer(held, torch.full((1000,), 3.0))).status == Status.ACCEPTED
        told = [await agent.expect("instruction") for agent in agents[1:]]
        assert all(instruction.step == held.step for instruction in told)
        state = await agents[1].stub.UploadStatus(header)
        assert (state.wanted, state.offset) == (True, 2222)
        header.offset = state.offset
        data = torch.full((1000,), 6.0).numpy().tobytes()
        assert (await agents[1].upload(header, data)).status == Status.ACCEPTED
        assert (await agents[2].answer(told[1], torch.full((1000,), 9.0))).status == Status.ACCEPTED
        # The next round has begun: the first one is committed, with all three.
        second = [await agent.expect("instruction") for agent in agents]
        assert all(instruction.step.round == 2 for instruction in second)
        record = json.loads((await operator.job(job)).history[0])
        assert record["contributors"] == list(AGENTS)
        model = await agents[0].download(second[0].train.model.digest)
        assert torch.frombuffer(bytearray(model[-4:]), dtype=torch.float32).item() == pytest.approx(6.0)
        for agent, instruction in zip(agents, second, strict=True):
            await agent.answer(instruction, torch.ones(1000))
        events = await operator.watch_until(job, "finished")
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        delivered = [event.client for event in events if event.kind == "update_received"]
        assert sorted(delivered) == sorted([*AGENTS, *AGENTS])


async def test_a_restart_between_aggregation_and_commit(
    settings: Callable[..., ServerConfig], database: str, certificates: Path
) -> None:
    """The new model exists, its evaluation is under way: the same model is evaluated and committed."""
    config = settings(database=database)
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit("[cohort]\nsize = 1", rounds=1)
        await agent.answer(await agent.expect("instruction"), torch.ones(4))
        before = await agent.expect("instruction")
        assert before.step.phase == "evaluate"
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        again = await agent.expect("instruction")
        assert (again.step, again.evaluate) == (before.step, before.evaluate)
        await agent.evaluate(again, accuracy=(9.0, 10))
        await operator.watch_until(job.id, "finished")
        (record,) = (await operator.job(job.id)).history
        assert json.loads(record)["evaluation"] == {"accuracy": [9.0, 10]}
        assert json.loads(record)["model"] == before.evaluate.model.digest


async def test_a_paused_job_stays_paused(settings: Callable[..., ServerConfig], certificates: Path) -> None:
    config = settings()
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        job = await operator.submit("")
        await operator.stub.PauseJob(operator_pb2.JobRequest(job=job.id))
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        assert (await operator.job(job.id)).job.status == "paused"
        await operator.stub.ResumeJob(operator_pb2.JobRequest(job=job.id))
        await agent.expect("instruction")


async def test_a_job_whose_model_is_damaged_is_paused_and_the_others_go_on(
    settings: Callable[..., ServerConfig], certificates: Path, tmp_path: Path
) -> None:
    config = settings()
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        broken = await operator.submit("", vector=torch.full((4,), 5.0), request="1")
        sound = await operator.submit("", request="2")
    path = next((tmp_path / "state" / "artifacts" / "objects").glob(f"*/{broken.model.digest}"))
    await asyncio.to_thread(path.write_bytes, b"x" * path.stat().st_size)
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        detail = await operator.job(broken.id)
        assert detail.job.status == "paused"
        assert "is damaged" in detail.job.reason
        assert (await operator.job(sound.id)).job.status == "waiting"
        assert isinstance(coordinator, Coordinator)
