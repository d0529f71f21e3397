"""How much each row counted in the answer of a coordinate-wise rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roundtable.aggregation.matrix import CELL, UpdateMatrix
from roundtable.aggregation.registry import Rule, RuleResult

_SAMPLED_CELLS = 32


def influence_of_rows(
    rule: Rule, parameters: Mapping[str, Any], result: RuleResult, matrix: UpdateMatrix
) -> np.ndarray | None:
    """Share of each row in the result, [n]: what the rule says; for a coordinate-wise rule, the share of
    coordinates in which the row was among those that count, over at most 32 evenly spread cells of columns.
    None for a rule that can say neither."""
    if result.influence is not None or rule.kept is None:
        return result.influence
    first, last = rule.kept(matrix.rows, parameters)
    cells = -(-matrix.columns // CELL)
    counts = np.zeros(matrix.rows)
    for cell in np.unique(np.linspace(0, cells - 1, min(cells, _SAMPLED_CELLS)).astype(int)):
        values = matrix.block(int(cell) * CELL, min(int(cell + 1) * CELL, matrix.columns))
        ranks = values.argsort(dim=0, stable=True).argsort(dim=0)
        counts += ((ranks >= first) & (ranks <= last)).sum(dim=1).cpu().numpy()
    return np.asarray(counts / max(counts.sum(), 1))
