"""Old updates count for less: each row scaled by what its staleness leaves of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from roundtable.aggregation import UpdateMatrix
from roundtable.aggregation.rows.matrix import BLOCK_BYTES, Block, DerivedRows
from roundtable.core.job_tables.discounts import Discount
from roundtable.engine.combining.received import Rows


def discounted(rows: Rows, round: int, discount: Discount) -> Rows:
    """Each row times what the discount leaves at the staleness of its update.

    The rows are scaled, not their weights: as in FedBuff's sum over K, an old update then counts for less
    without the others counting for more, and that under every rule.
    """
    ages = [update.staleness(round) for update in rows.updates]
    factors = [discount(age) for age in ages]
    if all(factor == 1.0 for factor in factors):
        return rows
    return Rows(ScaledRows(rows.matrix, factors), rows.updates)


class ScaledRows(DerivedRows):
    """Rows of another matrix, each with a factor of its own: no row touches another, not even a NaN."""

    def __init__(self, base: UpdateMatrix, factors: Sequence[float]) -> None:
        self.base = base
        self.factors = tuple(factors)
        self._column = torch.tensor(self.factors, dtype=base.dtype, device=base.device).unsqueeze(1)

    @property
    def rows(self) -> int:
        return self.base.rows

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.base.block(start, stop) * self._column

    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        for start, stop, values in self.base.blocks(budget_bytes // 2):
            yield start, stop, values * self._column

    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        return ScaledRows(self.base.select(indices), [self.factors[index] for index in indices])
