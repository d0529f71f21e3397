"""The agent against a scripted coordinator: real gRPC, real TLS; each step once, whatever happens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from roundtable.client import Refused, train
from roundtable.client.agent.agent import Agent
from roundtable.client.agent.connection import explain
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.training.local_work import LocalWork
from roundtable.core import JobConfig, Site, initial_state, load_task
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import ConfigError, IdentityError, ResourceError, UnavailableError
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.proto import agent_pb2

KEY = ("job-1", 1, 1, "train")


def expected_delta(silo: Any, round: int = 1) -> torch.Tensor:
    task = load_task("toy.py", silo.config.folder)
    data, _ = task.data(Site("hospital"))
    model = initial_state(task, silo.job.seed)
    layout, vector = silo.model.layout, silo.model.vector
    return train(task, model, data, LocalWork(silo.job, layout, vector, round, "hospital")).delta


async def test_a_round_is_trained_uploaded_and_evaluated(silo) -> None:
    coordinator = silo.coordinator
    async with silo.agent(silo.inline()):
        assert list(coordinator.hellos[0].tasks) == ["toy"]
        coordinator.say(instruction=silo.instruction())
        accepted = await coordinator.hear("accepted")
        assert (accepted.step.job, accepted.step.round) == ("job-1", 1)
        await coordinator.until(lambda: coordinator.receipts)
        coordinator.say(instruction=silo.instruction(phase="evaluate"))
        evaluated = await coordinator.hear("evaluated")
        await coordinator.until(lambda: silo.spooled == [])
    assert torch.equal(silo.delta(), expected_delta(silo))
    header = coordinator.uploads[KEY].header
    assert header.examples == 32
    assert [(m.name, m.count) for m in header.metrics] == [("loss", 32)]
    assert {m.name for m in evaluated.metrics} == {"loss", "accuracy"}
    assert coordinator.downloads == [0]
    assert coordinator.heard[-1].goodbye.reason == "the agent was stopped"


async def test_a_step_asked_twice_is_done_once(silo) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    trainer.gate = asyncio.Event()
    async with silo.agent(trainer):
        for _ in range(3):
            coordinator.say(instruction=silo.instruction())
            await coordinator.hear("accepted")
        trainer.gate.set()
        await coordinator.until(lambda: coordinator.receipts)
        for _ in range(2):
            coordinator.say(instruction=silo.instruction(phase="evaluate"))
            await coordinator.hear("evaluated")
    assert [step.phase for step in trainer.done] == ["train", "evaluate"]
    assert coordinator.uploads[KEY].offsets == [0]


@pytest.mark.parametrize("phase", ["train", "evaluate"])
async def test_nothing_leaves_that_came_of_a_model_that_rotted_meanwhile(silo, log, phase: str) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    done = getattr(trainer, phase)

    async def spoiled(work: Any, progress: Any) -> Any:
        result, before = await done(work, progress), work.model.stat()
        data = work.model.read_bytes()
        work.model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(work.model, ns=(before.st_atime_ns, before.st_mtime_ns))
        return result

    setattr(trainer, phase, spoiled)
    async with silo.agent(trainer):
        coordinator.say(instruction=silo.instruction(phase=phase))
        failed = await coordinator.hear("failure")
        assert (failed.kind, "damaged on the silo's own disk" in failed.detail) == ("data_corruption", True)
        assert not coordinator.uploads
        setattr(trainer, phase, done)
        coordinator.say(instruction=silo.instruction(attempt=2, phase=phase))
        if phase == "train":
            await coordinator.until(lambda: coordinator.receipts)
        else:
            await coordinator.hear("evaluated")
    assert coordinator.downloads == [0, 0]


BY_SPEED = {"name": "fednova", "steps": 6, "work": "by_speed", "batch_size": 8}


async def test_the_steps_that_the_coordinator_gives_by_speed_are_taken(silo) -> None:
    """The update is that of a job of so many steps, over ‖a‖₁ = K."""
    plain = replace(
        silo, job=silo.job.model_copy(update={"algorithm": AlgorithmTable(steps=2, batch_size=8)})
    )
    silo = replace(silo, job=JobConfig.model_validate({"task": "toy", "seed": 3, "algorithm": BY_SPEED}))
    coordinator = silo.coordinator
    async with silo.agent():
        coordinator.say(instruction=silo.instruction(steps=2))
        await coordinator.until(lambda: coordinator.receipts)
    torch.testing.assert_close(silo.delta(), expected_delta(plain) / 2)


@pytest.mark.parametrize(("algorithm", "steps"), [(BY_SPEED, 7), (BY_SPEED, 0), ({"steps": 6}, 2)])
async def test_steps_that_the_job_does_not_allow_are_refused(silo, algorithm: Any, steps: int) -> None:
    silo = replace(silo, job=JobConfig.model_validate({"task": "toy", "seed": 3, "algorithm": algorithm}))
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=silo.instruction(steps=steps))
        failed = await silo.coordinator.hear("failure")
    assert failed.kind == "protocol_violation"
    assert f"asked for {steps or 'no number of'} steps, and the job says work = " in failed.detail


async def test_a_newer_attempt_ends_the_older_one(silo) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    trainer.gate = asyncio.Event()
    async with silo.agent(trainer):
        coordinator.say(instruction=silo.instruction(attempt=1))
        await coordinator.hear("accepted")
        coordinator.say(instruction=silo.instruction(attempt=2))
        await coordinator.hear("accepted")
        trainer.gate.set()
        await coordinator.until(lambda: coordinator.receipts)
    assert list(coordinator.receipts) == [("job-1", 1, 2, "train")]


async def test_an_update_finished_while_the_coordinator_was_away_is_delivered(silo, log) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    trainer.gate = asyncio.Event()
    async with silo.agent(trainer):
        coordinator.say(instruction=silo.instruction())
        await log.until("training")
        await coordinator.stop()
        trainer.gate.set()
        await log.until("trained on 32 examples")
        await coordinator.start()
        await coordinator.until(lambda: coordinator.receipts)
        await log.until("connected again")
    assert torch.equal(silo.delta(), expected_delta(silo))
    assert coordinator.hellos[1].spooled[0].round == 1
    assert len(trainer.done) == 1


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (agent_pb2.UploadReceipt.STALE, "came too late"),
        (agent_pb2.UploadReceipt.REJECTED, "rejected the update: norm"),
        (agent_pb2.UploadReceipt.DUPLICATE, "delivered"),
    ],
)
async def test_the_spool_follows_the_coordinators_word(silo, log, status: Any, line: str) -> None:
    coordinator = silo.coordinator
    coordinator.receipts[KEY] = agent_pb2.UploadReceipt(status=status, reason="norm")
    async with silo.agent(silo.inline()):
        coordinator.say(instruction=silo.instruction())
        await log.until(line)
        await coordinator.until(lambda: silo.spooled == [])


async def test_an_upload_that_broke_off_goes_on_where_it_stopped(silo) -> None:
    coordinator = silo.coordinator
    coordinator.cut_upload = 100
    async with silo.agent(silo.inline()):
        coordinator.say(instruction=silo.instruction())
        await coordinator.until(lambda: coordinator.receipts)
    assert coordinator.uploads[KEY].offsets == [0, 100]
    assert torch.equal(silo.delta(), expected_delta(silo))


async def test_a_download_that_broke_off_goes_on_where_it_stopped(silo) -> None:
    coordinator = silo.coordinator
    coordinator.cut_download = 128
    async with silo.agent(silo.inline()):
        coordinator.say(instruction=silo.instruction())
        await coordinator.until(lambda: coordinator.receipts)
    assert coordinator.downloads == [0, 128]
    assert torch.equal(silo.delta(), expected_delta(silo))


def cached(silo: Any) -> tuple[Path, bytes]:
    """Where the model will be kept, and its bytes."""
    digest = silo.instruction().train.model.digest
    folder = silo.config.state / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest}.safetensors", silo.coordinator.artifacts[digest]


@pytest.mark.parametrize(
    ("lies", "downloads"),
    [
        (lambda path, data: path.with_suffix(".partial").write_bytes(data[:200]), [200]),
        (lambda path, data: path.with_suffix(".partial").write_bytes(data), []),
        (lambda path, data: path.with_suffix(".partial").write_bytes(b"?" * 200), [200, 0]),
        (lambda path, data: path.with_suffix(".partial").write_bytes(data + b"?"), [0]),
        (lambda path, data: path.write_bytes(data), []),
        (lambda path, data: path.write_bytes(data[:-1] + b"?"), [0]),
    ],
)
async def test_what_an_earlier_process_downloaded_is_used_if_it_is_right(
    silo, lies: Callable[[Path, bytes], int], downloads: list[int]
) -> None:
    lies(*cached(silo))
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=silo.instruction())
        await silo.coordinator.until(lambda: silo.coordinator.receipts)
    assert silo.coordinator.downloads == downloads
    assert torch.equal(silo.delta(), expected_delta(silo))


async def test_a_model_with_other_bytes_than_its_digest_is_reported(silo) -> None:
    path, data = cached(silo)
    silo.coordinator.artifacts[path.stem] = data[:-1] + b"?"
    instruction = silo.instruction()
    silo.coordinator.artifacts[path.stem] = data[:-1] + b"?"
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=instruction)
        failure = await silo.coordinator.hear("failure")
    assert failure.kind == "data_corruption"
    assert silo.coordinator.downloads == [0, 0, 0]


async def test_only_the_newest_models_are_kept(silo) -> None:
    silo.config = replace(silo.config, cached_models=2)
    async with silo.agent(silo.inline()):
        for round in range(1, 5):
            silo.model = replace(silo.model, metadata={"round": str(round)})
            silo.coordinator.say(instruction=silo.instruction(round))
            await silo.coordinator.until(
                lambda key=("job-1", round, 1, "train"): key in silo.coordinator.receipts
            )
    assert len(list((silo.config.state / "models").iterdir())) == 2


async def test_a_withdrawn_step_is_forgotten(silo, log) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    trainer.gate = asyncio.Event()
    async with silo.agent(trainer):
        coordinator.say(instruction=silo.instruction())
        await log.until("training")
        step = silo.instruction().step
        coordinator.say(withdraw=agent_pb2.Withdraw(step=step, reason="enough updates"))
        await log.until("withdrawn (enough updates)")
        coordinator.say(instruction=silo.instruction(round=2))
        trainer.gate.set()
        await coordinator.until(lambda: coordinator.receipts)
    assert [step.round for step in trainer.done] == [2]


async def test_a_step_asked_for_again_while_it_is_withdrawn_is_worked_on_anew(silo, log) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    trainer.gate, first, ended = asyncio.Event(), trainer.train, asyncio.Event()

    async def train_and_end_slowly(*given: Any) -> Any:
        try:
            return await first(*given)
        except asyncio.CancelledError:
            await ended.wait()
            raise

    trainer.train = train_and_end_slowly
    async with silo.agent(trainer):
        coordinator.say(instruction=silo.instruction())
        await log.until("training")
        coordinator.say(withdraw=agent_pb2.Withdraw(step=silo.instruction().step, reason="not yet"))
        coordinator.say(instruction=silo.instruction())
        await coordinator.hear("accepted")
        await coordinator.hear("accepted")
        trainer.gate.set()
        ended.set()
        await coordinator.until(lambda: coordinator.receipts)
    assert [step.round for step in trainer.done] == [1]


async def test_work_past_its_deadline_is_given_up(silo) -> None:
    trainer = silo.inline()
    trainer.gate = asyncio.Event()
    async with silo.agent(trainer):
        silo.coordinator.say(instruction=silo.instruction(deadline=0.2))
        failure = await silo.coordinator.hear("failure")
    assert failure.kind == "slow_node"
    assert trainer.done == []


async def test_a_task_that_the_silo_does_not_offer_is_refused(silo) -> None:
    silo.config = replace(silo.config, tasks={"other": "toy.py"})
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=silo.instruction())
        failure = await silo.coordinator.hear("failure")
    assert failure.kind == "refused"
    assert "does not offer the task 'toy'" in failure.detail


async def test_a_job_of_another_version_is_reported(silo) -> None:
    instruction = silo.instruction()
    instruction.job_config = '{"task": "toy", "quantum": true}'
    async with silo.agent(silo.inline()):
        silo.coordinator.say(instruction=instruction)
        failure = await silo.coordinator.hear("failure")
    assert failure.kind == "protocol_violation"
    assert "quantum" in failure.detail


async def test_a_silent_coordinator_is_left_and_sought_again(silo, log, monkeypatch) -> None:
    silo.coordinator.beat = 0.05
    monkeypatch.setattr(type(silo.coordinator), "say", lambda self, **message: None)
    async with silo.agent(silo.inline()):
        await log.until("has been silent")
        await silo.coordinator.until(lambda: len(silo.coordinator.hellos) == 2)


async def test_a_clock_that_is_off_and_another_coordinator_are_noticed(silo, log) -> None:
    silo.coordinator.clock_offset = 3600.0
    async with silo.agent(silo.inline()):
        await log.until("differs from the coordinator's by 3600 s")
        await silo.coordinator.stop()
        silo.coordinator.identity = "database-2"
        await silo.coordinator.start()
        await log.until("another coordinator than before")


async def test_a_refusal_ends_the_agent_with_its_reason(silo) -> None:
    silo.coordinator.refuse = "this coordinator speaks protocol 7"
    with pytest.raises(Refused, match="speaks protocol 7"):
        await Agent(silo.config, silo.inline()).run()


async def test_an_end_that_grpc_cannot_tell_is_said_as_such(silo) -> None:
    none = grpc.aio.Metadata()
    untold = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, "Internal error from Core")
    said = await explain(untold, silo.config.coordinator, silo.config.credentials)
    assert isinstance(said, UnavailableError)
    assert "it ended while this agent was writing; the next attempt may learn why" in str(said)


async def test_two_agents_cannot_share_a_state_folder(silo) -> None:
    async with silo.agent(silo.inline()):
        with pytest.raises(ResourceError, match=r"in use by another agent \(process \d+\)"):
            await Agent(silo.config, silo.inline()).run()


async def test_an_agent_without_tasks_trainer_or_role_does_not_start(silo, authority: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[tasks\]"):
        Agent(replace(silo.config, tasks={}))
    with pytest.raises(ConfigError, match=r"\[cluster\]"):
        Agent(replace(silo.config, cluster=ClusterTable()))
    with pytest.raises(IdentityError, match="role"):
        await Agent(replace(silo.config, credentials=authority / "coordinator")).run()
    with pytest.raises(ResourceError, match="CUDA"):
        await Agent(replace(silo.config, device="cuda:99")).run()


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """Credentials of an authority that the coordinator does not know."""
    create_ca(tmp_path / "other")
    return issue(tmp_path / "other", "hospital", "agent", tmp_path / "stranger")


async def test_an_unknown_authority_is_named_once_and_mended_without_a_restart(
    silo, log, stranger: Path, authority: Path, monkeypatch
) -> None:
    monkeypatch.setattr("roundtable.client.agent.agent._SLOW_SECONDS", 0.05)
    silo.config = replace(silo.config, credentials=stranger)
    agent = Agent(silo.config, silo.inline())
    running = asyncio.create_task(agent.run())
    line = await log.until("not connected")
    assert "another authority" in line
    for file in (authority / "hospital").iterdir():
        (stranger / file.name).write_bytes(file.read_bytes())
    await silo.coordinator.until(lambda: silo.coordinator.hellos)
    await log.until("connected to")
    agent.stop()
    await running
    assert sum("another authority" in line for line in log.lines) == 1


async def test_a_wrong_name_in_the_coordinators_certificate_is_named(silo, log, tmp_path, authority) -> None:
    address = f"localhost:{silo.coordinator.port}"
    elsewhere = issue(
        authority / "ca", "elsewhere", "coordinator", tmp_path / "elsewhere", hosts=("example.org",)
    )
    await silo.coordinator.stop()
    other = type(silo.coordinator)(elsewhere)
    await other.start()
    silo.config = replace(
        silo.config, coordinator=address.replace(str(silo.coordinator.port), str(other.port))
    )
    agent = Agent(silo.config, silo.inline())
    running = asyncio.create_task(agent.run())
    line = await log.until("not connected")
    assert "not for the name 'localhost'" in line
    agent.stop()
    await running
    await other.stop()


async def test_nobody_at_the_address_is_said_and_waited_for(silo, log) -> None:
    await silo.coordinator.stop()
    agent = Agent(silo.config, silo.inline())
    running = asyncio.create_task(agent.run())
    assert "nothing listens" in await log.until("not connected")
    await silo.coordinator.start()
    await silo.coordinator.until(lambda: silo.coordinator.hellos)
    agent.stop()
    await running


async def test_a_mistake_of_the_agents_own_is_reported_at_once(silo, log, monkeypatch) -> None:
    trainer = silo.inline()

    async def broken(work: Any, progress: Any) -> Any:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(trainer, "train", broken)
    async with silo.agent(trainer):
        silo.coordinator.say(instruction=silo.instruction())
        failure = await silo.coordinator.hear("failure")
    assert failure.kind == "node_failure"
    assert "its log says why" in failure.detail
    assert "nobody" not in failure.detail


async def test_what_was_delivered_is_sent_again_when_it_is_asked_for_again(silo, log) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    async with silo.agent(trainer):
        coordinator.say(instruction=silo.instruction())
        await log.until("delivered")
        first = bytes(coordinator.uploads[KEY].data)
        coordinator.receipts.clear()
        coordinator.say(instruction=silo.instruction())
        await coordinator.until(lambda: coordinator.receipts)
        assert bytes(coordinator.uploads[KEY].data) == first
        assert coordinator.uploads[KEY].offsets == [0, 0]
        await log.until("delivered before, and asked for again")
        await coordinator.until(lambda: silo.spooled == [])
        coordinator.say(instruction=silo.instruction(phase="evaluate"))
        await coordinator.hear("evaluated")
        assert list((silo.config.state / "spool").iterdir()) == []
    assert [step.phase for step in trainer.done] == ["train", "evaluate"]


async def test_an_update_that_is_damaged_on_the_silos_disk_is_made_again(silo, log) -> None:
    coordinator, trainer = silo.coordinator, silo.inline()
    coordinator.damaged = 2

    def spoil() -> None:
        (silo.config.state / "spool" / "job-1.1.1.train.update").write_bytes(b"rotten")

    coordinator.when_damaged = spoil
    async with silo.agent(trainer):
        coordinator.say(instruction=silo.instruction())
        trouble = await coordinator.hear("trouble")
        coordinator.when_damaged = lambda: None
        await coordinator.until(lambda: coordinator.receipts)
    assert (trouble.kind, trouble.action) == ("data_corruption", "trains again")
    assert trouble.detail == "the finished update was damaged on the silo's own disk"
    assert torch.equal(silo.delta(), expected_delta(silo))
    assert len(trainer.done) == 2
