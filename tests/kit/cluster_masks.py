"""What dropout drops on the ranks of a group, and what comes of it."""

from __future__ import annotations

from typing import Any

import torch
from cluster_cases import Case, bench_of
from cluster_models import Mask
from torch import Tensor, nn

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import local_of, plain_name
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core import Layout
from roundtable.core.task import Site, initial_state


def made(case: Case) -> RankTrainer:
    """A rank with the job's initial model."""
    model = initial_state(case.task, 7)
    assert isinstance(model, nn.Module)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    counters = {name: value for name, value in model.state_dict().items() if not value.is_floating_point()}
    trainer.load(Layout.of(model).flatten(model).clone(), counters)
    return trainer


def fit(trainer: RankTrainer, *, after: int = 0) -> RoundProgress:
    """Trains the steps of a round that come after so many."""
    data, _ = trainer.task.data(Site("silo"))
    batches, done = trainer.batches(data, 1), RoundProgress()
    batches.load_state_dict({"position": after})
    trainer.fit(batches, 1, done, lambda report: None)
    return done


def trained(case: Case) -> tuple[RankTrainer, RoundProgress]:
    """A rank after a round."""
    trainer = made(case)
    return trainer, fit(trainer)


def interrupted(rank: int, cases: list[Case]) -> dict[str, list[list[Any]]]:
    """Masks of a round's last step: of ranks that took those before it, and of ranks that did not."""

    def last(trainer: RankTrainer, after: int) -> list[Any]:
        fit(trainer, after=after)
        masks = [part for one in trainer.replica.parts for part in one.modules() if isinstance(part, Mask)]
        return [mask.kept[-1].tolist() for mask in masks]

    return {case.name: [last(made(case), 0), last(made(case), 1)] for case in cases}


def masks(rank: int, cases: list[Case]) -> dict[str, dict[str, list[list[bool]]]]:
    """For each case and place of dropout what each pass kept, flat."""
    found = {}
    for case in cases:
        trainer, _ = trained(case)
        found[case.name] = {
            plain_name(name): [kept.flatten().tolist() for kept in module.kept]
            for part in trainer.replica.parts
            for name, module in part.named_modules()
            if isinstance(module, Mask)
        }
    return found


def outcomes(rank: int, cases: list[Case]) -> dict[str, tuple[float, dict[str, Any]]]:
    """For each case the loss and this rank's parts of the weights, as lists of numbers."""

    def numbers(tensor: Tensor) -> list[float]:
        flat: list[float] = local_of(tensor).detach().flatten().tolist()
        return flat

    results = {}
    for case in cases:
        torch.manual_seed(rank)
        trainer, done = trained(case)
        weights = {name: numbers(tensor) for name, tensor in trainer.replica.tensors()}
        results[case.name] = done.loss_sum, weights
    return results
