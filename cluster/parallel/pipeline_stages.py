"""Cuts a model into pipeline stages, and runs the task's own loss through torch's schedules.

A stage is the model with the parts of other stages taken out: its `forward` must skip parts that are None, as
torchtitan's models do, or be a Sequential's. Names of parameters stay those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from roundtable.cluster.parallel.anatomy import Anatomy
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.core.errors import TaskError
from roundtable.core.task import Task


class _Schedule(Protocol):
    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def eval(self, *args: Any, **kwargs: Any) -> Any: ...


def partition(anatomy: Anatomy, stages: int) -> list[list[str]]:
    """Units of each stage: contiguous, with the heaviest stage as light as can be.

    Raises TaskError where there are fewer units than stages.
    """
    units = list(anatomy.units)
    if len(units) < stages:
        raise TaskError(f"the model has {len(units)} parts to cut between, fewer than {stages} stages")
    sizes = [sum(weight.elements for weight in anatomy.within(unit)) for unit in units]
    cost = {(i, 1): sum(sizes[:i]) for i in range(len(units) + 1)}
    cut: dict[tuple[int, int], int] = {}
    for stage in range(2, stages + 1):
        for end in range(stage, len(units) + 1):
            choices = [(max(cost[i, stage - 1], sum(sizes[i:end])), i) for i in range(stage - 1, end)]
            cost[end, stage], cut[end, stage] = min(choices)
    parts, end = [], len(units)
    for stage in range(stages, 0, -1):
        begin = cut[end, stage] if stage > 1 else 0
        parts.append(units[begin:end])
        end = begin
    return parts[::-1]


def refuse_cut(anatomy: Anatomy, stages: int) -> str:
    """Why the model cannot be cut into so many stages; empty where it can."""
    if len(anatomy.units) < stages:
        return f"the model has {len(anatomy.units)} parts for {stages} stages"
    if anatomy.loose:
        return f"{anatomy.loose[0]} lies in none of the model's parts, and each stage would have its own"
    stage_of = {unit: stage for stage, units in enumerate(partition(anatomy, stages)) for unit in units}
    for first, second in anatomy.tied:
        one, two = anatomy.unit_of(first), anatomy.unit_of(second)
        if one is not None and two is not None and stage_of[one] != stage_of[two]:
            return f"{first} and {second} are one parameter and would lie on different stages"
    return ""


def keep_only(model: nn.Module, anatomy: Anatomy, units: Sequence[str]) -> nn.Module:
    """Takes every other unit out of the model: entries of containers go, attributes become None."""
    containers = {block.rpartition(".")[0] for block in anatomy.blocks}
    for unit in anatomy.units:
        if unit in units:
            continue
        parent, _, key = unit.rpartition(".")
        owner = model.get_submodule(parent)
        if parent in containers or isinstance(owner, nn.Sequential):
            del owner._modules[key]
        else:
            owner._modules[key] = None
    return model


class _Stop(Exception):
    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs


class Capture(nn.Module):
    """Stands in for the model to catch the inputs that a loss calls it with."""

    @override
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises _Stop with the inputs."""
        if named:
            raise TaskError("in a pipeline the loss must call the model with positional arguments only")
        raise _Stop(inputs)


class FixedOutput(nn.Module):
    """Stands in for a model whose output was computed before."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    @override
    def forward(self, *inputs: Any) -> Any:
        """The output."""
        return self._output


def inputs_of(task: Task, batch: Any) -> tuple[Any, ...]:
    """The inputs that the task's loss calls the model with, for this batch."""
    try:
        task.loss(Capture(), batch)
    except _Stop as stop:
        return stop.inputs
    raise TaskError(f"{type(task).__name__}.loss() never calls the model, which a pipeline needs")


class Pipeline:
    """This rank's stages, run over micro-batches."""

    def __init__(
        self, stages: Sequence[nn.Module], strategy: Strategy, meshes: Meshes, device: torch.device
    ) -> None:
        self._stages = stages
        self._strategy = strategy
        self._device = device
        self._group = meshes.one("pp").get_group()
        self._rank = meshes.place("pp")
        self._size = strategy.mesh.pp
        self._schedules: dict[Any, _Schedule] = {}
        self._micro: list[Any] = []
        self._use: Callable[[Any, Any], Tensor] = lambda output, batch: output
        self.last = self._rank == self._size - 1

    def backward(self, task: Task, batches: Sequence[Any], weights: Sequence[float]) -> Tensor | None:
        """Gradients of Σ weight · loss over the micro-batches; the losses, where this is the last stage.

        All micro-batches have the same shape; the schedule decides how many it needs, see `padded`.
        """

        def weighted(output: Any, index: int) -> Tensor:
            return task.loss(FixedOutput(output), batches[index]) * weights[index]

        losses: list[Tensor] = []
        self._run(task, batches, weighted, losses, backward=True)
        if not self.last:
            return None
        pairs = zip(losses, weights, strict=True)
        return torch.stack([loss.detach() / (weight or 1.0) for loss, weight in pairs])

    def outputs(self, task: Task, batches: Sequence[Any]) -> list[Any] | None:
        """The model's outputs without gradients, on the last stage."""
        fillers = [batches[-1]] * (self.padded(len(batches)) - len(batches))
        outputs: list[Any] = [None] * (len(batches) + len(fillers))

        def note(output: Any, index: int) -> Tensor:
            outputs[index] = tree_map_only(Tensor, Tensor.detach, output)
            return torch.zeros((), device=self._device)

        with torch.no_grad():
            self._run(task, [*batches, *fillers], note, [], backward=False)
        return outputs[: len(batches)] if self.last else None

    def padded(self, count: int) -> int:
        """The number of micro-batches that the schedule takes for `count` of them."""
        count = max(count, self._size)
        return -(-count // self._size) * self._size if self._strategy.schedule == "interleaved" else count

    def _run(
        self,
        task: Task,
        batches: Sequence[Any],
        use: Callable[[Any, int], Tensor],
        losses: list[Tensor],
        *,
        backward: bool,
    ) -> None:
        inputs = [inputs_of(task, batch) for batch in batches]
        schedule = self._schedule(len(batches), inputs[0], backward)
        self._use = use
        joined = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
        arguments = joined if self._rank == 0 else []
        named = {"target": torch.arange(len(batches)), "losses": losses} if self.last else {}
        # Joining the outputs of all micro-batches would double the largest tensors that there are.
        (schedule.step if backward else schedule.eval)(*arguments, **named, return_outputs=False)

    def _schedule(self, count: int, inputs: tuple[Any, ...], backward: bool) -> _Schedule:
        """One for each shape of micro-batches: stages remember the shapes that they exchange."""
        key = (count, backward, *(tuple(value.shape) for value in inputs))
        if key not in self._schedules:
            total = self._size * len(self._stages)
            stages = [
                PipelineStage(part, self._rank + i * self._size, total, self._device, group=self._group)
                for i, part in enumerate(self._stages)
            ]
            options: dict[str, Any] = {
                "loss_fn": lambda output, index: self._use(output, int(index)),
                "scale_grads": False,
            }
            if self._strategy.schedule == "interleaved":
                self._schedules[key] = ScheduleInterleaved1F1B(list(stages), count, **options)
            else:
                kind = ScheduleGPipe if self._strategy.schedule == "gpipe" else Schedule1F1B
                self._schedules[key] = kind(stages[0], count, **options)
        return self._schedules[key]
