"""What goes wrong on the ranks of a group, on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cluster_cases import Case, bench_of
from cluster_models import Language
from torch import Tensor, nn

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.train.loss_guard import CheckpointTimes
from roundtable.cluster.train.rank import check_versions
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core import Layout
from roundtable.core.errors import ConfigError, InvalidUpdate
from roundtable.core.task import Site, initial_state


class Disturbed(Language):
    """Its loss on one rank, at one call, is another."""

    def __init__(self, rank: int, call: int, factor: float) -> None:
        super().__init__(dtype=torch.float64)
        self._rank = rank
        self._call = call
        self._factor = factor
        self._calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if isinstance(loss, Tensor) and model.training:
            self._calls += 1
            if self._calls == self._call and dist.is_initialized() and dist.get_rank() == self._rank:
                return loss * self._factor
        return loss


def disturbed_round(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    """What was said, at which steps the alarm rang, and whether the weights are those of the step before."""
    torch.manual_seed(0)
    start = Layout.of(model := initial_state(case.task, 7)).flatten(model).clone()  # type: ignore[arg-type]
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    data, _ = case.task.data(Site("silo"))
    alarms: list[int] = []
    after: list[list[Tensor]] = [[]]

    def watch(report: Any) -> None:
        after[0] = [local.detach().clone() for _, local in trainer.replica.tensors()]

    refusal = ""
    try:
        times = CheckpointTimes(ClusterTable(checkpoint_minutes=1e6))
        trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), watch, save=alarms.append, times=times)
    except InvalidUpdate as error:
        refusal = str(error)
    same = all(
        torch.equal(old, tensor) for old, (_, tensor) in zip(after[0], trainer.replica.tensors(), strict=True)
    )
    return {"said": refusal, "alarms": alarms, "same": same}


def other_versions(rank: int) -> str:
    """What ranks say to one of another version."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    version = "2.12.0" if rank == 1 else torch.__version__
    try:
        with mock.patch.object(torch, "__version__", version):
            check_versions(group)
    except ConfigError as error:
        return str(error)
    return ""
