"""Which lines of an agent's log leave, how many, and until when they are sent again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from roundtable.client.agent.silo_log import SiloLog
from roundtable.client.policy.config import load_agent_config
from roundtable.client.policy.sharing_tables import LogSharingTable
from roundtable.client.sharing import line_sharing
from roundtable.client.sharing.line_sharing import LineSharing
from roundtable.client.step_key import StepKey, about
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.observability.logs import belongs_to

ours = logging.getLogger("roundtable.agent")
EVERY = ["agent", "figures", "output"]
STEP = StepKey("job-1", 1, 1, "train")
JOB = {"task": "toy", "aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}}
PRIVATE = {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 2.0}
LEVELS: dict[str, Any] = {
    "none": {},
    "masked": {"privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 1.0}},
    "noisy": {"privacy": {**PRIVATE, "level": "client_local"}},
    "noised there": {"privacy": {**PRIVATE, "level": "client", "cohorts": "known"}},
    "drawn in secret": {"privacy": {**PRIVATE, "level": "client"}},
}


def job_of(level: str) -> JobConfig:
    return JobConfig.model_validate({**JOB, **LEVELS[level]})


@pytest.mark.parametrize(
    ("table", "level", "kinds"),
    [
        ({}, "none", []),
        ({"kinds": EVERY}, "none", EVERY),
        ({"kinds": EVERY}, "masked", ["agent"]),
        ({"kinds": EVERY}, "noisy", ["agent"]),
        ({"kinds": EVERY, "private_jobs": True}, "noisy", EVERY),
        ({"kinds": EVERY}, "noised there", []),
        ({"kinds": EVERY, "private_jobs": True}, "noised there", EVERY),
        ({"kinds": EVERY, "private_jobs": True}, "drawn in secret", []),
        ({"kinds": EVERY, "tasks": ["toy"], "jobs": ["job"]}, "none", EVERY),
        ({"kinds": EVERY, "tasks": ["scans"]}, "none", []),
        ({"kinds": EVERY, "jobs": ["", "other"]}, "none", []),
    ],
)
def test_what_leaves_follows_from_the_silos_file_and_the_jobs_level(
    table: dict[str, Any], level: str, kinds: list[str]
) -> None:
    assert LogSharingTable(**table).kinds_for("job-1", job_of(level), "toy") == set(kinds)


def test_a_task_that_the_silo_does_not_offer_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text(
        'coordinator = "hub:7443"\n[tasks]\ntoy = "toy.py:Toy"\n[log_sharing]\ntasks = ["tyo"]\n'
    )
    with pytest.raises(ConfigError, match="names no 'tyo'"):
        load_agent_config(tmp_path / "agent.toml")


class Sent:
    """What a silo has sent, and its own log."""

    def __init__(self, folder: Path) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.audit = folder / "audit.jsonl"
        self.log = SiloLog(self.audit, folder)

    async def next(self) -> list[Any]:
        async with asyncio.timeout(20):
            return list((await self.messages.get()).lines.lines)

    def noted(self) -> list[str]:
        entries = [json.loads(line)["entry"] for line in self.audit.read_text().splitlines()]
        return [line["text"] for entry in entries for line in entry["detail"]["lines"]]


@asynccontextmanager
async def sharing(folder: Path, **table: Any) -> AsyncIterator[tuple[LineSharing, Sent]]:
    """A silo that shares lines of a job without privacy, as long as the block lasts."""
    sent, level = Sent(folder), ours.level
    ours.setLevel(logging.DEBUG)
    belongs_to(lambda: {"silo": "hospital"})
    shared = LineSharing(LogSharingTable(**{"kinds": EVERY, **table}), "hospital", sent.log.note)
    running = asyncio.create_task(shared.run(sent.messages.put_nowait))
    await asyncio.sleep(0)
    shared.admit("job-1", job_of("none"), "toy")
    try:
        yield shared, sent
    finally:
        running.cancel()
        await asyncio.wait([running])
        ours.setLevel(level)


async def test_only_marked_lines_of_this_silo_and_of_admitted_jobs_leave(tmp_path: Path) -> None:
    async with sharing(tmp_path, level="info") as (_, sent):
        ours.info("unmarked")
        ours.info("unmarked, of the job", extra=STEP._asdict())
        ours.info("of a job that was refused", extra=about(STEP._replace(job="job-2")))
        ours.info("of another silo in this process", extra={**about(STEP), "silo": "clinic"})
        ours.debug("of a lesser level", extra=about(STEP))
        await asyncio.to_thread(ours.critical, "from a thread \x1b[2J", extra=about(STEP, "figures"))
        (line,) = await sent.next()
        assert (line.text, line.kind, line.level) == (r"from a thread \x1b[2J", "figures", "error")
        assert (line.step.job, line.step.round, line.step.phase) == ("job-1", 1, "train")
        assert sent.noted() == [line.text]


async def test_a_round_shares_so_much_and_says_that_there_was_more(tmp_path: Path) -> None:
    async with sharing(tmp_path, most_lines=3, most_bytes=2500) as (_, sent):
        for number in range(5):
            ours.info("line %d", number, extra=about(STEP))
        for _ in range(5):
            ours.info("x" * 10_000_000, extra=about(STEP._replace(round=2)))
        lines = await sent.next()
        assert [line.text for line in lines][:3] == ["line 0", "line 1", "line 2"]
        assert [line.text[:30] for line in lines][3:] == [
            "further lines of this round st",
            "x" * 30,
            "x" * 30,
            "further lines of this round st",
        ]


async def test_lines_are_sent_again_until_they_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing(tmp_path) as (shared, sent):
        ours.info("one", extra=about(STEP))
        first = await sent.next()
        ours.info("two", extra=about(STEP))
        second = await sent.next()
        shared.connected()
        assert [await sent.next(), await sent.next()] == [first, second]
        # In any order: what came later may be stored sooner.
        shared.taken(second[-1].number)
        shared.connected()
        assert await sent.next() == first
        shared.taken(first[-1].number)
        shared.connected()
        assert sent.messages.empty()
        assert sent.noted() == ["one", "two"]
        monkeypatch.setattr(line_sharing, "_MOST_WAITING", 2)
        for number in range(4):
            ours.info("line %d", number, extra=about(STEP))
        assert [line.text[:13] for line in await sent.next()] == ["line 0", "line 1", "further lines"]


async def test_nothing_is_sent_that_the_silos_own_log_cannot_keep(tmp_path: Path, log: Any) -> None:
    async with sharing(tmp_path) as (_, sent):
        sent.audit.mkdir()
        ours.info("one", extra=about(STEP))
        await log.until("no line of the log is shared")
        assert sent.messages.empty()
        sent.audit.rmdir()
        ours.info("two", extra=about(STEP))
        assert [line.text for line in await sent.next()] == ["two"]
