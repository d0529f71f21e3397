"""Training in float16 on ranks: with a scale that overflows, and from where it no longer does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from cluster_cases import Case, bench_of, reference
from torch.distributed.tensor import DTensor

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import local_of
from roundtable.cluster.stepping.loss_scaling import LossScale
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core.errors import InvalidUpdate
from roundtable.core.task import Site


def overflow(rank: int, cases: list[Case], scale: float) -> dict[str, dict[str, Any]]:
    """How a round went whose first steps overflow, and whether it is, bit for bit, the round without them."""
    return {case.name: _overflow(case, scale) for case in cases}


def _overflow(case: Case, scale: float) -> dict[str, Any]:
    first, reports, skipped, end = _round(case, LossScale(scale), 0)
    again, _, _, _ = _round(case, LossScale(scale / 2**skipped), skipped)
    return {
        "skipped": skipped,
        "reports": [report.skipped for report in reports],
        "scale": end.scale,
        "good": end.good,
        "same": all(torch.equal(first[name], again[name]) for name in first),
        "moved": any((first[name] != start).any() for name, start in _start(case).items() if name in first),
    }


def _start(case: Case) -> dict[str, Any]:
    _, _, start = reference(case)
    layout = bench_of(case, Meshes(case.strategy.mesh, "cpu")).layout
    return layout.unflatten(start)


def _round(
    case: Case, scale: LossScale, begin: int
) -> tuple[dict[str, Any], list[StepReport], int, LossScale]:
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    trainer.scale = scale
    data, _ = case.task.data(Site("silo"))
    batches, done = trainer.batches(data, 1), RoundProgress()
    batches.load_state_dict({"position": begin, "stream": None})
    reports: list[StepReport] = []
    trainer.fit(batches, 1, done, reports.append)
    weights = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in trainer.replica.tensors()
    }
    return weights, reports, done.skipped, trainer.scale


def lagging(rank: int, case: Case, bad: int) -> dict[str, Any]:
    """A round whose figures are looked at a step late: is it the same, and what of a loss that is NaN?"""
    weights, numbers = [], []
    for lags in (False, True):
        trainer = _ready(case)
        trainer.lags = lags
        reports: list[StepReport] = []
        data, _ = case.task.data(Site("silo"))
        trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), reports.append)
        weights.append(_weights(trainer))
        numbers.append([(report.step, report.loss, report.norm) for report in reports])
    same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    trainer = _ready(case)
    trainer.lags, taken = True, []
    good = case.task.loss

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = good(model, batch)
        taken.append(_weights(trainer))
        return value * float("nan") if rank == 1 and len(taken) == bad else value

    refused = ""
    with mock.patch.object(case.task, "loss", loss):
        try:
            trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
        except InvalidUpdate as error:
            refused = str(error)
    # The step after the bad one ran from the weights that the bad one began with.
    kept = all(torch.equal(taken[bad - 1][name], taken[bad][name]) for name in taken[bad])
    return {"same": same, "reports": numbers[0] == numbers[1], "refused": refused, "kept": kept}


def _ready(case: Case) -> RankTrainer:
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    return trainer


def _weights(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    return {name: local_of(tensor).detach().clone() for name, tensor in trainer.replica.tensors()}
