"""Robust aggregation together with secure aggregation: a rule over the means of groups.

Secure aggregation hides single updates, so a robust rule has nothing to look at. If the silos are split into
groups that are summed securely each on its own, a rule over the groups' means still stands f hostile silos,
as long as they cannot spoil too many groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.conditions import require
from roundtable.aggregation.registry import RuleResult, find_rule, rule
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.core.errors import ConfigError


@rule("group_robust", paper="groups as in Karimireddy et al. 2022, section 4 (bucketing)", needs_gram=False)
def group_robust(
    matrix: UpdateMatrix,
    weights: np.ndarray,
    *,
    f: int,
    rule: str = "median",
    parameters: Mapping[str, Any] | None = None,
) -> RuleResult:
    """`rule` over rows that are the means of securely summed groups. f counts hostile silos: each may spoil
    one group, so fewer than half of the groups may be hit, and a rule with an f of its own gets this one.

    Needs more than 2f groups.
    """
    require(
        "group_robust",
        "more than 2f groups (each hostile silo may spoil one)",
        matrix.rows > 2 * f,
        groups=matrix.rows,
        f=f,
    )
    inner = find_rule(rule)
    if inner.weighted or rule == "group_robust":
        raise ConfigError(f"group_robust needs a robust rule over the groups, not {rule!r}")
    options = dict(parameters or {})
    if inner.takes("f"):
        options.setdefault("f", f)
    inner.check(options)
    result = inner.function(matrix, np.ones(matrix.rows), **options)
    return RuleResult(result) if isinstance(result, torch.Tensor) else result
