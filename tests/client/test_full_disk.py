"""A receipt that comes while the silo's disk is full: the proof waits for room, and is never lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_disk import fill, small_disk

from roundtable.client.agent.silo_log import NAME, Notes
from roundtable.core import JobConfig
from roundtable.core.errors import ResourceError
from roundtable.proto import agent_pb2, common_pb2

KEY = ("job-1", 1, 1, "train")


@pytest.fixture
def cramped(silo, tmp_path: Path) -> Iterator[Any]:
    """A silo whose state folder is a disk of its own; skipped where this user may not mount one."""
    with small_disk(tmp_path / "small", "32m") as disk:
        if disk is None:
            pytest.skip("only root may mount the small file system that this test fills")
        yield replace(silo, config=replace(silo.config, state=disk / "state"))


async def fill_with_slack(silo: Any) -> Path:
    """Fills the disk, and then the rest of the log's last block with refusals of a job that has changed."""
    filler = fill(silo.config.state.parent)
    other = replace(silo, job=JobConfig.model_validate({"task": "toy", "seed": 4}))
    for attempt in range(2, 100):
        silo.coordinator.say(instruction=other.instruction(attempt=attempt))
        failed = await silo.coordinator.hear("failure")
        if failed.kind == "node_failure":
            assert "the silo's disk is full" in failed.detail
            return filler
        assert failed.kind == "refused"
    raise AssertionError("the log's last block is never full")


def noted(silo: Any) -> Counter[str]:
    lines = (silo.config.state / NAME).read_text().splitlines()
    return Counter(json.loads(line)["entry"]["action"] for line in lines if '"entry"' in line)


@pytest.mark.parametrize("meanwhile", ["nothing", "asked again", "withdrawn", "stopped"])
async def test_a_receipt_waits_for_room_in_the_silos_log(cramped, log, meanwhile: str) -> None:
    silo, coordinator = cramped, cramped.coordinator
    coordinator.cut_upload, coordinator.cut_again = 100, True
    async with AsyncExitStack() as first:
        await first.enter_async_context(silo.agent(silo.inline()))
        coordinator.say(instruction=silo.instruction())
        await log.until("the upload is resumed")
        filler = await fill_with_slack(silo)
        coordinator.cut_upload = None
        trouble = await coordinator.hear("trouble")
        assert (trouble.kind, trouble.action) == ("node_failure", "waits until it can be written")
        assert "free some space in the agent's state folder" in trouble.detail
        assert coordinator.receipts
        assert not noted(silo)["receipt"]
        assert silo.spooled
        if meanwhile == "asked again":
            coordinator.say(instruction=silo.instruction())
            await coordinator.hear("accepted")
        if meanwhile == "withdrawn":
            step = common_pb2.Step(job="job-1", round=1, attempt=1, phase="train")
            coordinator.say(withdraw=agent_pb2.Withdraw(step=step, reason="the attempt is over"))
            await log.until("withdrawn")
        if meanwhile == "stopped":
            await first.aclose()
        filler.unlink()
        if meanwhile == "stopped":
            await first.enter_async_context(silo.agent(silo.inline()))
        times = 2 if meanwhile == "asked again" else 1
        await coordinator.until(lambda: noted(silo)["receipt"] >= times)
    assert noted(silo)["receipt"] == times
    assert len([at for at in coordinator.uploads[KEY].offsets if at == 0]) == times


async def test_what_people_do_is_noted_in_its_order_once_there_is_room(log) -> None:
    """Draining counts at once, and ends no agent whose disk is full at that moment."""
    full, done, written = [True, True, True], asyncio.Event(), list[str]()

    def note(what: str) -> None:
        if full:
            full.pop()
            raise ResourceError("the silo's log cannot be written")
        written.append(what)
        if what == "resumed":
            done.set()

    notes = Notes()
    notes.add(partial(note, "drained"))
    notes.add(partial(note, "resumed"))
    await asyncio.wait_for(done.wait(), 60)
    assert written == ["drained", "resumed"]
    assert len([line for line in log.lines if "noted once that can be" in line]) == 1
