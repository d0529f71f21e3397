"""Jobs that are repeated, at a real coordinator whose clock the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator

from roundtable.proto import operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.clock import steady_time
from roundtable.server.jobs.admission.series import Series
from roundtable.server.store.jobs import jobs_in_order

NIGHTLY = '[cohort]\nsize = 1\n[evaluation]\nevery = 0\n[queue]\nrepeat = "0 3 * * *"\n'
PRIVATE = """[cohort]
minimum = 1
[evaluation]
every = 0
[aggregation]
weighting = "uniform"
[privacy]
level = "client_local"
clip_norm = 1.0
delta = 1e-5
noise_multiplier = 4.0
[queue]
repeat = "0 3 * * *"
"""
DAY = 86400.0


class Days:
    """A clock that is set forward by days."""

    ahead = 0.0

    def __call__(self) -> float:
        return steady_time() + self.ahead

    def next_night(self) -> float:
        """The next time at which it is three o'clock, UTC."""
        now = self()
        three = (
            datetime.fromtimestamp(now, UTC).replace(hour=3, minute=0, second=0, microsecond=0).timestamp()
        )
        return three if three > now else three + DAY


@asynccontextmanager
async def hub(config: ServerConfig, days: Days) -> AsyncIterator[Coordinator]:
    started = Coordinator(config, clock=days)
    await started.start()
    try:
        yield started
    finally:
        await started.stop()


async def runs(operator: Operator, count: int) -> list[Any]:
    """The jobs by name, as soon as there are so many."""
    async with asyncio.timeout(20):
        while len(jobs := (await operator.stub.ListJobs(operator_pb2.ListJobsRequest())).jobs) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return sorted(jobs, key=lambda job: job.name)


async def queued(operator: Operator) -> Any:
    """The one job of the queue, once it has been looked at."""
    async with asyncio.timeout(20):
        while not (jobs := (await operator.stub.ListQueue(operator_pb2.ListQueueRequest())).jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert len(jobs) == 1
    return jobs[0]


async def night(
    coordinator: Coordinator, agent: ScriptedAgent, operator: Operator, days: Days, job: str
) -> None:
    """It becomes three o'clock; the run has its turn and its round."""
    days.ahead += days.next_night() - days()
    coordinator.jobs.turns.look()
    while (said := await agent.next()).WhichOneof("message") != "instruction":
        """Of a run before."""
    assert said.instruction.step.job == job
    await agent.answer(said.instruction, torch.ones(4))
    await operator.watch_until(job, "finished")


async def test_each_night_has_its_run_once_over_restarts_until_the_series_is_cancelled(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, days = settings(), Days()
    async with (
        hub(config, days) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        first = await olga.submit(NIGHTLY, rounds=1)
        assert first.name == "t#1"
        place = await queued(olga)
        assert place.expected == days.next_night()
        assert place.reason.startswith("it begins at 20")
        # While the first run goes on for two days, the nights are left out.
        days.ahead += days.next_night() - days()
        coordinator.jobs.turns.look()
        instruction = await alder.expect("instruction")
        days.ahead += 2 * DAY
        assert len(await runs(olga, 1)) == 1
        await alder.answer(instruction, torch.ones(4))
        await olga.watch_until(first.id, "finished")
        second = (await runs(olga, 2))[1]
        assert (second.name, second.status) == ("t#2", "waiting")
        assert (await queued(olga)).expected == days.next_night()
        # This time the coordinator dies after the run has ended, before the next is made.
        monkeypatch.setattr(Series, "ended", lambda self, row: None)
        await night(coordinator, alder, olga, days, second.id)
    monkeypatch.undo()
    async with (
        hub(config, days) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        third = (await runs(olga, 3))[2]
        assert (third.name, third.status) == ("t#3", "waiting")
        # Whoever is told once more that the second is over, such as one who was replaced, makes nothing.
        rows = {row.name: row for row in await coordinator._database.read(jobs_in_order)}
        await coordinator.jobs._follow(rows["t#2"])
        assert len(await runs(olga, 3)) == 3
        await night(coordinator, alder, olga, days, third.id)
        assert [job.name for job in await runs(olga, 4)] == ["t#1", "t#2", "t#3", "t#4"]
        cancelled = await olga.stub.CancelJob(operator_pb2.JobRequest(job="t"))
        assert (cancelled.name, cancelled.status) == ("t#4", "cancelled")
    async with hub(config, days) as coordinator, Operator(coordinator.port, certificates / "olga") as olga:
        assert len(await runs(olga, 4)) == 4
        assert not (await olga.stub.ListQueue(operator_pb2.ListQueueRequest())).jobs


@pytest.mark.parametrize("whose", ["the job's", "the population's"])
async def test_a_run_that_could_make_no_round_ends_the_series_and_says_why(
    settings: Callable[..., ServerConfig], certificates: Path, whose: str
) -> None:
    days, private = Days(), PRIVATE
    if whose == "the job's":
        private = PRIVATE.replace("[queue]", "epsilon = 2.5\n[queue]")
    async with (
        hub(settings(), days) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        if whose == "the population's":
            limit = operator_pb2.PrivacyBudget(population="t", epsilon=2.5, delta=1e-5)
            await olga.stub.SetPrivacyBudget(limit)
        # The budget holds one round, which the first run makes.
        first = await olga.submit(private, rounds=1)
        await night(coordinator, alder, olga, days, first.id)
        async with asyncio.timeout(20):
            while not (await olga.job(first.id)).incidents:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        (incident,) = (await olga.job(first.id)).incidents
        assert incident.message.startswith("no run follows this one, and the series is over: the next round")
        assert "above its budget of 2.5" in incident.message
        assert [job.name for job in await runs(olga, 1)] == ["t#1"]
        with pytest.raises(grpc.aio.AioRpcError, match=r"above its budget of 2\.5"):
            await olga.submit(private, rounds=1, request="r2")


async def test_a_request_of_a_series_leaves_room_for_the_number(
    coordinator: Coordinator, operator: Operator
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="none with the sign #"):
        await operator.submit(NIGHTLY, request="r#2")
