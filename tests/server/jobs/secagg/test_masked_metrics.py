"""Metrics inside the secure sum in the service: dropouts, retries, silos that measure nonsense or lie."""

from __future__ import annotations

import json
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from secure_federation import Federation, GivenTrainer, unit
from service import Operator

from roundtable.client.agent import secure_attempts as client_secure
from roundtable.client.policy.config import PolicyTable
from roundtable.client.trainer import ProgressListener, StepWork
from roundtable.client.training.metrics import Metrics
from roundtable.privacy.secagg import ArraySource
from roundtable.proto import operator_pb2

COLUMNS = 300
SUMMED = """
[evaluation]
every = {every}
bounds = {{ accuracy = 1.0, loss = 20.0 }}
[privacy]
level = 'none'
secure_aggregation = true
clip_norm = 2.0
{more}
"""


@dataclass
class Measuring(GivenTrainer):
    """Training gives a vector, evaluation these sums; `asked` are the steps in which it was asked."""

    found: Metrics = field(default_factory=lambda: {"accuracy": (6.0, 8), "loss": (16.0, 8)})
    asked: list[Any] = field(default_factory=list)

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        progress(3, 8, 1.25)
        self.asked.append(work.step)
        return self.found


def measuring(federation: Federation, **found: Metrics) -> dict[str, Measuring]:
    made = {}
    for place, name in enumerate(federation.names):
        made[name] = Measuring(lambda round, place=place: unit(place, round, COLUMNS))
        made[name].found = found.get(name, made[name].found)
        made[name].gate.set()
    return made


def text(every: int = 1, more: str = "") -> str:
    return SUMMED.format(every=every, more=more)


async def updates_received(operator: Operator, job: str, wanted: int) -> None:
    call = operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60)
    seen = 0
    async for update in call:
        seen += sum(event.kind == "update_received" for event in update.events)
        if seen >= wanted:
            call.cancel()
            return
    raise AssertionError(f"the job ended after {seen} updates")


async def history_of(operator: Operator, job: str) -> list[dict[str, Any]]:
    return [json.loads(record) for record in (await operator.job(job)).history]


async def run(
    tmp_path: Path, config: str, rounds: int = 1, status: str = "finished", **found: Metrics
) -> tuple[list[dict[str, Any]], dict[str, Measuring], str]:
    """The history of a job of three silos with these findings, the silos, and the job's last reason."""
    federation = Federation.make(tmp_path, "alder", "birch", "cedar")
    silos = measuring(federation, **found)
    async with federation.coordinator(), federation.agents(silos), federation.operator() as operator:
        job = await operator.submit(config, rounds=rounds, vector=torch.zeros(COLUMNS))
        await operator.watch_until(job.id, status)
        reason = (await operator.job(job.id)).job.reason
        return await history_of(operator, job.id), silos, reason


async def test_rounds_that_are_due_sum_and_the_others_do_not(tmp_path: Path) -> None:
    history, silos, _ = await run(tmp_path, text(every=2), rounds=4)
    assert [sorted(record["before"]) for record in history] == [["accuracy", "loss"], []] * 2
    assert history[2]["before"]["accuracy"] == [pytest.approx(18.0, abs=1e-3), 24]
    assert history[2]["before"]["loss"] == [pytest.approx(48.0, abs=1e-2), 24]
    assert all(record["evaluation"] == {} == record["client_metrics"] for record in history)
    assert [step.round for step in silos["alder"].asked] == [1, 3]
    assert {step.phase for step in silos["alder"].asked} == {"train"}, "no phase of its own"


async def test_a_target_is_met_by_the_model_before_the_round(tmp_path: Path) -> None:
    stop = '[stop]\nmetric = "accuracy"\ntarget = 0.7\n'
    history, _, reason = await run(tmp_path, stop + text(), rounds=5)
    assert len(history) == 1
    assert reason == (
        "accuracy before the round reached 0.75; the target was 0.7; the best model is that of round 0: "
        "accuracy 0.75"
    )


async def test_nonsense_is_left_out_or_clipped_and_never_in_the_sum(tmp_path: Path) -> None:
    history, _, _ = await run(
        tmp_path,
        text(),
        alder={"accuracy": (math.nan, 8), "loss": (math.inf, 8)},
        birch={"accuracy": (1e30, 10), "loss": (-1e30, 10)},
        cedar={},
    )
    assert history[0]["before"] == {
        "accuracy": [pytest.approx(10.0, abs=1e-3), 10],
        "loss": [pytest.approx(-200.0, abs=1e-2), 10],
    }


