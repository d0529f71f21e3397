"""DiLoCo in one process, from torch's own optimizers, and the ranks' runs that are held against it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_cases import Case, bench_of, job_of
from torch import Tensor, nn

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import local_of, region_of
from roundtable.cluster.train.checkpoint_places import Position
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core import JobConfig, Layout
from roundtable.core.seeds import torch_generator
from roundtable.core.task import Site, initial_state


def diloco(
    loss: Callable[[nn.Module, Any], Tensor],
    model: nn.Module,
    data: tuple[Tensor, ...],
    job: JobConfig,
    inner: Callable[[Any], torch.optim.Optimizer],
    outer: tuple[int, int, float, float],
    client: str,
) -> nn.Module:
    """Douillard et al. 2023, algorithm 1, on `model`; `outer`: (replicas, local steps, rate, momentum).

    Inner and outer steps are torch's optimizers, replica after replica.
    """
    replicas, local_steps, rate, momentum = outer
    workers = [copy.deepcopy(model) for _ in range(replicas)]
    optimizers = [inner(worker.parameters()) for worker in workers]
    nesterov = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    generator = torch_generator(job.seed, 1, client, "batches")
    size, limit = job.algorithm.batch_size, job.algorithm.max_gradient_norm
    total = job.algorithm.steps or job.algorithm.passes * -(-len(data[0]) // size)
    batches: list[Tensor] = []
    while len(batches) < total:
        batches += torch.split(torch.randperm(len(data[0]), generator=generator), size)
    for step, rows in enumerate(batches[:total], 1):
        parts = rows.tensor_split(replicas)
        for worker, optimizer, part in zip(workers, optimizers, parts, strict=True):
            if not len(part):
                continue
            optimizer.zero_grad()
            loss(worker, tuple(tensor[part] for tensor in data)).backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(worker.parameters(), limit)
            optimizer.step()
        if step % local_steps == 0 or step == total:
            theirs = zip(*(worker.parameters() for worker in workers), strict=True)
            for parameter, copies in zip(model.parameters(), theirs, strict=True):
                parameter.grad = torch.stack([parameter.detach() - one.detach() for one in copies]).mean(0)
            nesterov.step()
            for worker in workers:
                worker.load_state_dict(model.state_dict())
    return model


def oracle(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """(weights after a round, start as a vector) of one process."""
    job, strategy = job_of(case), case.strategy
    data, _ = case.task.data(Site("silo"))
    model = initial_state(case.task, job.seed)
    assert isinstance(model, nn.Module)
    start = Layout.of(model).flatten(model).clone()
    outer = (strategy.mesh.dp, strategy.local_steps, strategy.outer_learning_rate, strategy.outer_momentum)
    make = case.task.optimizer  # type: ignore[attr-defined]
    diloco(case.task.loss, model, data, job, make, outer, "silo")
    return dict(model.state_dict()), start


def apart_cases(rank: int, cases: list[Case], folder: Path) -> dict[str, dict[str, float]]:
    """For each case: how far a round is from the oracle, and one that broke off and went on is."""
    results = {}
    for case in cases:
        expected, start = oracle(case)
        whole, saved = _begun(case, start), folder / case.name
        differ = _fit(whole, saved, checkpoint=case.strategy.local_steps + 1)
        broken = _begun(case, torch.zeros_like(start))
        _go_on(broken, saved)
        results[case.name] = {
            "differ": differ,
            "whole": _off(whole, expected, start),
            "again": _off(broken, expected, start),
        }
    return results


def go_on_as(rank: int, case: Case, folder: Path) -> float:
    """Goes on from a checkpoint with other replicas; how far these are from each other at the end."""
    model = initial_state(case.task, job_of(case).seed)
    trainer = _begun(case, torch.zeros_like(Layout.of(model).flatten(model)))
    _go_on(trainer, folder)
    worst = 0.0
    for parameter in trainer.replica.parameters():
        part = local_of(parameter).detach()
        first = part.clone()
        dist.broadcast(first, 0)
        worst = max(worst, float((part - first).abs().max()))
        assert torch.isfinite(first).all()
    return worst


def _begun(case: Case, start: Tensor) -> RankTrainer:
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu", apart=case.strategy.local_steps > 0))
    trainer.load(start, {})
    trainer.begin(1)
    return trainer


def _fit(trainer: RankTrainer, folder: Path, checkpoint: int) -> float:
    """Trains a round with a checkpoint between two meetings; how far apart the replicas are then."""
    data, _ = trainer.task.data(Site("silo"))
    checkpoints, done = Checkpoints(folder, [], 1, _group()), RoundProgress()
    apart = [0.0]

    def watch(report: StepReport) -> None:
        if report.step == checkpoint:
            position = Position(1, "m", report.step, done.seen, done.loss_sum)
            assert trainer.optimizer is not None
            checkpoints.save(trainer.replica, trainer.optimizer, position, trainer.outer)
            part = local_of(trainer.replica.parameters()[0]).detach()
            mean = part.clone()
            group = trainer.meshes.one("dp").get_group()
            dist.all_reduce(mean, group=group)
            apart[0] = float((part - mean / group.size()).abs().max())

    trainer.fit(trainer.batches(data, 1), 1, done, watch)
    checkpoints.finish()
    return apart[0]


def _go_on(trainer: RankTrainer, folder: Path) -> None:
    data, _ = trainer.task.data(Site("silo"))
    checkpoints, batches = Checkpoints(folder, [], 1, _group()), trainer.batches(data, 1)
    newest = checkpoints.newest(1, "m")
    assert newest is not None
    assert trainer.optimizer is not None
    checkpoints.load(newest[0], trainer.replica, trainer.optimizer, trainer.outer)
    batches.load_state_dict({"position": newest[1].step})
    trainer.fit(batches, 1, RoundProgress(newest[1].seen, newest[1].loss_sum), lambda report: None)


def _off(trainer: RankTrainer, expected: dict[str, Tensor], start: Tensor) -> float:
    """The largest difference of this rank's parts, over the largest change of their tensor."""
    worst, initial = 0.0, trainer.layout.unflatten(start)
    for name, tensor in trainer.replica.tensors():
        change = (expected[name] - initial[name]).abs().max()
        theirs = expected[name][region_of(name, tensor)]
        worst = max(worst, float((local_of(tensor).detach() - theirs).abs().max() / change))
    return worst


def _group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
