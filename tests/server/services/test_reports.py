"""Requests for reports of silos at the coordinator: what hostile silos and others can do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.core.identity.credentials import issue
from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.services import silo_reports


async def ask(operator: Operator, name: str = "alder", reason: str = "") -> Any:
    return await operator.stub.AskReport(operator_pb2.AskReportRequest(name=name, reason=reason))


async def newest(operator: Operator, name: str = "alder") -> Any:
    return await operator.stub.ShowReport(operator_pb2.ShowReportRequest(name=name))


async def say(agent: ScriptedAgent, request: str, status: str, report: bytes = b"", reason: str = "") -> None:
    said = agent_pb2.SiloReport(request=request, status=status, report=report, reason=reason)
    await agent.say(report=said)


async def test_only_the_silo_that_was_asked_answers_and_only_once(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        request = (await ask(operator, reason="it fails\n\x1b[2J")).request
        wish = await alder.expect("report_wish")
        assert (wish.request, wish.author, wish.reason) == (request, "operator/olga", r"it fails \x1b[2J")
        # Another silo, another request, and what is no report.
        await say(birch, request, "sent", b'{"silo": "birch"}')
        assert await birch.expect("report_taken") == request
        await say(alder, "0" * 16, "sent", b'{"silo": "alder"}')
        assert await alder.expect("report_taken") == "0" * 16
        for wrong in (b"no JSON", b"[]", b"[" * 100_000, b'{"a": "' + b"x" * (256 << 10) + b'"}', b"\xff\0"):
            await say(alder, request, "sent", wrong)
        await say(alder, request, "lost")
        await say(alder, request, "shown")
        await say(alder, request, "sent", b'{"silo": "alder"}', "\x07")
        assert await alder.expect("report_taken") == request
        await say(alder, request, "sent", b'{"silo": "another"}')
        await say(alder, request, "denied", reason="changed my mind")
        assert await alder.expect("report_taken") == request
        assert await alder.expect("report_taken") == request
        found = await newest(operator)
        assert (found.status, found.report, found.silo) == ("answered", b'{"silo": "alder"}', "alder")
        # Answered: the next one is another.
        assert (await ask(operator)).request != request


async def test_a_request_is_there_after_a_restart_until_it_expires(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, birch_s = settings(), certificates / "birch"
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as olga:
        with pytest.raises(grpc.aio.AioRpcError, match="no agent 'birch' has ever connected"):
            await ask(olga, "birch")
        async with ScriptedAgent(coordinator.port, birch_s):
            pass
        request = (await ask(olga, "birch")).request
        assert (await ask(olga, "birch", "twice")).request == request
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "oskar") as oskar:
        async with ScriptedAgent(coordinator.port, birch_s) as birch:
            assert (await birch.expect("report_wish")).request == request
        now = coordinator.clock()
        services = coordinator.jobs._services
        object.__setattr__(services, "clock", lambda: now + silo_reports.OPEN_SECONDS + 1)
        assert (await newest(oskar, "birch")).status == "expired"
        async with ScriptedAgent(coordinator.port, birch_s) as birch:
            # Too late: it is not kept.
            await say(birch, request, "sent", b"{}")
            assert await birch.expect("report_taken") == request
        found = await newest(oskar, "birch")
        assert (found.status, found.report) == ("expired", b"")
        assert (await ask(oskar, "birch")).request != request


async def test_reports_are_for_operators(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    if not (certificates / "ines").exists():
        issue(certificates / "ca", "ines", "data-scientist", certificates / "ines")
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder"),
        Operator(coordinator.port, certificates / "ines") as ines,
    ):
        await ask(operator)
        for call in (ask, newest):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(ines)
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
