"""What ranks really allocate in training, by torch's profiler: every block of its allocator, on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cluster_models import Language, Mixture
from torch.profiler import ProfilerActivity, profile

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.memory_estimate import estimate
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core import JobConfig, Layout
from roundtable.core.task import Site, initial_state

SIZES: dict[str, dict[str, Any]] = {
    "deep": {"dim": 128, "layers": 8, "heads": 4, "hidden": 512, "vocabulary": 500, "length": 64},
    "many words": {"dim": 128, "layers": 4, "heads": 4, "hidden": 256, "vocabulary": 8000, "length": 32},
    "large": {"dim": 512, "layers": 2, "heads": 8, "hidden": 2048, "vocabulary": 1000, "length": 32},
    "four large": {"dim": 512, "layers": 4, "heads": 8, "hidden": 2048, "vocabulary": 1000, "length": 32},
    "coded": {"dim": 512, "layers": 2, "heads": 8, "hidden": 2048, "vocabulary": 8000, "length": 8},
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
    probe = probe_model(task, data, device="cpu", bfloat16=half)
    whole = initial_state(task, job.seed)
    layout = Layout.of(whole)
    start = layout.flatten(whole).clone()
    del whole
    meshes = Meshes(strategy.mesh, "cpu")
    # What an earlier case left would be freed in this one's sight.
    gc.collect()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        plan = probe.tensor_parallel if strategy.mesh.tp > 1 else None
        trainer = RankTrainer(task, job, layout, strategy, meshes, torch.device("cpu"), "silo", plan)
        trainer.load(start, {})
        trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
    return Measured(estimate(probe, strategy, count).peak, peak_of(traced))


def measure_device(model: str, strategy: Strategy, count: int, device: torch.device) -> Measured:
    """The same of one rank on a GPU, by its allocator."""
    batch = strategy.micro_batch * count
    task = WithAdam(examples=2 * batch, **SIZES[model])
    table = {"steps": 2, "batch_size": batch}
    job = JobConfig.model_validate({"task": "t", "seed": 7, "algorithm": table})
    data, _ = task.data(Site("silo"))
    half = strategy.precision == "bfloat16"
    probe = probe_model(task, data, device="cuda", bfloat16=half)
    whole = initial_state(task, job.seed)
    layout = Layout.of(whole)
    # The work spaces of cuBLAS, 32 MiB on Hopper, are the process's and not the model's.
    square = torch.ones(64, 64, device=device)
    square @ square
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trainer = RankTrainer(task, job, layout, strategy, Meshes(strategy.mesh, "cuda"), device, "silo")
    trainer.load(layout.flatten(whole).clone(), {})
    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
    most = torch.cuda.max_memory_allocated(device) - before
    return Measured(estimate(probe, strategy, count).peak, most)


def peak_of(traced: profile) -> int:
    """The most bytes that were allocated at a time since the profile began.

    The profiler does not see what a thread of gloo frees, which is at times the one that lets go last of what
    a collective was given or copied. Such a block is counted until its place is allocated again or the next
    collective begins, by when it is gone.
    """
    assert traced.profiler is not None
    results: Any = traced.profiler.kineto_results
    changes = sorted(_changes(results.experimental_event_tree(), 0), key=lambda change: change.at)
    ends, there = _with_ends(changes), dict[int, _Change]()
    lost: list[_Change] = []
    level = most = 0
    for change in changes:
        if change.call:
            gone = [old for old in lost if old.call != change.call and there.get(old.address) is old]
            level -= sum(there.pop(old.address).size for old in gone)
            lost = [old for old in lost if old.call == change.call]
        before = there.pop(change.address, None)
        if change.size > 0:
            level -= before.size if before is not None else 0
            there[change.address] = change
            if change.call and change not in ends:
                lost.append(change)
        level += change.size
        most = max(most, level)
    return most


@dataclass(frozen=True)
class _Change:
    """Bytes allocated, or less than none for freed; `call` is when the collective began that did it, or 0."""

    at: int
    address: int
    size: int
    call: int


def _changes(events: Sequence[Any], call: int) -> Iterator[_Change]:
    for event in events:
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            yield _Change(event.start_time_ns, fields.ptr, fields.alloc_size, call)
        outermost = not call and event.name.startswith(("c10d::", "FSDP::"))
        yield from _changes(event.children, event.start_time_ns if outermost else call)


def _with_ends(changes: Sequence[_Change]) -> set[_Change]:
    """The allocations whose end was seen."""
    began: dict[int, _Change] = {}
    ended = set()
    for change in changes:
        if change.size > 0:
            began[change.address] = change
        elif change.address in began:
            ended.add(began.pop(change.address))
    return ended
