"""Turns of jobs at a real coordinator: who is asked, when, and what people are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.core.errors import StorageError
from roundtable.core.identity.credentials import issue
from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.jobs import job_registry
from roundtable.server.jobs.job_driver import StoredJob, make_driver
from roundtable.server.jobs.runner import JobRunner

BOTH = "[cohort]\nsize = 2\ngrace = 0.2\n[evaluation]\nevery = 0\n"
ONE = torch.ones(4)


async def queue(operator: Operator) -> dict[str, Any]:
    found = await operator.stub.ListQueue(operator_pb2.ListQueueRequest())
    return {each.job.id: each for each in found.jobs}


async def until_queue(operator: Operator, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The queue as soon as this holds of it: it is asked again and again, as people do."""
    async with asyncio.timeout(20):
        while not holds(found := await queue(operator)):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.1)
    return found


async def move(operator: Operator, job: str, **changes: Any) -> Any:
    return await operator.stub.MoveJob(operator_pb2.MoveJobRequest(job=job, **changes))


class Pair:
    """Two agents that answer whatever they are asked; `asked` are the jobs of the rounds, in order."""

    def __init__(self, *agents: ScriptedAgent) -> None:
        self.agents = agents
        self.asked: list[tuple[str, int]] = []

    async def round(self) -> str:
        """Answers the next round; returns its job."""
        found = [await self._next(agent) for agent in self.agents]
        assert len({(each.step.job, each.step.round) for each in found}) == 1, (
            "a silo works for two jobs at once"
        )
        for agent, instruction in zip(self.agents, found, strict=True):
            await agent.answer(instruction, ONE)
        self.asked.append((found[0].step.job, found[0].step.round))
        return str(found[0].step.job)

    async def _next(self, agent: ScriptedAgent) -> Any:
        while (message := await agent.next()).WhichOneof("message") != "instruction":
            pass
        return message.instruction


