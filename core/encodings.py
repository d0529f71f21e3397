"""How a flat vector becomes bytes for the journey: a registry of encodings.

A *dense* encoding is a plain little-endian array of one dtype; a received file of it can be mapped
and read in column blocks as it lies. Other encodings (sparse, quantised) are decoded to float32
once, on arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from roundtable.core.errors import EncodingError

BLOCK_ELEMENTS = 1 << 20


class Encoding(Protocol):
    """One way to write a float32 vector as bytes."""

    name: str
    dense_dtype: torch.dtype | None

    def encoded_size(self, elements: int) -> int | None:
        """Bytes that a vector of so many elements takes; None where it depends on the values."""

    def encode(self, vector: Tensor) -> Iterator[memoryview]:
        """The bytes of a float32 CPU vector, in blocks."""

    def decode(self, data: memoryview | bytes, out: Tensor) -> None:
        """Writes the vector that `data` encodes into `out`; EncodingError if it does not fit."""


class Dense:
    """A plain little-endian array of `dtype`."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dense_dtype: torch.dtype | None = dtype
        self._dtype = dtype

    def encoded_size(self, elements: int) -> int:
        return elements * self._dtype.itemsize

    def encode(self, vector: Tensor) -> Iterator[memoryview]:
        if vector.dtype != torch.float32 or vector.dim() != 1:
            raise EncodingError(
                f"only flat float32 vectors are encoded, not {vector.dtype} {list(vector.shape)}"
            )
        for block in torch.split(vector.detach(), BLOCK_ELEMENTS):
            yield block.to(self._dtype).contiguous().view(torch.uint8).numpy().data

    def decode(self, data: memoryview | bytes, out: Tensor) -> None:
        expected = self.encoded_size(out.numel())
        size = memoryview(data).nbytes
        if size != expected:
            raise EncodingError(f"{self.name} of {out.numel()} elements is {expected} bytes, got {size}")
        if out.numel():
            raw = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
            out.copy_(raw.view(self._dtype))


ENCODINGS: dict[str, Encoding] = {
    "float32": Dense("float32", torch.float32),
    "bfloat16": Dense("bfloat16", torch.bfloat16),
}


def get_encoding(name: str) -> Encoding:
    """The encoding of that name; EncodingError with the known ones otherwise."""
    try:
        return ENCODINGS[name]
    except KeyError:
        raise EncodingError(f"unknown encoding {name!r}; known: {', '.join(ENCODINGS)}") from None
