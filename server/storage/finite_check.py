"""Whether what arrives in pieces is an update, without keeping any of it: finite, and soundly encoded.

The norm is what tells of a value that is not finite, and spares the round a pass that measures it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from roundtable.aggregation.rows.encoded_matrix import FileBytes
from roundtable.aggregation.rows.matrix import CELL, block_ranges
from roundtable.core.encodings import GRID, Encoding, StreamKey
from roundtable.core.errors import EncodingError

DECODED_AT_A_TIME = 32 * GRID
_LEAST_SQUARES = 1e-30
"""‖cell‖² below which squares that float32 cannot hold may be a part of it that counts."""


class ContentCheck(Protocol):
    """Is shown the bytes of an upload in order, and asked when all have come."""

    @property
    def norm(self) -> float | None:
        """The Euclidean norm of the vector, once it is whole and nothing is wrong with it; None where it was
        not measured."""

    def __call__(self, data: bytes | memoryview) -> None:
        """Takes the next bytes."""

    def flaw(self, path: Path) -> str:
        """What is wrong with the whole, which now lies in this file; empty if nothing is. Blocks."""


class AnyContent:
    """For bytes that mean nothing by themselves: masked vectors are uniform."""

    norm = None

    def __call__(self, data: bytes | memoryview) -> None:
        return

    def flaw(self, path: Path) -> str:
        return ""


class EncodedCheck:
    """For encodings that are no plain array: once all bytes are there, they are decoded and let go, block
    by block.

    So a claim that would need more memory or does not hold is refused before anything else is made of it.
    """

    def __init__(self, encoding: Encoding, elements: int, key: StreamKey) -> None:
        self._encoding = encoding
        self._elements = elements
        self._key = key
        self._squares = 0.0

    @property
    def norm(self) -> float | None:
        return math.sqrt(self._squares)

    def __call__(self, data: bytes | memoryview) -> None:
        return

    def flaw(self, path: Path) -> str:
        source = FileBytes(path)
        block = torch.empty(min(self._elements, DECODED_AT_A_TIME))
        try:
            reader = self._encoding.reader(source, self._elements, self._key)
            for start in range(0, self._elements, DECODED_AT_A_TIME):
                part = block[: min(self._elements - start, DECODED_AT_A_TIME)]
                reader.read(part)
                self._squares += squared_norm(part.numpy())
                if not math.isfinite(self._squares):
                    return f"the update is not finite: an element from {start} on is NaN or infinite"
            return f"{source.left} bytes follow the update's last value" if source.left else ""
        except EncodingError as error:
            return f"the update cannot be decoded: {error}"
        finally:
            source.close()


class FiniteCheck:
    """Sees the bytes of a dense encoding in order; `first_bad` is the first element that is not finite, or,
    with a `largest` digit, no whole number from 0 to that: a silo's digits, which only add up if each is one.
    Where `given` [elements] is not NaN, a digit has to be that: its place is another silo's.

    NumPy and not torch: one thread for each upload is enough, and torch would start more for each.
    """

    def __init__(
        self, dtype: torch.dtype, largest: int | None = None, given: np.ndarray | None = None
    ) -> None:
        self._dtype = dtype
        self._largest = largest
        self._given = given
        self._rest = b""
        self._seen = 0
        self._squares = 0.0
        self.first_bad: int | None = None

    @property
    def norm(self) -> float | None:
        measured = self._largest is None and self.first_bad is None
        return math.sqrt(self._squares) if measured else None

    def __call__(self, data: bytes | memoryview) -> None:
        if self._rest:
            data = b"".join((self._rest, data))
        count = len(data) // self._dtype.itemsize
        self._rest = bytes(data[count * self._dtype.itemsize :])
        if count and self.first_bad is None:
            values = _float32(data, self._dtype, count)
            bad = self._not_finite(values) if self._largest is None else self._bad_digit(values)
            self.first_bad = None if bad is None else self._seen + bad
        self._seen += count

    def flaw(self, path: Path) -> str:
        bad = self.first_bad
        if bad is None:
            return ""
        if self._largest is not None:
            return (
                f"the sums are no digits: element {bad} is no whole number from 0 to {self._largest}, or has "
                "the place of another silo's, so that they are no silo's answer to the analysis"
            )
        return f"the update is not finite: element {bad} is NaN or infinite"

    def _not_finite(self, values: np.ndarray) -> int | None:
        squares = squared_norm(values)
        if math.isfinite(squares):
            self._squares += squares
            return None
        return int(np.isfinite(values).argmin())

    def _bad_digit(self, values: np.ndarray) -> int | None:
        with np.errstate(invalid="ignore"):
            right = (values >= 0) & (values <= self._largest) & (np.trunc(values) == values)
        if self._given is not None:
            given = self._given[self._seen : self._seen + len(values)]
            right &= np.isnan(given) | (values == given)
        return None if right.all() else int(right.argmin())


def squared_norm(values: np.ndarray) -> float:
    """‖values‖² of float32 [n], up to 1e-3 of it; not finite exactly where a value is not.

    In float32, which takes a quarter of the time, unless squares may have been too large or small for that.
    """
    total = 0.0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start, stop in block_ranges(len(values), CELL):
            cell = values[start:stop]
            squares = float(np.dot(cell, cell))
            if not _LEAST_SQUARES < squares < math.inf:
                exact = cell.astype(np.float64)
                squares = float(np.dot(exact, exact))
            total += squares
    return total


def _float32(data: bytes | memoryview, dtype: torch.dtype, count: int) -> np.ndarray:
    """The first `count` values of some bytes, little-endian."""
    if dtype == torch.bfloat16:
        bits = np.frombuffer(data, "<u2", count).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32)
    stored = np.frombuffer(data, "<f2" if dtype == torch.float16 else "<f4", count)
    return stored.astype(np.float32, copy=False)
