"""What operators get of a job, byte by byte: at no level anything that the table withholds."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import tomllib
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent, header_for
from service import AGENTS, Operator, running

from roundtable.core.observability.released import FIELDS, Tells, is_told
from roundtable.core.privacy_table import NoPrivacy, Private, privacy_from
from roundtable.proto import administration_pb2 as pb
from roundtable.proto import administration_pb2_grpc, agent_pb2, operator_pb2
from roundtable.proto.common_pb2 import StepFigures
from roundtable.server import ServerConfig
from roundtable.server.services import job_logs, watching
from roundtable.server.store import Database, tables

JOB = """
[cohort]
size = 1
strategy = "round_robin"
minimum = 1
retries = 30
deadline = 60
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
"""
FIGURES = "[privacy]\nclip_norm = 1.0\ndelta = 1e-3\nnoise_multiplier = 2.0\n"
LEVELS = {
    "none": "",
    "client": FIGURES + 'level = "client"',
    "known": FIGURES + 'level = "client"\ncohorts = "known"',
    "dp_ftrl": FIGURES + 'level = "dp_ftrl"\nseparation = 1',
    "cyclic": FIGURES + 'level = "dp_ftrl"\nseparation = 2\ncohorts = "hidden"',
    "client_local": FIGURES + 'level = "client_local"',
}
EXAMPLES, LOSS, WORDS = 486_115_293_771, 7.6543210987, "KeyError in patients.py, line 7"
LOST = 0.31415926535897
"""What a silo might tell of its data, in digits that no time, digest or signature holds by chance."""


async def take_part(agent: ScriptedAgent, change: torch.Tensor, fails: bool) -> None:
    """Does what an honest silo does, and tells more than it should."""
    while (message := await agent.call.read()) is not grpc.aio.EOF:
        if message.WhichOneof("message") != "instruction":
            continue
        step = message.instruction.step
        await agent.say(heartbeat=agent_pb2.Heartbeat(state="training"))
        figures = StepFigures(step=1, steps=2, gradient_norm=LOSS)
        progress = agent_pb2.Progress(step=step, done=EXAMPLES, total=EXAMPLES, loss=LOSS, figures=figures)
        await agent.say(progress=progress)
        line = agent_pb2.SharedLine(
            number=time.time_ns() // 1000, time=1.0, level="info", kind="agent", step=step
        )
        await agent.say(lines=agent_pb2.SharedLines(lines=[line]))
        if fails:
            await agent.say(failure=agent_pb2.Failure(step=step, kind="task_error", detail=WORDS))
        else:
            data = change.numpy().tobytes()
            header = header_for(message.instruction, data, EXAMPLES, loss=LOSS)
            header.writing.CopyFrom(agent_pb2.Writing(seconds=1.0, error=LOST))
            await agent.upload(header, data)


async def page_of(port: int) -> str:
    """The page of metrics."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


async def told_of(operator: Operator, job: str) -> str:
    """All that a coordinator tells operators of a job, but for its configuration."""
    events = await operator.watch_until(job, "finished")
    detail = await operator.job(job)
    detail.job_config = ""
    asked = operator_pb2.JobLogRequest(job=job, follow=True)
    log = [str(line) async for page in operator.stub.ReadJobLog(asked) for line in page.lines]
    assert any("round 8 is committed" in line for line in log)
    stub: Any = administration_pb2_grpc.AdministrationStub(operator.channel)
    provenance = (await stub.GetProvenance(pb.ProvenanceRequest(job=job))).statement
    audit = [line async for part in stub.ReadAudit(pb.ReadAuditRequest()) for line in part.lines]
    rounds = [line for line in audit if "round_committed" in line or "silo_refused" in line]
    charges = [str(each) async for each in operator.stub.ExportPrivacy(operator_pb2.PrivacyRequest())]
    return "\n".join([*map(str, events), *log, str(detail), provenance, *rounds, *charges])


