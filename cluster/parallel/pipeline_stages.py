"""Cuts a model into pipeline stages, and runs the task's own loss through torch's schedules.

A stage is the model with the parts of other stages taken out: its `forward` must skip parts that are None, as
torchtitan's models do, or be a Sequential's. Names of parameters stay those of the whole model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from roundtable.cluster.parallel.anatomy import Anatomy
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.core.errors import TaskError
from roundtable.core.seeds import derive_seed, isolated_randomness, seed_all
from roundtable.core.task import Task

_MULTIPLE: dict[str, Callable[..., Any]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


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
    sizes = _elements(anatomy)
    sums = list(accumulate((sizes[unit] for unit in units), initial=0))
    cost = {(end, 1): sums[end] for end in range(len(units) + 1)}
    cut: dict[tuple[int, int], int] = {}
    for stage in range(2, stages + 1):
        for end in range(stage, len(units) + 1):
            cost[end, stage], cut[end, stage] = _last_cut(sums, cost, stage, end)
    parts, end = [], len(units)
    for stage in range(stages, 0, -1):
        begin = cut[end, stage] if stage > 1 else 0
        parts.append(units[begin:end])
        end = begin
    return parts[::-1]


def _elements(anatomy: Anatomy) -> dict[str, int]:
    """Parameters of each unit."""
    found = dict.fromkeys(anatomy.units, 0)
    for weight in anatomy.weights:
        unit = anatomy.unit_of(weight.name)
        if unit is not None and unit != weight.name:
            found[unit] += weight.elements
    return found


def _last_cut(
    sums: Sequence[int], cost: Mapping[tuple[int, int], int], stage: int, end: int
) -> tuple[int, int]:
    """(the heaviest of `stage` stages up to unit `end`, where the last of them begins).

    What lies before the cut grows with it and the last stage shrinks, so the best is where they meet.
    """

    def heaviest(cut: int) -> int:
        return max(cost[cut, stage - 1], sums[end] - sums[cut])

    cuts = range(stage - 1, end)
    meet = cuts.start + bisect_left(cuts, True, key=lambda cut: cost[cut, stage - 1] >= sums[end] - sums[cut])
    best = min((heaviest(cut), cut) for cut in (meet - 1, meet) if cut in cuts)
    while best[1] - 1 in cuts and heaviest(best[1] - 1) == best[0]:
        best = best[0], best[1] - 1
    return best


def refuse_cut(anatomy: Anatomy, stages: int) -> str:
    """Why the model cannot be cut into so many stages; empty where it can."""
    if len(anatomy.units) < stages:
        return f"the model has {len(anatomy.units)} parts for {stages} stages"
    if anatomy.loose:
        return f"{anatomy.loose[0]} lies in none of the model's parts, and each stage would have its own"
    if anatomy.batch_norms:
        return f"{anatomy.batch_norms[0]} takes statistics over a batch, and a pipeline runs it in parts"
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


class _NoParts(nn.Module):
    """Stands in for a model of which other stages have parts: a loss that asks for them would miss those."""

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """TaskError: with it end `modules`, `parameters`, `buffers` and the like."""
        raise TaskError(
            "the loss reads the model's parts (modules, parameters, buffers), as for a penalty or the "
            "balance of experts, and in a pipeline each stage has some of them; let it read the output alone"
        )

    @override
    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As named_modules."""
        yield from self.named_modules()

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As named_modules."""
        return dict(self.named_modules())


class Capture(_NoParts):
    """Stands in for the model to catch the inputs that a loss calls it with."""

    @override
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises _Stop with the inputs."""
        if named:
            raise TaskError("in a pipeline the loss must call the model with positional arguments only")
        raise _Stop(inputs)


OTHER_INPUTS = (
    "in a pipeline the loss is called on the first stage and on the last, and it called the model with "
    "different inputs for one batch: let it draw random numbers from torch's generator"
)


class FixedOutput(nn.Module):
    """Stands in for a model whose output was computed before, from `inputs` where they are given.

    With `later` nobody waits for the device to compare inputs: `differs` is then a truth value on the device.
    """

    def __init__(self, output: Any, inputs: tuple[Any, ...] | None = None, *, later: bool = False) -> None:
        super().__init__()
        self._output = output
        self._inputs = inputs
        self._later = later
        self.differs: Tensor | None = None

    @override
    def forward(self, *inputs: Any) -> Any:
        """The output; TaskError for other inputs than it was computed from, with `later` for other shapes."""
        if self._inputs is not None:
            if [each.shape for each in inputs] != [each.shape for each in self._inputs]:
                raise TaskError(OTHER_INPUTS)
            pairs = zip(inputs, self._inputs, strict=True)
            self.differs = torch.stack([(one != other).any() for one, other in pairs]).any()
            if not self._later and self.differs:
                raise TaskError(OTHER_INPUTS)
        return self._output


class LastOutput(_NoParts, FixedOutput):
    """The output of a pipeline's last stage, for a loss that looks at nothing else."""


def inputs_of(task: Task, batch: Any) -> tuple[Any, ...]:
    """The inputs that the task's loss calls the model with, for this batch."""
    try:
        task.loss(Capture(), batch)
    except _Stop as stop:
        return stop.inputs
    raise TaskError(f"{type(task).__name__}.loss() never calls the model, which a pipeline needs")


