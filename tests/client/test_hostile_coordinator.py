"""A coordinator whose every word is the attacker's, against a running agent: real gRPC, real TLS."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundtable.client.agent.agent import Agent
from roundtable.client.agent.secure_attempts import certificate_of
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.core import Layout, models
from roundtable.core.config import JobConfig
from roundtable.core.identity.credentials import issue
from roundtable.core.models import Model
from roundtable.proto import agent_pb2, common_pb2

SECURE = {"level": "none", "secure_aggregation": True, "clip_norm": 1.0}
PUBLIC = SECURE | {"public_evaluation": True}
NOISY = {"level": "distributed", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}


def job(every: int = 0, rounds: int = 4, **changes: Any) -> JobConfig:
    table = {"task": "toy", "seed": 3, "rounds": rounds, "evaluation": {"every": every}, **changes}
    return JobConfig.model_validate({**table, "algorithm": {"batch_size": 8}})


def released(silo: Any) -> list[dict[str, Any]]:
    path = silo.config.state / "releases.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("asked", "round", "reason"),
    [
        (job(), 1, "evaluates no model of round 1"),
        (job(every=3), 2, "evaluates no model of round 2"),
        (job(privacy=SECURE), 1, "evaluates no model of round 1"),
        (job(every=1, privacy=PUBLIC), 1, "only where this silo's test data are public"),
        (job(evaluation={"bounds": {"accuracy": 1.0}}, privacy=PUBLIC), 1, "inside its secure sums alone"),
        (job(every=1, privacy=NOISY | {"public_evaluation": True}), 1, "only where this silo's test data"),
    ],
)
async def test_metrics_of_one_silo_on_a_model_of_choice(
    silo: Any, asked: JobConfig, round: int, reason: str
) -> None:
    silo.job, trainer = asked, silo.inline()
    async with silo.agent(trainer):
        for attempt in range(1, 4):
            silo.coordinator.say(instruction=silo.instruction(round, attempt, phase="evaluate"))
            failure = await silo.coordinator.hear("failure")
            assert (failure.kind, reason in failure.detail) == ("refused", True)
    assert not trainer.done
    assert not released(silo)


async def test_metrics_follow_the_job_are_counted_and_are_of_one_model_an_attempt(silo: Any) -> None:
    silo.config = replace(silo.config, policy=PolicyTable(rounds=4))
    silo.job = job(every=2)
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=silo.instruction(2, phase="evaluate"))
        await silo.coordinator.hear("evaluated")
    silo.model = moved(silo.model, 1.0)
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=silo.instruction(2, phase="evaluate"))
        failure = await silo.coordinator.hear("failure")
        assert "another model was evaluated for round 2, attempt 1" in failure.detail
    assert [entry["kind"] for entry in released(silo)] == ["evaluation"]


async def test_training_in_the_name_of_an_evaluation(silo: Any) -> None:
    """The phase is what the rules go by: it has to be that of the work."""
    silo.job = job()
    async with silo.agent(silo.inline()):
        forged = silo.instruction(1, phase="evaluate")
        forged.step.phase = "train"
        silo.coordinator.say(instruction=forged)
        failure = await silo.coordinator.hear("failure")
        assert "the step's phase is 'train', and its work 'evaluate'" in failure.detail


async def test_attempts_in_the_clear_are_counted_by_what_leaves(silo: Any) -> None:
    """One round, twelve attempts from twelve models: one update leaves; the same one leaves again."""
    silo.config = replace(silo.config, policy=PolicyTable(rounds=1))
    silo.job, coordinator, first = job(rounds=1), silo.coordinator, silo.model
    async with silo.agent(silo.inline()):
        coordinator.say(instruction=silo.instruction(attempt=1))
        await coordinator.until(lambda: len(coordinator.receipts) == 1)
        for attempt in range(2, 13):
            silo.model = moved(first, 0.1 * attempt)
            coordinator.say(instruction=silo.instruction(attempt=attempt))
            failure = await coordinator.hear("failure")
            assert "1 updates of this job have left this silo, which allows 1" in failure.detail
        silo.model = first
        coordinator.say(instruction=silo.instruction(attempt=13))
        await coordinator.until(lambda: len(coordinator.receipts) == 2)
    assert [entry["kind"] for entry in released(silo)] == ["update"]
    assert len({bytes(upload.data) for upload in coordinator.uploads.values()}) == 1


async def test_an_attempt_is_advertised_for_once(silo: Any, authority: Path, tmp_path: Path) -> None:
    """Asked again for the same numbers among others, or for lower ones, the silo shows no fresh keys."""
    for name in ("oak", "pine", "yew"):
        issue(authority / "ca", name, "agent", tmp_path / name)
    shown = [certificate_of(path) for path in (authority / "hospital", tmp_path / "oak", tmp_path / "pine")]
    silo.job, coordinator = job(privacy=SECURE), silo.coordinator

    def asked(attempt: int, *more: bytes) -> agent_pb2.Instruction:
        instruction = silo.instruction(2, attempt)
        instruction.train.identities.extend([*shown, *more])
        return instruction

    async with silo.agent(silo.inline()):
        coordinator.say(instruction=asked(2))
        await coordinator.hear("reply")
        step = common_pb2.Step(job="job-1", round=2, attempt=2, phase="train")
        # In one breath: the work that is withdrawn has not ended when the same numbers come again.
        coordinator.say(withdraw=agent_pb2.Withdraw(step=step, reason="another cohort"))
        more = certificate_of(tmp_path / "yew")
        coordinator.say(instruction=asked(2, more))
        failure = await coordinator.hear("failure")
        assert (failure.kind, "no attempt is begun twice" in failure.detail) == ("node_failure", True)
        coordinator.say(withdraw=agent_pb2.Withdraw(step=common_pb2.Step(job="job-1"), reason="all over"))
        coordinator.say(instruction=asked(1, more))
        failure = await coordinator.hear("failure")
        assert (failure.kind, "has begun round 2, attempt 2" in failure.detail) == ("refused", True)
    async with silo.agent(silo.inline()):
        coordinator.say(instruction=asked(2, more))
        failure = await coordinator.hear("failure")
        assert "no attempt is begun twice" in failure.detail
    assert [message.WhichOneof("message") for message in coordinator.heard].count("reply") == 1


async def test_a_header_that_the_silos_own_model_cannot_have_is_not_read(
    silo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of many tensors, well-formed and named by its digest: refused by the length of its header."""
    own, parsed = silo.model, []
    layout = Layout.of({f"tensor-{'x' * 400}-{number}": torch.zeros(1) for number in range(2000)})
    silo.model = Model(layout, torch.zeros(layout.size))
    read = models.Layout.from_json
    monkeypatch.setattr(models.Layout, "from_json", lambda text: parsed.append(len(text)) or read(text))
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=silo.instruction())
        failure = await silo.coordinator.hear("failure")
        assert "describes another model, and is not read" in failure.detail
        assert not parsed
        silo.model = own
        silo.coordinator.say(instruction=silo.instruction(attempt=2))
        await silo.coordinator.until(lambda: silo.coordinator.receipts)
    assert parsed == [len(own.layout.to_json())]


