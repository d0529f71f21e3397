"""Probes a task for a plan, on fake tensors: what its model is made of, keeps, and can be split into."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from roundtable.client.training.batches import count_examples, ordered_batches
from roundtable.client.training.module_state import isolated_randomness
from roundtable.cluster.parallel.anatomy import Anatomy, dissect
from roundtable.cluster.parallel.checkpointing import checkpoint_blocks
from roundtable.cluster.parallel.experts import Experts, MixtureOfExperts
from roundtable.cluster.parallel.forward_trace import NotTraceable, Trace, fake_model, quietly, trace, unheard
from roundtable.cluster.parallel.meta_init import model_on_meta
from roundtable.cluster.parallel.packed_layers import inputs_of_layer, outputs_of, take_inputs, take_outputs
from roundtable.cluster.parallel.pipeline_stages import (
    FixedOutput,
    inputs_of,
    keep_only,
    partition,
    refuse_cut,
)
from roundtable.cluster.parallel.shared_batch_norm import MicroBatch, share_batch_norms
from roundtable.cluster.parallel.split_attention import split_attention
from roundtable.cluster.parallel.strategy import Strategy, by_entry, cannot_code_state, take_kernels
from roundtable.cluster.parallel.tensor_parallel import TensorParallel, find_tensor_parallel, from_task
from roundtable.cluster.parallel.tensor_randomness import ShardedRegions
from roundtable.cluster.plan.arithmetic import OperatorRecorder, PassWork, count_work
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.core.errors import ConfigError, RoundtableError, TaskError
from roundtable.core.task import Task, initial_state

_DEGREES = (2, 4, 8, 16)
_CPU = torch.device("cpu")
_LARGEST = 1 - 2**-24
NOT_STREAMED = (
    "the training data are a stream, whose ranks have as many examples of a step as it brings, and the "
    "micro-batches of a pipeline have one size"
)
_VALUES = "the model or its loss cannot run on tensors without values, so no part of it could be tried"


def probe_model(
    task: Task,
    data: Any,
    *,
    device: str = "cuda",
    bfloat16: bool = False,
    told: Callable[[str], None] = unheard,
) -> ModelProbe:
    """Traces the task on the first training examples, on fake tensors where it can run on them, else on real.

    `data` are the training data: streamed ones say by their kind what no plan may do with them. `told` hears
    how far it is: large models take a minute.
    Raises TaskError with what the task raises, and NotTraceable where it needs values of a model that is too
    large for this machine's memory.
    """
    batch = example_batch(data)
    told("tracing the model on the first examples")
    try:
        mode, model, traced, varies = _traced(task, batch, bfloat16)
    except RoundtableError:
        raise
    except Exception as error:
        raise TaskError(_said(task, error)) from error
    anatomy = dissect(model)
    if not any(weight.trainable for weight in anatomy.weights):
        raise TaskError(f"{type(task).__name__}'s model has no parameters to train")
    plan = from_task(task, model, traced) or find_tensor_parallel(model, anatomy, traced, told)
    cost = optimizer_cost(task)

    def tried(degree: int) -> str:
        told(f"running one rank's part under tp = {degree}")
        return cannot_split(task, plan, batch, degree, anatomy, traced)

    return ModelProbe(
        anatomy=anatomy,
        trace=traced,
        tensor_parallel=plan,
        state_factor=cost.factor,
        # Multi-tensor kernels, which torch takes on GPUs, work on a copy of all at once.
        optimizer_temporaries=1.0 if cost.factor and device == "cuda" else 0.0,
        experts=tuple(name for name, module in model.named_modules() if isinstance(module, Experts)),
        cannot_split={degree: _VALUES if mode is None else tried(degree) for degree in _DEGREES},
        cannot_pipeline=_no_pipeline(task, anatomy, data, batch, traced, varies, real=mode is None),
        cannot_run=cannot_run(task, anatomy, batch) if mode is not None else _VALUES,
        half=in_half(task, batch) if bfloat16 and mode is not None else None,
        gloo=device == "cpu",
        work=count_work(task, batch),
        optimizer=cost.work,
        streamed=count_examples(data) is None,
        varies=varies,
        own_optimizer=cost.own,
        by_entry=cost.by_entry,
        cannot_code=cost.cannot_code,
        crowding={
            f"{name}.experts": module.crowding
            for name, module in model.named_modules()
            if isinstance(module, MixtureOfExperts)
        },
    )


def _traced(task: Task, batch: Any, bfloat16: bool) -> tuple[FakeTensorMode | None, nn.Module, Trace, str]:
    """(the mode, None where the model is real, the model, its trace, what some passes do not call)."""
    mode, model = fake_model(task)
    try:
        with quietly(), isolated_randomness(0, _CPU):
            before = _host_generators()
            traced = _settled(trace(task, mode, model, batch, bfloat16), task, mode, model, batch)
            drawn = _host_generators() != before
            return mode, model, traced, called_sometimes(task, mode, model, batch, traced) if drawn else ""
    except Exception as error:
        needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        if 2 * needed > _free_memory():
            if isinstance(error, RoundtableError):
                raise
            raise NotTraceable(_said(task, error)) from error
    made = initial_state(task, 0)
    assert isinstance(made, nn.Module)
    share_batch_norms(made, None, MicroBatch())
    with isolated_randomness(0, _CPU):
        traced = _settled(trace(task, None, made, batch, bfloat16), task, None, made, batch)
    return None, made, traced, called_sometimes(task, None, made, batch, traced)


def _host_generators() -> str:
    """The state of Python's and NumPy's generators, which a pass on tensors without values can ask too."""
    return repr((random.getstate(), np.random.get_state(legacy=False)))


def _settled(traced: Trace, task: Task, mode: FakeTensorMode | None, model: nn.Module, batch: Any) -> Trace:
    """The trace with what every pass changes: tables that the first one alone makes are no change."""
    if traced.rewritten:
        traced.rewritten = trace(task, mode, model, batch).rewritten
    return traced


def called_sometimes(
    task: Task, mode: FakeTensorMode | None, model: nn.Module, batch: Any, traced: Trace
) -> str:
    """The name of a module that another pass calls more or less often than the traced one; empty without.

    Tried are eight seeds, real models on single examples too, and with single random numbers, by which layers
    are left out, as small and as large as they can be.
    """
    usual = Counter(call.name for call in traced.calls)
    ways: list[tuple[Any, float | None]] = [(batch, None)] * 8
    if mode is None:
        ways += [(batch, 0.0), (batch, _LARGEST)]
        ways += [(tree_map_only(Tensor, partial(_one, place=i), batch), None) for i in range(traced.examples)]
    for seed, (given, value) in enumerate(ways, 1):
        try:
            with (
                quietly(),
                isolated_randomness(seed, _CPU),
                nullcontext() if value is None else _Chance(value),
            ):
                calls = Counter(call.name for call in trace(task, mode, model, given).calls)
        except Exception:  # noqa: BLE001 - of a single example some layers take no statistics
            continue
        if odd := (calls - usual) + (usual - calls):
            return min(odd)
    return ""


def _one(tensor: Tensor, place: int) -> Tensor:
    return tensor[place : place + 1] if tensor.dim() else tensor


class _Chance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Single random numbers between 0 and 1 have one value."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        uniform = func._schema.name.removeprefix("aten::") in ("rand", "rand_like", "uniform_", "uniform")
        if uniform and isinstance(output, Tensor) and output.numel() == 1:
            output.fill_(self._value)
        return output


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _said(task: Task, error: Exception) -> str:
    """An error of the task's code in a line, with the line of the code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or list(frames)
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return (
        f"{type(task).__name__}'s model or loss does not run on the first training examples: "
        f"{type(error).__name__}: {first} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
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


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of state for each byte of parameters, a step's work, is it the task's own, is it `by_entry`, and
    why its state cannot be in 8 bits.

    The work is the bytes that a step moves for each byte of gradients, and its calls for each parameter.
    """

    factor: float
    work: PassWork
    own: bool
    by_entry: bool
    cannot_code: str = ""


def optimizer_cost(task: Task) -> OptimizerCost:
    """What the task's optimizer costs, found on a small parameter.

    Plain SGD, which is the default, reads the gradient and reads and writes the parameter. Raises ConfigError
    for an optimizer whose state is in tensors of a kind of its own.
    """
    make: Callable[[Iterable[nn.Parameter]], Any] | None = getattr(task, "optimizer", None)
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = make([parameter]) if make is not None else None
    if optimizer is None:
        return OptimizerCost(0.0, PassWork(moved=3.0, calls=1.0), own=False, by_entry=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    own = next((type(value) for value in states if type(value) not in (Tensor, nn.Parameter)), None)
    if own is not None:
        raise ConfigError(
            f"the task's optimizer {type(optimizer).__name__} keeps its state in tensors of its own kind "
            f"({own.__name__}), which no checkpoint of a cluster can hold; use one with plain tensors, such "
            "as AdamW, with optimizer_bits = 8 or offload_optimizer = true where its state does not fit"
        )
    size = parameter.nbytes
    factor = sum(value.nbytes for value in states if value.numel() > 1) / size
    if by_entry(optimizer):
        take_kernels(optimizer)
    recorder = OperatorRecorder(nn.Module())
    with recorder:
        optimizer.step()
    work = sum(recorder.found(1)[0].values(), PassWork())
    # A fused kernel writes what it reads, weights and state, and gives nothing back that could be counted.
    fused = any(group.get("fused") for group in optimizer.param_groups)
    cost = PassWork(moved=3.0 + 2.0 * factor, calls=1.0)
    if not fused:
        cost = PassWork(moved=(work.moved + work.carried) / size, calls=work.calls)
    return OptimizerCost(factor, cost, True, by_entry(optimizer), cannot_code_state(optimizer))


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
            if style == "column":
                take_outputs(module, range(outputs_of(module) // degree))
            elif style == "row":
                take_inputs(module, range(inputs_of_layer(module) // degree))
        split_attention(model, plan.attentions, degree, None)
    for name, attribute in plan.heads:
        module = model.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // degree)
    regions = ShardedRegions(plan, sequence=False)
    regions.follow(model, anatomy.blocks)
    try:
        with quietly():
            part = trace(task, mode, model, batch, sharded=lambda: regions.sharded)
    except Exception as error:  # noqa: BLE001 - code that wants its whole layers may raise anything
        if reason := plan.few_heads(model_on_meta(task), degree):
            return reason
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        return f"with its part of the heads a rank cannot run the model: {first}"
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


def _no_pipeline(
    task: Task, anatomy: Anatomy, data: Any, batch: Any, traced: Trace, varies: str, *, real: bool
) -> str:
    """Why neither the data nor the model can go through stages; `real`: it had to run on tensors' values."""
    if count_examples(data) is None:
        return NOT_STREAMED
    if traced.whole_calls > 1:
        return f"the loss calls the model {traced.whole_calls} times, and a pipeline runs it once"
    if varies:
        return f"whether {varies} is called depends on chance"
    return _VALUES if real else cannot_pipeline(task, anatomy, batch)


def cannot_pipeline(task: Task, anatomy: Anatomy, batch: Any) -> str:
    """Why the model cannot be cut into stages: two halves are run one after the other on fake tensors."""
    if len(anatomy.units) < 2:
        return "the model has no parts in a row to cut between"
    if reason := refuse_cut(anatomy, 2):
        return reason
    cuts = partition(anatomy, 2)
    try:
        with quietly():
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
    except TaskError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - code that wants all of its parts may raise anything
        first = (str(error).strip().splitlines() or [""])[0][:120]
        return (
            "its forward does not skip parts that are None, as a stage's must "
            f"({type(error).__name__}: {first})"
        )
    return ""


def cannot_run(task: Task, anatomy: Anatomy, batch: Any) -> str:
    """Why runs of blocks cannot be checkpointed together: a pass on fake tensors is tried."""
    mode, model = fake_model(task)
    checkpoint_blocks(model, anatomy.blocks, Strategy(checkpointing="sqrt"))
    try:
        trace(task, mode, model, batch)
    except TaskError as error:
        return str(error)
    return ""
