"""A batch in parts, for a silo whose memory does not hold it whole: the same gradient, added up.

The gradient of a mean over n examples is Σ nᵢ/n times the gradient of the mean over part i. It is refused
where that is not what training would do: where a layer looks at the whole batch, or a loss is no mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from roundtable.client.training.batches import Batch
from roundtable.core.errors import TaskError
from roundtable.core.task import Task

_PROBE = 32
_TOLERANCE = 1e-3


class CannotSplit(TaskError):
    """Training in parts of a batch would not be the same training."""


def backward_in_parts(task: Task, module: nn.Module, batch: Batch, size: int) -> Tensor:
    """Adds the gradient of the batch's mean loss, at most `size` examples at a time; gives the loss.

    Raises CannotSplit for a batch that is not made of tensors with one row for each example.
    """
    whole: Tensor | None = None
    for part, count in parts(batch.data, batch.size, size):
        loss = task.loss(module, part) * (count / batch.size)
        loss.backward()  # type: ignore[no-untyped-call]
        whole = loss.detach() if whole is None else whole + loss.detach()
    assert whole is not None
    return whole


def parts(data: Any, examples: int, size: int) -> Iterator[tuple[Any, int]]:
    """The batch's data in order, with the number of examples in each part."""
    for start in range(0, examples, size):
        end = min(start + size, examples)
        yield _rows(data, examples, start, end), end - start


def check_splittable(task: Task, module: nn.Module, batch: Batch, size: int) -> None:
    """Raises CannotSplit where parts of a batch would give another gradient than the whole.

    Whether the loss is a mean is tried on a few examples, without dropout.
    """
    check_layers(module)
    few = min(batch.size, max(2, min(size, _PROBE)))
    if few < 2:
        return
    training = {layer: layer.training for layer in module.modules()}
    module.eval()
    with torch.no_grad():
        data = _rows(batch.data, batch.size, 0, few)
        whole = float(task.loss(module, data))
        mean = sum(float(task.loss(module, part)) * n / few for part, n in parts(data, few, (few + 1) // 2))
    for layer, mode in training.items():
        layer.training = mode
    if not math.isclose(whole, mean, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE**2):
        raise CannotSplit(
            f"{type(task).__name__}.loss() must be the mean over the batch: its value for {few} examples "
            "differs from the mean of its two halves, so the batch cannot be split"
        )


def check_layers(module: nn.Module) -> None:
    """Raises CannotSplit for a layer that looks at the whole batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats):
            raise CannotSplit(
                f"the layer {name!r} ({type(layer).__name__}) takes statistics over the whole batch, so that "
                "parts of it would train another model; nn.GroupNorm in its place can be split"
            )


def _rows(data: Any, examples: int, start: int, end: int) -> Any:
    if isinstance(data, Tensor) and data.dim() and len(data) == examples:
        return data[start:end]
    if isinstance(data, dict):
        return {key: _rows(value, examples, start, end) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        if len(data) == examples and all(isinstance(each, (str, bytes)) for each in data):
            return data[start:end]
        return type(data)(_rows(value, examples, start, end) for value in data)
    found = f"a tensor of shape {list(data.shape)}" if isinstance(data, Tensor) else type(data).__name__
    raise CannotSplit(f"a batch of {examples} examples holds {found}, which cannot be cut by examples")
