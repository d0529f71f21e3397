"""What happens in the training process is reported, and the agent lives; what is finished survives a kill."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_processes import ask, workers

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.worker.training_process import post_mortem
from roundtable.client.worker.worker_trainer import WorkerTrainer
from roundtable.core.initial_model import initial_model
from roundtable.core.task import load_task

KEY = ("job-1", 1, 1, "train")
AGENT = """
import sys
from roundtable.client import load_agent_config, run_agent
sys.exit(run_agent(load_agent_config(__import__("pathlib").Path(sys.argv[1]))))
"""


async def test_whatever_happens_in_training_is_reported_and_the_agent_lives(silo) -> None:
    async with silo.agent():
        assert await ask(silo, 1) is None
        first = workers(os.getpid())
        assert len(first) == 1
        silo.play("raise")
        failure = await ask(silo, 2)
        assert failure.kind == "task_error"
        assert "ValueError in toy.py, line" in failure.detail
        assert "Jane Doe" not in failure.detail
        silo.play("nan")
        failure = await ask(silo, 3)
        assert failure.kind == "invalid_update"
        assert "loss is nan at step 1, epoch 1 of round 3" in failure.detail
        assert workers(os.getpid()) == first
        silo.play("memory")
        assert (await ask(silo, 4)).kind == "out_of_memory"
        silo.play("")
        assert await ask(silo, 5) is None
        assert workers(os.getpid()) not in ([], first)
        silo.play("crash")
        failure = await ask(silo, 6)
        assert (failure.kind, failure.detail) == ("task_error", "the training process crashed (SIGSEGV)")
        silo.play("kill")
        failure = await ask(silo, 7)
        assert failure.kind == "node_failure"
        assert "SIGKILL" in failure.detail
    assert workers(os.getpid()) == []


async def test_withdrawn_training_stops_and_the_process_stays_warm(silo, log, monkeypatch) -> None:
    coordinator = silo.coordinator
    silo.job = silo.job.model_copy(
        update={"algorithm": silo.job.algorithm.model_copy(update={"epochs": 100_000})}
    )
    silo.play("slow")
    monkeypatch.setattr("roundtable.client.worker.training_process._STOP_SECONDS", 60.0)
    async with silo.agent():
        coordinator.say(instruction=silo.instruction(1))
        await coordinator.until(
            lambda: any(m.HasField("progress") and m.progress.done for m in coordinator.heard)
        )
        warm = workers(os.getpid())
        coordinator.say(withdraw={"step": silo.instruction(1).step, "reason": "enough"})
        coordinator.say(instruction=silo.instruction(2, phase="evaluate"))
        await coordinator.hear("evaluated")
        assert workers(os.getpid()) == warm
        monkeypatch.setattr("roundtable.client.worker.training_process._STOP_SECONDS", 0.1)
        silo.play("hang")
        coordinator.say(instruction=silo.instruction(3))
        await log.until("task: hanging")
        coordinator.say(withdraw={"step": silo.instruction(3).step, "reason": "enough"})
        coordinator.say(instruction=silo.instruction(4, phase="evaluate"))
        (silo.config.folder / "trick").unlink()
        await coordinator.hear("evaluated")
        assert workers(os.getpid()) != warm


@pytest.mark.slow
async def test_a_step_in_line_says_so_and_its_time_does_not_run(silo, log, monkeypatch) -> None:
    coordinator = silo.coordinator
    monkeypatch.setattr("roundtable.client.worker.training_process._STOP_SECONDS", 0.1)

    def queued(job: str) -> list[bool]:
        said = (m.accepted for m in coordinator.heard if m.HasField("accepted"))
        # What a silo trains on it tells apart, once it is known.
        return [each.queued for each in said if each.step.job == job and not each.HasField("setup")]

    def beats() -> int:
        return sum(m.HasField("heartbeat") for m in coordinator.heard)

    def asked(job: str, seconds: float) -> Any:
        instruction = silo.instruction(1, deadline=seconds)
        instruction.step.job = job
        return instruction

    async with silo.agent():
        silo.play("hang")
        coordinator.say(instruction=silo.instruction(1))
        await log.until("task: hanging")
        coordinator.say(instruction=asked("job-2", 3 * coordinator.beat))
        coordinator.say(instruction=asked("job-3", 600.0))
        await coordinator.until(lambda: queued("job-2") == queued("job-3") == [False, True])
        before = beats()
        await coordinator.until(lambda: beats() > before + 4)
        coordinator.say(instruction=asked("job-2", 0.0))
        await coordinator.until(lambda: queued("job-2") == [False, True, True])
        assert not any(m.HasField("failure") for m in coordinator.heard)
        coordinator.say(withdraw={"step": asked("job-2", 0.0).step, "reason": "enough"})
        (silo.config.folder / "trick").unlink()
        coordinator.say(withdraw={"step": silo.instruction(1).step, "reason": "enough"})
        await coordinator.until(lambda: ("job-3", 1, 1, "train") in coordinator.uploads)
        assert queued("job-3") == [False, True, False]


async def test_a_full_disk_is_said_and_healed(silo) -> None:
    async with silo.agent():
        assert await ask(silo, 1) is None
        (worker,) = workers(os.getpid())
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        failure = await ask(silo, 2)
        assert failure.kind == "node_failure"
        assert "disk is full" in failure.detail
        assert "state folder" in failure.detail
        await silo.coordinator.until(lambda: silo.spooled == [])
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert await ask(silo, 3) is None


def agent_file(silo: Any) -> Path:
    path: Path = silo.config.folder / "agent.toml"
    path.write_text(
        f'coordinator = "{silo.config.coordinator}"\n'
        f'credentials = "{silo.config.credentials}"\n'
        'tasks = { toy = "toy.py" }\n[limits]\ndevice = "cpu"\nthreads = 1\n'
    )
    return path


async def start(silo: Any) -> asyncio.subprocess.Process:
    greeted = len(silo.coordinator.hellos)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, str(agent_file(silo)))
    await silo.coordinator.until(lambda: len(silo.coordinator.hellos) > greeted)
    return process


async def test_a_killed_agent_delivers_from_its_spool_without_training_again(silo) -> None:
    coordinator = silo.coordinator
    process = await start(silo)
    coordinator.cut_upload, coordinator.cut_again = 40, True
    coordinator.say(instruction=silo.instruction())
    await coordinator.until(lambda: KEY in coordinator.uploads and "job-1.1.1.train.json" in silo.spooled)
    orphans = workers(process.pid)
    process.kill()
    await process.wait()
    assert len(orphans) == 1
    coordinator.cut_upload = None
    trainer = silo.inline()
    async with silo.agent(trainer):
        await coordinator.until(lambda: coordinator.receipts)
    assert coordinator.uploads[KEY].offsets[-1] == 40
    assert coordinator.hellos[-1].spooled[0].job == "job-1"
    assert trainer.done == []
    assert torch.isfinite(silo.delta()).all()
    assert workers(1) == []


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)],
)
async def test_a_signal_stops_the_agent_cleanly(silo, number: signal.Signals, status: int) -> None:
    process = await start(silo)
    await silo.coordinator.hear("heartbeat")
    process.send_signal(number)
    assert await process.wait() == status
    assert (await silo.coordinator.hear("goodbye")).reason == "the agent was stopped"
    assert workers(process.pid) == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
async def test_what_a_whole_service_is_told_ends_no_training(silo, number: signal.Signals) -> None:
    """`systemctl kill --signal HUP`, Ctrl-C and a terminal that closes reach the training process too."""
    async with silo.agent():
        assert await ask(silo, 1) is None
        [process] = workers(os.getpid())
        os.kill(process, number)
        assert await ask(silo, 2) is None
        assert workers(os.getpid()) == [process]


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [(3, 4, "out_of_memory"), (3, 3, "node_failure"), (None, None, "out_of_memory")],
)
def test_a_kill_is_called_out_of_memory_on_evidence(monkeypatch, before, after, kind: str) -> None:
    monkeypatch.setattr("roundtable.client.worker.training_process.memory_kills", lambda: after)
    assert post_mortem(-signal.SIGKILL, before, []).kind == kind
    early = post_mortem(-signal.SIGKILL, before, [], begun=False)
    assert (early.kind, early.whole) == (kind, kind == "out_of_memory")
    assert ("no smaller batch_size would help" in early.detail) == early.whole


async def test_training_that_holds_more_memory_than_the_policy_allows_ends(silo) -> None:
    silo.config = replace(silo.config, policy=PolicyTable(max_memory="50 MiB"))
    async with silo.agent():
        failure = await ask(silo, 1)
    assert failure.kind == "out_of_memory"
    assert "this silo allows 50 MiB ([policy] max_memory)" in failure.detail
    silo.config = replace(silo.config, policy=PolicyTable(max_memory="1TiB"))
    async with silo.agent():
        assert await ask(silo, 2) is None


async def test_a_silo_whose_frozen_weights_differ_is_refused_by_name(silo, log) -> None:
    path = silo.config.folder / "toy.py"
    code = path.read_text()
    model = "        return nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 3))\n"
    frozen = (
        "        made = nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 3))\n"
        "        made[0].requires_grad_(False).bias.data.add_(0.0)\n        return made\n"
    )
    assert model in code
    path.write_text(code.replace(model, frozen))
    shutil.copy(path, path.with_name("same.py"))
    silo.model = initial_model(silo.job, load_task("same.py", silo.config.folder))
    async with silo.agent():
        assert await ask(silo, 1) is None
        assert len(silo.delta()) == silo.model.layout.size == 27
    path.write_text(code.replace(model, frozen.replace("0.0", "0.5")))
    async with silo.agent():
        failure = await ask(silo, 2)
        assert "'0.bias' is float32 [8] (frozen with values of digest" in failure.detail
        assert "pretrained weights" in failure.detail


async def test_of_a_job_that_is_over_a_silos_own_model_alone_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AgentConfig("c:1", tmp_path, tmp_path, device="cpu", folder=tmp_path)
    trainer = WorkerTrainer(config, "north", tmp_path / "jobs")
    kept = {}
    for job, other in (("plain", ""), ("personal", "order.json"), ("asked", "released-1.safetensors")):
        for name in ("round-1.1.safetensors", "round-2.1.safetensors", other):
            path = tmp_path / "jobs" / job / (name or "round-3.1.safetensors")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        kept[job] = path.parent
        trainer.release(job, met=False)
    trainer.release("never-seen", met=False)
    (tmp_path / "jobs" / "stuck" / "round-1.1.safetensors").mkdir(parents=True)
    trainer.release("stuck", met=False)
    await trainer.close()
    assert "what job stuck kept here could not be removed" in caplog.text
    assert not kept["plain"].exists()
    assert len(list(kept["personal"].iterdir())) == 3
    # A release with noise is the same whoever asks again.
    assert [file.name for file in kept["asked"].iterdir()] == ["released-1.safetensors"]
