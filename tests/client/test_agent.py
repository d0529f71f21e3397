"""The agent against a scripted coordinator: real gRPC, real TLS, a real training process."""

from __future__ import annotations

import torch

from roundtable.client import train
from roundtable.core import initial_state, load_task
from roundtable.proto import agent_pb2


async def test_a_round_is_trained_uploaded_and_evaluated(silo) -> None:
    coordinator = silo.coordinator
    async with silo.agent():
        hello = coordinator.hellos[0]
        assert list(hello.tasks) == ["toy"]
        coordinator.say(instruction=silo.instruction())
        accepted = await coordinator.hear("accepted")
        assert (accepted.step.job, accepted.step.round) == ("job-1", 1)
        await coordinator.until(lambda: coordinator.receipts)
        coordinator.say(instruction=silo.instruction(phase="evaluate"))
        evaluated = await coordinator.hear("evaluated")
    upload = coordinator.uploads[("job-1", 1, 1, "train")]
    task = load_task("toy.py", silo.config.folder)
    model = initial_state(task, silo.job.seed)
    data, _ = task.data(type("S", (), {"options": {}}))
    expected = train(
        task, model, data, silo.job, silo.model.layout, silo.model.vector, round=1, client="hospital"
    )
    assert torch.equal(silo.delta(), expected.delta)
    assert upload.header.examples == 32
    assert {m.name: (m.sum, m.count) for m in upload.header.metrics} == expected.metrics
    assert {m.name for m in evaluated.metrics} == {"loss", "accuracy"}
    assert coordinator.downloads == [0]
    assert not list((silo.config.state / "spool").iterdir())
    assert coordinator.heard[-1].goodbye == agent_pb2.Goodbye(reason="the agent was stopped")