class Pipeline:
    """This rank's stages, run over micro-batches.

    After a backward pass `differs` says on the last stage, in a truth value on the device, whether the loss
    called the model with other inputs than the first stage was given.
    """

    def __init__(
        self, stages: Sequence[nn.Module], strategy: Strategy, meshes: Meshes, device: torch.device
    ) -> None:
        self._stages = stages
        self._strategy = strategy
        self._device = device
        self._group = meshes.one("pp").get_group()
        self._rank = meshes.place("pp")
        self._size = strategy.mesh.pp
        self._places = strategy.stages_of(self._rank)
        self._schedules: dict[Any, _Schedule] = {}
        self._micro: list[Any] = []
        self._use: Callable[[Any, Any], Tensor] = lambda output, batch: output
        self.differs: Tensor | None = None
        self._seed = 0
        for index, part in enumerate(stages):
            begin = partial(self._begin, self._places[index])
            part.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        self.last = self._size * len(stages) - 1 in self._places

    def backward(self, task: Task, batches: Sequence[Any], weights: Sequence[float]) -> Tensor | None:
        """Gradients of Σ weight · loss over the micro-batches; the losses, where this is the last stage.

        All micro-batches have the same shape; the schedule decides how many it needs, see `padded`. From
        the seed of the default generator a loss draws the same on all stages, and each stage something else.
        """
        drawn = torch.initial_seed()
        inputs: list[tuple[Any, ...]] = []

        def the_same(index: int) -> AbstractContextManager[None]:
            return isolated_randomness(derive_seed(drawn, "loss", index), self._device)

        def weighted(output: Any, index: int) -> Tensor:
            model = LastOutput(output, None if index else inputs[0], later=True)
            with the_same(index):
                loss = task.loss(model, batches[index]) * weights[index]
            if not index:
                self.differs = model.differs
            return loss

        for index, batch in enumerate(batches):
            with the_same(index):
                inputs.append(inputs_of(task, batch))
        losses: list[Tensor] = []
        self._run(inputs, weighted, losses, drawn)
        if not self.last:
            return None
        pairs = zip(losses, weights, strict=True)
        return torch.stack([loss.detach() / (weight or 1.0) for loss, weight in pairs])

    def outputs(self, task: Task, batch: Any) -> LastOutput | None:
        """The model's output without gradients, as a model for this batch's loss, on the last stage.

        The generators are afterwards as they were before, so that the loss may draw the same again.
        """
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            inputs = inputs_of(task, batch)
        outputs: list[Any] = [None] * self.padded(1)

        def note(output: Any, index: int) -> Tensor:
            outputs[index] = tree_map_only(Tensor, Tensor.detach, output)
            return torch.zeros((), device=self._device)

        self._infer_together(len(outputs), inputs)
        with torch.no_grad():
            self._run([inputs] * len(outputs), note, [])
        return LastOutput(outputs[0], inputs) if self.last else None

    def padded(self, count: int) -> int:
        """The number of micro-batches that the schedule takes for `count` of them."""
        count = max(count, self._size)
        return -(-count // self._size) * self._size if self._strategy.virtual_stages > 1 else count

    def _run(
        self,
        inputs: Sequence[tuple[Any, ...]],
        use: Callable[[Any, int], Tensor],
        losses: list[Tensor],
        seed: int | None = None,
    ) -> None:
        """Runs the schedule; with a backward pass where there is a seed for what the stages draw."""
        backward, self._seed = seed is not None, seed or 0
        schedule = self._schedule(len(inputs), inputs[0], backward)
        self._use = use
        joined = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
        arguments = joined if self._rank == 0 else []
        places = torch.arange(len(inputs))
        named = {"target": places, "losses": losses} if self.last else {}
        step = schedule.step if backward else schedule.eval
        with isolated_randomness(self._seed, self._device):
            # Joining the outputs of all micro-batches would double the largest tensors that there are.
            step(*arguments, **named, place=places, return_outputs=False)

    def _begin(self, stage: int, part: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, Any]:
        """Seeds a stage's pass by its micro-batch: torch runs one more where it does not know the shapes."""
        seed_all(derive_seed(self._seed, "stage", stage, int(named.pop("place"))), self._device)
        return inputs, named

    def _infer_together(self, count: int, inputs: tuple[Any, ...]) -> None:
        """Has all ranks run the pass that tells shapes where one does: experts and shards exchange within it,
        and in an evaluation data ranks have batches of different lengths. Collective."""
        key = self._key(count, inputs, False)
        unknown = torch.tensor(float(key not in self._schedules), device=self._device)
        dist.all_reduce(unknown)
        if unknown:
            self._schedules.pop(key, None)

    @staticmethod
    def _key(count: int, inputs: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        return (count, backward, *(tuple(value.shape) for value in inputs))

    def _schedule(self, count: int, inputs: tuple[Any, ...], backward: bool) -> _Schedule:
        """One for each shape of micro-batches: stages remember the shapes that they exchange."""
        key = self._key(count, inputs, backward)
        if key not in self._schedules:
            total = self._size * len(self._stages)
            stages = [
                PipelineStage(part, self._places[i], total, self._device, group=self._group)
                for i, part in enumerate(self._stages)
            ]
            options: dict[str, Any] = {
                "loss_fn": lambda output, index: self._use(output, int(index)),
                "scale_grads": False,
            }
            if (multiple := _MULTIPLE.get(self._strategy.schedule)) is not None:
                self._schedules[key] = multiple(list(stages), count, **options)
            else:
                kind = ScheduleGPipe if self._strategy.schedule == "gpipe" else Schedule1F1B
                self._schedules[key] = kind(stages[0], count, **options)
        return self._schedules[key]
