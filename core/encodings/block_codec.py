"""What codecs in blocks share: a kernel where there is one, and torch otherwise."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings import compiled
from roundtable.core.encodings.block_tables import FLAWS, refusal
from roundtable.core.encodings.codec import Codec
from roundtable.core.encodings.torch_blocks import read_blocks, write_blocks
from roundtable.core.errors import EncodingError


class BlockCodec(Codec):
    """Blocks of `unit` values that are encoded by themselves. `kernel` names the kernels of kernels.cpp."""

    kernel: str

    @abstractmethod
    def block_size(self, count: int) -> int:
        """Bytes of a block of `count` values."""

    @abstractmethod
    def encoding_arguments(self, first: int, key: int) -> tuple[int | np.ndarray, ...]:
        """What the kernel that encodes is given behind values, their number and the unit."""

    @abstractmethod
    def decoding_arguments(self) -> tuple[int | np.ndarray, ...]:
        """What the kernel that decodes is given behind bytes, the number of values and the unit."""

    @abstractmethod
    def to_rows(self, block: Tensor, at: int, key: int) -> Tensor:
        """Finite values [blocks, size], the first at place `at`, as bytes [blocks, block_size]."""

    @abstractmethod
    def from_rows(self, raw: Tensor, out: Tensor) -> None:
        """Decodes such bytes into `out` [blocks, size]; EncodingError for what no encoder writes."""

    @override
    def size(self, count: int) -> int:
        whole, rest = divmod(count, self.unit)
        return whole * self.block_size(self.unit) + (self.block_size(rest) if rest else 0)

    @override
    def encode(self, values: Tensor, first: int, key: int) -> np.ndarray:
        kernels = compiled.load()
        if kernels is None or values.device.type != "cpu":
            return write_blocks(values, first, self.unit, lambda block, at: self.to_rows(block, at, key))
        out = np.empty(self.size(len(values)), dtype=np.uint8)
        arguments = self.encoding_arguments(first, key)
        bad = kernels.call(f"encode_{self.kernel}", values, len(values), self.unit, *arguments, out)
        if bad >= 0:
            raise refusal(first + bad * self.unit, self.unit)
        return out

    @override
    def decode(self, data: memoryview, out: Tensor) -> None:
        kernels = compiled.load()
        if kernels is None or out.device.type != "cpu" or not len(out):
            read_blocks(data, out, self.unit, self.block_size, self.from_rows)
            return
        name, arguments = f"decode_{self.kernel}", self.decoding_arguments()
        if flaw := kernels.call(name, data, len(out), self.unit, *arguments, out):
            raise EncodingError(FLAWS[flaw])
