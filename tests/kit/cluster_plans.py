"""Short names for strategies and cases in tests of the cluster."""

from __future__ import annotations

from typing import Any

import torch
from cluster_cases import Case, adam
from cluster_models import Language

from roundtable.cluster.parallel.strategy import Mesh, Strategy

STEPS = {"steps": 4, "batch_size": 8, "max_gradient_norm": 0.5}


def plan(kind: str = "none", micro: int = 2, **options: Any) -> Strategy:
    """A strategy; degrees of the mesh and other options by name."""
    mesh = {key: options.pop(key) for key in ("pp", "dp", "fsdp", "tp", "ep") if key in options}
    return Strategy(Mesh(**mesh), kind, micro, **options)  # type: ignore[arg-type]


def case(
    name: str,
    strategy: Strategy,
    algorithm: dict[str, Any] | None = None,
    *,
    tolerance: float = 1e-10,
    sgd: bool = False,
    **model: Any,
) -> Case:
    """The small transformer in float64, under AdamW or SGD."""
    task = Language(dtype=torch.float64, **model) if sgd else adam(**model)
    return Case(name, strategy, task, {**STEPS, **(algorithm or {})}, tolerance)
