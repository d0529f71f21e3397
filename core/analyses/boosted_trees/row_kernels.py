"""Histograms of gradients, and rows' way down a tree: compiled where there is a compiler, else in NumPy.

Everything that is added up is a whole number, so both give the same, in whatever order rows lie.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from roundtable.core.native_build import load_kernels

Whole = npt.NDArray[np.int64]
_SOURCE = Path(__file__).with_name("histograms.cpp")
PAIR = np.dtype([("gradient", np.int32), ("hessian", np.uint32)])
"""A row's gradient and Hessian as whole numbers; the Hessian below 2^31."""
CHANNELS = 3


@dataclass(frozen=True)
class BinnedRows:
    """Rows as bins, uint8 or uint16 [rows, features]. Feature f has offsets[f + 1] − offsets[f] bins, int64
    [features + 1], the last of which holds the rows where it is missing."""

    bins: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    offsets: Whole

    @property
    def width(self) -> int:
        """Bins of all features together."""
        return int(self.offsets[-1])

    def histograms(self, nodes: npt.NDArray[np.int32], asked: Whole, pairs: npt.NDArray[np.void]) -> Whole:
        """For each node that is asked for, the sums of gradient, Hessian and one of its rows: int64
        [asked, width, 3]. `nodes` [rows] is where each row is, `pairs` [rows] of `PAIR`."""
        slot = np.full(int(max(nodes.max(initial=0), asked.max(initial=0))) + 1, -1, dtype=np.int64)
        slot[asked] = np.arange(len(asked))
        out = np.zeros((len(asked), self.width, CHANNELS), dtype=np.int64)
        library = _library()
        if library is not None:
            function = getattr(library, f"histograms_{self.bins.dtype.name}")
            counts = [ctypes.c_int64(number) for number in (*self.bins.shape, len(asked))]
            before = (_at(self.bins), *counts[:2], _at(self.offsets), _at(nodes), _at(slot))
            function(*before, counts[2], _at(pairs), _at(out))
            return out
        for place, node in enumerate(asked):
            own = np.flatnonzero(nodes == node)
            self._add(own, pairs[own], out[place])
        return out

    def _add(self, rows: Whole, pairs: npt.NDArray[np.void], out: Whole) -> None:
        # Doubles hold these whole numbers exactly up to 2^53.
        weights = [pairs["gradient"].astype(np.float64), pairs["hessian"].astype(np.float64), None]
        for feature in range(self.bins.shape[1]):
            start, stop = self.offsets[feature], self.offsets[feature + 1]
            bins = self.bins[rows, feature]
            for channel, weight in enumerate(weights):
                counted = np.bincount(bins, weight, minlength=int(stop - start))
                out[start:stop, channel] = np.rint(counted).astype(np.int64)

    def descend(self, nodes: npt.NDArray[np.int32], feature: Whole, cut: Whole, missing_left: Whole) -> None:
        """Moves rows from the nodes where they are, in place, down to where a node has no children: of each
        node its split's feature (−1: none), the last bin that goes left, and whether missing values do."""
        library = _library()
        if library is not None:
            function = getattr(library, f"descend_{self.bins.dtype.name}")
            rows, features = self.bins.shape
            pointers = (_at(self.offsets), _at(feature), _at(cut), _at(missing_left), _at(nodes))
            function(_at(self.bins), ctypes.c_int64(rows), ctypes.c_int64(features), *pointers)
            return
        missing = self.offsets[1:] - self.offsets[:-1] - 1
        moving = np.flatnonzero(feature[nodes] >= 0)
        while moving.size:
            here = nodes[moving]
            by = feature[here]
            bins = self.bins[moving, by].astype(np.int64)
            left = np.where(bins == missing[by], missing_left[here] != 0, bins <= cut[here])
            nodes[moving] = 2 * here + np.where(left, 1, 2)
            moving = moving[feature[nodes[moving]] >= 0]


def _at(array: npt.NDArray[np.generic] | npt.NDArray[np.void]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(_SOURCE)
