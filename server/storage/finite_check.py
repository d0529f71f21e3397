"""Whether a vector that arrives in pieces is finite, without keeping any of it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

_BFLOAT16_EXPONENT = np.uint16(0x7F80)


class ContentCheck(Protocol):
    """Is shown the bytes of an upload in order; `first_bad` is the first element that is not finite."""

    first_bad: int | None

    def __call__(self, data: bytes | memoryview) -> None:
        """Takes the next bytes."""


class AnyContent:
    """For bytes that mean nothing by themselves: masked vectors are uniform."""

    first_bad: int | None = None

    def __call__(self, data: bytes | memoryview) -> None:
        return


class FiniteCheck:
    """Sees the bytes of a dense encoding in order; `first_bad` is the first element that is not finite.

    NumPy and not torch: one thread for each upload is enough, and torch would start more for each.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._half = dtype == torch.bfloat16
        self._stored = np.dtype("<u2") if self._half else np.dtype("<f4")
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
            bad = self._bad_bfloat16(values) if self._half else self._bad_float32(values)
            self.first_bad = None if bad is None else self._seen + bad
        self._seen += count

    @staticmethod
    def _bad_float32(values: np.ndarray) -> int | None:
        # NaN and infinity survive every sum, so one pass tells; a sum that overflows is looked at closely.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(values.sum()):
                return None
        bad = np.flatnonzero(~np.isfinite(values))
        return int(bad[0]) if len(bad) else None

    @staticmethod
    def _bad_bfloat16(bits: np.ndarray) -> int | None:
        bad = (bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT
        return int(bad.argmax()) if bad.any() else None
