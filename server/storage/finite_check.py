"""Whether what arrives in pieces is an update, without keeping any of it: finite, and soundly encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from roundtable.aggregation.rows.encoded_matrix import FileBytes
from roundtable.core.encodings import GRID, Encoding, StreamKey
from roundtable.core.errors import EncodingError

_EXPONENTS = {torch.bfloat16: np.uint16(0x7F80), torch.float16: np.uint16(0x7C00)}
"""The bits of 16 that are all set where a value is NaN or infinite."""

DECODED_AT_A_TIME = 32 * GRID


class ContentCheck(Protocol):
    """Is shown the bytes of an upload in order, and asked when all have come."""

    def __call__(self, data: bytes | memoryview) -> None:
        """Takes the next bytes."""

    def flaw(self, path: Path) -> str:
        """What is wrong with the whole, which now lies in this file; empty if nothing is. Blocks."""


class AnyContent:
    """For bytes that mean nothing by themselves: masked vectors are uniform."""

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
                if not np.isfinite(part.numpy()).all():
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
        self._largest = largest
        self._given = given
        self._exponent = _EXPONENTS.get(dtype)
        self._stored = np.dtype("<f4") if self._exponent is None else np.dtype("<u2")
        self._rest = b""
        self._seen = 0
        self.first_bad: int | None = None

    def __call__(self, data: bytes | memoryview) -> None:
        if self._rest:
            data = b"".join((self._rest, data))
        count = len(data) // self._stored.itemsize
        self._rest = bytes(data[count * self._stored.itemsize :])
        if count and self.first_bad is None:
            values = np.frombuffer(data, dtype=self._stored, count=count)
            if self._exponent is not None:
                bad = self._bad_half(values)
            else:
                bad = self._bad_float32(values) if self._largest is None else self._bad_digit(values)
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

    @staticmethod
    def _bad_float32(values: np.ndarray) -> int | None:
        # NaN and infinity survive every sum, so one pass tells; a sum that overflows is looked at closely.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(values.sum()):
                return None
        bad = np.flatnonzero(~np.isfinite(values))
        return int(bad[0]) if len(bad) else None

    def _bad_digit(self, values: np.ndarray) -> int | None:
        with np.errstate(invalid="ignore"):
            right = (values >= 0) & (values <= self._largest) & (np.trunc(values) == values)
        if self._given is not None:
            given = self._given[self._seen : self._seen + len(values)]
            right &= np.isnan(given) | (values == given)
        return None if right.all() else int(right.argmin())

    def _bad_half(self, bits: np.ndarray) -> int | None:
        bad = (bits & self._exponent) == self._exponent
        return int(bad.argmax()) if bad.any() else None
