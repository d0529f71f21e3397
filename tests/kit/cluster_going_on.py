"""Rounds with a checkpoint in their middle, and what the ranks' buffers are where others go on from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_cases import Case, bench_of, reference
from torch import Tensor

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.train.checkpoint_places import Position
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core.task import Site

Buffers = dict[str, Tensor]


def twice(rank: int, cases: list[Case], folder: Path) -> dict[str, tuple[Buffers, Buffers]]:
    """This rank's buffers after a round, and after one that goes on from the other's second step."""
    return {
        case.name: (_round(case, folder / case.name, _save), go_on(rank, case, folder / case.name))
        for case in cases
    }


def go_on(rank: int, case: Case, folder: Path) -> Buffers:
    """This rank's buffers after a round that goes on from the checkpoint in this folder."""
    return _round(case, folder, _load)


def _save(trainer: RankTrainer, batches: Any, checkpoints: Checkpoints, report: StepReport | None) -> None:
    if report is not None and report.step == 2:
        assert trainer.optimizer is not None
        checkpoints.save(trainer.replica, trainer.optimizer, Position(1, "m", 2, 0, 0.0), trainer.outer)


def _load(trainer: RankTrainer, batches: Any, checkpoints: Checkpoints, report: StepReport | None) -> None:
    if report is None:
        newest = checkpoints.newest(1, "m")
        assert newest is not None
        trainer.begin(1)
        assert trainer.optimizer is not None
        checkpoints.load(newest[0], trainer.replica, trainer.optimizer, trainer.outer)
        batches.load_state_dict({"position": newest[1].step})


def _round(case: Case, folder: Path, seen: Callable[..., None]) -> Buffers:
    """`seen` is called before the round, without a report, and after each step."""
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu", apart=case.strategy.local_steps > 0))
    trainer.load(start, {spec.name: torch.zeros((), dtype=torch.int64) for spec in trainer.layout.tensors})
    data, _ = case.task.data(Site("silo"))
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    batches, checkpoints = trainer.batches(data, 1), Checkpoints(folder, [], 2, group)
    seen(trainer, batches, checkpoints, None)
    trainer.fit(batches, 1, RoundProgress(), partial(seen, trainer, batches, checkpoints))
    checkpoints.finish()
    return {name: tensor.clone() for name, tensor in trainer.replica.buffers()}