@pytest.mark.parametrize("name", LEVELS)
async def test_operators_are_told_what_the_table_says_and_no_more(
    settings: Callable[..., ServerConfig],
    certificates: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "roundtable")
    monkeypatch.setattr(job_logs, "GATHER_SECONDS", 0.05)
    monkeypatch.setattr(job_logs, "QUIET_SECONDS", 0.5)
    text, config = JOB + LEVELS[name], settings(metrics="127.0.0.1:0")
    if name == "cyclic":
        text = text.replace('size = 1\nstrategy = "round_robin"', 'strategy = "poisson"\nprobability = 0.9')
    updates = [torch.full((4,), number / 8) for number in range(3)]
    tasks = []
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / each) for each in AGENTS]
        for agent, update in zip(agents, updates, strict=True):
            await agent.connect()
            tasks.append(asyncio.create_task(take_part(agent, update, agent is agents[2])))
        job = await operator.submit(text, rounds=8)
        # A line that nobody has classified.
        ours = logging.getLogger("roundtable.server.jobs")
        ours.warning("%s: %s", AGENTS[0], WORDS, extra={"job": job.id})
        told = await told_of(operator, job.id)
        page = await page_of(coordinator.metrics_port)
        records = [json.loads(each) for each in (await operator.job(job.id)).history]
        clients = (await operator.stub.ListClients(operator_pb2.ListClientsRequest())).clients
        for task, agent in zip(tasks, agents, strict=True):
            task.cancel()
            await agent.close()
    privacy = _privacy(LEVELS[name])
    database = Database.open(config.database)
    table = tables.updates.c
    query = sa.select(table.examples, table.loss)
    kept = await database.read(lambda connection: [tuple(row) for row in connection.execute(query)])
    database.close()
    assert kept
    whole = (EXAMPLES, pytest.approx(LOSS))
    assert all(row == (whole if is_told(privacy, Tells.SILO) else (1, None)) for row in kept)
    digests = [blake3(update.numpy().tobytes()).hexdigest() for update in updates]

    def tells(*words: str) -> bool:
        return any(word in told or word in page for word in words)

    assert any(each in told for each in AGENTS) is is_told(privacy, Tells.COHORT)
    assert any(each.selected for each in clients) is is_told(privacy, Tells.COHORT)
    assert ('result="accepted"' in page) is is_told(privacy, Tells.COHORT)
    assert tells(*digests) is is_told(privacy, Tells.UPDATE)
    assert tells(WORDS) is is_told(privacy, Tells.UPDATE)
    assert tells(str(EXAMPLES), str(LOSS), str(LOST)) is is_told(privacy, Tells.SILO)
    names = {
        line.split()[2].removeprefix("roundtable_")
        for line in page.splitlines()
        if "# TYPE roundtable_" in line
    }
    assert {re.sub("_total$|_created$", "", name) for name in names} <= FIELDS["metrics"].keys()
    withheld = {name for record in records for name in record["withheld"]}
    fields = {name for name in withheld if "." not in name}
    assert fields == {name for name, kind in FIELDS["round"].items() if not is_told(privacy, kind)}
    transfers = [each for record in records for each in record["transfers"].values()]
    sent = {name: FIELDS["transfer"][name] for each in transfers for name in each}
    assert all(is_told(privacy, kind) for kind in sent.values())
    assert bool(sent) is is_told(privacy, Tells.COHORT)
    assert ("roundtable_update_bytes_total{" in page) is is_told(privacy, Tells.UPDATE, Tells.COHORT)
    assert ("participants" in told) is is_told(privacy, Tells.COHORT)


def _privacy(table: str) -> NoPrivacy | Private:
    return privacy_from(tomllib.loads(table).get("privacy", {"level": "none"}))


async def test_nobody_who_follows_a_job_can_count_the_answers_of_a_secret_cohort(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "LEAST_SECONDS_BETWEEN", 0.0)
    text = JOB.replace('size = 1\nstrategy = "round_robin"\nminimum = 1', "size = 3") + LEVELS["client"]
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        AsyncExitStack() as stack,
    ):
        connected = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        agents = [await stack.enter_async_context(agent) for agent in connected]
        job = await operator.submit(text)
        told: list[operator_pb2.JobUpdate] = []

        async def follow() -> None:
            async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id)):
                if told and update.detail.phase != told[-1].detail.phase == "train":
                    return
                told.append(update)

        following = asyncio.create_task(follow())
        for agent in agents:
            await agent.answer(await agent.expect("instruction"), torch.ones(4))
            # Each is stored, and everybody who follows has been woken, before the next.
            await operator.job(job.id)
        await following
    phases = [update.detail.phase for update in told]
    assert phases[-1] == "train"
    for update, before in zip(told[1:], phases, strict=False):
        training = update.detail.phase == before == "train"
        assert update.events or not training, "an update that tells nothing tells that a silo has answered"
