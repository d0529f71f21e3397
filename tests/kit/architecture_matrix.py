"""Every architecture under every strategy: planned as a silo's rank 0 plans, and run on real ranks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.cluster.choice.planner import make_plan
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.packed_layers import part_of, unpacked_name
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core import JobConfig, Layout
from roundtable.core.errors import RoundtableError
from roundtable.core.task import Site, initial_state

_ZERO3 = {"data_parallel": "zero3", "micro_batch": 2}
_PIPE = {"pp": 2, "micro_batch": 2}
# What [cluster.strategy] says, and on how many ranks.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel": "ddp"}),
    "ddp sqrt": (2, {"data_parallel": "ddp", "checkpointing": "sqrt"}),
    "zero1": (2, {"data_parallel": "zero1", "micro_batch": 2}),
    "zero2": (2, {"data_parallel": "zero2"}),
    "zero3": (2, _ZERO3),
    "zero3 every": (2, {**_ZERO3, "checkpointing": "every"}),
    "zero3 selective": (2, {**_ZERO3, "checkpointing": "selective"}),
    "zero3 sqrt": (2, {**_ZERO3, "checkpointing": "sqrt"}),
    "tp": (2, {"tp": 2, "sequence_parallel": False}),
    "tp sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "gpipe": (2, {**_PIPE, "schedule": "gpipe"}),
    "1f1b": (2, _PIPE),
    "interleaved": (2, {**_PIPE, "schedule": "interleaved", "virtual_stages": 2}),
    "local sgd": (2, {"data_parallel": "ddp", "local_steps": 1}),
    "zero1 tp": (4, {"data_parallel": "zero1", "tp": 2}),
    "hsdp": (4, {**_ZERO3, "dp": 2, "fsdp": 2}),
    "zero3 tp": (4, {**_ZERO3, "tp": 2, "fsdp": 2}),
    "pp zero2": (4, {**_PIPE, "data_parallel": "zero2"}),
    "pp tp": (4, {**_PIPE, "tp": 2}),
}
# What differs by more than rounding in float64: masks of dropout, which each rank draws for its own examples,
# and weights in float32.
TOLERANCE = {"batch norm": 1.0, "Mixtral": 1e-3}


@dataclass(frozen=True)
class PlannedCell:
    """A strategy that the planner allows for an architecture."""

    architecture: str
    name: str
    strategy: Strategy
    tensor_parallel: TensorParallel | None


def job_of(architecture: str) -> JobConfig:
    table = {"name": "fedavg", "steps": 2, "batch_size": 8, "learning_rate": 0.05, "momentum": 0.9}
    return JobConfig.model_validate({"task": "t", "seed": 3, "algorithm": table})


@cache
def probe_of(architecture: str, devices: int = 4) -> ModelProbe:
    task, _ = ARCHITECTURES[architecture]
    data, _ = task.data(Site("silo"))
    return probe_model(task, data, device="cpu", devices=devices)


def planned(architecture: str, probe: ModelProbe, name: str) -> PlannedCell | str:
    """The cell, or why it is refused."""
    world, table = STRATEGIES[name]
    try:
        plan = make_plan(
            probe,
            Resources(1, world, 1 << 40, "cpu"),
            job_of(architecture),
            ClusterTable.model_validate({"strategy": table}),
        )
    except RoundtableError as error:
        return str(error)
    split = probe.tensor_parallel if plan.strategy.mesh.tp > 1 else None
    return PlannedCell(architecture, name, plan.strategy, split)


def table_of_page() -> dict[tuple[str, str], str]:
    """What docs/cluster-evidence.md says of each (architecture, strategy)."""
    page = (Path(__file__).parents[2] / "docs/cluster-evidence.md").read_text(encoding="utf-8")
    after = page.partition("tools/architecture_table.py")[2]
    # The first table after its tool's name; others may follow.
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group().splitlines()]
    return {
        (architecture, row[0]): cell
        for row in rows[2:]
        for architecture, cell in zip(rows[0][1:], row[1:], strict=True)
    }


def write_silo(folder: Path, architecture: str, name: str) -> tuple[Path, Path]:
    """(agent.toml, job file) of a silo that sets a strategy for an architecture."""
    world, table = STRATEGIES[name]
    # A process imports a file once.
    task = folder / f"task{list(ARCHITECTURES).index(architecture)}.py"
    task.write_text(
        "from architectures import ARCHITECTURES\n\n\n"
        f"def of_silo():\n    return ARCHITECTURES[{architecture!r}][0]\n"
    )
    strategy = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    agent = folder / "agent.toml"
    agent.write_text(
        f'coordinator = "localhost:1"\ncredentials = "c"\nstate = "s"\n[tasks]\nt = "{task.name}:of_silo"\n'
        f'[cluster]\ndevices = {world}\nmemory = "1TiB"\nbackend = "gloo"\n[cluster.strategy]\n{strategy}'
    )
    job = job_of(architecture).algorithm
    steps = f"steps = {job.steps}\nbatch_size = {job.batch_size}\n"
    (folder / "job.toml").write_text(f'task = "t"\n[algorithm]\n{steps}')
    return agent, folder / "job.toml"


def tolerance(cell: PlannedCell) -> float:
    if cell.name == "local sgd" and cell.architecture == "ResNet":
        # Replicas that train apart take the statistics of their own examples.
        return 1.0
    return TOLERANCE.get(cell.architecture, 1e-6)


def run_cells(rank: int, cells: list[PlannedCell]) -> list[dict[str, float]]:
    """The differences of each cell's weights and loss from one process's."""
    alone = {cell.architecture: _alone(cell.architecture) for cell in cells}
    return [run_cell(cell, *alone[cell.architecture]) for cell in cells]


def _alone(architecture: str) -> tuple[dict[str, Tensor], float, Tensor]:
    task, job = ARCHITECTURES[architecture][0], job_of(architecture)
    model = initial_state(task, job.seed)
    assert isinstance(model, nn.Module)
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    data, _ = task.data(Site("silo"))
    update = train(task, model, data, LocalWork(job, layout, start, 1, "silo"))
    return {name: value.clone() for name, value in model.state_dict().items()}, update.loss, start


def run_cell(cell: PlannedCell, expected: dict[str, Tensor], loss: float, start: Tensor) -> dict[str, float]:
    """max|a − b| / max|b| of any weight's change, and the losses' difference."""
    task, job = ARCHITECTURES[cell.architecture][0], job_of(cell.architecture)
    strategy = Strategy.from_plain(json.loads(json.dumps(cell.strategy.to_plain())))
    layout = Layout.of(initial_state(task, job.seed))
    meshes = Meshes(strategy.mesh, "cpu", apart=strategy.local_steps > 0)
    device = torch.device("cpu")
    trainer = RankTrainer(task, job, layout, strategy, meshes, device, "silo", cell.tensor_parallel)
    trainer.load(start, {name: torch.zeros((), dtype=torch.int64) for name in expected})
    data, _ = task.data(Site("silo"))
    done = RoundProgress()
    trainer.fit(trainer.batches(data, 1), 1, done, lambda report: None)
    initial = layout.unflatten(start)
    worst, largest = 0.0, 0.0
    for name, tensor in trainer.replica.tensors():
        if tensor.is_floating_point():
            whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            name, part = unpacked_name(name)
            wanted = part_of(expected[name], part)
            worst = max(worst, float((whole - wanted).abs().max()))
            largest = max(largest, float((expected[name] - initial[name]).abs().max()))
    gap = torch.tensor([worst / largest])
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    return {"weights": float(gap), "loss": abs(done.loss_sum / done.seen - loss)}