def moved(model: Model, by: float) -> Model:
    """A model of the attacker's, under the same layout."""
    return replace(model, vector=model.vector + by)


@pytest.mark.parametrize(
    "job",
    [
        "../../credentials/",
        "../../*",
        "*",
        "[a-z]*",
        "/etc/passwd",
        ".",
        "",
        "job-1/../../x",
        "a\nb",
        "j" * 5000,
    ],
)
async def test_a_withdrawal_of_what_is_no_job_touches_no_file(
    authority: Path, silo: Any, log: Any, job: str
) -> None:
    silo.config = replace(silo.config, credentials=silo.config.folder / "credentials")
    shutil.copytree(authority / "hospital", silo.config.credentials)
    for name in ("secure/other.1.1.secure.sealed", "privacy/account.json", "jobs/approved/job-9.json"):
        path = silo.config.state / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"kept")
    async with silo.agent(silo.inline()):
        (silo.config.state / "secure" / "late.1.1.secure.done").write_bytes(b"kept")
        before = files_below(silo.config.folder)
        for phase, round in (("", 0), ("secure", 0), ("train", 1)):
            step = common_pb2.Step(job=job, round=round, attempt=round, phase=phase)
            silo.coordinator.say(withdraw=agent_pb2.Withdraw(step=step, reason="\x1b[2J"))
        await log.until("is not a valid identifier")
        silo.coordinator.say(instruction=silo.instruction())
        await silo.coordinator.until(lambda: silo.coordinator.receipts)
        assert before <= files_below(silo.config.folder)
    assert not [line for line in log.lines if not line.isprintable()]


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".partial"}


