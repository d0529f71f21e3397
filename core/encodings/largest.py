"""The largest values of a vector, exactly and in order, and their places as gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roundtable.core.encodings import compiled
from roundtable.core.encodings.block_tables import refusal
from roundtable.core.errors import EncodingError

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = 0x7F800000


def _magnitudes(values: Tensor, piece: int = 1 << 16) -> Iterator[np.ndarray]:
    """The bits of magnitudes, in pieces that stay in the cache."""
    whole = values.numpy().view(np.int32)
    for start in range(0, max(len(whole), 1), max(piece, 1)):
        yield whole[start : start + piece] & _MAGNITUDE


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
        if values.device.type != "cpu":
            return cls._on_device(values, k)
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
        """As the kernel: a histogram of the upper 15 bits of magnitudes, then those of one of its bars."""
        bars: np.ndarray = np.zeros(1 << 15, dtype=np.int64)
        for bits in _magnitudes(values):
            bars += np.bincount(bits >> 16, minlength=len(bars))
        if bars[_INFINITE >> 16 :].any():
            raise refusal(0, len(values))
        from_above = np.cumsum(bars[::-1])
        place = int(np.searchsorted(from_above, k))
        bar, missing = len(bars) - 1 - place, k - int(from_above[place - 1] if place else 0)
        inside = np.concatenate([bits[bits >> 16 == bar] for bits in _magnitudes(values)])
        bound = int(np.partition(inside, len(inside) - missing)[len(inside) - missing])
        return cls(bound, missing - int((inside > bound).sum()))

    @classmethod
    def _on_device(cls, values: Tensor, k: int) -> Largest:
        bits = values.view(torch.int32) & int(_MAGNITUDE)
        if int(bits.max()) >= _INFINITE:
            raise refusal(0, len(values))
        bound = int(torch.topk(bits, k, sorted=False).values.min())
        return cls(bound, k - int((bits > bound).sum()))

    def collect(self, values: Tensor) -> tuple[np.ndarray, Tensor]:
        """(places uint32, values) of those taken from the next values of the vector."""
        if values.device.type != "cpu":
            return self._collect_on_device(values)
        kernels = compiled.load()
        if kernels is None:
            (bits,) = _magnitudes(values, len(values))
            found = np.flatnonzero(bits >= self.bound)
            equal = bits[found] == self.bound
            places = found[~equal | (np.cumsum(equal) <= self.ties)]
            self.ties -= min(self.ties, int(equal.sum()))
            return places.astype(np.uint32), torch.from_numpy(values.numpy()[places])
        places, taken = np.empty(len(values), dtype=np.uint32), torch.empty(len(values))
        ties = np.zeros(1, dtype=np.int64)
        count = kernels.call("collect", values, len(values), self.bound, self.ties, places, taken, ties)
        self.ties -= int(ties[0])
        return places[:count], taken[:count]

    def _collect_on_device(self, values: Tensor) -> tuple[np.ndarray, Tensor]:
        bits = values.view(torch.int32) & int(_MAGNITUDE)
        equal = (bits == self.bound).nonzero().view(-1)[: self.ties]
        self.ties -= len(equal)
        places = torch.cat(((bits > self.bound).nonzero().view(-1), equal)).sort().values
        return places.cpu().numpy().astype(np.uint32), values[places]


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
    """A code ends `shift` bits behind the first zero from its beginning on, so that each zero names the next
    code's; that is followed from the first code on, twice as far with each step."""
    if not count or 8 * len(data) >= count * (1 + shift) + (size >> shift) + 8:
        return not count and not len(data)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    zeros = np.flatnonzero(bits == 0).astype(np.int32)
    before = np.zeros(len(bits) + 1, dtype=np.int32)
    np.cumsum(bits == 0, out=before[1:])
    none = len(zeros)
    following = np.append(before[np.minimum(zeros + (1 + shift), len(bits))], np.int32(none))
    found = np.zeros(1, dtype=np.int32)
    while len(found) < count:
        found = np.concatenate((found, following[found[: count - len(found)]]))
        following = following[following]
    if int(found[-1]) == none:
        return False
    tails = zeros[found].astype(np.int64) + 1
    end = int(tails[-1]) + shift
    if end > len(bits) or (end + 7) // 8 != len(data) or bits[end:].any():
        return False
    gaps = (np.diff(tails, prepend=-shift) - 1 - shift) << shift
    for bit in range(shift):
        gaps += bits[tails + bit].astype(np.int64) << bit
    np.cumsum(gaps + 1, out=gaps)
    places[:] = gaps - 1
    return int(gaps[-1]) <= size


def _within(counts: np.ndarray) -> np.ndarray:
    """0..c−1 for each count c, one after the other."""
    ends = np.cumsum(counts)
    within: np.ndarray = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return within
