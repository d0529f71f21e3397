"""Sparse updates: the largest values, or values that a seed chooses; written frame by frame."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from roundtable.core.layout import Layout
from roundtable.core.toml_tables import Table

FRAME = 32 * GRID
_FIRST = 0.25
"""The first ratio of a warm-up (Lin et al. 2018, section 3.3)."""
_HEAD = struct.Struct("<II")
_GAP_BYTES = 3


class TopKTable(Table):
    """Parameters of topk."""

    ratio: float | None = Field(None, gt=0.0, le=1.0, description="share of the values that are sent")
    threshold: float | None = Field(
        None, gt=0.0, description="or: send magnitudes from here on; per layer, in units of its largest"
    )
    per: Literal["vector", "layer"] = Field(
        "vector", description="layer: the largest of each tensor, so that none is left out"
    )
    warmup: int = Field(
        0, ge=0, le=10_000, description="rounds in which ratio comes down from 0.25, each time by one factor"
    )
    rescale: bool = Field(
        False, description="lengthen what is sent to the norm of what it was chosen from; not with feedback"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.ratio is None) == (self.threshold is None):
            raise ValueError("topk takes either ratio or threshold, for example topk(ratio=0.05)")
        if self.warmup and self.ratio is None:
            raise ValueError("warmup is of a ratio: for example topk(ratio=0.001, warmup=4)")
        if self.per == "layer" and (self.threshold or 0.0) > 1.0:
            raise ValueError(
                f"threshold={self.threshold} with per=layer is a share of each tensor's largest magnitude: "
                "at most 1"
            )
        return self

    def share(self, round: int) -> float:
        """The ratio of a round (from 1): 0.25, 0.063, 0.016, 0.004, 0.001 for 0.001 and a warm-up of 4."""
        assert self.ratio is not None
        if not self.warmup or round > self.warmup or self.ratio >= _FIRST:
            return self.ratio
        share = _FIRST * (self.ratio / _FIRST) ** ((max(round, 1) - 1) / self.warmup)
        return float(f"{share:.6g}")  # The same on both ends, whatever their power function's last bit is.


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
        self._left = encoding.most(elements, key.round)
        self._places: np.ndarray = np.empty(0, dtype=np.int64)
        self._values: np.ndarray = np.empty(0, dtype=np.float32)

    def read(self, out: Tensor) -> None:
        out.zero_()
        # NumPy and not torch, which shares even small operations out over threads.
        here = out.numpy() if out.device.type == "cpu" else None
        start = 0
        while start < len(out):
            base = self._at % FRAME
            if base == 0:
                self._frame()
            part = out[start : start + FRAME - base]
            low, high = np.searchsorted(self._places, (base, base + len(part)))
            places, values = self._places[low:high] - base, self._values[low:high]
            if here is not None:
                here[start + places] = values
            else:
                part[torch.from_numpy(places).to(out.device)] = torch.from_numpy(values).to(out.device)
            self._at += len(part)
            start += len(part)

    def _frame(self) -> None:
        size = min(FRAME, self._elements - self._at)
        self._places = self._encoding.read_places(self._source, self._at, size, self._left, self._key)
        self._left -= len(self._places)
        codec = self._encoding.codec
        decoded = torch.empty(len(self._places))
        codec.decode(self._source.read(codec.size(len(decoded))), decoded)
        self._values = decoded.numpy()
        if self._encoding.factor != 1.0:
            with np.errstate(over="ignore"):
                self._values *= np.float32(self._encoding.factor)
        if not np.isfinite(self._values).all():
            raise EncodingError("a value is too large for float32 once it is scaled")


class LargestValues(Encoding):
    """The k = ⌈ratio·d⌉ largest magnitudes of the whole vector, ties by the lowest index; or all from
    `threshold` on. Per layer: the same in each tensor, `threshold` in units of its largest magnitude.

    ‖C(x)−x‖² ≤ (1 − k/d)·‖x‖², and never longer than x (Stich et al. 2018, lemma A.1). With a threshold t per
    layer at least its largest is sent: (1 − 1/(1 + (d−1)t²))·‖x‖². Rescaled, what is sent has the norm of
    what it was chosen from, and ‖C(x)−x‖² ≤ 2(1 − √(k/d))·‖x‖²: seldom nearer than zero in the worst case.
    Places travel as gaps in Golomb-Rice code, 8.1 bits at 1 %. Which values are sent tells of the silo's
    data. Values are read twice before they are written, rescaled ones four times.
    """

    factor = 1.0

    def __init__(
        self, chain: str, table: TopKTable, codec: Codec, sizes: Sequence[int] | None = None
    ) -> None:
        self.chain = chain
        self.table = table
        self.codec = codec
        self._tensors = sizes
        self.traits = Traits(
            "bounded",
            self._worst,
            codec.traits.lengthens,
            support="own",
            feedback=not table.rescale and (table.ratio is not None or table.per == "layer"),
            rescaled=table.rescale,
            by_round=table.warmup > 0,
            size_tells=True,
        )

    @override
    def over(self, layout: Layout) -> LargestValues:
        sizes = [spec.size for spec in layout.averaged if spec.size]
        return LargestValues(self.chain, self.table, self.codec, sizes)

    def most(self, elements: int, round: int) -> int:
        """How many values may be sent in a round."""
        if self.table.ratio is None:
            return elements
        share = self.table.share(round)
        return sum(math.ceil(share * size) for size in self._groups(elements))

    @override
    def size_bound(self, elements: int) -> int:
        frames, most = -(-elements // FRAME), self.most(elements, 1)
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
        chosen = self._chosen(values, key.round)
        for first in range(0, len(values), FRAME):
            places, taken = next(chosen)
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

    def _worst(self, elements: int) -> float:
        table, codec = self.table, self.codec.traits.worst(FRAME)
        share = table.ratio or 0.0
        if self._layered and table.threshold is not None:
            share = 1 / (1 + (elements - 1) * table.threshold**2)
        if table.rescale:
            return math.sqrt(2 - 2 * math.sqrt(share)) + codec
        return math.sqrt(1 - share * max(0.0, 1 - codec**2))

    @property
    def _layered(self) -> bool:
        return self.table.per == "layer"

    def _groups(self, elements: int) -> Sequence[int]:
        """Sizes of the parts, one behind the other, in which values are chosen by themselves."""
        if not self._layered:
            return (elements,)
        if self._tensors is None or sum(self._tensors) != elements:
            raise EncodingError(
                f"{self.chain} chooses in each tensor, and no layout of {elements} values was given to it"
            )
        return self._tensors

    def _chosen(self, values: Tensor, round: int) -> Iterator[tuple[np.ndarray, Tensor]]:
        """(places in the frame uint32, values) that are sent of each frame."""
        parts = torch.split(values, list(self._groups(len(values))))
        groups = ((len(part), *self._choice(part, round)) for part in parts)
        left, factor, choice = 0, 1.0, Largest(0, 0)
        for first in range(0, len(values), FRAME):
            frame = values[first : first + FRAME]
            places, taken, at = [], [], 0
            while at < len(frame):
                if not left:
                    left, choice, factor = next(groups)
                count = min(left, len(frame) - at)
                found, numbers = choice.collect(frame[at : at + count])
                places.append(found + np.uint32(at))
                taken.append(numbers if factor == 1.0 else numbers * factor)
                at, left = at + count, left - count
            yield np.concatenate(places), torch.cat(taken)

    def _choice(self, part: Tensor, round: int) -> tuple[Largest, float]:
        """Which values of a part are taken, and what they are multiplied by."""
        if self.table.ratio is not None:
            choice = Largest.of(part, math.ceil(self.table.share(round) * len(part)))
        else:
            assert self.table.threshold is not None
            unit = max(abs(float(end)) for end in torch.aminmax(part)) if self._layered else 1.0
            choice = Largest.above(part, self.table.threshold * unit)
        return choice, _lengthening(part, replace(choice)) if self.table.rescale else 1.0


def _lengthening(part: Tensor, choice: Largest) -> float:
    """‖x‖ over the norm of what is taken of it; 1 where nothing is."""
    whole = kept = 0.0
    for piece in torch.split(part, FRAME):
        whole += _energy(piece)
        kept += _energy(choice.collect(piece)[1])
    return (whole / kept) ** 0.5 if kept > 0 else 1.0


def _energy(values: Tensor) -> float:
    return float(np.square(values.cpu().numpy(), dtype=np.float64).sum())


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

    def most(self, elements: int, round: int = 1) -> int:
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
            taken = frame[torch.from_numpy(places).to(frame.device)]
            yield self.codec.encode(taken, first, own).data

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return SparseReader(self, source, elements, key)

    def read_places(self, source: ByteSource, at: int, size: int, left: int, key: StreamKey) -> np.ndarray:
        """The places of a frame of `size` values, which are not sent."""
        return self._places(at, size, key)

    @property
    def shared(self) -> bool:
        """Whether all silos of a step send the same places, as they are: their sum means something."""
        return self.table.indices == "cohort" and self.codec.dense_dtype == torch.float32

    def unscaled(self) -> RandomK:
        """The same without the factor: what is clipped, and only then multiplied."""
        table = self.table.model_copy(update={"scaled": False})
        return RandomK(self.chain, table, self.codec)

    def places(self, elements: int, key: StreamKey) -> np.ndarray:
        """The places of all values that are sent, int64 in order; at most `most(elements)`."""
        frames = (self._places(at, min(FRAME, elements - at), key) + at for at in range(0, elements, FRAME))
        return np.concatenate([*frames]) if elements else np.empty(0, dtype=np.int64)

    def take(self, vector: np.ndarray, key: StreamKey) -> np.ndarray:
        """The values that are sent [most(d)], float32; zero where the last stratum's place is beyond d."""
        taken = np.zeros(self.most(len(vector)), dtype=np.float32)
        places = self.places(len(vector), key)
        taken[: len(places)] = vector[places]
        return taken

    def spread(self, taken: Tensor, elements: int, key: StreamKey) -> Tensor:
        """The vector [elements] that such values stand for, multiplied by the factor; zero elsewhere."""
        vector, places = torch.zeros(elements), torch.from_numpy(self.places(elements, key))
        vector[places] = taken[: len(places)] * self.factor
        return vector

    def made_up(self, vector: Tensor, key: StreamKey) -> Tensor:
        """A sum of `unscaled` updates, multiplied by the factor; zero where, by the key, no silo sends any.

        A function of the seed alone: done after the noise, it tells no more than the noisy sum does.
        """
        if self.table.indices == "own":
            return vector * self.factor
        return self.spread(torch.from_numpy(self.take(vector.numpy(), key)), len(vector), key)

    def _places(self, first: int, size: int, key: StreamKey) -> np.ndarray:
        stride, seed = self.stride, key.own if self.table.indices == "own" else key.cohort
        low, high = first // stride, -(-(first + size) // stride)
        draws = draw_bits(seed ^ _CHOICE, low, high - low).numpy().view(np.uint32).astype(np.uint64)
        places = np.arange(low, high, dtype=np.int64) * stride
        places += ((draws * np.uint64(stride)) >> np.uint64(32)).astype(np.int64)
        return places[(places >= first) & (places < first + size)] - first


_CHOICE = 0x5E1EC7
"""Keeps the draws of places apart from those of rounding."""
