"""Probes a task for a plan, on fake tensors: what its model is made of, keeps, and can be split into."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
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

from roundtable.client.batch_tensors import give_float32
from roundtable.client.first_batch.step_memory import quietly
from roundtable.client.streams.readers import lanes_of
from roundtable.client.training.batches import count_examples, ordered_batches
from roundtable.cluster.parallel.anatomy import Anatomy, dissect
from roundtable.cluster.parallel.checkpointing import checkpoint_blocks
from roundtable.cluster.parallel.experts import Experts, MixtureOfExperts, balances_batch
from roundtable.cluster.parallel.forward_trace import (
    NotTraceable,
    Trace,
    fake_model,
    trace,
    unheard,
)
from roundtable.cluster.parallel.meta_init import check_same_tensors, model_on_meta
from roundtable.cluster.parallel.packed_layers import inputs_of_layer, outputs_of, take_inputs, take_outputs
from roundtable.cluster.parallel.pipeline_stages import (
    LastOutput,
    inputs_of,
    keep_only,
    partition,
    refuse_cut,
)
from roundtable.cluster.parallel.settled_trace import is_whole_loss, settled_trace, try_batch
from roundtable.cluster.parallel.shared_batch_norm import MicroBatch, share_batch_norms
from roundtable.cluster.parallel.split_attention import split_attention
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel, find_tensor_parallel, from_task
from roundtable.cluster.parallel.tensor_randomness import ShardedRegions
from roundtable.cluster.plan.arithmetic import count_work, optimizer_cost
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.precision_choice import rounded_by_half
from roundtable.core.errors import RoundtableError, TaskError
from roundtable.core.layout import carried_state
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import Task, initial_state

_DEGREES = (2, 4, 8, 16)
_CPU = torch.device("cpu")
_MANY = 8
# Of which examples differ in numbers.
_SPREAD = 32
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
    devices: int = _DEGREES[-1],
    told: Callable[[str], None] = unheard,
) -> ModelProbe:
    """Traces the task on the first training examples, on fake tensors where it can run on them, else on real.

    `data` are the training data: streamed ones say by their kind what no plan may do with them. Splits are
    tried over as many ranks as a node has `devices`. `told` hears how far it is: large models take a minute.
    Raises TaskError with what the task raises, LayoutError for a tensor that no job carries, and
    NotTraceable where it needs values of a model that is too large for this machine's memory.
    """
    try:
        batch = example_batch(data)
    except RoundtableError:
        raise
    except Exception as error:
        raise TaskError(f"{type(task).__name__}'s training data cannot be read: {in_words(error)}") from error
    told("tracing the model on the first examples")
    (mode, model, traced, varies), cannot_half = _in_some_precision(task, batch, bfloat16)
    carried_state(model)
    anatomy = dissect(model)
    if not any(weight.trainable for weight in anatomy.weights):
        raise TaskError(f"{type(task).__name__}'s model has no parameters to train")
    if {weight.name for weight in anatomy.weights if weight.trainable} <= {*traced.unused}:
        raise TaskError(
            f"{type(task).__name__}'s loss depends on none of the model's parameters: it is detached, or "
            "computed outside of torch"
        )
    plan = from_task(task, model, traced) or find_tensor_parallel(model, anatomy, traced, told)
    cost, work, many = optimizer_cost(task), count_work(task, batch), example_batch(data, _MANY)
    trial = try_batch(task, traced, model, work.flops, many)

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
        cannot_split={
            degree: _VALUES if mode is None else tried(degree) for degree in _DEGREES if degree <= devices
        },
        cannot_pipeline=_no_pipeline(task, anatomy, data, batch, traced, varies, real=mode is None),
        cannot_run=_no_runs(task, anatomy, batch, varies) if mode is not None else _VALUES,
        half=in_half(task, batch) if bfloat16 and mode is not None and not cannot_half else None,
        gloo=device == "cpu",
        work=work,
        optimizer=cost.work,
        streamed=count_examples(data) is None,
        lanes=lanes_of(data),
        whole_loss=bool(trial.whole) or is_whole_loss(task, traced, (many, batch)) or balances_batch(model),
        evaluations=trial.evaluations,
        varies=varies,
        cannot_half=cannot_half,
        rounded=rounded_by_half(task, example_batch(data, _SPREAD)) if bfloat16 else "",
        own_optimizer=cost.own,
        by_entry=cost.by_entry,
        cannot_code=cost.cannot_code,
        cannot_share=cost.cannot_share,
        cannot_part=cost.cannot_part,
        crowding={
            f"{name}.experts": module.crowding
            for name, module in model.named_modules()
            if isinstance(module, MixtureOfExperts)
        },
    )


def _in_some_precision(
    task: Task, batch: Any, bfloat16: bool
) -> tuple[tuple[FakeTensorMode | None, nn.Module, Trace, str], str]:
    """As `_traced`, and why that is not in bfloat16 where it should be; TaskError where it runs in none."""
    try:
        return _traced(task, batch, bfloat16), ""
    except RoundtableError:
        raise
    except Exception as error:
        if not bfloat16:
            raise TaskError(does_not_run(task, error)) from error
        said = in_words(error)
    return _in_some_precision(task, batch, False)[0], said


def _traced(task: Task, batch: Any, bfloat16: bool) -> tuple[FakeTensorMode | None, nn.Module, Trace, str]:
    """(the mode, None where the model is real, the model, its trace, what some passes do not call)."""
    mode, model = fake_model(task)
    names = tuple(model.state_dict())
    try:
        with quietly(), isolated_randomness(0, _CPU):
            before = _host_generators()
            traced = settled_trace(task, mode, model, batch, bfloat16)
            drawn = _host_generators() != before
            return mode, model, traced, called_sometimes(task, mode, model, batch, traced) if drawn else ""
    except Exception as error:
        needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        if 2 * needed > _free_memory():
            if isinstance(error, RoundtableError):
                raise
            raise NotTraceable(does_not_run(task, error)) from error
    made = initial_state(task, 0)
    assert isinstance(made, nn.Module)
    check_same_tensors(names, made.state_dict())
    share_batch_norms(made, None, MicroBatch())
    with isolated_randomness(0, _CPU):
        traced = settled_trace(task, None, made, batch, bfloat16)
    return None, made, traced, called_sometimes(task, None, made, batch, traced)


def _host_generators() -> str:
    """The state of Python's and NumPy's generators, which a pass on tensors without values can ask too."""
    return repr((random.getstate(), np.random.get_state(legacy=False)))


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


def does_not_run(task: Task, error: Exception) -> str:
    """An error of the task's code in a line, with the line of the code that it comes from."""
    return (
        f"{type(task).__name__}'s model or loss does not run on the first training examples: "
        f"{in_words(error)}"
    )


