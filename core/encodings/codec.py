"""Codecs: stages that write every value in a fixed number of bits, alone or for what another stage chose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.encoding import (
    BLOCK_ELEMENTS,
    GRID,
    NO_KEY,
    ByteSource,
    Encoding,
    Memory,
    StreamKey,
    Traits,
    VectorReader,
    check_vector,
)
from roundtable.core.encodings.torch_blocks import piece_on

_AT_A_TIME = 32 * GRID


class Codec(ABC):
    """Writes values unit by unit: `unit` values are `size(unit)` bytes, and the last unit may be shorter.

    `unit` divides GRID. What it draws depends on `key` and a value's place alone, so that it may begin
    anywhere.
    """

    unit: int
    traits: Traits
    dense_dtype: torch.dtype | None = None

    @abstractmethod
    def size(self, count: int) -> int:
        """Bytes of so many values."""

    @abstractmethod
    def encode(self, values: Tensor, first: int, key: int) -> np.ndarray:
        """The bytes (uint8) of float32 values, of which the first has the place `first`, a multiple of the
        unit.

        Raises EncodingError for values that are not finite or too large.
        """

    @abstractmethod
    def decode(self, data: memoryview, out: Tensor) -> None:
        """Decodes exactly `size(out.numel())` bytes; EncodingError for what no encoder writes."""


class CodecEncoding(Encoding):
    """A codec over the whole vector."""

    def __init__(self, chain: str, codec: Codec) -> None:
        self.chain = chain
        self.codec = codec
        self.traits = codec.traits
        self.dense_dtype = codec.dense_dtype

    @override
    def size_bound(self, elements: int) -> int:
        return self.codec.size(elements)

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        values, own = check_vector(vector), key.own
        piece = piece_on(values.device, BLOCK_ELEMENTS)
        for first in range(0, len(values), piece):
            yield self.codec.encode(values[first : first + piece], first, own).data

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return CodecReader(self.codec, source)


class CodecReader:
    """Reads what a codec wrote."""

    def __init__(self, codec: Codec, source: ByteSource) -> None:
        self._codec = codec
        self._source = source

    def read(self, out: Tensor) -> None:
        piece = piece_on(out.device, _AT_A_TIME)
        for first in range(0, len(out), piece):
            part = out[first : first + piece]
            self._codec.decode(self._source.read(self._codec.size(len(part))), part)
