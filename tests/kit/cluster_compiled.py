"""Trials of compiled blocks, run on the ranks of one process group."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cluster_cases import Case, bench_of, reference
from torch import nn
from torch.distributed.tensor import DTensor

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.stepping.compile_trial import CompileTrial, TrialMemory
from roundtable.cluster.stepping.compiled_blocks import CompiledBlocks
from roundtable.cluster.train.round_reports import RoundFigures, RoundProgress
from roundtable.core.task import Site


def control() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def follow_trials(rank: int, folder: Path, trials: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """(are blocks compiled, what is said) after trials, each by the seconds of a step plain and compiled on
    this rank, whether the compiler fails here, and the number of steps; then what the next start finds.
    """
    found = {}
    group = control()
    for name, ranks in trials.items():
        plain, compiled, fails, steps = ranks[rank]
        ends = []
        for count in (steps, 0):
            blocks = CompiledBlocks([nn.Linear(3, 3)])
            trial = CompileTrial(blocks, TrialMemory(folder, ("model", name), group))
            for _ in range(count):
                if fails and blocks.on:
                    blocks.failed = "BackendCompilerFailed: no compiler"
                trial.note(compiled if blocks.on else plain)
            ends.append((blocks.on, trial.said))
        found[name] = ends
    return found


def fit_compiled(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    """The difference from one process where blocks become compiled ones after six steps, however fast."""
    expected, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    memory = TrialMemory(folder, (case.name,), control())
    with mock.patch("roundtable.cluster.stepping.compile_trial.GAIN", -1e9):
        trainer.replica.try_compiled("try", memory, apart=False)
        figures = RoundFigures(trial=trainer.replica.trial)
        data, _ = case.task.data(Site("silo"))
        batches = trainer.batches(data, 1)
        trainer.fit(batches, 1, RoundProgress(), figures.seen_by(lambda report: None))
    worst, initial = 0.0, trainer.layout.unflatten(start)
    for name, tensor in trainer.replica.tensors():
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        change = (expected[name] - initial[name]).abs().max()
        worst = max(worst, float((whole - expected[name]).abs().max() / change))
    return {"on": trainer.replica.compiled.on, "worst": worst, "said": figures.alone(0.0)["compile"]}


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no kernel for this\nand a long trace")


def with_backend(backend: Any) -> Any:
    return mock.patch.object(torch, "compile", partial(torch.compile, backend=backend))