def in_words(error: Exception) -> str:
    """An error of a task's code in a line: its kind, its words, and the line that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or list(frames)
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first} ({Path(own[-1].filename).name}, line {own[-1].lineno})"


def in_half(task: Task, batch: Any) -> Trace | None:
    """Traces the model in bfloat16, with a float32 output; None where its own code mixes precisions."""
    mode, model = fake_model(task, torch.bfloat16)
    give_float32(model)
    halves = tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, batch)
    try:
        return trace(task, mode, model, halves)
    except RuntimeError:
        return None


def example_batch(data: Any, examples: int = 3) -> Any:
    """The first few training examples as a batch.

    Of one alone some layers take no statistics, and a power of two gives activations the shapes of weights.
    """
    # A stream tells how many it has by ending.
    first = None if count_examples(data) == 0 else next(iter(ordered_batches(data, examples)), None)
    if first is None:
        raise TaskError("the silo has no training examples, so what a batch is made of cannot be seen")
    return first.data


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
                task.loss(LastOutput(torch.empty(values[0].shape, dtype=values[0].dtype)), fakes)
    except TaskError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - code that wants all of its parts may raise anything
        first = (str(error).strip().splitlines() or [""])[0][:120]
        return (
            "its forward does not skip parts that are None, as a stage's must "
            f"({type(error).__name__}: {first})"
        )
    return ""


def _no_runs(task: Task, anatomy: Anatomy, batch: Any, varies: str) -> str:
    """Why runs of blocks cannot be checkpointed together: a pass that leaves one out ends no run."""
    if varies:
        return f"checkpointing = 'sqrt': whether {varies} is called depends on chance; use 'every'"
    return cannot_run(task, anatomy, batch)


def cannot_run(task: Task, anatomy: Anatomy, batch: Any) -> str:
    """Why runs of blocks cannot be checkpointed together: a pass on fake tensors is tried."""
    mode, model = fake_model(task)
    checkpoint_blocks(model, anatomy.blocks, Strategy(checkpointing="sqrt"))
    try:
        called = {call.name for call in trace(task, mode, model, batch).calls}
    except TaskError as error:
        return str(error)
    if idle := next((block for block in anatomy.blocks if block not in called), ""):
        return f"checkpointing = 'sqrt' runs all blocks, and {idle} is not called; use 'every'"
    return ""
