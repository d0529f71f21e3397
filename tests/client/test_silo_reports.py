"""Reports that operators ask of silos: seen by the silo's people, sent when they say so, over restarts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation import Federation, federation_of, silo

from roundtable.cli.main import run as run_command
from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.sharing_tables import DiagnosticsTable
from roundtable.client.sharing.report_requests import ReportRequests
from roundtable.operator import OperatorClient
from roundtable.proto.operator_pb2 import Report

TASK = "from roundtable.core import Task\nclass Toy(Task):\n    pass\n"
SECRET = "hunter2hunter2"
FINDINGS = [
    {
        "name": "traces",
        "state": "fail",
        "message": f"http://joe:{SECRET}@otlp.example.org",
        "remedy": "/srv/patients",
    },
    {"name": "long", "state": "ok", "message": "x" * 1_000_000, "remedy": "\x1b[2J"},
]


@pytest.fixture
async def federation(tmp_path: Path) -> AsyncIterator[Federation]:
    async with federation_of(tmp_path, TASK) as started:
        yield started


class IdleTrainer:
    """Trains nothing: these silos are asked for nothing."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def running_agent(config: AgentConfig) -> AsyncIterator[None]:
    agent = Agent(config, IdleTrainer(), examine=lambda: FINDINGS)  # type: ignore[arg-type]
    task = asyncio.create_task(agent.run())
    try:
        yield
    finally:
        agent.stop()
        await task


def ask(federation: Federation, call: Any) -> Any:
    address, folder = federation
    with OperatorClient(address, folder / "operator") as operator:
        return call(operator)


async def until(federation: Federation, status: str, name: str = "alder") -> Report:
    """The request, once it has this status; asked again and again, as `clients diagnose --wait` does."""
    async with asyncio.timeout(60):
        while True:
            found = await asyncio.to_thread(ask, federation, lambda operator: operator.report(name))
            if found.status == status:
                return found
            await asyncio.sleep(0.1)


async def connected(federation: Federation) -> None:
    """Waits until the coordinator knows a silo."""
    async with asyncio.timeout(60):
        while True:
            if await asyncio.to_thread(ask, federation, lambda operator: operator.clients()):
                return
            await asyncio.sleep(0.1)


def actions(config: AgentConfig) -> list[str]:
    entries = [json.loads(line) for line in (config.state / "audit.jsonl").read_text().splitlines()]
    return [entry["entry"]["action"] for entry in entries if "entry" in entry]


def settings(federation: Federation, table: DiagnosticsTable | None = None) -> AgentConfig:
    data = {"path": "/srv/patients", "seed": 1}
    return replace(
        silo(federation, "alder"),
        data=data,
        diagnostics=table or DiagnosticsTable(),
        traces=f"http://a:{SECRET}@o/v1",
    )


async def test_a_report_is_sent_as_a_person_saw_it_over_restarts_and_without_secrets(
    federation: Federation, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "roundtable")
    address, folder = federation
    config = settings(federation)
    place = ["--coordinator", address, "--credentials", str(folder / "operator")]
    (folder / "agent.toml").write_text(
        f'coordinator = "{address}"\nstate = "{config.state}"\ncredentials = "{config.credentials}"\n'
    )

    async def command(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        told = await asyncio.to_thread(run_command, [str(word) for word in words])
        seen = capsys.readouterr()
        assert told == code, seen.err
        return seen.out

    def at_the_silo(*words: str, **codes: int) -> Any:
        return command("client", "--config", str(folder / "agent.toml"), "requests", *words, **codes)

    async with running_agent(config):
        await connected(federation)
    # It is away: it is asked when it comes back. A second request is the first one.
    assert "has not seen it yet" in await command("clients", "diagnose", "alder", "--reason", "why?", *place)
    first = await asyncio.to_thread(ask, federation, lambda operator: operator.ask_report("alder", "again"))
    assert (first.status, first.reason, first.author) == ("waiting", "why?", "operator/operator")
    async with running_agent(config):
        assert (await until(federation, "shown")).request == first.request
    async with running_agent(config):
        # The process was another one; what it made is still what would be sent.
        assert first.request in await at_the_silo()
        shown = await at_the_silo("show", first.request[:6])
        assert "Approved" in await at_the_silo("approve", first.request, "--yes")
        answered = await until(federation, "answered")
    report = json.loads(answered.report)
    assert json.loads(shown) == report
    assert len(answered.report) <= 256 << 10
    assert report["configuration"]["data"] == {"path": "(not told)", "seed": "(not told)"}
    for secret in (SECRET, "/srv/patients", "PRIVATE KEY"):
        assert secret not in answered.report.decode()
    assert any("connected" in line["text"] for line in report["log"])
    assert actions(config).count("report_sent") == 1
    sealed = [json.loads(line) for line in (config.state / "audit.jsonl").read_text().splitlines()]
    sent = next(n for n, line in enumerate(sealed) if line.get("entry", {}).get("action") == "report_sent")
    assert "seal" in sealed[sent + 1]
    assert list(ReportRequests(config.state).open_ones()) == []
    assert [file.stem for file in (config.state / "reports/sent").iterdir()] == [first.request]
    out = folder / "kept.json"
    assert "Wrote" in await command("clients", "diagnose", "alder", "-o", str(out), *place)
    assert out.read_bytes() == answered.report
    told = await command("clients", "diagnose", "alder", *place)
    assert "fail  traces: http://otlp.example.org" in told
    assert told.replace("\n", "").isprintable()


async def test_a_person_or_the_silos_file_says_no(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    address, folder = federation
    config, files = settings(federation), ReportRequests(folder / "state/alder")
    async with running_agent(config):
        await connected(federation)
        await asyncio.to_thread(ask, federation, lambda operator: operator.ask_report("alder", ""))
        await until(federation, "shown")
        (request,) = files.open_ones()
        files.answer(request, False, "not today")
        denied = await until(federation, "denied")
        assert (denied.said, denied.report) == ("not today", b"")
    place = ["--coordinator", address, "--credentials", str(folder / "operator")]
    assert await asyncio.to_thread(run_command, ["clients", "diagnose", "alder", *place]) == 1
    assert "not today" in capsys.readouterr().out
    async with running_agent(settings(federation, DiagnosticsTable(reports="never"))):
        await asyncio.to_thread(ask, federation, lambda operator: operator.ask_report("alder", ""))
        assert "settings allow no reports" in (await until(federation, "denied")).said
    async with running_agent(settings(federation, DiagnosticsTable(reports="always"))):
        await asyncio.to_thread(ask, federation, lambda operator: operator.ask_report("alder", ""))
        assert json.loads((await until(federation, "answered")).report)["silo"] == "alder"
    said = [action for action in actions(config) if action.startswith("report_")]
    assert said == ["report_requested", "report_denied", "report_denied", "report_requested", "report_sent"]
