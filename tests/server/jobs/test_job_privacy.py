"""What operators are told of one job's privacy: against whom it holds, what is spent, what will be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from privacy_table import LEVELS
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.cli.main import run
from roundtable.core.config import job_from_json
from roundtable.core.encodings.foreign import approval
from roundtable.core.privacy_table import ClientLevel
from roundtable.privacy.accounting.accountants import gaussian_epsilon
from roundtable.privacy.mechanisms import central_noise
from roundtable.privacy.protection import MACHINE, RELAY, protection
from roundtable.proto import operator_pb2
from roundtable.server import ServerConfig
from roundtable.simulation import canary_rounds

JOB = """
[cohort]
size = 3
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "client"
cohorts = "known"
clip_norm = 1.0
delta = 1e-3
noise_multiplier = 3.0
epsilon = 4.0
"""


async def test_what_is_spent_now_and_at_the_end(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    """The forecast of a job is what it has spent once it is over, by the formula of one Gaussian."""
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
        async with agents[0], agents[1], agents[2]:
            work = [asyncio.create_task(agent.take_part(torch.ones(4))) for agent in agents[:2]]
            job = await operator.submit(JOB, rounds=4)
            ask = operator_pb2.JobRequest(job=job.id)
            before = await operator.stub.ShowJobPrivacy(ask)
            work.append(asyncio.create_task(agents[2].take_part(torch.ones(4))))
            await operator.watch_until(job.id, "finished")
            after = await operator.stub.ShowJobPrivacy(ask)
            for task in work:
                task.cancel()
    whole = gaussian_epsilon(3.0 / 4**0.5, 1e-3)
    assert (before.epsilon, before.rounds_done) == (0.0, 0)
    assert before.forecast == pytest.approx(whole) == before.own_forecast
    assert after.epsilon == pytest.approx(whole) == after.forecast
    assert (after.silos, after.budget, after.HasField("population_budget")) == (3, 4.0, False)
    assert after.hides == "all data of any one silo; not that it takes part"
    machine = next(each for each in after.protections if each.party == MACHINE)
    seen = "it sees each silo's update as it was sent, and who was drawn"
    assert (machine.holds, machine.assumption) == (False, seen)
    assert "over 4 releases of 1 job" in after.statement


async def test_the_page_of_a_job_audits_that_job_and_tells_what_persons_are_left(
    settings: Callable[..., ServerConfig],
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is audited is the job that the coordinator has, with the noise settled at its submission."""
    # Always the same seed: an honest audit is refuted once in a thousand runs.
    monkeypatch.setattr(canary_rounds, "os", SimpleNamespace(urandom=bytes))
    text = JOB.replace("noise_multiplier = 3.0\n", "")
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        AsyncExitStack() as stack,
    ):
        for name in AGENTS:
            await stack.enter_async_context(ScriptedAgent(coordinator.port, certificates / name))
        job = await operator.submit(text, rounds=2)
        where = [
            "--coordinator",
            f"localhost:{coordinator.port}",
            "--credentials",
            str(certificates / "olga"),
        ]

        async def page(*more: str) -> tuple[int, str]:
            code = await asyncio.to_thread(run, ["job", "privacy", job.id, *more, *where])
            return code, capsys.readouterr().out

        _, plain = await page()
        code, told = await page("--audit", "--group", "2", "--json")
        honest = central_noise.noise_onto
        monkeypatch.setattr(
            central_noise, "noise_onto", lambda values, std, *more: honest(values, 0.5 * std, *more)
        )
        refuted, words = await page("--audit")
        with monkeypatch.context() as patch:
            patch.setattr(approval, "not_approved", lambda names, held, who, file: [f"{who} has not read it"])
            assert await page("--audit") == (2, "")
    shown = json.loads(told)
    settled = job_from_json(shown["settled_job"])
    assert isinstance(settled.privacy, ClientLevel)
    noise = settled.privacy.noise_multiplier
    assert noise is not None
    assert gaussian_epsilon(noise / 2**0.5, 1e-3) == pytest.approx(4.0, rel=1e-3)
    assert "the unit is a silo, not a person" in plain
    assert "audit       none made" in plain
    assert shown["group_epsilon"] == pytest.approx(gaussian_epsilon(noise / 2 / 2**0.5, 1e-3), rel=1e-3)
    assert (code, shown["audit"]["refuted"]) == (0, False)
    assert shown["audit"]["findings"][0]["claimed"] == pytest.approx(noise)
    assert shown["audit"]["stated"] == pytest.approx(shown["own_forecast"])
    assert refuted == 1
    assert "REFUTED: less privacy than stated" in words


@pytest.mark.parametrize("level", LEVELS)
def test_no_level_holds_against_who_sees_bare_updates(level: str) -> None:
    holds = {each.party: each.holds for each in protection(LEVELS[level])}
    assert holds[MACHINE] is holds[RELAY] is (level in ("distributed", "client_local", "example"))
    assert set(holds.values()) == ({False} if level.startswith("none") else {True, holds[MACHINE]})
