"""Whether a vector that arrives in pieces is finite, without keeping any of it."""

from __future__ import annotations

import warnings

import torch

BLOCK_BYTES = 1 << 20


class FiniteCheck:
    """Sees the bytes of a dense encoding in order; `first_bad` is the first element that is not finite."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rest = b""
        self._seen = 0
        self.first_bad: int | None = None

    def __call__(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        whole = len(data) - len(data) % self._dtype.itemsize
        self._rest = data[whole:]
        if whole and self.first_bad is None:
            self._look(memoryview(data)[:whole])
        self._seen += whole // self._dtype.itemsize

    def _look(self, data: memoryview) -> None:
        with warnings.catch_warnings():
            # torch warns that bytes are read-only; nothing is written to them.
            warnings.simplefilter("ignore", UserWarning)
            values = torch.frombuffer(data, dtype=self._dtype)
        # NaN and infinity survive every sum, so one pass tells; a sum that overflows is looked at closely.
        if not bool(torch.isfinite(values.sum(dtype=torch.float32))):
            bad = torch.nonzero(~torch.isfinite(values))
            if len(bad):
                self.first_bad = self._seen + int(bad[0])
