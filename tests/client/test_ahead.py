"""A silo trains a round before its order is here: the same bits, and nothing is left of a wrong guess."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundtable.client.policy.health_table import HealthTable
from roundtable.client.policy.known_jobs import KnownJobs
from roundtable.client.policy.maintenance import Maintenance
from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_order import Order
from roundtable.core import JobConfig, Model
from roundtable.core.initial_model import initial_model
from roundtable.core.models import save_model
from roundtable.core.task import load_task

TASK = """
import os, signal, sys, torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        made = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        last = made[2]  # A part that the module reaches by another way than its own attributes.
        made[1].register_forward_hook(lambda module, given, found: found * last.weight.norm())
        return made
    def data(self, site):
        g = torch.Generator().manual_seed(0)
        rows = torch.randn(32, 4, generator=g), torch.randint(0, 3, (32,), generator=g)
        return rows, rows
    def loss(self, model, batch, context):
        if not model.training:
            if os.path.exists("full") and 3 in getattr(self, "step", {}):
                raise MemoryError
            return F.cross_entropy(model(batch[0]), batch[1])
        self.step = getattr(self, "step", {})
        step = self.step[context.round] = self.step.get(context.round, 0) + 1
        print("round", context.round, "step", step, file=sys.stderr, flush=True)
        gate = f"gate-{context.round}-{step}"
        if os.path.exists(gate):
            said = open(gate).read()  # A pipe: it opens once somebody writes.
            if said == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if not said:
                raise ValueError("the gate says so")
            os.remove(gate)
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        torch.rand(3)
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
STEPS = 4


@pytest.fixture
def ahead(silo: Any) -> Any:
    """A silo with a job whose rounds can be trained ahead."""
    (silo.config.folder / "toy.py").write_text(TASK)
    algorithm = {"name": "streaming", "fragments": 2, "overlap": True, "mixing": 0.5, "batch_size": 8}
    algorithm |= {"steps": STEPS, "momentum": 0.5, "optimizer_state": "keep"}
    table = {"task": "toy", "seed": 3, "rounds": 3, "algorithm": algorithm, "model": {"local": ["0.bias"]}}
    silo.job = JobConfig.model_validate(table)
    silo.model = initial_model(silo.job, load_task("toy.py", silo.config.folder))
    return silo


def moved(model: Model, by: float) -> Model:
    return Model(model.layout, model.vector + by, model.local)


def gate(silo: Any, round: int, step: int) -> Path:
    """A pipe at which training waits before this step."""
    path: Path = silo.config.folder / f"gate-{round}-{step}"
    os.mkfifo(path)
    return path


async def order(silo: Any, *step: Any, **counted: Any) -> None:
    """Orders a step of the silo's model, and waits for the answer."""
    coordinator, asked = silo.coordinator, silo.instruction(*step, **counted)
    coordinator.say(instruction=asked)
    if asked.step.phase == "evaluate":
        await coordinator.hear("evaluated")
    else:
        key = (asked.step.job, asked.step.round, asked.step.attempt, asked.step.phase)
        await coordinator.until(lambda: key in coordinator.receipts)


class Plain:
    """The same orders, one after the other, in a silo of its own."""

    def __init__(self, silo: Any, folder: Path) -> None:
        self._silo = silo
        self._folder = folder
        folder.mkdir()
        (folder / "toy.py").write_text(TASK)
        self._executor = Executor(Settings("hospital", str(folder), str(folder / "jobs"), "cpu", 1, {}))

    def train(
        self, model: Model, round: int, attempt: int = 1, counted: tuple[int, int] | None = None
    ) -> bytes:
        path, out = self._folder / "model", self._folder / "out"
        save_model(path, model)
        order = Order(
            job="job-1",
            round=round,
            phase="train",
            config=self._silo.job.to_json(),
            task=f"{self._folder / 'toy.py'}:Toy",
            model=str(path),
            layout=model.layout.fingerprint,
            output=str(out),
            attempt=attempt,
            counted=counted,
        )
        self._executor.train(order, lambda *seen: None)
        return out.read_bytes()


def sent(silo: Any, round: int, attempt: int = 1) -> bytes:
    return bytes(silo.coordinator.uploads["job-1", round, attempt, "train"].data)


async def test_a_round_that_was_trained_ahead_gives_the_same_bits(
    ahead: Any, log: Any, tmp_path: Path
) -> None:
    """Round 2 is trained before its order; an evaluation comes after it, one in the middle of round 3."""
    first, plain = ahead.model, Plain(ahead, tmp_path / "plain")
    half = gate(ahead, 3, 3)
    async with ahead.agent():
        await order(ahead, 1)
        await log.until("task: round 2 step 4")
        ahead.model = moved(first, 0.25)
        await order(ahead, 1, 1, "evaluate")
        await order(ahead, 2)
        await log.until("task: round 3 step 3")
        own = json.loads((ahead.config.state / "jobs" / "job-1" / "order.json").read_text())
        assert own["order"]["round"] == 2, "the silo's own model is of what it was ordered, and no guess"
        ahead.model = moved(first, 0.5)
        ahead.coordinator.say(instruction=ahead.instruction(2, 1, "evaluate"))
        await ahead.coordinator.until(lambda: _accepted(ahead, 2, "evaluate"))
        half.write_text("go on")
        await ahead.coordinator.hear("evaluated")
        await order(ahead, 3)
        await order(ahead, 3, 1, "evaluate")
    assert not any("round 4 step" in line for line in log.lines)
    found = [line for line in log.lines if "batches ahead" in line]
    assert found == [f"job-1, round {round}: began 4 batches ahead" for round in (2, 3)]
    assert sent(ahead, 1) == plain.train(first, 1)
    assert sent(ahead, 2) == plain.train(moved(first, 0.25), 2, counted=(1, 1))
    assert sent(ahead, 3) == plain.train(moved(first, 0.5), 3, counted=(2, 1))


