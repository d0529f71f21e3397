"""Cases of distributed training, run on the ranks of one process group one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_models import Language, Mixture
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roundtable.client.cluster.anatomy import dissect
from roundtable.client.cluster.bench import Bench, Progress
from roundtable.client.cluster.meshes import Meshes
from roundtable.client.cluster.shards import plain_name, prepare_update, write_deltas
from roundtable.client.cluster.strategy import Strategy
from roundtable.client.cluster.tensor_parallel import find_tensor_parallel
from roundtable.client.cluster.tracing import fake_model, trace
from roundtable.client.training import train
from roundtable.core import JobConfig, Layout
from roundtable.core.task import Site, Task, initial_state


@dataclass(frozen=True)
class Case:
    """A strategy on a task; `tolerance` bounds max|a − b| / max|b| of any weight's change."""

    name: str
    strategy: Strategy
    task: Task
    algorithm: dict[str, Any]
    tolerance: float = 1e-10


class WithAdam(Language):
    """AdamW, in float64 so that differences mean mistakes."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


def adam(**model: Any) -> WithAdam:
    return WithAdam(dtype=torch.float64, **model)


def experts() -> WithAdam:
    return adam(block=Mixture)


def job_of(case: Case) -> JobConfig:
    return JobConfig.model_validate({"task": "t", "seed": 7, "algorithm": case.algorithm})


def reference(case: Case) -> tuple[dict[str, Tensor], float, Tensor]:
    """(weights after one round, loss, start) of a single process."""
    job = job_of(case)
    model = initial_state(case.task, job.seed)
    assert isinstance(model, nn.Module)
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    data, _ = case.task.data(Site("silo"))
    update = train(case.task, model, data, job, layout, start, round=1, client="silo")
    return {name: value.clone() for name, value in model.state_dict().items()}, update.loss, start


def bench_of(case: Case, meshes: Meshes) -> Bench:
    job = job_of(case)
    mode, fake = fake_model(case.task)
    plan = None
    if case.strategy.mesh.tp > 1:
        data, _ = case.task.data(Site("silo"))
        batch = tuple(part[:2] for part in data)
        plan = find_tensor_parallel(fake, dissect(fake), trace(case.task, mode, fake, batch))
    # Fake tensors share their memory with nobody: ties are found on a real model.
    layout = Layout.of(initial_state(case.task, job.seed))
    device = torch.device("cpu")
    return Bench(case.task, job, layout, case.strategy, meshes, device, "silo", plan)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Differences from the single process: of the weights, of the update's file, of the loss."""
    expected, loss, start = reference(case)
    meshes = Meshes(case.strategy.mesh, "cpu")
    bench = bench_of(case, meshes)
    bench.load(start, {})
    data, _ = case.task.data(Site("silo"))
    done = Progress()
    norms: list[float] = []
    bench.fit(bench.batches(data, 1), 1, done, lambda report: norms.append(report.norm))
    path = folder / f"{case.name}.update"
    if dist.get_rank() == 0:
        prepare_update(path, "float32", bench.layout)
    dist.barrier()
    write_deltas(path, "float32", bench.replica.tensors(), bench.places, start, meshes)
    dist.barrier()
    worst = 0.0
    initial = bench.layout.unflatten(start)
    for name, tensor in bench.replica.tensors():
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        change = (expected[name] - initial[name]).abs().max()
        worst = max(worst, float((whole - expected[name]).abs().max() / change))
    written = torch.from_file(str(path), size=bench.layout.size)
    theirs = bench.layout.flatten(expected) - start
    return {
        "weights": worst,
        "file": float((written - theirs).abs().max() / theirs.abs().max()),
        "loss": abs(done.loss_sum / done.seen - loss),
        "norms": norms,
        "tolerance": case.tolerance,
    }


def run_cases(rank: int, cases: list[Case], folder: Path) -> dict[str, dict[str, Any] | str]:
    """All cases on this rank."""
    return {case.name: run_case(case, folder) for case in cases}


__all__ = [
    "Case",
    "adam",
    "bench_of",
    "experts",
    "job_of",
    "plain_name",
    "reference",
    "run_case",
    "run_cases",
]
