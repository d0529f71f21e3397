"""What an update is once it has travelled: encoded and decoded again, where nothing really travels; and what
that took and lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from roundtable.core.encodings.encoding import GRID, ByteSource, Encoding, StreamKey

_AT_A_TIME = 32 * GRID


def travelled(encoding: Encoding, values: Tensor, key: StreamKey) -> int:
    """Puts what a receiver would decode into `values`, float32 on any device; the bytes that it took."""
    vector = values.cpu() if values.device.type != "cpu" else values
    if encoding.dense_dtype is not None:
        values.copy_(values.to(encoding.dense_dtype))
        return values.numel() * encoding.dense_dtype.itemsize
    data = b"".join(encoding.encode(vector, key))
    encoding.decode(data, vector, key)
    if vector is not values:
        values.copy_(vector)
    return len(data)


def norm(values: Tensor) -> float:
    """The Euclidean norm, added up in float64 a block at a time."""
    parts = torch.split(values, _AT_A_TIME)
    return float(sum(float(part.double().square_().sum()) for part in parts) ** 0.5)


def norm_lost(values: Tensor, encoding: Encoding, source: ByteSource, key: StreamKey) -> float:
    """‖x − C(x)‖ for what a receiver decodes from `source`; the values are left alone."""
    reader, squares = encoding.reader(source, len(values), key), 0.0
    block = torch.empty(min(len(values), _AT_A_TIME))
    for part in torch.split(values, _AT_A_TIME):
        decoded = block[: len(part)]
        reader.read(decoded)
        squares += float(decoded.sub_(part).double().square_().sum())
    return float(squares**0.5)


class EncodingWatch:
    """Counts the seconds that an iterator takes, without those of whoever asks it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        """The same blocks."""
        while True:
            began = time.perf_counter()
            block = next(blocks, None)
            self.seconds += time.perf_counter() - began
            if block is None:
                return
            yield block
