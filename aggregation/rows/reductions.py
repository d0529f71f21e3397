"""Sums over columns and over rows, by whatever is fastest here: compiled kernels, NumPy, or the accelerator.

On a CPU without kernels this is NumPy and not torch: torch shares even small operations out over threads,
which is many times slower as soon as another process wants the same cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.rows.column_threads import in_ranges
from roundtable.aggregation.rows.kernels import Kernels
from roundtable.aggregation.rows.matrix import CELL, accelerated, block_ranges

_DEVICE_CELL = CELL << 7

Array = Any
"""A NumPy array on a CPU, a tensor on an accelerator; `@`, `*` and `.sum(axis)` mean the same for both."""


def in_float64(values: torch.Tensor) -> Array:
    """A float64 copy: an array for a CPU tensor, else a tensor on the same device."""
    return values.double() if accelerated(values.device) else values.numpy().astype(np.float64)


def as_numpy(values: Array) -> np.ndarray:
    """The values as an array, fetched from the device where they are on one."""
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def cell_on(device: torch.device) -> int:
    """Columns that are added up at a time: on a GPU many, as the host waits for each sum."""
    return _DEVICE_CELL if accelerated(device) else CELL


def is_finite(vector: torch.Tensor) -> bool:
    """Whether all values of a vector [d] are finite."""
    if accelerated(vector.device):
        return bool(torch.isfinite(vector).all())
    values = vector.numpy()
    # One value that is not finite makes the sum so; a sum that is not finite by itself decides nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return True
    return all(np.isfinite(values[start:stop]).all() for start, stop in block_ranges(len(values), CELL << 3))


def combine_block(
    values: torch.Tensor, factors: np.ndarray, out: torch.Tensor, compiled: Kernels | None
) -> None:
    """Writes Σ_i factors[i] · row i of a block into `out`, summed in float64."""
    if compiled is not None:
        _combine_compiled(compiled, values, factors, out)
        return
    used = np.flatnonzero(factors)
    if not accelerated(values.device):
        rows, target, factors = values.numpy(), out.numpy(), factors[used]
        # A selection copies, once more than the cast does.
        chosen = slice(None) if len(used) == len(rows) else used
        with np.errstate(over="ignore", invalid="ignore"):
            for start, stop in block_ranges(values.shape[1], CELL):
                target[start:stop] = factors @ rows[chosen, start:stop].astype(np.float64)
        return
    weights = torch.from_numpy(factors[used]).to(values.device)
    for start, stop in block_ranges(values.shape[1], _DEVICE_CELL):
        out[start:stop] = weights @ values[used, start:stop].double()


def cells_compiled(
    kernels: Kernels, name: str, values: torch.Tensor, *arguments: int, pairs: bool = False
) -> Iterable[np.ndarray]:
    """What a kernel makes of each cell of a block: a number for each row, or for each of their `pairs`."""
    rows = len(values) if kernels.order is None else len(kernels.order)
    sums = np.empty(
        (-(-values.shape[1] // CELL), rows, rows) if pairs else (-(-values.shape[1] // CELL), rows)
    )

    def work(start: int, stop: int) -> None:
        kernels.call(name, values[:, start:stop], CELL, sums[start // CELL :].ctypes.data, *arguments)

    in_ranges(work, values.shape[1], CELL)
    return sums


def _combine_compiled(kernels: Kernels, values: torch.Tensor, factors: np.ndarray, out: torch.Tensor) -> None:
    contiguous = np.ascontiguousarray(factors)

    def work(start: int, stop: int) -> None:
        kernels.call("combine", values[:, start:stop], contiguous.ctypes.data, out[start:stop].data_ptr())

    in_ranges(work, values.shape[1], CELL)
