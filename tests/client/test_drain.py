"""A silo that a person drains: it finishes what it was asked for, and begins nothing new, over restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from roundtable.client.policy.maintenance import Maintenance
from roundtable.core.errors import ConfigError


async def test_it_finishes_its_round_and_takes_no_other_until_it_resumes_over_restarts(silo, log) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    trainer.gate, files = asyncio.Event(), Maintenance(silo.config.state)
    async with silo.agent(trainer):
        assert not coordinator.hellos[-1].maintenance.drained
        coordinator.say(instruction=silo.instruction())
        await log.until("training")
        files.drain("new racks")
        said = await coordinator.hear("maintenance")
        assert (said.drained, said.reason) == (True, "new racks")
        coordinator.say(instruction=silo.instruction(attempt=2))
        failed = await coordinator.hear("failure")
        assert (failed.kind, failed.detail) == ("refused", "the silo is drained: new racks")
    # The process ended in the middle of the round; the next one is asked for it again.
    async with silo.agent(silo.inline()):
        greeting = coordinator.hellos[-1].maintenance
        assert (greeting.drained, greeting.reason) == (True, "new racks")
        coordinator.say(instruction=silo.instruction())
        await coordinator.until(lambda: coordinator.receipts)
        coordinator.say(instruction=silo.instruction(phase="evaluate"))
        await coordinator.hear("evaluated")
        coordinator.say(instruction=silo.instruction(round=2))
        assert (await coordinator.hear("failure")).step.round == 2
        coordinator.say(instruction=silo.instruction(round=2, phase="evaluate"))
        assert (await coordinator.hear("failure")).step.phase == "evaluate"
        files.resume()
        assert not (await coordinator.hear("maintenance")).drained
        coordinator.say(instruction=silo.instruction(round=2))
        await coordinator.until(lambda: len(coordinator.receipts) == 2)
    noted = [json.loads(line) for line in (silo.config.state / "audit.jsonl").read_text().splitlines()]
    actions = [entry["entry"]["action"] for entry in noted if "entry" in entry]
    assert [each for each in actions if each in ("drained", "resumed")] == ["drained", "drained", "resumed"]


async def test_it_says_once_nothing_is_under_way(silo, log) -> None:
    trainer = silo.inline()
    trainer.gate = asyncio.Event()
    async with silo.agent(trainer):
        silo.coordinator.say(instruction=silo.instruction())
        await log.until("training")
        Maintenance(silo.config.state).drain("")
        await silo.coordinator.hear("maintenance")
        assert not [line for line in log.lines if "nothing is under way" in line]
        trainer.gate.set()
        await log.until("nothing is under way: the agent can be stopped")
        assert silo.coordinator.receipts


async def test_a_file_that_cannot_be_read_counts_as_drained_until_somebody_resumes(silo, log) -> None:
    silo.config.state.mkdir(parents=True)
    (silo.config.state / "maintenance.json").write_text('{"reason": ')
    async with silo.agent(silo.inline()):
        await log.until("`roundtable client resume` deletes it")
        assert silo.coordinator.hellos[-1].maintenance.drained
        Maintenance(silo.config.state).resume()
        assert not (await silo.coordinator.hear("maintenance")).drained


def test_a_reason_is_one_line_that_can_be_shown(tmp_path: Path) -> None:
    for wrong in ("a\nb", "\x1b[2J", "x" * 201):
        with pytest.raises(ConfigError, match="200 printable characters"):
            Maintenance(tmp_path).drain(wrong)
    assert Maintenance(tmp_path).now() is None
    assert Maintenance(tmp_path).drain("x" * 200) is None
    assert Maintenance(tmp_path).drain("again").reason == "x" * 200
    assert Maintenance(tmp_path).resume().reason == "again"
    assert Maintenance(tmp_path).resume() is None
