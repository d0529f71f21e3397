"""Histograms of gradients, and rows' way down a tree: compiled where there is a compiler, else in NumPy.

Everything that is added up is a whole number, so both give the same, in whatever order rows lie.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from roundtable.core.analyses.digit_kernels import address, cut_digits
from roundtable.core.analyses.exact_sums import Digits, Singles, Whole
from roundtable.core.native_build import load_kernels

_SOURCE = Path(__file__).with_name("histograms.cpp")
PAIR = np.dtype([("gradient", np.int32), ("hessian", np.uint32)])
"""A row's gradient and Hessian as whole numbers; the Hessian below 2^31."""
CHANNELS = 3
LANES = 8
"""Features that lie together: the bins of so many are in the nearest cache."""
_SMALL = 256


@dataclass(frozen=True)
class BinnedRows:
    """Rows as bins, uint8 or uint16 [groups, rows, LANES], a group of features after the other. Feature f has
    offsets[f + 1] − offsets[f] bins, int64 [features + 1], the last of which holds the rows where it is
    missing."""

    bins: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    offsets: Whole

    @classmethod
    def of(cls, columns: Iterable[Whole], rows: int, offsets: Whole) -> BinnedRows:
        """Of the bins of so many rows in each feature; a byte holds each where none of them is larger."""
        shape = (-(-(len(offsets) - 1) // LANES), rows, LANES)
        bins: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] = np.zeros(shape, dtype=np.uint8)
        for feature, column in enumerate(columns):
            if column.max(initial=0) >= _SMALL and bins.dtype == np.uint8:
                bins = bins.astype(np.uint16)
            bins[feature // LANES, :, feature % LANES] = column
        return cls(bins, offsets)

    @property
    def width(self) -> int:
        """Bins of all features together."""
        return int(self.offsets[-1])

    def column(self, feature: int) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
        """The rows' bins in a feature."""
        return self.bins[feature // LANES, :, feature % LANES]

    def descend(self, nodes: npt.NDArray[np.int32], feature: Whole, cut: Whole, missing_left: Whole) -> None:
        """Moves rows from the nodes where they are, in place, down to where a node has no children: of each
        node its split's feature (−1: none), the last bin that goes left, and whether missing values do."""
        library = _library()
        if library is not None:
            function = getattr(library, f"descend_uint{8 * self.bins.itemsize}")
            where = [address(each) for each in (self.offsets, feature, cut, missing_left, nodes)]
            function(address(self.bins), ctypes.c_int64(len(nodes)), *where)
            return
        missing = self.offsets[1:] - self.offsets[:-1] - 1
        moving = np.flatnonzero(feature[nodes] >= 0)
        while moving.size:
            here = nodes[moving]
            by = feature[here]
            bins = self.bins[by // LANES, moving, by % LANES].astype(np.int64)
            left = np.where(bins == missing[by], missing_left[here] != 0, bins <= cut[here])
            nodes[moving] = 2 * here + np.where(left, 1, 2)
            moving = moving[feature[nodes[moving]] >= 0]


@dataclass(frozen=True)
class AskedNodes:
    """Of one output: where each row is, int32 [rows], its gradients, `PAIR` [rows], the nodes whose
    histograms are asked for, and the slot of each."""

    nodes: npt.NDArray[np.int32]
    pairs: npt.NDArray[np.void]
    asked: Whole
    slots: Whole


@dataclass(frozen=True)
class NodeHistograms:
    """The numbers of rows in each bin, and the sums of their gradients and, with two `channels`, Hessians, of
    the nodes that are asked for; 0 in the other of so many slots."""

    rows: BinnedRows
    slots: int
    channels: int
    asked: Sequence[AskedNodes]

    @property
    def counted(self) -> Whole:
        """The rows, int64 [slots, width]."""
        found: Whole = self.whole[0]
        return found

    @property
    def whole(self) -> Whole:
        """Rows, gradients and Hessians, int64 [1 + channels, slots, width]."""
        found = np.zeros((1 + self.channels, self.slots, self.rows.width), dtype=np.int64)
        for each in self.asked:
            for node, slot in zip(each.asked, each.slots, strict=True):
                own = np.flatnonzero(each.nodes == node)
                self._add(own, each.pairs[own], found[:, slot])
        return found

    def _add(self, rows: Whole, pairs: npt.NDArray[np.void], out: Whole) -> None:
        # Doubles hold these whole numbers exactly up to 2^53.
        weights = [None, pairs["gradient"].astype(np.float64), pairs["hessian"].astype(np.float64)]
        for feature in range(len(self.rows.offsets) - 1):
            start, stop = self.rows.offsets[feature], self.rows.offsets[feature + 1]
            bins = self.rows.column(feature)[rows]
            for own, weight in zip(out, weights, strict=False):
                counted = np.bincount(bins, weight, minlength=int(stop - start))
                own[start:stop] = np.rint(counted).astype(np.int64)

    def write(self, digits: Digits, out: Singles) -> bool:
        """Their digits into `out` [planes, slots × width]; False where one is beyond what those hold."""
        library = _library()
        if library is None:
            return _write(self.whole.reshape(1 + self.channels, -1), digits, out)
        planes, width = out.reshape(len(out), self.slots, -1), self.rows.width
        asked = {slot for each in self.asked for slot in each.slots.tolist()}
        for slot in range(self.slots):
            if slot not in asked:
                planes[:, slot] = 0.0
                planes[digits.count + digits.whole - 1 :: digits.whole, slot] = digits.high
        function = getattr(library, f"histograms_uint{8 * self.rows.bins.itemsize}")
        function.restype = ctypes.c_int64
        beyond = False
        for each in self.asked:
            most = max(int(each.nodes.max(initial=0)), int(each.asked.max(initial=0)))
            slot_of = np.full(most + 1, -1, dtype=np.int64)
            slot_of[each.asked] = np.arange(len(each.asked))
            counts = [ctypes.c_int64(number) for number in (len(each.nodes), len(self.rows.offsets) - 1)]
            where = (address(self.rows.offsets), address(each.nodes), address(slot_of))
            layout = (self.slots * width, digits.bits, digits.count, digits.whole, self.channels)
            slots = (ctypes.c_int64(len(each.asked)), address(each.slots), address(each.pairs))
            numbers = map(ctypes.c_int64, layout)
            beyond |= bool(function(address(self.rows.bins), *counts, *where, *slots, address(out), *numbers))
        return not beyond


def _write(whole: Whole, digits: Digits, out: Singles) -> bool:
    start = 0
    for place, numbers in enumerate(whole):
        count = digits.whole if place else digits.count
        offset = digits.offset(count) if place else 0
        raised = numbers + offset
        if not (raised >> count * digits.bits == 0).all():
            return False
        cut_digits(raised, digits.bits, out[start : start + count])
        start += count
    return True


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(_SOURCE)
