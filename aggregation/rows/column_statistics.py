"""Order statistics of every column of a block: by compiled kernels, NumPy, or the accelerator."""

from __future__ import annotations

import numpy as np
import torch

from roundtable.aggregation.conditions import NotFinite
from roundtable.aggregation.rows.column_threads import in_ranges
from roundtable.aggregation.rows.kernels import Kernels
from roundtable.aggregation.rows.matrix import CELL, accelerated, block_ranges
from roundtable.aggregation.rows.sorting_networks import Network, sorted_wires, sorted_wires_on_device

MEAN_OF_WIRES, AROUND_MEDIAN = 0, 1
"""What is made of a column in order: the mean of some places, or of the values around its median."""


def column_statistic(
    values: torch.Tensor,
    comparators: np.ndarray,
    kind: int,
    first: int,
    last: int,
    out: torch.Tensor,
    compiled: Kernels | None,
) -> None:
    """Writes the statistic of each column of a block into `out`; `comparators`, int32 [count, 2], sort it.

    Raises NotFinite where a value is not.
    """
    if compiled is not None:
        _compiled(compiled, values, comparators, kind, first, last, out)
        return
    network = tuple((int(low), int(high)) for low, high in comparators)
    if accelerated(values.device):
        _on_device(values, network, kind, first, last, out)
    else:
        _in_numpy(values.numpy(), network, kind, first, last, out.numpy())


def _compiled(
    kernels: Kernels,
    values: torch.Tensor,
    comparators: np.ndarray,
    kind: int,
    first: int,
    last: int,
    out: torch.Tensor,
) -> None:
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
        if kind == AROUND_MEDIAN:
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
    if kind == MEAN_OF_WIRES:
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
