"""How much each silo counted in the answer of a coordinate-wise rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.registry import Kept, RuleResult
from roundtable.aggregation.rows.matrix import CELL, UpdateMatrix

_SAMPLED_CELLS = 32


def sampled_shares(
    kept: Kept,
    parameters: Mapping[str, Any],
    result: RuleResult,
    mixed: UpdateMatrix,
    clients: UpdateMatrix,
    mixing: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Influence and contribution of each client, [n] and [n], each summing to 1 for a mean of what was kept.

    Influence is the share of coordinates in which the client's row was kept; contribution is its share in the
    squared length of the result. Both are taken over at most 32 evenly spread cells of columns. `mixed` is
    what the rule saw, `mixing` how it came from the clients' rows.
    """
    factors = torch.from_numpy(mixing)
    cells = -(-clients.columns // CELL)
    weights, lengths = np.zeros(clients.rows), np.zeros(clients.rows)
    columns = 0
    for cell in np.unique(np.linspace(0, cells - 1, min(cells, _SAMPLED_CELLS)).astype(int)):
        start, stop = int(cell) * CELL, min(int(cell + 1) * CELL, clients.columns)
        mask = kept(mixed.block(start, stop), parameters, result.details).cpu().double()
        shares = factors.T @ (mask / mask.sum(dim=0, keepdim=True).clamp(min=1))
        rows = clients.block(start, stop).cpu().double()
        along = shares * rows * result.part(start, stop).cpu().double()
        weights += shares.sum(dim=1).numpy()
        lengths += along.sum(dim=1).numpy()
        columns += stop - start
    total = lengths.sum()
    return weights / max(columns, 1), lengths / total if total != 0 else lengths


def kept_by_rank(values: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Which rows hold the values of rank first to last in each column, [n, width]; ties by row."""
    ranks = values.argsort(dim=0, stable=True).argsort(dim=0)
    return (ranks >= first) & (ranks <= last)


def kept_around_median(values: torch.Tensor, keep: int) -> torch.Tensor:
    """Which rows hold the `keep` values nearest to the median of each column, [n, width]."""
    ordered = values.sort(dim=0).values
    middle = (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
    return kept_by_rank((values - middle).abs(), 0, keep - 1)
