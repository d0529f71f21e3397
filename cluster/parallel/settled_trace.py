"""Traces a task's loss as often as it takes to tell what every pass changes of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from roundtable.cluster.parallel.anatomy import Rewritten, attributes_of
from roundtable.cluster.parallel.forward_trace import Trace, trace
from roundtable.core.errors import TaskError
from roundtable.core.task import Task


def settled_trace(
    task: Task, mode: FakeTensorMode | None, model: nn.Module, batch: Any, bfloat16: bool = False
) -> Trace:
    """The trace with what every pass changes: tables that the first one alone makes are no change.

    Raises TaskError where two passes draw from one generator of the task's own.
    """
    before = attributes_of(model)
    traced = trace(task, mode, model, batch, bfloat16)
    after = attributes_of(model)
    same = before.keys() == after.keys() and all(_alike(each, after[name]) for name, each in before.items())
    if same and not traced.rewritten and not traced.generators:
        return traced
    second = trace(task, mode, model, batch)
    kept = [id(each) for _, each in traced.generators]
    if own := next((name for name, each in second.generators if id(each) in kept), None):
        raise TaskError(
            f"{own or 'the loss'} draws random numbers from a generator of its own, which knows neither "
            "steps nor ranks: a round that is done again, and a block that is computed again, would draw "
            "others; draw from torch's default generator, which is seeded for each step"
        )
    counted = {
        name: value
        for name, value in after.items()
        if not isinstance(value, Tensor) and attributes_of(model).get(name) != value
    }
    numbers = [Rewritten(name, name.rpartition(".")[0], weight=False, by_batch=False) for name in counted]
    traced.rewritten = (*second.rewritten, *numbers)
    if traced.rewritten and traced.examples > 1:
        traced.rewritten = _by_examples(
            traced, counted, lambda fewer: trace(task, mode, model, fewer), model, batch
        )
    return traced


def _by_examples(
    traced: Trace, counted: Mapping[str, float], again: Callable[[Any], Trace], model: nn.Module, batch: Any
) -> tuple[Rewritten, ...]:
    """What a pass changes, told of another with an example less whether it depends on how many there are."""
    reached = attributes_of(model)
    for name, value in counted.items():
        owner, _, key = name.rpartition(".")
        vars(model.get_submodule(owner))[key] = value

    def without_last(tensor: Tensor) -> Tensor:
        return tensor[:-1] if tensor.dim() and len(tensor) == traced.examples else tensor

    try:
        found = again(tree_map_only(Tensor, without_last, batch))
    except Exception:  # noqa: BLE001 - a loss may want batches of one length
        return traced.rewritten
    fewer, now = {each.name: each.numbers for each in found.rewritten}, attributes_of(model)
    return tuple(
        replace(
            each,
            by_batch=each.by_batch
            or fewer.get(each.name, each.numbers) != each.numbers
            or (each.name in counted and now[each.name] != reached[each.name]),
        )
        for each in traced.rewritten
    )


def _alike(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and bool(one == other))
