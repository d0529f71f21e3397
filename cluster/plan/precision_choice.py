"""Settles `precision = "auto"`: what the silo's devices multiply fast, and what the job allows."""

from __future__ import annotations

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.plan.privacy_composition import is_example_level
from roundtable.cluster.plan.resources import Resources
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError


def settled(table: ClusterTable, resources: Resources, job: JobConfig) -> tuple[ClusterTable, str]:
    """(the table with a precision that is no longer "auto", the reason; empty where it was set).

    Raises ConfigError for tf32 on devices that do not have it.
    """
    chosen = table.precision
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
    why = {
        "bfloat16": "bfloat16, and TF32 for products in float32: these devices have both",
        "float16": "float16 with a loss scale: these devices have no bfloat16",
    }[resources.fast]
    return table.model_copy(update={"precision": resources.fast}), why
