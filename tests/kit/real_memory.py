"""What ranks really allocate in training, by torch's profiler: every block of its allocator, on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cluster_models import Language, Mixture
from torch.profiler import ProfilerActivity, profile

from roundtable.client.cluster.bench import Bench, Progress
from roundtable.client.cluster.memory import estimate
from roundtable.client.cluster.meshes import Meshes
from roundtable.client.cluster.strategy import Strategy
from roundtable.client.cluster.survey import example_batch, survey
from roundtable.core import JobConfig, Layout
from roundtable.core.task import Site, initial_state

SIZES: dict[str, dict[str, Any]] = {
    "deep": {"dim": 128, "layers": 8, "heads": 4, "hidden": 512, "vocabulary": 500, "length": 64},
    "many words": {"dim": 128, "layers": 4, "heads": 4, "hidden": 256, "vocabulary": 8000, "length": 32},
    "experts": {
        "dim": 128,
        "layers": 4,
        "heads": 4,
        "hidden": 256,
        "vocabulary": 500,
        "length": 64,
        "block": Mixture,
    },
}


class WithAdam(Language):
    """Two states for each parameter."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)


@dataclass(frozen=True)
class Measured:
    """Bytes at the peak of two steps: what the estimate says, and what this rank allocated."""

    estimated: int
    allocated: int


def measure(rank: int, cases: Sequence[tuple[str, str, Strategy, int]]) -> dict[str, Measured]:
    """For each case: name, model, strategy, micro-batches in a step."""
    return {name: _measure(model, strategy, count) for name, model, strategy, count in cases}


def _measure(model: str, strategy: Strategy, count: int) -> Measured:
    batch = strategy.micro_batch * count * strategy.mesh.data
    task = WithAdam(examples=2 * batch, **SIZES[model])
    table = {"steps": 2, "batch_size": batch}
    job = JobConfig.model_validate({"task": "t", "seed": 7, "algorithm": table})
    data, _ = task.data(Site("silo"))
    half = strategy.precision == "bfloat16"
    found = survey(task, example_batch(data), device="cpu", bfloat16=half)
    whole = initial_state(task, job.seed)
    layout = Layout.of(whole)
    start = layout.flatten(whole).clone()
    del whole
    meshes = Meshes(strategy.mesh, "cpu")
    # What an earlier case left would be freed in this one's sight.
    gc.collect()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        plan = found.tensor_parallel if strategy.mesh.tp > 1 else None
        bench = Bench(task, job, layout, strategy, meshes, torch.device("cpu"), "silo", plan)
        bench.load(start, {})
        bench.fit(bench.batches(data, 1), 1, Progress(), lambda report: None)
    return Measured(estimate(found, strategy, count).peak, peak_of(traced))


def peak_of(traced: profile) -> int:
    """The most bytes that were allocated at a time since the profile began."""
    assert traced.profiler is not None
    results: Any = traced.profiler.kineto_results
    level = most = 0
    for event in sorted(
        (event for event in results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    ):
        level += event.nbytes()
        most = max(most, level)
    return most
