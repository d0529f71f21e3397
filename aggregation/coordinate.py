"""Rules that look at each parameter on its own: median, trimmed mean, mean around the median."""

from __future__ import annotations

import numpy as np
import torch

from roundtable.aggregation.conditions import NOT_FINITE, require
from roundtable.aggregation.kernels import Kernels, kernels_for
from roundtable.aggregation.matrix import CELL, UpdateMatrix, block_ranges
from roundtable.aggregation.networks import (
    Network,
    merge_exchange,
    network_for_mean,
    sorted_wires,
)
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.workers import in_ranges
from roundtable.core.errors import AggregationError

_MEAN_OF_WIRES, _AROUND_MEDIAN = 0, 1


@rule("median", paper="Yin et al. 2018, definition 1", kept=lambda n, p: ((n - 1) // 2, n // 2))
def median(matrix: UpdateMatrix, weights: np.ndarray) -> RuleResult:
    """The median of each coordinate; of an even number of updates, the mean of the two middle ones.

    Sound while fewer than half of the updates are byzantine.
    """
    return RuleResult(_mean_of_wires(matrix, (matrix.rows - 1) // 2, matrix.rows // 2))


@rule("trimmed_mean", paper="Yin et al. 2018, definition 2", kept=lambda n, p: (p["f"], n - 1 - p["f"]))
def trimmed_mean(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """The mean of each coordinate without its f smallest and f largest values. Needs n > 2f."""
    require("trimmed_mean", "n > 2f (Yin et al. 2018)", matrix.rows > 2 * f, n=matrix.rows, f=f)
    return RuleResult(_mean_of_wires(matrix, f, matrix.rows - 1 - f))


@rule("mean_around_median", paper="Xie et al. 2018, definition 7")
def mean_around_median(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> RuleResult:
    """The mean of the n − f values of each coordinate that lie nearest to its median. Needs n > 2f."""
    require("mean_around_median", "n > 2f (Xie et al. 2018)", matrix.rows > 2 * f, n=matrix.rows, f=f)
    return RuleResult(mean_nearest_to_median(matrix, matrix.rows - f))


def mean_nearest_to_median(matrix: UpdateMatrix, keep: int) -> torch.Tensor:
    """The mean of the `keep` values of each column nearest to the column's median, [d]."""
    return _column_statistic(matrix, merge_exchange(matrix.rows), _AROUND_MEDIAN, 0, keep - 1)


def _mean_of_wires(matrix: UpdateMatrix, first: int, last: int) -> torch.Tensor:
    network = network_for_mean(matrix.rows, first, last)
    return _column_statistic(matrix, network, _MEAN_OF_WIRES, first, last)


def _column_statistic(
    matrix: UpdateMatrix, network: Network, kind: int, first: int, last: int
) -> torch.Tensor:
    out = torch.empty(matrix.columns, dtype=matrix.dtype, device=matrix.device)
    for start, stop, values in matrix.blocks():
        compiled = kernels_for(values, matrix.rows * matrix.columns)
        if compiled is None:
            _in_torch(values, network, kind, first, last, out[start:stop])
        else:
            _compiled(compiled, values, network, kind, first, last, out[start:stop])
    return out


def _compiled(
    kernels: Kernels,
    values: torch.Tensor,
    network: Network,
    kind: int,
    first: int,
    last: int,
    out: torch.Tensor,
) -> None:
    comparators = np.array(network, dtype=np.int32).reshape(-1, 2)
    arguments = (comparators.ctypes.data, len(comparators), kind, first, last)

    def work(start: int, stop: int) -> None:
        pointer = out[start:stop].data_ptr()
        if kernels.call("column_statistic", values[:, start:stop], *arguments, pointer):
            raise AggregationError(NOT_FINITE)

    in_ranges(work, values.shape[1], CELL)


def _in_torch(
    values: torch.Tensor, network: Network, kind: int, first: int, last: int, out: torch.Tensor
) -> None:
    width = out.numel() if out.device.type == "cuda" else 2 * CELL
    for start, stop in block_ranges(out.numel(), width):
        wires = sorted_wires(values[:, start:stop], network)
        if kind == _MEAN_OF_WIRES:
            total = wires[first].double()
            for wire in wires[first + 1 : last + 1]:
                total = total + wire
            out[start:stop] = total / (last - first + 1)
        else:
            out[start:stop] = _around_median(torch.stack(wires).double(), last - first + 1)


def _around_median(ordered: torch.Tensor, keep: int) -> torch.Tensor:
    """Mean of the window of `keep` sorted values nearest to the median: [n, width] → [width].

    The window starts at the first row that is not farther from the median than the one just right of the
    window; rows outside are masked, not subtracted, so that a hostile magnitude cannot cancel digits.
    """
    rows = len(ordered)
    middle = (ordered[(rows - 1) // 2] + ordered[rows // 2]) / 2
    farther = middle - ordered[: rows - keep] > ordered[keep:] - middle
    start = farther.long().cumprod(dim=0).sum(dim=0)
    index = torch.arange(rows, device=ordered.device)[:, None]
    inside = (index >= start) & (index < start + keep)
    return torch.where(inside, ordered, 0.0).sum(dim=0) / keep
