"""Sorting networks over the rows of a block: order statistics of every column at once.

A network is a fixed list of comparators `(i, j)`: wires i and j are replaced by their minimum and maximum.
Each comparator works on whole rows, so a column-wise median costs a few dozen element-wise operations, with
no branch and no transposition. Batcher's merge exchange (Knuth, The Art of Computer Programming, volume 3,
section 5.2.2, algorithm M) needs O(n log² n) of them.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from roundtable.aggregation.conditions import NotFinite

Network = tuple[tuple[int, int], ...]
"""Comparators in the order in which they run."""

_NETWORK_ROWS = 48
"""Beyond this, one sort of the transposed tile is faster than the network without a compiler."""


@functools.lru_cache(maxsize=256)
def merge_exchange(rows: int) -> Network:
    """Batcher's merge exchange for any number of wires."""
    comparators: list[tuple[int, int]] = []
    top = 1 << max(rows - 1, 0).bit_length() >> 1
    step = top
    while step:
        merge, residue, distance = top, 0, step
        while distance:
            comparators += [(i, i + distance) for i in range(rows - distance) if i & step == residue]
            distance, residue = merge - step, step
            merge >>= 1
        step >>= 1
    return tuple(comparators)


@functools.lru_cache(maxsize=256)
def network_for_mean(rows: int, first: int, last: int) -> Network:
    """The comparators of `merge_exchange` that matter to the mean of sorted wires first to last.

    Read from the end: a comparator whose outputs are both unused is left out, and so is one whose outputs
    are both only summed, because a sum does not care which of the two is larger.
    """
    unused, summed, needed = 0, 1, 2
    wires = [summed if first <= wire <= last else unused for wire in range(rows)]
    kept: list[tuple[int, int]] = []
    for low, high in reversed(merge_exchange(rows)):
        if wires[low] == wires[high] != needed:
            continue
        wires[low] = wires[high] = needed
        kept.append((low, high))
    return tuple(reversed(kept))


def sorted_wires(values: np.ndarray, network: Network) -> list[np.ndarray]:
    """The rows of `values` [n, width] after the network; many rows are sorted outright.

    Raises AggregationError where a value is not finite: a NaN has no place in an order.
    """
    tainted = np.zeros_like(values[0])
    with np.errstate(invalid="ignore"):
        for row in values:
            tainted += row * 0
    if not (tainted == 0).all():
        raise NotFinite
    if len(values) > _NETWORK_ROWS:
        ordered = np.sort(np.ascontiguousarray(values.T), axis=1)
        return list(np.ascontiguousarray(ordered.T))
    wires = list(values.copy())
    spare = np.empty_like(tainted)
    for low, high in network:
        np.minimum(wires[low], wires[high], out=spare)
        np.maximum(wires[low], wires[high], out=wires[high])
        wires[low], spare = spare, wires[low]
    return wires


def sorted_wires_on_device(values: torch.Tensor, network: Network) -> list[torch.Tensor]:
    """The same on an accelerator."""
    if not bool(torch.isfinite(values).all()):
        raise NotFinite
    if len(values) > _NETWORK_ROWS:
        return list(values.sort(dim=0).values)
    wires = list(values)
    for low, high in network:
        first, second = wires[low], wires[high]
        wires[low], wires[high] = torch.minimum(first, second), torch.maximum(first, second)
    return wires
