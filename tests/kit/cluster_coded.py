"""Optimizers whose state is in 8 bits, on the ranks of a process group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_cases import Case, bench_of, job_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.stepping.coded_state import CodedTensor
from roundtable.cluster.train.checkpoint_places import Position
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core import Layout
from roundtable.core.task import Site, initial_state


def kinds_of_state(optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """How many values of the optimizer's state are in codes, and how many are not."""
    inner = getattr(optimizer, "optim", optimizer)
    found = {"coded": 0, "plain": 0}
    for values in inner.state.values():
        for value in values.values():
            if isinstance(value, CodedTensor):
                found["coded"] += value.shape.numel()
            elif value.dim():
                found["plain"] += value.numel()
    return found


def _begun(case: Case) -> RankTrainer:
    start = initial_state(case.task, job_of(case).seed)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu", apart=case.strategy.local_steps > 0))
    trainer.load(Layout.of(start).flatten(start).clone(), {})
    return trainer


def _whole(trainer: RankTrainer) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in trainer.replica.tensors()
    }


def against_float32(rank: int, cases: list[Case]) -> dict[str, dict[str, float]]:
    """Of each case how much of its state is in codes, and how far weights are from those without codes.

    Far is the largest norm of a tensor's difference, over that of its change.
    """
    found = {}
    for case in cases:
        trainer, plain = (
            _trained(replace(case, strategy=replace(case.strategy, optimizer_bits=bits))) for bits in (8, 32)
        )
        kinds, whole = kinds_of_state(trainer.optimizer), kinds_of_state(plain.optimizer)
        assert whole["coded"] == 0
        far = _apart(_whole(trainer), _whole(plain), _whole(_begun(case)))
        found[case.name] = {"coded": kinds["coded"] / (kinds["coded"] + kinds["plain"]), "far": far}
    return found


def _trained(case: Case) -> RankTrainer:
    trainer = _begun(case)
    data, _ = case.task.data(Site("silo"))
    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
    return trainer


def _apart(one: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    return max(
        float((value - other[name]).norm() / (other[name] - start[name]).norm())
        for name, value in one.items()
    )


def go_on(rank: int, before: Case, after: list[Case], folder: Path) -> dict[str, float]:
    """Trains a round with a checkpoint after half of it, and goes on from there under other strategies.

    Returns, for each, the largest norm of a tensor's difference from the first's, over its change's.
    """
    data, _ = before.task.data(Site("silo"))
    group = dist.new_group(backend="gloo")
    checkpoints = Checkpoints(folder, [], 2, group)
    trainer, done = _begun(before), RoundProgress()

    def watch(report: StepReport) -> None:
        if report.step == report.steps // 2:
            assert trainer.optimizer is not None
            position = Position(1, "m", report.step, done.seen, done.loss_sum)
            checkpoints.save(trainer.replica, trainer.optimizer, position)

    start = _whole(trainer)
    trainer.fit(trainer.batches(data, 1), 1, done, watch)
    checkpoints.finish()
    straight = _whole(trainer)
    return {each.name: _resumed(each, data, checkpoints, start, straight) for each in after}


def _resumed(
    case: Case, data: Any, checkpoints: Checkpoints, start: dict[str, Tensor], straight: dict[str, Tensor]
) -> float:
    trainer = _begun(case)
    newest = checkpoints.newest(1, "m")
    assert newest is not None
    path, position = newest
    trainer.begin(1)
    assert trainer.optimizer is not None
    checkpoints.load(path, trainer.replica, trainer.optimizer)
    batches = trainer.batches(data, 1)
    batches.load_state_dict({"position": position.step})
    trainer.fit(batches, 1, RoundProgress(position.seen, position.loss_sum), lambda report: None)
    return _apart(_whole(trainer), straight, start)
