"""The largest values of a vector, exactly and in order, and their places as gaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roundtable.core.encodings import compiled
from roundtable.core.encodings.block_tables import refusal
from roundtable.core.errors import EncodingError

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = 0x7F800000


@dataclass
class Largest:
    """Which values are taken: magnitudes whose bits exceed `bound`, and the next `ties` that equal it."""

    bound: int
    ties: int

    @classmethod
    def of(cls, values: Tensor, k: int) -> Largest:
        """The k largest magnitudes. EncodingError for values that are not finite."""
        if k == 0 or not len(values):
            return cls(_INFINITE, 0)
        kernels = compiled.load()
        if kernels is None:
            return cls._in_numpy(values, k)
        counts, answer = np.empty(65536, dtype=np.uint32), np.zeros(2, dtype=np.uint32)
        if not kernels.call("threshold", values, len(values), k, counts, answer):
            raise refusal(0, len(values))
        return cls(int(answer[0]), int(answer[1]))

    @classmethod
    def above(cls, values: Tensor, threshold: float) -> Largest:
        """All magnitudes from `threshold` on; zeros are none."""
        if len(values) and not all(bool(torch.isfinite(end)) for end in torch.aminmax(values)):
            raise refusal(0, len(values))
        return cls(max(1, int(np.float32(threshold).view(np.int32))), len(values))

    @classmethod
    def _in_numpy(cls, values: Tensor, k: int) -> Largest:
        bits = values.numpy().view(np.int32) & _MAGNITUDE
        if int(bits.max()) >= _INFINITE:
            raise refusal(0, len(values))
        bound = int(np.partition(bits, len(bits) - k)[len(bits) - k])
        return cls(bound, k - int((bits > bound).sum()))

    def collect(self, values: Tensor) -> tuple[np.ndarray, Tensor]:
        """(places uint32, values) of those taken from the next values of the vector."""
        kernels = compiled.load()
        if kernels is None:
            bits = values.numpy().view(np.int32) & _MAGNITUDE
            equal = np.flatnonzero(bits == self.bound)[: self.ties]
            self.ties -= len(equal)
            places = np.sort(np.concatenate((np.flatnonzero(bits > self.bound), equal))).astype(np.uint32)
            return places, values[torch.from_numpy(places.astype(np.int64))]
        places, taken = np.empty(len(values), dtype=np.uint32), torch.empty(len(values))
        ties = np.zeros(1, dtype=np.int64)
        count = kernels.call("collect", values, len(values), self.bound, self.ties, places, taken, ties)
        self.ties -= int(ties[0])
        return places[:count], taken[:count]


def shift_for(count: int, size: int) -> int:
    """The parameter of Golomb-Rice code for `count` places among `size`: both ends work it out."""
    return max(0, int(0.69 * size / count).bit_length() - 1) if count else 0


def gaps_of(places: np.ndarray, shift: int) -> bytes:
    """Ascending places as gaps − 1 in Golomb-Rice code: see `write_gaps` of sparse.h."""
    kernels = compiled.load()
    if not len(places):
        return b""
    if kernels is not None:
        out = np.empty((len(places) * (shift + 1) + (int(places[-1]) >> shift)) // 8 + 16, dtype=np.uint8)
        return out[: kernels.call("encode_gaps", places, len(places), shift, out)].tobytes()
    following = places.astype(np.int64) + 1
    gaps: np.ndarray = places.astype(np.int64) - np.concatenate(([0], following[:-1]))
    ones = gaps >> shift
    ends = np.cumsum(ones + 1 + shift)
    bits = np.zeros(int(ends[-1]), dtype=np.uint8)
    starts = ends - (ones + 1 + shift)
    runs = np.repeat(starts, ones) + _within(ones)
    bits[runs] = 1
    for bit in range(shift):
        bits[starts + ones + 1 + bit] = (gaps >> bit) & 1
    return np.packbits(bits, bitorder="little").tobytes()


def places_of(data: memoryview, count: int, shift: int, size: int) -> np.ndarray:
    """The places (int64) again, strictly ascending and below `size`; EncodingError for anything else."""
    places = np.empty(count, dtype=np.uint32)
    kernels = compiled.load()
    if kernels is not None:
        sound = bool(
            kernels.call("decode_gaps", np.frombuffer(data, np.uint8), len(data), count, shift, size, places)
        )
        if not count:
            sound = not len(data)
    else:
        sound = _decoded(data, count, shift, size, places)
    if not sound:
        raise EncodingError(f"the places of {count} values among {size} are out of range, or too few or many")
    return places.astype(np.int64)


def _decoded(data: memoryview, count: int, shift: int, size: int, places: np.ndarray) -> bool:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    zeros = np.flatnonzero(bits == 0)
    weights = 1 << np.arange(shift, dtype=np.int64)
    at, following = 0, 0
    for number in range(count):
        place = int(np.searchsorted(zeros, at))
        if place == len(zeros):
            return False
        end = int(zeros[place]) + 1
        if end + shift > len(bits):
            return False
        gap = ((end - 1 - at) << shift) + int(bits[end : end + shift] @ weights)
        at, following = end + shift, following + gap + 1
        if following > size:
            return False
        places[number] = following - 1
    return (at + 7) // 8 == len(data) and not bits[at:].any()


def _within(counts: np.ndarray) -> np.ndarray:
    """0..c−1 for each count c, one after the other."""
    ends = np.cumsum(counts)
    within: np.ndarray = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return within
