"""The weighted mean (FedAvg): of a matrix, or of updates that arrive one by one."""

from __future__ import annotations

import numpy as np
import torch

from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.gram import combination
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.rows.reductions import is_finite
from roundtable.core.errors import AggregationError, InvalidUpdate


@rule("mean", paper="McMahan et al. 2017, algorithm 1", weighted=True, reads_all=True)
def mean(matrix: UpdateMatrix, weights: np.ndarray) -> RuleResult:
    """Σ_i weights[i] · row i / Σ_i weights[i]. One hostile update moves it anywhere."""
    total = float(np.sum(weights))
    if not total > 0 or not np.all(np.isfinite(weights)) or np.any(weights < 0):
        raise AggregationError(
            "the mean needs weights that are finite, not negative and not all zero; check the example counts "
            "or losses that the silos report"
        )
    shares = np.asarray(weights, dtype=np.float64) / total
    return RuleResult(combination(matrix, shares), shares)


class StreamingMean:
    """The weighted mean of updates that are added as they arrive: one vector in memory, one pass over each.

    Sums are kept in float32 in the order of arrival, so two orders may differ by rounding; where the last
    bit matters, add in the order of the clients' names.
    """

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(columns, dtype=torch.float32, device=device)
        self._unit = 0.0
        self._total = 0.0
        self._count = 0

    @property
    def count(self) -> int:
        """Updates added so far."""
        return self._count

    @property
    def total_weight(self) -> float:
        """Sum of the weights added so far."""
        return self._total

    def add(self, vector: torch.Tensor, weight: float = 1.0) -> None:
        """Adds an update [d] in place. Raises InvalidUpdate for another length, AggregationError for a weight
        that is negative or not finite."""
        if vector.shape != self._sum.shape:
            raise InvalidUpdate(
                "layout", f"an update of {vector.numel()} values does not fit a mean of {self._sum.numel()}"
            )
        if not 0 <= weight < float("inf"):
            raise AggregationError(
                f"the weight of an update must be a finite number from 0 on, not {weight!r}"
            )
        self._count += 1
        if weight == 0:
            return
        # The first weight is the unit: example counts as large as they come then cannot overflow float32.
        self._unit = self._unit or weight
        self._sum.add_(vector, alpha=weight / self._unit)
        self._total += weight

    def result(self, denominator: float | None = None) -> torch.Tensor:
        """The mean [d], written over the sum: call it once. `denominator` replaces the sum of the weights,
        as differential privacy wants the expected cohort there. Raises AggregationError where nothing of
        weight was added or the result is not finite."""
        divisor = self._total if denominator is None else denominator
        if not divisor > 0:
            raise AggregationError(f"no update of positive weight among the {self._count} that were added")
        self._sum.mul_(self._unit / divisor)
        if not is_finite(self._sum):
            raise AggregationError(
                "the mean is not finite: an update holds infinities or NaN, or values too large to add; "
                "check each update with check_update before adding it"
            )
        return self._sum
