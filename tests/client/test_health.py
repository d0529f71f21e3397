"""Checks of a silo's own: what counts as failing, what leaves of it, and that no work is taken meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from roundtable.client.policy import health
from roundtable.client.policy.health import HealthChecks, reason_of
from roundtable.client.policy.health_table import HealthTable
from roundtable.core.errors import ConfigError

READY = '{"ready": true}'


def check(code: str, timeout: float = 20.0) -> HealthTable:
    """A command that runs this Python with the inquiry as `said`."""
    program = f"import json, os, sys; said = json.load(sys.stdin)\n{code}"
    return HealthTable(name="disk", command=(sys.executable, "-c", program), timeout=timeout)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"print('{READY}')", ""),
        ("print(json.dumps({'ready': said['job'] == 'j' and said['task'] == 't'}))", ""),
        ('print(\'{"ready": false, "reason": "3 GiB\\\\n left"}\')', "disk: 3 GiB left"),
        ("print(json.dumps({'ready': False, 'reason': 'x' * 5000}))", "disk: " + "x" * 150),
        ("print('{\"ready\": false}')", "disk: no reason given"),
        ("print('{\"ready\": 1}')", "disk: it did not answer"),
        ("print('fine')", "disk: the check itself failed"),
        ("sys.exit(3)", "disk: the check itself failed"),
        ("print(json.dumps({'ready': True, 'more': 'x' * 100_000}))", "disk: the check itself failed"),
        ("import time; time.sleep(600)", "disk: no answer within 1 s"),
        ("import subprocess; subprocess.run(['sleep', '600'])", "disk: no answer within 1 s"),
        ("print(json.dumps({'ready': 'ROUNDTABLE_TOKEN' not in os.environ}))", ""),
    ],
)
async def test_what_a_command_says(code: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDTABLE_TOKEN", "secret")
    checks = HealthChecks([check(code, 1.0 if "sleep" in code else 20.0)], "north")
    async with asyncio.timeout(20):  # Also of what hangs below a check, and holds its pipes.
        said = await checks.before("j", "t")
    assert said == reason if not reason or reason.endswith("x") else said.startswith(reason)


async def test_a_program_that_is_not_there_fails_and_a_function_that_is_not_is_refused() -> None:
    missing = HealthTable(name="disk", command=("/nowhere/check",))
    assert (await HealthChecks([missing], "north").before("", "")).startswith("disk: the check itself failed")
    with pytest.raises(ConfigError, match="unknown health check 'absent'"):
        HealthChecks([HealthTable(name="own", entry="absent")], "north")


async def test_a_function_is_asked_in_a_thread_and_one_that_hangs_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, go = [], threading.Event()

    def function(inquiry: dict[str, str]) -> dict[str, bool]:
        asked.append(inquiry)
        go.wait(20)
        return {"ready": True}

    monkeypatch.setattr(health, "resolve", lambda *_: function)
    checks = HealthChecks([HealthTable(name="own", entry="own", timeout=0.2)], "north")
    assert await checks.before("j", "t") == await checks.before("j", "t") == "own: no answer within 0.2 s"
    assert asked == [{"check": "own", "silo": "north", "job": "j", "task": "t"}]
    go.set()
    async with asyncio.timeout(20):
        while await checks.before("j", "t"):
            """Its thread ends."""


def test_an_answer_is_an_object_with_a_truth() -> None:
    assert reason_of({"ready": True}) == ""
    for strange in (None, [], "ready", {"ready": "yes"}, {}):
        assert reason_of(strange).startswith("it did not answer")
    assert reason_of({"ready": False, "reason": {"a": 1}}) == "no reason given"


async def test_a_silo_that_is_not_ready_says_so_takes_no_step_and_comes_back(
    silo, log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STEADY_SECONDS", 0.0)
    full, coordinator = tmp_path / "full", silo.coordinator
    code = f"print(json.dumps({{'ready': not os.path.exists({str(full)!r}), 'reason': '1 GiB left'}}))"
    silo.config = replace(silo.config, health=(check(code).model_copy(update={"every": 1.0}),))
    async with silo.agent(silo.inline()):
        coordinator.say(instruction=silo.instruction())
        await coordinator.until(lambda: coordinator.receipts)
        full.touch()
        said = await coordinator.hear("maintenance")
        assert (said.drained, said.reason) == (True, "not ready: disk: 1 GiB left")
        # Of a job that it was asked for already: also what it was asked before is not begun.
        coordinator.say(instruction=silo.instruction(round=2))
        failed = await coordinator.hear("failure")
        assert failed.detail == "the silo is drained: not ready: disk: 1 GiB left"
        full.unlink()
        assert not (await coordinator.hear("maintenance")).drained
        coordinator.say(instruction=silo.instruction(round=2, attempt=2))
        await coordinator.until(lambda: len(coordinator.receipts) == 2)
    assert [line for line in log.lines if "health check disk: passes again" in line]


async def test_it_is_looked_at_before_a_step_however_long_the_period(silo, tmp_path: Path) -> None:
    full = tmp_path / "full"
    code = f"print(json.dumps({{'ready': not os.path.exists({str(full)!r}), 'reason': '1 GiB left'}}))"
    silo.config = replace(silo.config, health=(check(code),))
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=silo.instruction())
        await silo.coordinator.until(lambda: silo.coordinator.receipts)
        full.touch()
        silo.coordinator.say(instruction=silo.instruction(round=2))

        def said() -> bool:
            """In either order."""
            heard = {each.WhichOneof("message"): each for each in silo.coordinator.heard}
            return {"failure", "maintenance"} <= heard.keys() and heard["maintenance"].maintenance.drained

        await silo.coordinator.until(said)
        failed = await silo.coordinator.hear("failure")
        assert (failed.kind, failed.detail) == ("node_failure", "the silo is not ready: disk: 1 GiB left")
