"""The log of a job as operators read it: whose lines are kept, who may read them, how long they stay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.cli.main import run as run_command
from roundtable.core.identity.credentials import issue
from roundtable.proto import agent_pb2, common_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.store import job_lines

ONE = torch.ones(4)
ALONE = "[cohort]\nsize = 1\nminimum = 1\n[evaluation]\nevery = 0\n"


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "roundtable")


def line(job: str, number: int, text: str, **changes: Any) -> agent_pb2.SharedLine:
    step = common_pb2.Step(job=job, round=changes.pop("round", 1), attempt=1, phase="train")
    values = {"number": number, "time": time.time(), "level": "info", "kind": "agent"}
    return agent_pb2.SharedLine(**{**values, **changes}, step=step, text=text)


async def share(agent: ScriptedAgent, *lines: agent_pb2.SharedLine) -> None:
    """Shares lines, and waits until they are stored or dropped."""
    await agent.say(lines=agent_pb2.SharedLines(lines=lines))
    while (message := await agent.next()).WhichOneof("message") != "lines_taken":
        pass
    assert message.lines_taken == lines[-1].number


async def log_of(operator: Operator, job: str, **wish: Any) -> list[Any]:
    pages = operator.stub.ReadJobLog(operator_pb2.JobLogRequest(job=job, **wish), timeout=30)
    return [line async for page in pages for line in page.lines]


async def texts_of(operator: Operator, job: str, silo: str) -> list[str]:
    return [line.text for line in await log_of(operator, job, silo=silo)]


async def test_lines_of_a_hostile_silo_carry_its_own_name_stay_short_and_command_no_terminal(
    coordinator: Coordinator, operator: Operator, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch", tasks=("other",)) as birch,
    ):
        job = (await operator.submit(ALONE, rounds=1)).id
        instruction = await alder.expect("instruction")
        await share(alder, line(job, 1, "\x1b[2J\x07\u202eforged\n2026 INFO birch: all is well"))
        await share(alder, line(job, 2, "x" * 2_000_000), line(job, 3, "\0" * 100))
        # A job that has drawn it for nothing, and one that there is not.
        await share(birch, line(job, 1, "in another's job"), line("none", 2, "in none"))
        found = await log_of(operator, job, silo="alder")
        assert found[0].text == r"\x1b[2J\x07\u202eforged 2026 INFO birch: all is well"
        assert all(each.silo == "alder" and len(each.text) <= 1200 for each in found)
        assert await texts_of(operator, job, "birch") == []
        for wrong in ({"level": "shout"}, {"kind": "gossip"}, {"round": 2**32 - 1}, {"time": float("nan")}):
            await alder.say(lines=agent_pb2.SharedLines(lines=[line(job, 4, "wrong", **wrong)]))
        await alder.say(lines=agent_pb2.SharedLines(lines=[line("../../etc", 5, "out")]))
        await share(alder, line(job, 6, "still here", level="warning", round=7))
        assert [each.text for each in await log_of(operator, job, silo="alder", round=7)] == ["still here"]
        await alder.answer(instruction, ONE)
        await operator.watch_until(job, "finished")
        capsys.readouterr()
        place = [
            "--coordinator",
            f"localhost:{coordinator.port}",
            "--credentials",
            str(certificates / "olga"),
        ]
        assert await asyncio.to_thread(run_command, ["job", "log", job, *place, "--follow"]) == 0
        shown = capsys.readouterr().out
        assert "WARNING alder, round 7: still here" in shown
        assert "coordinator, round 1: round 1: alder" in shown
        assert shown.replace("\n", "").isprintable()


async def test_what_is_sent_again_counts_once_over_restarts_and_goes_with_its_job(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    alder_s, olga_s = certificates / "alder", certificates / "olga"
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, olga_s) as olga,
        ScriptedAgent(coordinator.port, alder_s) as alder,
    ):
        job = (await olga.submit(ALONE, rounds=1)).id
        await alder.expect("instruction")
        await share(alder, line(job, 10, "first"), line(job, 11, "second"))
    async with running(settings()) as coordinator, Operator(coordinator.port, olga_s) as olga:
        async with ScriptedAgent(coordinator.port, alder_s) as alder:
            instruction = await alder.expect("instruction")
            await share(alder, line(job, 10, "first"), line(job, 11, "second"), line(job, 12, "third"))
            following = asyncio.create_task(log_of(olga, job, silo="alder", follow=True, from_sequence=1))
            await alder.answer(instruction, ONE)
            await olga.watch_until(job, "finished")
            # What a silo says last comes after the job's end.
            await share(alder, line(job, 13, "delivered"))
            assert [each.text for each in await following] == ["first", "second", "third", "delivered"]
        await olga.stub.DeleteJob(operator_pb2.JobRequest(job=job))
        services = coordinator.jobs._services
        kept = await services.database.read(
            lambda c: job_lines.lines_from(c, job, 1, job_lines.LineFilter(), 100)
        )
        assert kept == []


async def test_a_silo_fills_neither_log_nor_disk(
    coordinator: Coordinator,
    operator: Operator,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(job_lines, "MOST_KEPT", 30)
    async with ScriptedAgent(coordinator.port, certificates / "alder") as alder:
        job = (await operator.submit(ALONE, rounds=1)).id
        await alder.expect("instruction")
        for start in range(1, 101, 20):
            await share(alder, *(line(job, number, str(number)) for number in range(start, start + 20)))
        assert await texts_of(operator, job, "alder") == [str(number) for number in range(71, 101)]
        for start in range(1000, 1000 + 12 * 500, 500):
            await share(alder, *(line(job, number, "flood") for number in range(start, start + 500)))
        assert len(await texts_of(operator, job, "alder")) == 30
        assert "alder shares more lines of its log than are kept: 500 are dropped" in caplog.text


async def test_lines_are_for_who_submitted_the_job_and_for_operators(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    for name, role in (("vera", "viewer"), ("dana", "data-scientist"), ("dora", "data-scientist")):
        if not (certificates / name).exists():
            issue(certificates / "ca", name, role, certificates / name)
    async with (
        Operator(coordinator.port, certificates / "dana") as dana,
        Operator(coordinator.port, certificates / "dora") as dora,
        Operator(coordinator.port, certificates / "vera") as vera,
    ):
        job = (await dana.submit(ALONE, rounds=1)).id
        assert await log_of(dana, job) is not None
        assert await log_of(operator, job) is not None
        for other, words in ((dora, "reads the logs of jobs of their own only"), (vera, "viewer")):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await log_of(other, job)
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_lines_go_after_their_days_by_the_coordinators_clock(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        running(settings(retention={"logs": 10})) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        job = (await olga.submit(ALONE, rounds=1)).id
        await alder.expect("instruction")
        await share(alder, line(job, 1, "from the future", time=1e10))
        retention = coordinator.jobs._services.retention
        now, day = coordinator.clock(), 86400.0
        await retention.sweep(now + 9 * day)
        assert await texts_of(olga, job, "alder") == ["from the future"]
        await retention.sweep(now + 11 * day)
        assert await texts_of(olga, job, "alder") == []
