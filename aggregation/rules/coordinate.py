"""Rules that look at each parameter on its own: median, trimmed mean, mean around the median."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.conditions import NotFinite, require
from roundtable.aggregation.influence import kept_around_median, kept_by_rank
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.column_threads import in_ranges
from roundtable.aggregation.rows.kernels import Kernels, blocks_with_kernels
from roundtable.aggregation.rows.matrix import CELL, UpdateMatrix, accelerated, block_ranges
from roundtable.aggregation.rows.sorting_networks import (
    Network,
    merge_exchange,
    network_for_mean,
    sorted_wires,
    sorted_wires_on_device,
)

_MEAN_OF_WIRES, _AROUND_MEDIAN = 0, 1


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
    for start, stop, values, compiled in blocks_with_kernels(matrix, matrix.rows * matrix.columns):
        part = out[start:stop]
        if compiled is not None:
            _compiled(compiled, values, network, kind, first, last, part)
        elif accelerated(values.device):
            _on_device(values, network, kind, first, last, part)
        else:
            _in_numpy(values.numpy(), network, kind, first, last, part.numpy())
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
            raise NotFinite

    in_ranges(work, values.shape[1], CELL)


def _in_numpy(
    values: np.ndarray, network: Network, kind: int, first: int, last: int, out: np.ndarray
) -> None:
    for start, stop in block_ranges(len(out), 2 * CELL):
        wires = sorted_wires(values[:, start:stop], network)
        if kind == _AROUND_MEDIAN:
            out[start:stop] = _around_median(np.stack(wires).astype(np.float64), last - first + 1)
            continue
        total = wires[first].astype(np.float64)
        for wire in wires[first + 1 : last + 1]:
            total += wire
        out[start:stop] = total / (last - first + 1)


def _around_median(ordered: np.ndarray, keep: int) -> np.ndarray:
    """Mean of the window of `keep` sorted values nearest to the median: [n, width] → [width].

    The window starts at the first row that is not farther from the median than the one just right of the
    window; rows outside are masked, not subtracted, so that a hostile magnitude cannot cancel digits.
    """
    rows = len(ordered)
    middle = (ordered[(rows - 1) // 2] + ordered[rows // 2]) / 2
    farther = middle - ordered[: rows - keep] > ordered[keep:] - middle
    start = np.logical_and.accumulate(farther, axis=0).sum(axis=0)
    index = np.arange(rows)[:, None]
    inside = (index >= start) & (index < start + keep)
    return np.asarray(np.where(inside, ordered, 0.0).sum(axis=0) / keep)


def _on_device(
    values: torch.Tensor, network: Network, kind: int, first: int, last: int, out: torch.Tensor
) -> None:
    wires = torch.stack(sorted_wires_on_device(values, network))
    if kind == _MEAN_OF_WIRES:
        out.copy_(wires[first : last + 1].double().mean(dim=0))
        return
    rows, keep = len(wires), last - first + 1
    ordered = wires.double()
    middle = (ordered[(rows - 1) // 2] + ordered[rows // 2]) / 2
    farther = middle - ordered[: rows - keep] > ordered[keep:] - middle
    start = farther.long().cumprod(dim=0).sum(dim=0)
    index = torch.arange(rows, device=out.device)[:, None]
    inside = (index >= start) & (index < start + keep)
    out.copy_(torch.where(inside, ordered, 0.0).sum(dim=0) / keep)
