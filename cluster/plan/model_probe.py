"""Probes a task for a plan, on fake tensors: what its model is made of, keeps, and can be split into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from roundtable.client.training.batches import count_examples, ordered_batches
from roundtable.cluster.parallel.anatomy import Anatomy, dissect
from roundtable.cluster.parallel.experts import Experts
from roundtable.cluster.parallel.forward_trace import Trace, fake_model, trace
from roundtable.cluster.parallel.pipeline_stages import (
    FixedOutput,
    inputs_of,
    keep_only,
    partition,
    refuse_cut,
)
from roundtable.cluster.parallel.tensor_parallel import TensorParallel, find_tensor_parallel, from_task
from roundtable.cluster.parallel.tensor_randomness import ShardedRegions
from roundtable.cluster.plan.arithmetic import count_work
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.core.errors import TaskError
from roundtable.core.task import Task

_DEGREES = (2, 4, 8, 16)


def probe_model(task: Task, batch: Any, *, device: str = "cuda", bfloat16: bool = False) -> ModelProbe:
    """Traces the task on one real batch, whose values do not matter.

    Raises NotTraceable where the loss needs values, and whatever the task raises.
    """
    mode, model = fake_model(task)
    anatomy = dissect(model)
    traced = trace(task, mode, model, batch, bfloat16)
    plan = from_task(task, model, traced) or find_tensor_parallel(model, anatomy, traced)
    factor = state_factor(task)
    return ModelProbe(
        anatomy=anatomy,
        trace=traced,
        tensor_parallel=plan,
        state_factor=factor,
        # Multi-tensor kernels, which torch takes on GPUs, work on a copy of all at once.
        optimizer_temporaries=1.0 if factor and device == "cuda" else 0.0,
        experts=tuple(name for name, module in model.named_modules() if isinstance(module, Experts)),
        cannot_split={
            degree: cannot_split(task, plan, batch, degree, anatomy, traced) for degree in _DEGREES
        },
        cannot_pipeline=cannot_pipeline(task, anatomy, batch),
        half=in_half(task, batch) if bfloat16 else None,
        gloo=device == "cpu",
        flops=count_work(task, batch).flops,
    )


def in_half(task: Task, batch: Any) -> Trace | None:
    """Traces the model in bfloat16, with a float32 output; None where its own code mixes precisions."""
    mode, model = fake_model(task, torch.bfloat16)
    model.register_forward_hook(lambda module, inputs, output: tree_map_only(Tensor, _widened, output))
    halves = tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, batch)
    try:
        return trace(task, mode, model, halves)
    except RuntimeError:
        return None


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def example_batch(data: Any, examples: int = 3) -> Any:
    """The first few training examples as a batch.

    Of one alone some layers take no statistics, and a power of two gives activations the shapes of weights.
    """
    if count_examples(data) == 0:
        raise TaskError("the silo has no training examples, so what a batch is made of cannot be seen")
    return next(iter(ordered_batches(data, examples))).data


def state_factor(task: Task) -> float:
    """Bytes of optimizer state for each byte of parameters, found on a small parameter."""
    make: Callable[[Iterable[nn.Parameter]], Any] | None = getattr(task, "optimizer", None)
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = make([parameter]) if make is not None else None
    if optimizer is None:
        return 0.0
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    return sum(value.nbytes for value in states if value.numel() > 1) / parameter.nbytes


def cannot_split(
    task: Task, plan: TensorParallel, batch: Any, degree: int, anatomy: Anatomy, whole: Trace
) -> str:
    """Why tensor parallelism of this degree is impossible: one rank's part is run on fake tensors.

    `whole` is the record of the whole model: a draw whose shape is another there is for a shard.
    """
    mode, model = fake_model(task)
    if reason := plan.refusal(model, degree):
        return reason
    with mode:
        for name, style in plan.styles.items():
            module = model.get_submodule(name)
            if style in ("column", "row") and isinstance(module, nn.Linear):
                _shrink(module, 0 if style == "column" else 1, degree)
    for name, attribute in plan.heads:
        module = model.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // degree)
    regions = ShardedRegions(plan, sequence=False)
    regions.follow(model, anatomy.blocks)
    try:
        part = trace(task, mode, model, batch, sharded=lambda: regions.sharded)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        return f"with its part of the heads a rank cannot run the model: {str(error).splitlines()[0][:160]}"
    return _cannot_draw(whole, part)


def _cannot_draw(whole: Trace, part: Trace) -> str:
    """Why ranks could not agree on their random numbers; empty where layers tell what a shard is."""
    if [draw.name for draw in whole.draws] != [draw.name for draw in part.draws]:
        return "two passes draw random numbers in different places, so that ranks could not agree on them"
    for one, other in zip(whole.draws, part.draws, strict=True):
        if (one.shape != other.shape) != other.sharded:
            kind = "whole" if other.sharded else "split"
            return (
                f"{other.name or 'the model'} draws random numbers for a tensor that is {kind} there, which "
                "the order of its layers does not tell; draw right after the layer that makes the tensor"
            )
    return ""


def cannot_pipeline(task: Task, anatomy: Anatomy, batch: Any) -> str:
    """Why the model cannot be cut into stages: two halves are run one after the other on fake tensors."""
    if len(anatomy.units) < 2:
        return "the model has no parts in a row to cut between"
    if reason := refuse_cut(anatomy, 2):
        return reason
    cuts = partition(anatomy, 2)
    try:
        values: Any = None
        for units in cuts:
            mode, model = fake_model(task)
            keep_only(model, anatomy, units)
            if values is None:
                values = inputs_of(task, tree_map_only(Tensor, mode.from_tensor, batch))
            with mode:
                passed = [torch.empty(value.shape, dtype=value.dtype) for value in values]
                output = model(*passed)
                if not isinstance(output, Tensor):
                    return f"a stage would hand on a {type(output).__name__}, not a tensor"
                values = (output,)
        with mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, batch)
            task.loss(FixedOutput(torch.empty(values[0].shape, dtype=values[0].dtype)), fakes)
    except (RuntimeError, TypeError, AttributeError, ValueError, LookupError, TaskError) as error:
        return (
            "its forward does not skip parts that are None, as a stage's must "
            f"({type(error).__name__}: {str(error).splitlines()[0][:120]})"
        )
    return ""


def _shrink(module: nn.Linear, dimension: int, degree: int) -> None:
    """One rank's part of a linear layer, as empty tensors."""
    shape = list(module.weight.shape)
    shape[dimension] //= degree
    module.weight = nn.Parameter(torch.empty(shape, dtype=module.weight.dtype))
    if dimension == 0:
        module.out_features = shape[0]
        if module.bias is not None:
            module.bias = nn.Parameter(torch.empty(shape[0], dtype=module.bias.dtype))
    else:
        module.in_features = shape[1]
