"""Rules that look at each parameter on its own: median, trimmed mean, mean around the median."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.conditions import require
from roundtable.aggregation.influence import kept_around_median, kept_by_rank
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.column_statistics import AROUND_MEDIAN, MEAN_OF_WIRES
from roundtable.aggregation.rows.column_work import OrderStatistic
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.rows.row_passes import ColumnPass
from roundtable.aggregation.rows.sorting_networks import Network, merge_exchange, network_for_mean


def _kept_by_median(values: torch.Tensor, _: Mapping[str, Any], __: Mapping[str, Any]) -> torch.Tensor:
    return kept_by_rank(values, (len(values) - 1) // 2, len(values) // 2)


def _kept_by_trimming(
    values: torch.Tensor, parameters: Mapping[str, Any], _: Mapping[str, Any]
) -> torch.Tensor:
    return kept_by_rank(values, parameters["f"], len(values) - 1 - parameters["f"])


def _kept_around_median(
    values: torch.Tensor, parameters: Mapping[str, Any], _: Mapping[str, Any]
) -> torch.Tensor:
    return kept_around_median(values, len(values) - parameters["f"])


@rule("median", paper="Yin et al. 2018, definition 1", kept=_kept_by_median, reads_all=True)
def median(matrix: UpdateMatrix, weights: np.ndarray) -> RuleResult:
    """The median of each coordinate; of an even number of updates, the mean of the two middle ones.

    Sound while fewer than half of the updates are byzantine.
    """
    return RuleResult(_mean_of_wires(matrix, (matrix.rows - 1) // 2, matrix.rows // 2))


@rule("trimmed_mean", paper="Yin et al. 2018, definition 2", kept=_kept_by_trimming, reads_all=True)
def trimmed_mean(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """The mean of each coordinate without its f smallest and f largest values. Needs n > 2f."""
    require("trimmed_mean", "n > 2f (Yin et al. 2018)", matrix.rows > 2 * f, n=matrix.rows, f=f)
    return RuleResult(_mean_of_wires(matrix, f, matrix.rows - 1 - f))


@rule("mean_around_median", paper="Xie et al. 2018, definition 7", kept=_kept_around_median, reads_all=True)
def mean_around_median(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """The mean of the n − f values of each coordinate that lie nearest to its median. Needs n > 2f."""
    require("mean_around_median", "n > 2f (Xie et al. 2018)", matrix.rows > 2 * f, n=matrix.rows, f=f)
    return RuleResult(mean_nearest_to_median(matrix, matrix.rows - f))


def mean_nearest_to_median(matrix: UpdateMatrix, keep: int) -> ColumnPass:
    """The pass for the mean of the `keep` values of each column nearest to the column's median, [d]."""
    return _column_statistic(matrix, merge_exchange(matrix.rows), AROUND_MEDIAN, 0, keep - 1)


def _mean_of_wires(matrix: UpdateMatrix, first: int, last: int) -> ColumnPass:
    network = network_for_mean(matrix.rows, first, last)
    return _column_statistic(matrix, network, MEAN_OF_WIRES, first, last)


def _column_statistic(matrix: UpdateMatrix, network: Network, kind: int, first: int, last: int) -> ColumnPass:
    comparators = np.array(network, dtype=np.int32).reshape(-1, 2)
    return ColumnPass.over(matrix, OrderStatistic(comparators, kind, first, last))
