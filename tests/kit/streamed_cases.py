"""Rounds over a stream under each strategy, and on one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cluster_cases import Case, WithAdam, bench_of, job_of
from tar_files import record_id
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core import Layout
from roundtable.core.task import Site, initial_state

LANES = 3


class Streamed(WithAdam):
    """Tokens that follow from a record's number, read from shards."""

    def __init__(self, urls: list[str], **options: Any) -> None:
        super().__init__(dtype=torch.float64, **options)
        self._urls = urls

    def data(self, site: Site) -> Any:
        return TarShards(self._urls, self._decode, shuffle=6, lanes=LANES), None

    def _decode(self, sample: Any) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(record_id(sample))
        # Drawn by the data set too: each record anew, whichever rank reads it.
        tokens = torch.randint(64, (17,), generator=chance)
        return tokens[:-1], tokens[1:]


def after_streams(rank: int, cases: list[Case], urls: list[str]) -> dict[str, float]:
    """The weights' largest difference from one process's after two rounds, over the second's largest change.

    The second round begins in the stream where the first one ended.
    """
    gaps = {}
    for each in cases:
        kind, sizes = each.task._kind, each.task._model  # type: ignore[attr-defined]
        case = replace(each, task=Streamed(urls, kind=kind, **sizes))
        expected, starts = _alone(case)
        trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
        data, _ = case.task.data(Site("silo"))
        place = None
        for round, (start, others) in enumerate(starts, 1):
            trainer.optimizer = None
            trainer.load(start, others)
            batches = trainer.batches(data, round, place)
            trainer.fit(batches, round, RoundProgress(), lambda report: None)
            place = batches.place(batches.steps, dist.group.WORLD)  # type: ignore[union-attr]
        whole = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in trainer.replica.tensors()
        }
        initial = trainer.layout.unflatten(starts[-1][0])
        gaps[case.name] = max(
            float((value - expected[name]).abs().max() / (expected[name] - initial[name]).abs().max())
            for name, value in whole.items()
            if value.is_floating_point()
        )
    return gaps


def _alone(case: Case) -> tuple[dict[str, Tensor], list[tuple[Tensor, dict[str, Tensor]]]]:
    """(weights after two rounds, what each begins with: the model in float32, and what does not travel) of
    one process."""
    job = job_of(case)
    model = initial_state(case.task, job.seed)
    assert isinstance(model, nn.Module)
    layout = Layout.of(model)
    counters = {name: value.clone() for name, value in model.named_buffers() if not value.is_floating_point()}
    starts = [(layout.flatten(model).clone(), counters)]
    data, _ = case.task.data(Site("silo"))
    local: dict[str, Tensor] = {}
    for round in (1, 2):
        work = LocalWork(job, layout, starts[-1][0], round, "silo", local or None)
        update = train(case.task, model, data, work)
        local = dict(update.local)
        if round == 1:
            starts.append((layout.flatten(model).clone(), local))
    return {name: value.clone() for name, value in model.state_dict().items()}, starts
