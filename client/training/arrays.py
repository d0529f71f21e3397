"""Local work for tasks that are no PyTorch modules: weights are dicts of NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundtable.client.training.metrics import Metrics
from roundtable.core.errors import InvalidUpdate, LayoutError, NoExamples, TaskError
from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import DTYPES


def arrays_of(layout: Layout, vector: Tensor, local: Mapping[str, Tensor] | None) -> dict[str, np.ndarray]:
    """The weights that `ArrayTask.fit` gets: copies, so that a task may write into them.

    In the task's own order, also of those that stay at the silo. bfloat16, which NumPy lacks, becomes
    float32.
    """
    state = {**layout.unflatten(vector), **(local or {})}
    names = [spec.name for spec in layout.tensors if spec.name in state]
    return {
        name: (state[name].float() if state[name].dtype == torch.bfloat16 else state[name]).numpy().copy()
        for name in dict.fromkeys([*names, *state])
    }


def state_of(layout: Layout, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arrays as tensors of the layout's names, shapes and dtypes; LayoutError where they do not fit."""
    unknown = set(arrays) - {spec.name for spec in layout.tensors}
    if unknown:
        raise LayoutError(f"weights that the job's layout does not know: {sorted(unknown)[:5]}")
    state: dict[str, Tensor] = {}
    for spec in layout.tensors:
        if spec.name not in arrays:
            if spec.rule in ("drop", "frozen"):
                continue
            raise LayoutError(f"the weights lack {spec.name!r}, which the job's layout holds")
        tensor = torch.from_numpy(np.array(arrays[spec.name]))
        if tuple(tensor.shape) != spec.shape:
            raise LayoutError(
                f"weight {spec.name!r} has shape {list(tensor.shape)}, the layout says {list(spec.shape)}"
            )
        state[spec.name] = tensor.to(DTYPES[spec.dtype])
    return state


def fit_result(result: Any, task: Any) -> tuple[Mapping[str, Any], int, Metrics]:
    """What `ArrayTask.fit` returned, checked; its means become (sum, count)."""
    if not (isinstance(result, tuple) and len(result) == 3):
        raise TaskError(f"{type(task).__name__}.fit() must return (weights, examples, metrics)")
    weights, examples, metrics = result
    if int(examples) != examples or examples < 0:
        raise TaskError(f"{type(task).__name__}.fit() reported {examples!r} examples")
    if examples == 0:
        raise NoExamples("fit() reported zero examples: there is nothing to learn from")
    sums = {name: (float(mean) * int(examples), int(examples)) for name, mean in metrics.items()}
    for name, (total, _) in sums.items():
        if not math.isfinite(total):
            raise InvalidUpdate("non_finite", f"fit() reported {name} = {metrics[name]}")
    return weights, int(examples), sums
