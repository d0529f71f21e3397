"""Sparse updates: the largest values, or values that a seed chooses; written frame by frame."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_tables import refusal
from roundtable.core.encodings.codec import Codec
from roundtable.core.encodings.encoding import (
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
from roundtable.core.encodings.largest import Largest, gaps_of, places_of, shift_for
from roundtable.core.encodings.torch_draws import draw_bits
from roundtable.core.errors import EncodingError
from roundtable.core.toml_tables import Table

FRAME = 32 * GRID
_HEAD = struct.Struct("<II")
_GAP_BYTES = 3


class TopKTable(Table):
    """Parameters of topk."""

    ratio: float | None = Field(None, gt=0.0, le=1.0, description="share of the values that are sent")
    threshold: float | None = Field(None, gt=0.0, description="or: send magnitudes from here on")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.ratio is None) == (self.threshold is None):
            raise ValueError("topk takes either ratio or threshold, for example topk(ratio=0.05)")
        return self


class RandomKTable(Table):
    """Parameters of randomk."""

    ratio: float = Field(gt=0.0, le=1.0, description="share of the values: one of each 1/ratio, rounded")
    indices: Literal["own", "cohort"] = Field(
        "own", description="cohort: all silos of a round send the same ones"
    )
    scaled: bool = Field(
        True, description="multiply by d/k, which makes it unbiased; without, for error feedback"
    )


class SparseReader:
    """Puts the values of each frame in their places."""

    def __init__(
        self, encoding: LargestValues | RandomK, source: ByteSource, elements: int, key: StreamKey
    ) -> None:
        self._encoding = encoding
        self._source = source
        self._elements = elements
        self._key = key
        self._at = 0
        self._left = encoding.most(elements)
        self._places: np.ndarray = np.empty(0, dtype=np.int64)
        self._values = torch.empty(0)

    def read(self, out: Tensor) -> None:
        out.zero_()
        for start in range(0, len(out), GRID):
            if self._at % FRAME == 0:
                self._frame()
            part = out[start : start + GRID]
            base = self._at % FRAME
            low, high = np.searchsorted(self._places, (base, base + len(part)))
            part[torch.from_numpy(self._places[low:high] - base)] = self._values[low:high]
            self._at += len(part)

    def _frame(self) -> None:
        size = min(FRAME, self._elements - self._at)
        self._places = self._encoding.read_places(self._source, self._at, size, self._left, self._key)
        self._left -= len(self._places)
        codec = self._encoding.codec
        self._values = torch.empty(len(self._places))
        codec.decode(self._source.read(codec.size(len(self._values))), self._values)
        self._values *= self._encoding.factor
        if not bool(torch.isfinite(self._values).all()):
            raise EncodingError("a value is too large for float32 once it is scaled")


class LargestValues(Encoding):
    """The k = ⌈ratio·d⌉ largest magnitudes of the whole vector, ties by the lowest index; or all from
    `threshold` on.

    ‖C(x)−x‖² ≤ (1 − k/d)·‖x‖², and never longer than x (Stich et al. 2018, lemma A.1). Places travel as
    gaps in Golomb-Rice code, 8.1 bits at 1 %. Which values are sent tells of the silo's data. Values are
    read twice before they are written.
    """

    factor = 1.0

    def __init__(self, chain: str, table: TopKTable, codec: Codec) -> None:
        self.chain = chain
        self.table = table
        self.codec = codec
        rest = max(0.0, 1 - codec.traits.worst(FRAME) ** 2)
        share = table.ratio or 0.0
        worst = (1 - share * rest) ** 0.5
        self.traits = Traits(
            "bounded",
            lambda n: worst,
            codec.traits.lengthens,
            support="own",
            feedback=table.ratio is not None,
        )

    def most(self, elements: int) -> int:
        """How many values may be sent."""
        return elements if self.table.ratio is None else math.ceil(self.table.ratio * elements)

    @override
    def size_bound(self, elements: int) -> int:
        frames, most = -(-elements // FRAME), self.most(elements)
        codes = self.codec.size(most) + frames * self.codec.size(1)
        return frames * (_HEAD.size + 1) + _GAP_BYTES * most + codes

    @override
    def encoded_size(self, elements: int) -> int | None:
        return None

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        values, own = check_vector(vector), key.own
        if self.table.threshold is None:
            chosen = Largest.of(values, self.most(len(values)))
        else:
            chosen = Largest.above(values, self.table.threshold)
        for first in range(0, len(values), FRAME):
            places, taken = chosen.collect(values[first : first + FRAME])
            gaps = gaps_of(places, shift_for(len(places), min(FRAME, len(values) - first)))
            codes = self.codec.encode(taken, first, own)
            yield memoryview(b"".join((_HEAD.pack(len(places), len(gaps)), gaps, codes.data)))

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return SparseReader(self, source, elements, key)

    def read_places(self, source: ByteSource, at: int, size: int, left: int, key: StreamKey) -> np.ndarray:
        """The places of a frame of `size` values; EncodingError for more than `left`, or for none."""
        count, length = _HEAD.unpack(source.read(_HEAD.size))
        if count > min(size, left):
            raise EncodingError(f"{count} values in a frame of {size}, where {left} of the update's are left")
        if length > _GAP_BYTES * count + 1:
            raise EncodingError(f"{length} bytes for {count} places")
        return places_of(source.read(length), count, shift_for(count, size), size)


class RandomK(Encoding):
    """One value of each stratum of S = round(1/ratio) neighbours, chosen by the seed: no index is sent.

    Scaled by S it is unbiased with E‖C(x)−x‖² ≤ (S − 1)·‖x‖², and up to S times as long as x; without, its
    error is (1 − 1/S)·‖x‖² in expectation. With `cohort` indices errors of silos do not average out: they
    all miss the same values. With `own` ones a coordinate-wise median sees mostly zeros.
    """

    def __init__(self, chain: str, table: RandomKTable, codec: Codec) -> None:
        self.chain = chain
        self.table = table
        self.codec = codec
        self.stride = max(1, round(1 / table.ratio))
        self.factor = float(self.stride) if table.scaled else 1.0
        codec_error = codec.traits.worst(FRAME)
        if table.scaled:
            worst = (self.stride * (1 + codec_error**2) - 1) ** 0.5
        else:
            worst = (1 - max(0.0, 1 - codec_error**2) / self.stride) ** 0.5
        exact = codec.traits.error != "bounded"
        self.traits = Traits(
            "unbiased" if table.scaled and exact else "bounded",
            lambda n: worst,
            lambda n: self.factor * codec.traits.lengthens(n),
            support="seeded" if table.indices == "own" else "cohort",
            feedback=not table.scaled,
            scaled=self.factor > 1,
        )

    def most(self, elements: int) -> int:
        """How many values are sent."""
        return -(-elements // self.stride)

    @override
    def size_bound(self, elements: int) -> int:
        whole, rest = divmod(elements, FRAME)
        return (
            (whole + 1) * self.codec.size(FRAME // self.stride + 2)
            if whole
            else self.codec.size(self.most(rest))
        )

    @override
    def encoded_size(self, elements: int) -> int | None:
        return None

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        values, own = check_vector(vector), key.own
        for first in range(0, len(values), FRAME):
            frame = values[first : first + FRAME]
            if not all(bool(torch.isfinite(end)) for end in torch.aminmax(frame)):
                raise refusal(first, len(frame))
            places = self._places(first, len(frame), key)
            yield self.codec.encode(frame[torch.from_numpy(places)], first, own).data

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return SparseReader(self, source, elements, key)

    def read_places(self, source: ByteSource, at: int, size: int, left: int, key: StreamKey) -> np.ndarray:
        """The places of a frame of `size` values, which are not sent."""
        return self._places(at, size, key)

    def _places(self, first: int, size: int, key: StreamKey) -> np.ndarray:
        stride, seed = self.stride, key.own if self.table.indices == "own" else key.cohort
        low, high = first // stride, -(-(first + size) // stride)
        draws = draw_bits(seed ^ _CHOICE, low, high - low).numpy().view(np.uint32).astype(np.uint64)
        places = np.arange(low, high, dtype=np.int64) * stride
        places += ((draws * np.uint64(stride)) >> np.uint64(32)).astype(np.int64)
        return places[(places >= first) & (places < first + size)] - first


_CHOICE = 0x5E1EC7
"""Keeps the draws of places apart from those of rounding."""
