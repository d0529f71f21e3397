"""Optimizers over parameters that lie on several ranks and meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from roundtable.client.training.sgd import Correction, make_correction
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import local_of
from roundtable.cluster.parallel.strategy import (
    Strategy,
    by_entry,
    cannot_code_state,
    cannot_offload_state,
    cannot_share_out,
    group_options,
    take_kernels,
)
from roundtable.cluster.stepping.coded_state import code_state, open_state
from roundtable.cluster.stepping.local_parameters import localise
from roundtable.cluster.stepping.offloaded_state import offload_state
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.task import Task


def make_optimizer(
    task: Task, parameters: Sequence[nn.Parameter], job: JobConfig, strategy: Strategy, meshes: Meshes
) -> torch.optim.Optimizer:
    """The task's own optimizer, or SGD as the job says; sharded over the replicas under ZeRO-1.

    Raises ConfigError for one that the strategy cannot share out, or offload.
    """
    table, step = job.algorithm, make_algorithm(job.algorithm).step()
    make: Callable[[Iterable[nn.Parameter]], Any] | None = getattr(task, "optimizer", None)
    own: torch.optim.Optimizer | None = make(parameters) if make is not None else None
    if own is None:
        own = torch.optim.SGD(
            parameters, lr=table.learning_rate, momentum=step.momentum, weight_decay=step.weight_decay
        )
    if strategy.offload_optimizer and (reason := cannot_offload_state(by_entry(own))):
        raise ConfigError(f"offload_optimizer = true: {reason}")
    if strategy.optimizer_bits == 8 and (reason := cannot_code_state(own)):
        raise ConfigError(f"optimizer_bits = 8: {reason}")
    if strategy.data_parallel == "zero1":
        return _zero(own, meshes, strategy)
    if by_entry(own):
        localise(own)
        take_kernels(own)
    else:
        _split_groups(own)
    _place_state(own, strategy)
    for group in own.param_groups:
        group["initial_lr"] = group["lr"]
    return own


def set_decay(optimizer: torch.optim.Optimizer, job: JobConfig, round: int) -> float:
    """Sets every group's learning rate for the round; gives the first one."""
    decay = job.algorithm.learning_rate_decay ** (round - 1)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * decay
    return float(optimizer.param_groups[0]["lr"])


def sharded_correction(step: LocalStep, parameters: Sequence[nn.Parameter]) -> Correction | None:
    """The step's correction of gradients, one for each mesh, as foreach kernels take one mesh at a time."""
    made = [make_correction(step, group) for group in _by_mesh(parameters).values()]
    corrections = [correction for correction in made if correction is not None]
    if not corrections:
        return None

    def correct() -> None:
        for correction in corrections:
            correction()

    return correct


@torch.no_grad()
def align_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Places each gradient as its parameter: that of a split embedding comes whole to every rank."""
    for parameter in parameters:
        gradient = parameter.grad
        if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the optimizer's state as its first step would, without moving a weight, to load into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate, decay in zip(optimizer.param_groups, rates, decays, strict=True):
        group["lr"] = rate
        if decay is not None:
            group["weight_decay"] = decay
    open_state(getattr(optimizer, "optim", optimizer))


def _place_state(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Where and how state waits from one step to the next."""
    if strategy.offload_optimizer:
        offload_state(optimizer)
    if strategy.optimizer_bits == 8:
        code_state(optimizer)


def _zero(own: torch.optim.Optimizer, meshes: Meshes, strategy: Strategy) -> torch.optim.Optimizer:
    if reason := cannot_share_out(own):
        raise ConfigError(reason)
    group = meshes.one("dp").get_group()
    take_kernels(own)
    # Of what the task gave its group: it may leave parameters out, and set other options than the defaults.
    held = own.param_groups[0]["params"]
    options = group_options(own)
    made = ZeroRedundancyOptimizer(held, type(own), process_group=group, **options)
    _place_state(made.optim, strategy)
    for one in made.param_groups:
        one["initial_lr"] = one["lr"]
    return made


def parts_by_kind(
    parameters: Iterable[nn.Parameter],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """This rank's parts of the gradients, as foreach kernels take them: of one device and type at a time."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and (part := local_of(parameter.grad)).numel():
            groups.setdefault((part.device, part.dtype), []).append(part)
    return groups


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    return groups


def _split_groups(optimizer: torch.optim.Optimizer) -> None:
    """One group for each mesh."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups.extend({**group, "params": part} for part in _by_mesh(group["params"]).values())
    optimizer.param_groups[:] = groups
