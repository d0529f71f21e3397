"""How a job's steps speed up with the number of ranks: `roundtable client profile --worlds 1,2,4`.

Each rank runs `main` under torchrun, with the job's own batch for all worlds (strong scaling).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.config import load_agent_config
from roundtable.client.training.local_training import split_data
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.plan.model_probe import example_batch, probe_model
from roundtable.cluster.plan.planner import make_plan
from roundtable.cluster.plan.resources import find_resources
from roundtable.cluster.train.rank_trainer import RankTrainer, RoundProgress, StepReport
from roundtable.core.config import JobConfig, load_job
from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.layout import Layout
from roundtable.core.task import ArrayTask, Site, Task, initial_state, load_task

# Two steps warm up, the third is under the profiler.
_BEFORE = 3


@dataclass(frozen=True)
class ScalingPoint:
    """One number of ranks: speed, efficiency against the smallest world, share of time in collectives."""

    world: int
    strategy: str
    examples_per_second: float
    efficiency: float
    communication: float


def scaling(
    agent: Path, job_file: Path, overrides: Mapping[str, Any], worlds: Sequence[int], steps: int
) -> list[ScalingPoint]:
    """Runs the job's steps on each number of ranks of this machine, one after the other.

    Raises ConfigError for a job that no rank can train, ResourceError, with the ranks' last words, where
    they fail or there are more ranks than GPUs.
    """
    gpus = torch.cuda.device_count()
    if gpus and max(worlds) > gpus:
        raise ResourceError(f"{max(worlds)} ranks need as many CUDA devices, and this machine has {gpus}")
    order = json.dumps([str(agent), str(job_file), dict(overrides), steps])
    found: list[ScalingPoint] = []
    for world in sorted(worlds):
        one = _run(world, order)
        rate = one["examples_per_second"]
        base = found[0] if found else None
        ideal = base.examples_per_second / base.world * world if base else rate
        found.append(ScalingPoint(world, one["strategy"], rate, rate / ideal, one["communication"]))
    return found


def _run(world: int, order: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += ["-m", "roundtable.cluster.tools.scaling", order]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    said = [line for line in done.stderr.splitlines() if "Error" in line]
    raise ResourceError(f"{world} ranks failed: {said[-1].strip() if said else done.stderr[-300:]}")


def main() -> None:
    """One rank; rank 0 writes a JSON document to standard output."""
    agent, job_file, overrides, steps = json.loads(sys.argv[1])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=300))
    reports: list[StepReport] = []
    trainer, data = _trainer(Path(agent), Path(job_file), overrides, steps, device)
    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), reports.append)
    if dist.get_rank() == 0:
        timed = reports[_BEFORE:]
        rate = sum(report.examples for report in timed) / sum(report.seconds for report in timed)
        share = trainer.sampler.share or 0.0
        result = {"strategy": str(trainer.strategy), "examples_per_second": rate, "communication": share}
        print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


def _trainer(
    agent: Path, job_file: Path, overrides: dict[str, Any], steps: int, device: torch.device
) -> tuple[RankTrainer, Any]:
    job = load_job(job_file, {**overrides, "algorithm.steps": steps + _BEFORE})
    table, folder, options = ClusterTable(), job_file.resolve().parent, dict(job.simulation.data)
    name = job.task
    if agent.exists():
        config = load_agent_config(agent)
        table, folder, options = config.cluster or table, config.folder, dict(config.data)
        name = config.reference_of(job.task) or name
    task = load_task(name, folder)
    if isinstance(task, ArrayTask):
        raise ConfigError(f"task {name!r} is an ArrayTask, which is not spread over ranks")
    return _planned(task, job, table, options, device)


def _planned(
    task: Task, job: JobConfig, table: ClusterTable, options: dict[str, Any], device: torch.device
) -> tuple[RankTrainer, Any]:
    data, _ = split_data(task, Site("profile", options=options))
    here = table.model_copy(update={"nodes": 1, "devices": dist.get_world_size()})
    half = table.precision == "bfloat16"
    found = probe_model(task, example_batch(data), device=device.type, bfloat16=half)
    strategy = make_plan(found, find_resources(here), job, here).strategy
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    split = found.tensor_parallel if strategy.mesh.tp > 1 else None
    meshes = Meshes(strategy.mesh, device.type, apart=strategy.local_steps > 0)
    trainer = RankTrainer(task, job, layout, strategy, meshes, device, "profile", split)
    trainer.load(layout.flatten(model).clone(), {})
    return trainer, data


if __name__ == "__main__":
    main()