async def test_three_jobs_on_two_silos_have_their_turns_one_after_another_and_nobody_is_blamed(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        pair = Pair(alder, birch)
        jobs = [(await operator.submit(BOTH, rounds=2, request=f"r{n}")).id for n in range(3)]
        found = await until_queue(
            operator, lambda q: len(q) == 3 and [e.place for e in q.values()] == [0, 1, 2]
        )
        assert list(found) == jobs
        assert found[jobs[1]].reason == "t has its turn at alder"
        assert (found[jobs[1]].silos, found[jobs[1]].connected, found[jobs[1]].least) == (2, 2, 2)
        async with asyncio.timeout(20):
            while "has its turn at alder" not in (await operator.job(jobs[2])).job.reason:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for _ in range(6):
            await pair.round()
        assert pair.asked == [(job, round) for job in jobs for round in (1, 2)]
        for job in jobs:
            events = await operator.watch_until(job, "finished")
            assert not [event.kind for event in events if event.kind in ("client_failed", "attempt_failed")]
        assert await queue(operator) == {}


async def test_one_with_a_higher_priority_takes_the_turn_when_the_round_ends_and_gives_it_back(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        pair = Pair(alder, birch)
        long = (await operator.submit(BOTH, rounds=3, request="long")).id
        assert await pair.round() == long
        urgent = (await operator.submit(f"{BOTH}[queue]\npriority = 5", rounds=2, request="urgent")).id
        # The turn is taken back from then on when nothing more is to be asked of the one that has it.
        found = await until_queue(
            operator, lambda q: len(q) == 2 and "when the rounds" in q[urgent].reason and not q[long].reason
        )
        assert (found[urgent].priority, found[urgent].level, found[long].place) == (5, 5, 0)
        for _ in range(4):
            await pair.round()
        assert pair.asked == [(long, 1), (long, 2), (urgent, 1), (urgent, 2), (long, 3)]
        events = await operator.watch_until(long, "finished")
        assert "job_waiting" in [event.kind for event in events]


async def test_operators_hold_release_and_move_jobs_over_a_restart(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as olga:
        first = (await olga.submit(BOTH, rounds=1, request="first")).id
        second = (await olga.submit(BOTH, rounds=1, request="second")).id
        await move(olga, first, hold="until the\nreview is done")
        await move(olga, second, priority=-3)
        found = await queue(olga)
        assert found[first].reason == "until the review is done"
        assert found[second].priority == -3
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        pair = Pair(alder, birch)
        assert (await queue(olga))[first].reason == "until the review is done"
        assert await pair.round() == second
        await move(olga, first, hold="")
        assert await pair.round() == first
        await olga.watch_until(first, "finished")


async def test_a_turn_that_runs_goes_on_after_a_restart_before_the_others(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        running_job = (await olga.submit(BOTH, rounds=2, request="a")).id
        await Pair(alder, birch).round()
        await alder.expect("instruction")
        urgent = (await olga.submit(f"{BOTH}[queue]\npriority = 9", rounds=1, request="b")).id
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        pair = Pair(alder, birch)
        assert [await pair.round(), await pair.round()] == [running_job, urgent]
        await olga.watch_until(urgent, "finished")


async def test_a_job_comes_after_others_and_says_so_if_they_do_not_finish(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    first = (await operator.submit(BOTH, rounds=1, request="first")).id
    text = f'{BOTH}[queue]\nafter = ["{first}"]'
    then = (await operator.submit(text, rounds=1, request="then")).id
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        pair = Pair(alder, birch)
        assert (await queue(operator))[then].reason == "it comes after t, which is not finished"
        since = (await move(operator, then, hold="not yet")).submitted
        assert await pair.round() == first
        # It has waited in line since the other one has ended.
        await until_queue(operator, lambda q: q[then].since > since)
        await move(operator, then, hold="")
        assert await pair.round() == then
    await operator.watch_until(then, "finished")
    lost = (await operator.submit(BOTH, rounds=1, request="lost")).id
    orphan = (await operator.submit(f'{BOTH}[queue]\nafter = ["{lost}"]', rounds=1, request="orphan")).id
    await operator.stub.CancelJob(operator_pb2.JobRequest(job=lost))
    await until_queue(operator, lambda q: "which is cancelled: cancel this one" in q[orphan].reason)
    with pytest.raises(grpc.aio.AioRpcError, match=r"queue\.after: there is no job 'nothing'"):
        await operator.submit(f'{BOTH}[queue]\nafter = ["nothing"]', request="none")


async def test_a_job_comes_after_one_that_could_not_be_taken_up_and_its_predecessor_stays(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        done = (await olga.submit(BOTH, rounds=1, request="done")).id
        assert await Pair(alder, birch).round() == done
        await olga.watch_until(done, "finished")
        first = (await olga.submit(BOTH, rounds=1, request="first")).id
        await until_queue(olga, lambda q: not q[first].place)
        then = (await olga.submit(f'{BOTH}[queue]\nafter = ["{done}", "{first}"]', request="then")).id
        with pytest.raises(grpc.aio.AioRpcError, match="t comes after it and has not begun"):
            await olga.stub.DeleteJob(operator_pb2.JobRequest(job=done))

    def spoiled(stored: StoredJob, *rest: Any) -> JobRunner:
        if stored.row.id == first:
            raise StorageError("its model cannot be read")
        return make_driver(stored, *rest)

    monkeypatch.setattr(job_registry, "make_driver", spoiled)
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        found = await until_queue(olga, lambda q: "which is paused" in q[then].reason)
        assert found[then].place == 1
        monkeypatch.undo()
        # Two operators at once: one driver takes the job up.
        resume = operator_pb2.JobRequest(job=first)
        await asyncio.gather(*(olga.stub.ResumeJob(resume) for _ in range(2)))
        pair = Pair(alder, birch)
        assert [await pair.round(), await pair.round()] == [first, then]


async def test_a_job_asks_only_silos_that_have_what_it_needs(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    text = BOTH.replace("size = 2", "size = 1") + '[resources]\ngpus = 2\nlabels = { region = "north" }'
    job = (await operator.submit(text, rounds=1)).id
    agents = {
        name: ScriptedAgent(coordinator.port, certificates / name, region=region)
        for name, region in (("alder", "north"), ("birch", "south"), ("cedar", "north"))
    }
    small, large = agent_pb2.Capacity(jobs=1, gpus=1), agent_pb2.Capacity(jobs=1, gpus=2)
    try:
        await agents["alder"].connect(capacity=small)
        await agents["birch"].connect(capacity=large)
        await until_queue(operator, lambda q: "2 of 2 are without what [resources]" in q[job].reason)
        await agents["cedar"].connect(capacity=large)
        await agents["cedar"].answer(await agents["cedar"].expect("instruction"), ONE)
        await operator.watch_until(job, "finished")
    finally:
        for agent in agents.values():
            await agent.close()


async def test_a_job_waits_for_so_many_silos_of_a_kind_and_the_next_is_told_when_it_begins_about(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    wish = '[resources]\nexpected = "30m"\nat_least = [{ silos = 2, labels = { region = "north" } }]'
    text = BOTH.replace("size = 2", "size = 2\nminimum = 1")
    first = (await operator.submit(f"{text}{wish}", rounds=1, request="first")).id
    alder, birch, cedar = (
        ScriptedAgent(coordinator.port, certificates / name, region=region)
        for name, region in (("alder", "north"), ("birch", "south"), ("cedar", "north"))
    )
    async with alder, birch:
        await until_queue(
            operator, lambda q: "1 of 2 silos with region = north are available" in q[first].reason
        )
        async with cedar:
            found = await until_queue(operator, lambda q: not q[first].place)
            then = (await operator.submit(text, rounds=1, request="then")).id
            found = await until_queue(operator, lambda q: then in q)
            assert 1700 < found[then].expected - found[first].since < 1900
            assert found[then].reason == "t has its turn at alder"


async def test_silos_with_room_for_two_jobs_have_two(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    alder = ScriptedAgent(coordinator.port, certificates / "alder")
    try:
        await alder.connect(capacity=agent_pb2.Capacity(jobs=2))
        text = BOTH.replace("size = 2", "size = 1")
        jobs = [(await operator.submit(text, rounds=1, request=f"r{n}")).id for n in range(3)]
        asked = [(await alder.expect("instruction")).step.job for _ in range(2)]
        assert sorted(asked) == sorted(jobs[:2])
        assert [each.place for each in (await queue(operator)).values()] == [0, 0, 1]
    finally:
        await alder.close()
    broken = ScriptedAgent(coordinator.port, certificates / "birch")
    said = await broken.connect(capacity=agent_pb2.Capacity(jobs=0))
    await broken.close()
    assert "the jobs at a time" in said.refused.reason


async def test_a_data_scientist_takes_no_place_that_others_pay_for(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    if not (certificates / "dana").exists():
        issue(certificates / "ca", "dana", "data-scientist", certificates / "dana")
    projects = {"heart": {"jobs": 3, "members": ["ben"]}, "lung": {"jobs": 2}}
    async with (
        running(settings(queue_priority=2, projects=projects)) as coordinator,
        Operator(coordinator.port, certificates / "dana") as dana,
        Operator(coordinator.port, certificates / "olga") as olga,
    ):
        for place, said in (
            ("priority = 3", r"queue\.priority = 3 is more .* which is 2: ask an operator"),
            ('project = "anew"', r"queue\.project = 'anew' is none of this coordinator's, heart, lung"),
            ('project = "heart"', "'heart' counts no jobs of dana"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
                await dana.submit(f"{BOTH}[queue]\n{place}", request="r")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await olga.submit(f"{BOTH}[queue]\n{place}", request=place)
        for place in ("priority = 2", 'project = "lung"', 'project = "dana"'):
            await dana.submit(f"{BOTH}[queue]\n{place}", request=f"{place} of dana")
