"""Settles `precision = "auto"`: what the silo's devices multiply fast, and what the job allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roundtable.client.batch_tensors import tensors_in
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.parallel.pipeline_stages import inputs_of
from roundtable.cluster.parallel.strategy import Precision
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.privacy_composition import is_example_level
from roundtable.cluster.plan.resources import Resources
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.task import Task

# The share of a column's spread over examples that rounding to two bytes may be: it is 0.2 % of numbers
# around 0, and more where they are far from it beside their spread, as years are.
_COARSE = 0.02


def settled(
    table: ClusterTable, resources: Resources, job: JobConfig, probe: ModelProbe | None = None
) -> tuple[ClusterTable, str]:
    """(the table with a precision that is no longer "auto", the reason; empty where it was set).

    `probe` knows what the model and its data stand, None before they were looked over. Raises ConfigError for
    tf32 on devices that do not have it, and for two bytes in which the model does not run.
    """
    chosen = table.precision
    if probe is not None and probe.cannot_half and chosen in ("bfloat16", "float16"):
        raise ConfigError(
            f"[cluster] precision = {chosen!r}: the model or its loss does not run in it "
            f'({probe.cannot_half}); use "auto" or "float32"'
        )
    if chosen == "tf32" and resources.fast != "bfloat16":
        raise ConfigError(
            f'[cluster] precision = "tf32": {resources} have no products in TF32 (GPUs since Ampere do); use '
            '"float32"'
        )
    if chosen != "auto":
        slow = chosen == "bfloat16" and resources.device == "cuda" and resources.fast != "bfloat16"
        return table, "these devices compute bfloat16 without tensor cores: float16 is faster" if slow else ""
    if resources.fast == "float32":
        why = "" if resources.device == "cpu" else "float32: these devices have no tensor cores"
        return table.model_copy(update={"precision": "float32"}), why
    if is_example_level(job):
        why = 'float32: at privacy.level = "example" clipped gradients are checked against plain passes'
        return table.model_copy(update={"precision": "float32"}), why
    if probe is not None and (probe.rounded or probe.cannot_half):
        plain: Precision = "float32" if probe.rounded or resources.fast != "bfloat16" else "tf32"
        why = probe.rounded or f"the model or its loss does not run in two bytes ({probe.cannot_half})"
        return table.model_copy(update={"precision": plain}), f"{plain}: {why}"
    why = {
        "bfloat16": "bfloat16, and TF32 for products in float32: these devices have both",
        "float16": "float16 with a loss scale: these devices have no bfloat16",
    }[resources.fast]
    return table.model_copy(update={"precision": resources.fast}), why


def rounded_by_half(task: Task, batch: Any) -> str:
    """What two bytes would do to what the model is given of these examples; empty where it is little.

    Tables and series are looked at, column by column; of pictures a column says nothing.
    """
    try:
        given: Any = inputs_of(task, batch)
    except Exception:  # noqa: BLE001 - a loss that looks at the model's output
        given = batch
    for number, tensor in enumerate(tensors_in(given), 1):
        if tensor.dtype in (torch.float32, torch.float64) and 1 <= tensor.dim() <= 3 and len(tensor) > 1:
            columns = tensor.detach().double().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
            lost = _lost(columns)
            if lost.numel() and (worst := float(lost.max())) > _COARSE:
                return (
                    f"two bytes would round column {int(lost.argmax()) + 1} of the model's input {number} by "
                    f"{worst:.0%} of its spread; have data() standardise it"
                )
    return ""


def _lost(columns: Tensor) -> Tensor:
    """[n, columns] float64 → the root mean square of rounding to bfloat16, over each column's deviation."""
    spread = columns.std(0, correction=0)
    error = (columns - columns.bfloat16().double()).square().mean(0).sqrt()
    return torch.where(spread > 0, error / spread, torch.zeros_like(spread))