def _accepted(silo: Any, round: int, phase: str) -> bool:
    return any(
        m.HasField("accepted") and (m.accepted.step.round, m.accepted.step.phase) == (round, phase)
        for m in silo.coordinator.heard
    )


async def test_a_wrong_guess_and_a_failure_leave_nothing(
    ahead: Any, log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 1 is made again: what was trained of round 2 is given up. Then it fails, and is done on order.
    While round 3 is trained ahead, a person refuses the job."""
    monkeypatch.setattr("roundtable.client.worker.worker_trainer._LOOK_SECONDS", 0.02)
    half = gate(ahead, 3, 2)
    first, plain = ahead.model, Plain(ahead, tmp_path / "plain")
    async with ahead.agent():
        await order(ahead, 1)
        await log.until("task: round 2 step 4")
        closed = gate(ahead, 2, 6)
        await order(ahead, 1, 2)
        await log.until("task: round 2 step 6")
        closed.write_text("")
        closed.unlink()
        await log.until("round 2 was begun ahead, and is given up")
        ahead.model = moved(first, 0.25)
        asked = ahead.instruction(2)
        asked.counted.attempt = 2
        ahead.coordinator.say(instruction=asked)
        await ahead.coordinator.until(lambda: ("job-1", 2, 1, "train") in ahead.coordinator.receipts)
        await log.until("task: round 3 step 2")
        jobs = KnownJobs(ahead.config.state)
        jobs.refuse(jobs.find("job-1"), "not here")
        await log.until("round 3: is not trained ahead any more: the silo does not let the job in")
        half.write_text("go on")
        ahead.coordinator.say(instruction=ahead.instruction(2, 1, "evaluate"))
        assert "not here" in (await ahead.coordinator.hear("failure")).detail
    # The process hears of it while it trains: perhaps a step later.
    assert not any("round 3 step 4" in line for line in log.lines)
    assert sent(ahead, 1) == plain.train(first, 1)
    assert sent(ahead, 1, 2) == plain.train(first, 1, attempt=2)
    assert sent(ahead, 2) == plain.train(moved(first, 0.25), 2, counted=(1, 2))
    assert not any("batches ahead" in line for line in log.lines)


async def test_an_end_of_the_process_ahead_costs_no_step(ahead: Any, log: Any, tmp_path: Path) -> None:
    """It is killed ahead of round 2. Ahead of round 3 there is no memory for an evaluation: that is done
    without anything ahead, in whole batches, and so is what follows."""
    first, plain = ahead.model, Plain(ahead, tmp_path / "plain")
    deadly, half = gate(ahead, 2, 2), gate(ahead, 3, 2)
    async with ahead.agent():
        await order(ahead, 1)
        await log.until("task: round 2 step 2")
        deadly.write_text("die")
        deadly.unlink()
        await order(ahead, 2)
        await log.until("task: round 3 step 2")
        (ahead.config.folder / "full").touch()
        ahead.coordinator.say(instruction=ahead.instruction(2, 1, "evaluate"))
        await ahead.coordinator.until(lambda: _accepted(ahead, 2, "evaluate"))
        half.write_text("go on")
        await ahead.coordinator.hear("evaluated")
        told = [m.trouble for m in ahead.coordinator.heard if m.HasField("trouble")]
        await order(ahead, 3)
    assert [each.action for each in told] == [
        "evaluates again, and trains no round of the job ahead from now on"
    ]
    assert [line for line in log.lines if "ended while it trained" in line] == [
        "job-1: the training process ended while it trained a round ahead; another one does the step"
    ]
    assert sent(ahead, 1) == plain.train(first, 1)
    assert sent(ahead, 2) == plain.train(first, 2, counted=(1, 1))
    assert sent(ahead, 3) == plain.train(first, 3, counted=(2, 1))


async def test_nothing_is_trained_ahead_where_the_silo_is_drained_or_not_ready(
    ahead: Any, log: Any, tmp_path: Path
) -> None:
    """What is trained ahead ends where the silo is drained; and none is begun where a check says no."""
    check, hot = tmp_path / "check.sh", tmp_path / "hot"
    check.write_text(
        f'#!/bin/sh\nif [ -e {hot} ]; then echo \'{{"ready": false, "reason": "hot"}}\'\n'
        "else echo '{\"ready\": true}'; fi\n"
    )
    check.chmod(0o755)
    health = HealthTable.model_validate({"name": "heat", "command": [str(check)]})
    ahead.config = replace(ahead.config, health=(health,))
    maintenance = Maintenance(ahead.config.state)
    half, last = gate(ahead, 2, 2), gate(ahead, 1, 8)
    async with ahead.agent():
        await order(ahead, 1)
        await log.until("task: round 2 step 2")
        maintenance.drain("new racks")
        await log.until("drained, takes no new round: new racks")
        half.write_text("go on")
        await order(ahead, 1, 1, "evaluate")
        maintenance.resume()
        await log.until("takes part again")
        ahead.coordinator.say(instruction=ahead.instruction(1, 2))
        await log.until("task: round 1 step 8")
        hot.touch()
        last.write_text("go on")
        await log.until("heat: hot")
        hot.unlink()
        await order(ahead, 1, 2, "evaluate")
    assert not any("round 2 step 3" in line for line in log.lines)
