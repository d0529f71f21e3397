"""What silos say that they train on: bounded, kept once, shown where cohorts are told, gone with the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import ServerConfig
from roundtable.server.door import agent_messages as said
from roundtable.server.door.from_agents import message_of

OPEN = "[cohort]\nsize = 1\nminimum = 1\n[evaluation]\nevery = 0\n"
SECRET = """[cohort]
strategy = "poisson"
probability = 1.0
minimum = 1
[evaluation]
every = 0
[aggregation]
weighting = "uniform"
[privacy]
level = "client"
clip_norm = 1.0
delta = 1e-3
noise_multiplier = 2.0
"""


def setup(ranks: int = 8) -> agent_pb2.Setup:
    degrees = {"fsdp": 4, "tp": 2}
    return agent_pb2.Setup(
        machines=2, ranks=ranks, device="NVIDIA A100", memory=80 << 30, plan="fsdp4 × tp2", degrees=degrees
    )


@pytest.mark.parametrize(("table", "ranks"), [(OPEN, [8, 4]), (SECRET, [])])
async def test_a_jobs_record_keeps_what_silos_train_on(
    settings: Callable[..., ServerConfig], certificates: Path, database: str, table: str, ranks: list[int]
) -> None:
    config = settings(database=database)
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as olga,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        job = await olga.submit(table, rounds=4)
        for number in (8, 8, 4, 4):
            asked = await alder.expect("instruction")
            told = agent_pb2.Accepted(step=asked.step, setup=setup(number))
            # The job leaves it no choice of a rank.
            claim = agent_pb2.Setup(machines=1, ranks=1, factor_rank=5)
            await alder.say(accepted=agent_pb2.Accepted(step=asked.step, setup=claim))
            await alder.say(accepted=told)
            await alder.answer(asked, torch.ones(4))
        await olga.watch_until(job.id, "finished")
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as olga:
        found = (await olga.job(job.id)).setups
        assert [(each.client, each.ranks) for each in found] == [("alder", number) for number in ranks]
        if ranks:
            assert [each.round for each in found] == [1, 3]
            assert (found[0].plan, dict(found[0].degrees)) == ("fsdp4 × tp2", {"fsdp": 4, "tp": 2})
        await olga.stub.DeleteJob(operator_pb2.JobRequest(job=job.id))


@pytest.mark.parametrize(
    "strange",
    [
        agent_pb2.Setup(machines=0, ranks=1),
        agent_pb2.Setup(machines=1, ranks=2_000_000),
        agent_pb2.Setup(machines=1, ranks=1, degrees={"../x": 2}),
        agent_pb2.Setup(machines=1, ranks=1, degrees={"tp": 0}),
        agent_pb2.Setup(machines=1, ranks=1, degrees={f"way{n}": 2 for n in range(21)}),
        agent_pb2.Setup(machines=1, ranks=1, memory=1 << 60),
        agent_pb2.Setup(machines=1, ranks=1, factor_rank=2_000_000),
    ],
)
def test_what_cannot_be_is_refused(strange: agent_pb2.Setup) -> None:
    step = {"job": "j", "round": 1, "attempt": 1, "phase": "train"}
    told = agent_pb2.FromAgent(accepted=agent_pb2.Accepted(step=step, setup=strange))
    assert isinstance(message_of(told), said.RefusedMessage)


def test_words_are_cut_and_printable() -> None:
    words = agent_pb2.Setup(machines=1, ranks=1, device="a\nb" * 100, plan="\x1b[31m" + "x" * 5000)
    step = {"job": "j", "round": 1, "attempt": 1, "phase": "train"}
    told = message_of(agent_pb2.FromAgent(accepted=agent_pb2.Accepted(step=step, setup=words)))
    assert isinstance(told, said.Begun)
    assert told.setup is not None
    assert told.setup.device.isprintable()
    assert len(told.setup.device) <= 100
    assert told.setup.plan.isprintable()
    assert len(told.setup.plan) <= 510
