"""The measured line to a silo: what is believed of it, who is shown it; a restart forgets nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from scripted_agent import ScriptedAgent, header_for
from service import AGENTS, Operator, running

from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import ServerConfig

JOB = "[cohort]\nsize = 1\nminimum = 1\ndeadline = 60\n[evaluation]\nevery = 0\n"
HIDDEN = """
[aggregation]
weighting = "uniform"
[privacy]
level = "client"
clip_norm = 1.0
delta = 1e-3
noise_multiplier = 2.0
"""


async def one_round(coordinator_port: int, folder: Path, operator: Operator, text: str, request: str) -> None:
    """A round of one silo, which says that its model came in no time."""
    values = torch.zeros(1 << 16)
    async with ScriptedAgent(coordinator_port, folder / AGENTS[0]) as agent:
        job = await operator.submit(text, rounds=1, vector=values, request=request)
        asked = await agent.expect("instruction")
        await agent.say(accepted=agent_pb2.Accepted(step=asked.step))
        model = await agent.download(asked.train.model.digest)
        header = header_for(asked, values.numpy().tobytes())
        header.arrival.CopyFrom(agent_pb2.Arrival(size=len(model), seconds=0.0))
        header.writing.CopyFrom(agent_pb2.Writing(seconds=1.0, error=0.0))
        await agent.upload(header, values.numpy().tobytes())
        await operator.watch_until(job.id, "finished")


async def links(operator: Operator) -> list[operator_pb2.Link]:
    """What operators are shown of the lines that were measured."""
    known = (await operator.stub.ListClients(operator_pb2.ListClientsRequest())).clients
    return [client.link for client in known if client.HasField("link")]


async def test_a_line_is_measured_shown_and_kept(
    settings: Callable[..., ServerConfig], certificates: Path, database: str
) -> None:
    config = settings(database=database)
    async with running(config) as one, Operator(one.port, certificates / "olga") as operator:
        await one_round(one.port, certificates, operator, JOB, "r1")
        (link,) = await links(operator)
    assert link.up > 0
    assert link.encoding == 4 * (1 << 16)
    # No faster than the bytes left here, whatever the silo says.
    assert 0 < link.down < 1e10
    assert 0 < link.round_trip < 20
    async with running(config) as two, Operator(two.port, certificates / "olga") as operator:
        assert await links(operator) == [link]


async def test_a_secret_cohort_moves_no_estimate(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    text = (
        JOB.replace("size = 1\nminimum = 1", 'strategy = "poisson"\nprobability = 1.0\nminimum = 1') + HIDDEN
    )
    config = settings()
    async with running(config) as one, Operator(one.port, certificates / "olga") as operator:
        await one_round(one.port, certificates, operator, text, "r1")
        assert await links(operator) == []


async def test_an_update_comes_as_the_silo_was_told_over_a_restart(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config, text = settings(), '[cohort]\nsize = 1\n[evaluation]\nevery = 0\n[transfer]\nup = "auto"\n'
    values = torch.zeros(4)
    async with (
        running(config) as one,
        Operator(one.port, certificates / "olga") as operator,
        ScriptedAgent(one.port, certificates / AGENTS[0]) as agent,
    ):
        await operator.submit(text, rounds=1)
        assert (await agent.expect("instruction")).train.encoding == "int8"
    async with running(config) as two, ScriptedAgent(two.port, certificates / AGENTS[0]) as agent:
        asked = await agent.expect("instruction")
        assert asked.train.encoding == "int8"
        header = header_for(asked, values.numpy().tobytes())
        receipt = await agent.upload(header, values.numpy().tobytes())
        assert receipt.status == agent_pb2.UploadReceipt.REJECTED
        assert "encoded as 'float32', the silo was told 'int8'" in receipt.reason
