"""Measures how a job's steps speed up with ranks: `roundtable client profile --worlds 1,2,4`.

Each rank runs `main` under torchrun, with the job's own batch for all worlds (strong scaling).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.plan.arithmetic import count_work
from roundtable.cluster.plan.device_peaks import peak_flops
from roundtable.cluster.plan.launch_variables import LaunchVariables
from roundtable.cluster.plan.model_probe import example_batch
from roundtable.cluster.plan.resources import find_resources
from roundtable.cluster.tools.local_ranks import check_world, print_result, run_ranks
from roundtable.cluster.tools.planning import plan_task
from roundtable.cluster.tools.silo_job import load_silo_job, open_data
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundFigures, RoundProgress, StepReport
from roundtable.core.layout import Layout
from roundtable.core.task import initial_state

# Two steps warm up, the third is under the profiler.
_BEFORE = 3


@dataclass(frozen=True)
class ScalingPoint:
    """One number of ranks: speed, efficiency against the smallest world, share of time in collectives.

    `report` is as of a round, of rank 0.
    """

    world: int
    strategy: str
    examples_per_second: float
    efficiency: float
    communication: float
    report: dict[str, Any]


def scaling(
    agent: Path, job_file: Path, overrides: Mapping[str, Any], worlds: Sequence[int], steps: int
) -> list[ScalingPoint]:
    """Runs the job's steps on each number of ranks of this machine, one after the other.

    Raises ConfigError for a job that no rank can train, ResourceError as `run_ranks` does.
    """
    check_world(max(worlds))
    order = json.dumps([str(agent), str(job_file), dict(overrides), steps])
    points: list[ScalingPoint] = []
    for world in sorted(worlds):
        one = run_ranks(world, "roundtable.cluster.tools.scaling", order)
        rate = one["examples_per_second"]
        base = points[0] if points else None
        ideal = base.examples_per_second / base.world * world if base else rate
        points.append(
            ScalingPoint(
                world=world,
                strategy=one["strategy"],
                examples_per_second=rate,
                efficiency=rate / ideal,
                communication=one["communication"],
                report=one["report"],
            )
        )
    return points


def main() -> None:
    """One rank; rank 0 writes a JSON document to standard output."""
    agent, job_file, overrides, steps = json.loads(sys.argv[1])
    cuda = torch.cuda.is_available()
    place = LaunchVariables.read(os.environ)
    device = torch.device("cuda", place.device_of(torch.cuda.device_count())) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=300))
    reports: list[StepReport] = []
    trainer, data, memory = _trainer(Path(agent), Path(job_file), overrides, steps, device)
    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), reports.append)
    if dist.get_rank() == 0:
        timed = reports[_BEFORE:]
        rate = sum(report.examples for report in timed) / sum(report.seconds for report in timed)
        figures = RoundFigures()
        for report in timed:
            figures.add(report)
        plan = {"plan": str(trainer.strategy), "strategy": trainer.strategy.to_plain()}
        result = {
            "strategy": str(trainer.strategy),
            "examples_per_second": rate,
            "communication": trainer.sampler.share or 0.0,
            "report": {**figures.alone(memory), **plan},
        }
        print_result(result)
    dist.destroy_process_group()


def _trainer(
    agent: Path, job_file: Path, overrides: dict[str, Any], steps: int, device: torch.device
) -> tuple[RankTrainer, Any, float]:
    """(this rank's trainer with the task's initial model, the silo's training data, a GPU's bytes or 0)."""
    loaded = load_silo_job(agent, job_file, {**overrides, "algorithm.steps": steps + _BEFORE})
    task, job = loaded.task, loaded.job
    table = loaded.table.model_copy(update={"nodes": 1, "devices": dist.get_world_size()})
    plan = plan_task(task, job, table, find_resources(table), loaded.options)
    data, _ = open_data(task, "profile", loaded.options)
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    trainer = RankTrainer(
        task=task,
        job=job,
        layout=layout,
        strategy=plan.strategy,
        meshes=Meshes(plan.strategy.mesh, device.type, apart=plan.strategy.local_steps > 0),
        device=device,
        client="profile",
        tensor_parallel=plan.tensor_parallel,
    )
    trainer.load(layout.flatten(model).clone(), {})
    trainer.work = count_work(task, example_batch(data))
    trainer.peak = peak_flops(table, device, plan.strategy.precision)
    return trainer, data, plan.resources.memory if device.type == "cuda" else 0.0


if __name__ == "__main__":
    main()