async def test_a_metric_that_the_task_does_not_measure_fails_by_its_name(tmp_path: Path) -> None:
    wrong: Metrics = {"accurracy": (1.0, 2), "loss": (1.0, 2)}
    retries = "[cohort]\nretries = 0\n"
    _, silos, reason = await run(
        tmp_path, retries + text(), status="paused", alder=wrong, birch=wrong, cedar=wrong
    )
    assert "evaluation.bounds names accuracy, and the task measures accurracy, loss" in reason
    assert not silos["alder"].steps, "it is not trained for nothing"


async def test_what_a_policy_keeps_at_the_silo_is_not_in_the_sum_either(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, "alder", "birch", "cedar")
    silos = measuring(federation)
    policies = {"alder": PolicyTable(metrics="none"), "birch": PolicyTable(metrics_digits=0)}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        for name, trainer in silos.items():
            policy = policies.get(name, PolicyTable())
            await stack.enter_async_context(federation.agent(name, trainer, policy=policy))
        operator = await stack.enter_async_context(federation.operator())
        job = await operator.submit(text(), rounds=1, vector=torch.zeros(COLUMNS))
        await operator.watch_until(job.id, "finished")
        (record,) = await history_of(operator, job.id)
        committed = await operator.watch_for(job.id, "round_committed")
    assert json.loads(committed.detail)["before"]["accuracy"] == pytest.approx(14 / 16, abs=1e-3)
    assert not silos["alder"].asked
    assert record["before"]["accuracy"] == [pytest.approx(8.0 + 6.0, abs=1e-3), 16], (
        "birch's 0.75 counts as 1"
    )
    assert record["training"]["loss"][1] == 20, "alder's training loss stays with it, too"


@pytest.mark.parametrize(
    ("lost", "contributors", "accuracy"),
    [("dogwood", ["alder", "birch", "cedar", "elm"], (18.0, 1024)), ("alder", [], (118.0, 1124))],
    ids=["without its vector", "after its upload"],
)
async def test_a_silo_that_is_lost_counts_if_its_vector_arrived(
    tmp_path: Path, lost: str, contributors: list[str], accuracy: tuple[float, int]
) -> None:
    federation = Federation.make(tmp_path, "alder", "birch", "cedar", "dogwood", "elm")
    dogwood: Metrics = {"accuracy": (100.0, 100), "loss": (0.0, 100)}
    silos = measuring(federation, dogwood=dogwood, alder={"accuracy": (0.0, 1000), "loss": (0.0, 1000)})
    silos["dogwood"].gate.clear()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(federation.coordinator())
        running = {n: await stack.enter_async_context(federation.agent(n, s)) for n, s in silos.items()}
        operator = await stack.enter_async_context(federation.operator())
        cohort = '[cohort]\nsize = 5\ngrace = "0.2s"\ndeadline = "20s"\n'
        job = await operator.submit(cohort + text(), rounds=1, vector=torch.zeros(COLUMNS))
        await updates_received(operator, job.id, 4)
        await federation.kill(running[lost])
        silos["dogwood"].gate.set()
        await operator.watch_until(job.id, "finished")
        (record,) = await history_of(operator, job.id)
    assert (record["attempt"], record["contributors"]) == (1, contributors or sorted(silos))
    total, count = accuracy
    assert record["before"]["accuracy"] == [pytest.approx(total, abs=1e-2), count]


async def test_a_tail_that_no_honest_silo_writes_closes_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = client_secure.MaskingAttempt.mask

    def mask(attempt: Any, *given: Any) -> Any:
        if attempt.client.name == "cedar" and attempt.client.session.round == 1:
            encode = attempt._round.encode

            def lying(*values: Any) -> Any:
                source = encode(*values)
                vector = source.block(0, len(source)).copy()
                vector[-2:] = (1 << 32) - 1
                return ArraySource(vector)

            attempt._round = type("Malicious", (), {"encode": staticmethod(lying), "bounds": {}})()
        return honest(attempt, *given)

    monkeypatch.setattr(client_secure.MaskingAttempt, "mask", mask)
    history, _, _ = await run(tmp_path, text(), rounds=2)
    assert "no honest silos can" in history[0]["closed"]
    assert history[0]["before"] == {}
    assert history[1]["before"]["accuracy"] == [pytest.approx(18.0, abs=1e-3), 24]
