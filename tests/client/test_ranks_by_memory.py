"""A silo takes the largest rank of which a training step fits its memory, says so, and keeps to it."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import agents, federation_of, silo
from pydantic import ValidationError

from roundtable.cli.jobs.job_record import job_record
from roundtable.cli.jobs.job_view import print_detail
from roundtable.client.first_batch.enough_memory import Room, check_room, of_rank
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.training.local_work import LocalWork
from roundtable.client.worker.own_model import forget_unused
from roundtable.client.worker.silo_state import rank_file
from roundtable.client.worker.step_room import settled_rank, tried_step
from roundtable.core import JobConfig, load_task, save_model
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.errors import ConfigError, InsufficientMemory
from roundtable.core.initial_model import initial_model
from roundtable.core.task import Site, Task
from roundtable.operator import OperatorClient
from roundtable.proto.operator_pb2 import JobDetail
from roundtable.simulation import simulate

MOST = 2048
TASK = f"""
import torch
from torch import nn
from roundtable.core import Task

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_A = nn.ModuleDict({{"default": nn.Linear(8, {MOST}, bias=False)}})
        self.lora_B = nn.ModuleDict({{"default": nn.Linear({MOST}, 8, bias=False)}})
        nn.init.zeros_(self.lora_B["default"].weight)
    def forward(self, x):
        return x + self.lora_B["default"](self.lora_A["default"](x))

class Toy(Task):
    def model(self):
        return nn.Sequential(*(Adapted() for _ in range(8)), Frozen())
    def data(self, site):
        x = torch.ones(4096, 8)
        return (x, 2 * x), (x, 2 * x)
    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1600, 1600), requires_grad=False)
    def forward(self, x):
        return x + self.weight[0, :8]
"""
JOB: dict[str, Any] = {
    "task": "toy",
    "rounds": 1,
    "cohort": {"size": 2},
    "algorithm": {
        "name": "flexlora",
        "batch_size": 4096,
        "learning_rate": 0.01,
        "steps": 1,
        "ranks_by_memory": [1, MOST],
    },
    "evaluation": {"every": 0},
}


async def test_the_record_tells_what_each_silos_memory_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nearly all that a step of rank 2048 needs is what the pass keeps, 260 MiB; of rank 1 it is 15 MiB."""
    job = JobConfig.model_validate(JOB)
    caplog.set_level(logging.INFO, "roundtable.agent")
    async with federation_of(tmp_path, TASK) as federation:
        small = replace(silo(federation, "alder"), policy=PolicyTable(max_memory="400MiB"))
        save_model(tmp_path / "initial.safetensors", initial_model(job, load_task("toy.py", tmp_path)))

        def ran() -> tuple[JobDetail, dict[str, Any]]:
            with OperatorClient(federation[0], tmp_path / "operator") as operator:
                submitted = operator.submit(job, tmp_path / "initial.safetensors")
                for update in operator.watch(submitted.id):
                    if update.detail.job.status == "paused":
                        break
                detail = operator.job(submitted.id)
                return detail, job_record(detail, (), ())

        async with agents(small, silo(federation, "birch")):
            detail, record = await asyncio.to_thread(ran)
    assert detail.job.status == "finished"
    assert {each.client: each.factor_rank for each in detail.setups} == {"alder": 1, "birch": MOST}
    assert [record["silos"][name]["setups"][0]["factor_rank"] for name in ("alder", "birch")] == [1, MOST]
    print_detail(detail)
    assert f"alder 1, birch {MOST} (by memory)" in capsys.readouterr().out
    said = sorted(each.getMessage() for each in caplog.records if "rank of this silo" in each.getMessage())
    assert len(said) == 2
    assert "is 1, of [1, 2048]: there are" in said[0]
    assert "this silo allows 400 MiB" in said[0]
    # FlexLoRA's update is of the ranks that were trained: alder's row, and all of birch's.
    assert json.loads(detail.history[0])["training"]["merge_error"][0] < 1e-3


def test_a_rank_is_kept_falls_where_it_must_and_never_rises(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TASK)
    job, task = JobConfig.model_validate(JOB), load_task("toy.py", tmp_path)
    model = initial_model(job, task)
    assert isinstance(task, Task)
    module, (data, _) = task.model(), task.data(Site("alder"))
    rules = make_algorithm(job.algorithm)
    work = LocalWork(job, model.layout, model.vector, 1, "alder", algorithm=rules)
    step = tried_step(task, module, data, work, torch.device("cpu"))
    assert step is not None
    held = step.held
    least, most = (of_rank(step, rank).needed(step.examples) for rank in (1, MOST))
    assert most > 10 * least

    def chosen(there: int | None, of: str = "job") -> int:
        room = None if there is None else Room(there - held, "free here")
        return settled_rank(step, [MOST, 1], room, rank_file(tmp_path, of))

    assert chosen(2 * most) == MOST
    assert chosen(most) == MOST  # It is tight, and kept.
    assert chosen(most - 1) == 1
    assert chosen(2 * most) == 1
    forget_unused(tmp_path, "job")
    assert chosen(2 * most) == MOST  # Another job.
    assert chosen(most, "tight") == 1
    assert chosen(None, "unknown") == 1
    assert settled_rank(None, [MOST, 1], Room(2 * most, ""), tmp_path / "no step") == 1
    with pytest.raises(InsufficientMemory, match=r"What would fit, by estimate: .*factors of rank 1024 \("):
        check_room(of_rank(step, MOST), Room(most - 1 - held, "free here"))


def test_a_simulated_client_takes_the_rank_that_its_stated_memory_holds(tmp_path: Path) -> None:
    """With the bits of the job that names these ranks; what cannot be is refused before round 1."""
    (tmp_path / "toy.py").write_text(TASK)

    heard: list[Any] = []

    def simulated(memory: list[str], **algorithm: Any) -> Any:
        capacity = {"memory": memory} if memory else {}
        table = {"clients": 2, "backend": "sequential", "capacity": capacity}
        own = {**JOB["algorithm"], "batch_size": 512, **algorithm}
        job = {**JOB, "task": "toy.py", "algorithm": own, "simulation": table}
        return simulate(JobConfig.model_validate(job), folder=tmp_path, progress=heard.append)

    result = simulated(["1GiB", "32MiB"])
    told = [each.note.message for each in heard if each.note is not None and each.note.kind == "client_ranks"]
    assert told == [f"ranks of factors by memory: 1 at client-0; {MOST} at client-1"]
    named = simulated([], ranks={"client-0": 1, "client-1": MOST}, ranks_by_memory=[])
    assert torch.equal(named.model.vector, result.model.vector)
    with pytest.raises(ConfigError, match=r"nobody says what memory client-0 has; set memory in \["):
        simulated([])
    with pytest.raises(
        InsufficientMemory,
        match=r"with factors of rank 1 needs .*there are 10.00 MiB .the memory of client-0",
    ):
        simulated(["10MiB"])


@pytest.mark.parametrize("choices", [[4, 2], [2, 2], [0, 2]])
def test_ranks_are_named_once_and_the_smallest_first(choices: list[int]) -> None:
    with pytest.raises(ValidationError, match="ranks_by_memory"):
        JobConfig.model_validate({**JOB, "algorithm": {"name": "flora", "ranks_by_memory": choices}})
