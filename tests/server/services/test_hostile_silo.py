"""A silo of the job whose every word is the attacker's, against a running coordinator: the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent, header_for
from service import Operator
from strange_messages import fill

from roundtable.core import open_model
from roundtable.proto import agent_pb2, common_pb2
from roundtable.server import Coordinator
from roundtable.server.door import agent_messages as said
from roundtable.server.door.from_agents import message_of, offer_of

KINDS = ("heartbeat", "accepted", "progress", "failure", "evaluated", "reply", "trouble", "proof", "hello")
STEPS = (
    {},
    {"round": 0},
    {"round": 2**32 - 1},
    {"attempt": 9},
    {"phase": "../x"},
    {"phase": "secure"},
    {"job": "*"},
)
TABLE = "[cohort]\nsize = 3\nminimum = 2\n[evaluation]\nevery = 1\n"


def strange(kind: str, step: Any, chance: random.Random) -> agent_pb2.FromAgent:
    """A message of this kind about the step that the silo was asked for, or about one near it."""
    message = agent_pb2.FromAgent()
    if kind == "proof":
        message.proof = chance.randbytes(5000)
        return message
    inner = getattr(message, kind)
    inner.SetInParent()
    fill(inner, inner.DESCRIPTOR, chance)
    if "step" in inner.DESCRIPTOR.fields_by_name:
        inner.step.CopyFrom(step)
        for name, value in chance.choice(STEPS).items():
            setattr(inner.step, name, value)
    return message


def strange_update(asked: Any, chance: random.Random) -> tuple[agent_pb2.UploadHeader, bytes]:
    """An update, and a header that is wrong in one respect."""
    values = [[1.0] * 4, [3.4e38] * 4, [math.nan] * 4, [1.0] * 5, []]
    data = np.array(chance.choice(values), np.float32).tobytes()
    header = header_for(asked, data)
    wrong = agent_pb2.UploadHeader()
    fill(wrong, wrong.DESCRIPTOR, chance)
    field = chance.choice(["content", "layout", "encoding", "examples", "metrics", "offset", "announcement"])
    header.ClearField(field)
    header.MergeFrom(agent_pb2.UploadHeader(**{field: getattr(wrong, field)}))
    return header, data


async def test_whatever_numbers_a_silo_says_of_its_step_operators_are_shown_the_job(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    """At the bounds of each kind of field; what was refused leaves the last word that was not."""
    fields = common_pb2.StepFigures.DESCRIPTOR.fields
    whole = {field.name for field in fields if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)}
    async with ScriptedAgent(coordinator.port, certificates / "alder") as hostile:
        job = await operator.submit("[cohort]\nsize = 1\nminimum = 1\n[evaluation]\nevery = 0")
        step = (await hostile.expect("instruction")).step
        for field, value in [
            *((name, value) for name in sorted(whole) for value in (2**32 - 1, 2**53, 2**64 - 1)),
            *(
                (field.name, value)
                for field in fields
                for value in (math.nan, -1e100)
                if field.name not in whole
            ),
        ]:
            figures = common_pb2.StepFigures()
            with contextlib.suppress(ValueError):  # A field of 32 bits.
                setattr(figures, field, value)
            await hostile.say(progress=agent_pb2.Progress(step=step, done=1, total=2, figures=figures))
            await hostile.say(heartbeat=agent_pb2.Heartbeat())
            await hostile.expect("heartbeat")
            (shown,) = (await operator.job(job.id)).clients
            assert not math.isnan(getattr(shown.figures, field))


async def attack(agent: ScriptedAgent, instruction: Any, chance: random.Random) -> None:
    """Thirty strange messages and six strange updates; then the step is given up, if it is there yet."""
    for _ in range(30):
        await agent.call.write(strange(chance.choice(KINDS), instruction.step, chance))
    for _ in range(6):
        header, data = strange_update(instruction, chance)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await agent.upload(header, data)
    await agent.say(failure=agent_pb2.Failure(step=instruction.step, kind="task_error", detail="\x1b[2J"))


@pytest.mark.parametrize("seed", range(3))
async def test_a_silo_of_the_job_that_says_anything_stops_nobody(
    coordinator: Coordinator,
    operator: Operator,
    certificates: Path,
    tmp_path: Path,
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chance, rounds = random.Random(seed), 4
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as first,
        ScriptedAgent(coordinator.port, certificates / "birch") as second,
        ScriptedAgent(coordinator.port, certificates / "cedar") as hostile,
    ):
        job = await operator.submit(TABLE, rounds=rounds)
        honest = [asyncio.create_task(agent.take_part(torch.ones(4))) for agent in (first, second)]
        done: set[tuple[int, int, str]] = set()

        async def hostility() -> None:
            while (message := await hostile.next()) is not None:
                asked = message.instruction
                key = (asked.step.round, asked.step.attempt, asked.step.phase)
                if message.WhichOneof("message") == "instruction" and key not in done:
                    done.add(key)
                    await attack(hostile, asked, chance)

        attacking = asyncio.create_task(hostility())
        events = await operator.watch_until(job.id, "finished")
        attacking.cancel()
        for each in honest:
            each.cancel()
    assert done
    found = await operator.job(job.id)
    records = [json.loads(record, parse_constant=pytest.fail) for record in found.history]
    assert len(records) == rounds
    assert all({"alder", "birch"} <= set(record["contributors"]) for record in records)
    assert all(event.message.isprintable() for event in events)
    path = tmp_path / "model.safetensors"
    path.write_bytes(await operator.fetch(found.job.model.digest))
    assert torch.isfinite(open_model(path).vector).all()
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record.getMessage() for record in caplog.records if not record.getMessage().isprintable()]


AT = {"job": "j", "phase": "train"}
ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"evaluated": {"step": AT, "metrics": [{"name": "loss", "sum": 1e308}]}}, "has the sum 1e+308"),
    ({"evaluated": {"step": AT | {"job": "../x"}}}, "'../x' is not a valid identifier"),
    ({"failure": {"step": AT | {"phase": "a/b"}}}, "'a/b' is not a valid identifier"),
    ({"accepted": {"step": AT | {"round": 2**32 - 1}}}, "a step's round is 4294967295"),
    ({"progress": {"step": AT, "done": 2**64 - 1}}, "done = 18446744073709551615"),
    ({"progress": {"step": AT, "loss": -math.inf}}, "loss = -inf"),
    (
        {"progress": {"step": AT, "figures": {"memory_bytes": 2**64 - 1}}},
        "memory_bytes = 18446744073709551615",
    ),
    ({"hello": {"identity": b"x" * (1 << 17)}}, "has 131072 bytes"),
    ({"hello": {"seen": [{"job": "a/../b"}]}}, "'a/../b' is not a valid identifier"),
    ({"proof": b"x" * 2000}, "has 2000 bytes"),
    ({}, "of a kind that this coordinator does not know"),
]


@pytest.mark.parametrize(("message", "reason"), ABSURD)
def test_what_no_message_can_hold_is_refused_by_name(message: dict[str, Any], reason: str) -> None:
    found = message_of(agent_pb2.FromAgent(**message))
    assert isinstance(found, said.RefusedMessage)
    assert reason in found.reason
    assert found.reason.isprintable()


def test_texts_of_silos_become_single_printable_lines() -> None:
    rude = "\x1b[2J\u202e\nroot: " + "x" * 10_000
    step = common_pb2.Step(job="j", phase="train")
    failure = message_of(agent_pb2.FromAgent(failure=agent_pb2.Failure(step=step, kind=rude, detail=rude)))
    hello = message_of(
        agent_pb2.FromAgent(
            hello=agent_pb2.Hello(version=rude, tasks=[rude] * 2000, metadata={rude: rude}, clock=math.nan)
        )
    )
    assert isinstance(failure, said.GivenUp)
    assert isinstance(hello, said.Introduction)
    assert (failure.kind, len(hello.tasks), hello.clock) == ("task_error", 1000, 0.0)
    texts = [failure.detail, hello.version, *hello.tasks, *hello.metadata, *hello.metadata.values()]
    assert all(text.isprintable() and len(text) < 2100 for text in texts)


def test_an_update_that_cannot_be_taken_still_names_its_step() -> None:
    header = agent_pb2.UploadHeader(
        step=common_pb2.Step(job="j", round=1, attempt=1, phase="train"),
        content=common_pb2.Artifact(digest="../" * 30, size=2**64 - 1),
        examples=2**64 - 1,
        metrics=[common_pb2.Metric(name="loss", sum=math.inf, count=1)],
    )
    offer = offer_of(header)
    assert offer.flaw == "the update's digest is no BLAKE3 digest of 64 hexadecimal digits"
    assert (offer.at.job, offer.at.step.round, dict(offer.metrics)) == ("j", 1, {})
    header.content.digest = blake3(b"").hexdigest()
    assert "has the sum inf" in offer_of(header).flaw
    del header.metrics[:]
    assert "claims 18446744073709551615 examples" in offer_of(header).flaw
