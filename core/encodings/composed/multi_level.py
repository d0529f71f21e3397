"""Each tensor of an update at a level of its own: exact, 8 bits, or its largest values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_integers import BlockIntegers, IntegerTable
from roundtable.core.encodings.block_tables import refusal
from roundtable.core.encodings.codec import CodecEncoding
from roundtable.core.encodings.composed.runs import BufferedRun, HeldRun, RunReader, ValueRun, tensors_of
from roundtable.core.encodings.dense import Dense
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
from roundtable.core.encodings.sparse import LargestValues, TopKTable
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import TensorSpec
from roundtable.core.toml_tables import Table

_DENSE, _SPARSE = 0, 1


_AT_A_TIME = 32 * GRID


class MultiLevelTable(Table):
    """Parameters of multilevel."""

    small: int = Field(
        1024, ge=0, le=1 << 16, description="tensors of up to so many values: exact, and first"
    )
    large: int = Field(
        1 << 16, ge=2, le=BLOCK_ELEMENTS, description="tensors of so many values and more: the largest"
    )
    ratio: float = Field(0.05, gt=0.0, le=1.0, description="share of a large tensor's values")
    variance: float = Field(
        0.1, ge=0.0, description="others below this part of the update's mean square: 8 bits a value"
    )
    threshold: float = Field(
        0.1, gt=0.0, le=1.0, description="the rest: magnitudes from this share of the tensor's largest on"
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.small >= self.large:
            raise ValueError(f"small={self.small} and large={self.large}: small tensors are below large ones")
        return self


class _Parts(NamedTuple):
    """Tensors of a layout: those that travel first, and all in order with whether each is among them."""

    first: int
    tensors: tuple[tuple[TensorSpec, bool], ...]


class MultiLevel(Encoding):
    """Tensors of up to `small` values exact and ahead of all others, of `large` and more by their ⌈ratio·d⌉
    largest; of those in between the ones with a mean square below `variance` times the update's in 8 bits,
    the rest by the magnitudes from `threshold` times their largest on, unless 8 bits are shorter.

    Values are int8 in blocks of 256, error ω = 0.063. For each tensor ‖C(x)−x‖² is at most 1 − ratio(1 − ω²),
    ω² or 1 − (1 − ω²)/(1 + (d−1)t²) times ‖x‖², d below `large`; so for all of them. At most 1 + ω times as
    long as x. A vector is read once for its mean square. Small tensors beyond a block of 1 M values are
    treated as those in between. Which values are sent tells of the silo's data.
    """

    def __init__(self, chain: str, table: MultiLevelTable, layout: Layout | None = None) -> None:
        self.chain = chain
        self.table = table
        self._layout = layout
        codec = BlockIntegers(8, IntegerTable())
        self._exact = CodecEncoding(chain, Dense(torch.float32))
        self._dense = CodecEncoding(chain, codec)
        self._by_ratio = LargestValues(chain, TopKTable(ratio=table.ratio), codec)
        self._codec = codec
        above = self._above(table.large)
        worst = max(each.traits.worst(table.large) for each in (self._by_ratio, self._dense, above))
        self.traits = Traits(
            "bounded",
            lambda n: worst,
            codec.traits.lengthens,
            support="own",
            feedback=True,
            size_tells=True,
        )

    @override
    def over(self, layout: Layout) -> MultiLevel:
        return MultiLevel(self.chain, self.table, layout)

    @override
    def size_bound(self, elements: int) -> int:
        parts = self._parts(elements)
        rest = (spec.size for spec, first in parts.tensors if not first)
        return self._exact.size_bound(parts.first) + sum(self._bound(size) for size in rest)

    @override
    def encoded_size(self, elements: int) -> int | None:
        return None

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        values = check_vector(vector)
        parts = self._parts(len(values))
        if not _finite(values):
            raise refusal(0, len(values))
        low = self.table.variance * _mean_square(values)
        ahead = [_part(values, spec) for spec, first in parts.tensors if first]
        if ahead:
            yield from self._exact.encode(torch.cat(ahead))
        for spec, first in parts.tensors:
            if not first:
                yield from self._tensor(_part(values, spec), low)

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return RunReader(self._runs(source, elements))

    def _tensor(self, part: Tensor, low: float) -> Iterator[memoryview]:
        size = len(part)
        if size >= self.table.large:
            yield from self._by_ratio.encode(part)
            return
        data = b""
        if _mean_square(part) >= low:
            data = b"".join(self._above(size).encode(part))
        if not data or len(data) > self._dense.size_bound(size):
            yield memoryview(bytes([_DENSE]))
            yield from self._dense.encode(part)
        else:
            yield memoryview(bytes([_SPARSE]) + data)

    def _runs(self, source: ByteSource, elements: int) -> Iterator[tuple[int, ValueRun]]:
        parts = self._parts(elements)
        ahead = torch.empty(parts.first)
        self._exact.reader(source, len(ahead)).read(ahead)
        if not _finite(ahead):
            raise EncodingError("a value of a small tensor is NaN or infinite")
        at = 0
        for spec, first in parts.tensors:
            if first:
                yield spec.size, HeldRun(ahead[at : at + spec.size])
                at += spec.size
            else:
                yield spec.size, BufferedRun(self._reader(source, spec.size), spec.size)

    def _reader(self, source: ByteSource, size: int) -> VectorReader:
        if size >= self.table.large:
            return self._by_ratio.reader(source, size)
        level = source.read(1)[0]
        if level not in (_DENSE, _SPARSE):
            raise EncodingError(f"a tensor at the level {level}; there are {_DENSE} and {_SPARSE}")
        return (self._above(size) if level == _SPARSE else self._dense).reader(source, size)

    def _above(self, size: int) -> LargestValues:
        table = TopKTable(threshold=self.table.threshold, per="layer")
        return LargestValues(self.chain, table, self._codec, (size,))

    def _bound(self, size: int) -> int:
        """The most bytes of a tensor that does not travel first."""
        if size >= self.table.large:
            return self._by_ratio.size_bound(size)
        return 1 + self._dense.size_bound(size)

    def _parts(self, elements: int) -> _Parts:
        total, tensors = 0, []
        for spec in tensors_of(self.chain, self._layout, elements):
            first = spec.size <= self.table.small and total + spec.size <= BLOCK_ELEMENTS
            total += spec.size if first else 0
            tensors.append((spec, first))
        return _Parts(total, tuple(tensors))


def _part(values: Tensor, spec: TensorSpec) -> Tensor:
    return values[spec.offset : spec.offset + spec.size]


def _finite(values: Tensor) -> bool:
    return not len(values) or all(bool(torch.isfinite(end)) for end in torch.aminmax(values))


def _mean_square(values: Tensor) -> float:
    total = sum(float(piece.double().square().sum()) for piece in torch.split(values, _AT_A_TIME))
    return total / len(values) if len(values) else 0.0