ABSURD: list[dict[str, Any]] = [
    {"step": {"job": "../x"}},
    {"step": {"phase": "a/b"}},
    {"step": {"round": 0}},
    {"step": {"attempt": 0}},
    {"deadline_seconds": math.nan},
    {"deadline_seconds": math.inf},
    {"deadline_seconds": -1.0},
    {"job_config": "x" * ((1 << 20) + 1)},
    {"train": {"layout": "../x"}},
    {"train": {"model": {"digest": "../../credentials/node.key"}}},
    {"train": {"model": {"size": 1 << 63}}},
    {"train": {"identities": [b"x" * (1 << 17)]}},
    {"submission": {"time": math.nan, "signature": b"x"}},
    {"submission": {"submitter": "x" * 501, "signature": b"x"}},
    {"submission": {"initial_model": "x", "signature": b"x"}},
    {"submission": {"certificate": b"x" * (1 << 17), "signature": b"x"}},
]


async def test_an_instruction_with_an_absurd_value_is_refused_by_name_and_the_next_is_done(silo: Any) -> None:
    trainer = silo.inline()
    async with silo.agent(trainer):
        for changes in ABSURD:
            asked = silo.instruction()
            for name, value in changes.items():
                if isinstance(value, dict):
                    part = getattr(asked, name)
                    part.MergeFrom(type(part)(**value))
                    for inner in {"round", "attempt"} & value.keys():
                        setattr(part, inner, value[inner])
                else:
                    setattr(asked, name, value)
            silo.coordinator.say(instruction=asked)
            failure = await silo.coordinator.hear("failure")
            assert failure.kind == "protocol_violation", changes
            assert (failure.step.job, failure.step.round) == (asked.step.job, asked.step.round)
            assert "the coordinator" in failure.detail
            assert failure.detail.isprintable()
        empty = silo.instruction()
        empty.ClearField("train")
        silo.coordinator.say(instruction=empty)
        assert "no work" in (await silo.coordinator.hear("failure")).detail
        assert not trainer.done
        silo.coordinator.say(instruction=silo.instruction())
        await silo.coordinator.until(lambda: silo.coordinator.receipts)
    assert len(trainer.done) == 1
    assert len(silo.coordinator.hellos) == 1, "no message ended the stream"


@pytest.mark.parametrize("beat", [0.0, -1.0, 1e-6, math.nan, math.inf, 1e9])
async def test_an_interval_that_would_take_the_agents_core_or_never_end(
    silo: Any, log: Any, beat: float
) -> None:
    silo.coordinator.beat = beat
    agent = Agent(silo.config, silo.inline())
    running = asyncio.create_task(agent.run())
    await log.until("; between 0.05 and 3600 can be")
    assert not running.done()
    agent.stop()
    await running
    assert not silo.coordinator.heard
