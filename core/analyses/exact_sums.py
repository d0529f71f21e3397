"""Numbers as digits that add up exactly, and doubles as floats that travel exactly.

An update is a float32 vector, which holds whole numbers up to 2^24. So a number is cut into digits, each a
value of its own: those of as many silos as the cohort has add up below 2^23, and their float32 mean times the
number of silos, rounded, is their sum. The fewer silos, the longer digits may be, and the fewer there are:
18 bits with up to 31, 13 with `MOST_SILOS`. Under secure aggregation the digits themselves are masked.

    count   a whole number from 0 on, of at least 34 bits: 2 digits of 18 bits, 3 of 13
    whole   a whole number, within ± 2^50 at least: 3 digits of 18 bits, 4 of 13
    real    fixed point with 56 bits behind the point, within ± 2^34: 6 digits of 18 bits, 7 of 13; rounded
            once, by 2^-57 at most

Public numbers go down as doubles, each as three floats whose sum it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ldexp, prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roundtable.core.analyses.digit_kernels import (
    FLOATS,
    cut_digits,
    join_digits,
    part_doubles,
    whole_doubles,
)
from roundtable.core.errors import AggregationError, InvalidUpdate

Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
Arrays = Mapping[str, Doubles]
Shape = tuple[int, ...]

MOST_SILOS = 1023
_SUM_BITS, _MOST_BITS = 23, 18
_COUNT_BITS, _WHOLE_BITS, _REAL_BITS, _FRACTION_BITS = 34, 51, 91, 56
_LARGEST_REAL = float(1 << 34)


def largest_digit(silos: int) -> int:
    """The largest digit of sums over at most so many silos."""
    return (1 << Digits(silos).bits) - 1


@dataclass(frozen=True)
class Digits:
    """How numbers are cut where at most so many silos add up."""

    silos: int = MOST_SILOS

    @cached_property
    def bits(self) -> int:
        """Of a digit."""
        return min(_MOST_BITS, _SUM_BITS - self.silos.bit_length())

    @cached_property
    def count(self) -> int:
        """Digits of a count."""
        return -(-_COUNT_BITS // self.bits)

    @cached_property
    def whole(self) -> int:
        """Digits of a whole number of either sign."""
        return -(-_WHOLE_BITS // self.bits)

    @cached_property
    def real(self) -> int:
        """Digits of a real number."""
        return -(-_REAL_BITS // self.bits)

    @property
    def high(self) -> float:
        """The highest digit of 0 with its offset; the others are 0."""
        return float(1 << self.bits - 1)

    def offset(self, digits: int) -> int:
        """What makes a number of either sign with so many digits one from 0 on."""
        return 1 << digits * self.bits - 1


class Histograms(Protocol):
    """Counts and whole numbers in cells, which write their digits themselves."""

    @property
    def counted(self) -> Whole:
        """The counts."""
        ...

    def write(self, digits: Digits, out: Singles) -> bool:
        """The digits, plane by plane, into `out` [planes, cells]: those of the counts, then of each array of
        whole numbers. False where one is beyond what its digits hold."""
        ...


Sums = Mapping[str, "Doubles | Histograms"]


@dataclass(frozen=True)
class SumPlaces:
    """The sums that a silo sends: shapes of arrays by name, of counts, of reals, of whole numbers, and of
    histograms: [1 + n, ...] where the first is of counts and n are of whole numbers."""

    counts: Mapping[str, Shape] = field(default_factory=dict)
    reals: Mapping[str, Shape] = field(default_factory=dict)
    wholes: Mapping[str, Shape] = field(default_factory=dict)
    histograms: Mapping[str, Shape] = field(default_factory=dict)
    digits: Digits = field(default_factory=Digits)

    @cached_property
    def size(self) -> int:
        """Values of the vector."""
        return sum(planes * cells for _, planes, cells in self._places)

    @cached_property
    def _places(self) -> list[tuple[str, int, int]]:
        """Name, digits of a cell, and cells, in order."""
        digits, found = self.digits, []
        for shapes, each in (
            (self.counts, digits.count),
            (self.reals, digits.real),
            (self.wholes, digits.whole),
        ):
            found += [(name, each, prod(shape)) for name, shape in shapes.items()]
        for name, shape in self.histograms.items():
            found.append((name, digits.count + (shape[0] - 1) * digits.whole, prod(shape[1:])))
        return found

    def encode(self, sums: Sums) -> Tensor:
        """The digits of one silo's sums, float32 [size]; what is not among them is 0.

        InvalidUpdate for a sum that is not finite or beyond the range, with its name.
        """
        out, start = np.empty(self.size, dtype=np.float32), 0
        for name, planes, cells in self._places:
            own = out[start : start + planes * cells].reshape(planes, cells)
            start += own.size
            values = sums.get(name)
            if values is None:
                self._write_nothing(name, own)
            elif not isinstance(values, np.ndarray):
                if not values.write(self.digits, own):
                    raise _beyond(name)
            elif name in self.reals:
                self._write_reals(name, values, own)
            else:
                self._write_wholes(name, values, own)
        return torch.from_numpy(out)

    def others_digits(self, own: Mapping[str, int]) -> Singles:
        """The digits of 0 where a sum's places are others', NaN elsewhere, float32 [size]: `own` says of sums
        whose first axis is of silos which place there is free, −1 for none."""
        out, start = np.array(self.encode({}).numpy()), 0
        for name, planes, cells in self._places:
            digits = out[start : start + planes * cells].reshape(planes, cells)
            start += digits.size
            if name not in own:
                digits[:] = np.nan
            elif own[name] >= 0:
                each = cells // {**self.counts, **self.reals, **self.wholes}[name][0]
                digits[:, own[name] * each : (own[name] + 1) * each] = np.nan
        return out

    def _write_nothing(self, name: str, out: Singles) -> None:
        digits = self.digits
        out[:] = 0.0
        if name in self.histograms:
            out[digits.count + digits.whole - 1 :: digits.whole] = digits.high
        elif name not in self.counts:
            out[-1] = digits.high

    def _write_wholes(self, name: str, values: Doubles, out: Singles) -> None:
        offset = 0 if name in self.counts else self.digits.offset(len(out))
        if not (np.abs(values) < (offset or 1 << len(out) * self.digits.bits)).all():
            raise _beyond(name)
        cut_digits(values.ravel().astype(np.int64) + offset, self.digits.bits, out)

    def _write_reals(self, name: str, values: Doubles, out: Singles) -> None:
        if not (np.abs(values) < _LARGEST_REAL).all():
            raise InvalidUpdate(
                "range",
                f"the sum {name!r} of an analysis is beyond ± 2^34 in units of its columns: the columns' "
                "least and most are too narrow, or the analysis does not converge",
            )
        offset, bits = self.digits.offset(len(out)), self.digits.bits
        whole = [round(ldexp(float(value), _FRACTION_BITS)) + offset for value in values.ravel()]
        for place, plane in enumerate(out):
            plane[:] = [number >> place * bits & (1 << bits) - 1 for number in whole]

    def decode(self, mean: Tensor, silos: int) -> dict[str, Doubles]:
        """The sums over so many silos, of the mean of their digits [size]. AggregationError for what no
        digits of theirs add up to."""
        digits, sums, start = self.digits, {}, 0
        values = np.ascontiguousarray(mean.numpy(), dtype=np.float32)
        for name, planes, cells in self._places:
            own = values[start : start + planes * cells].reshape(planes, cells)
            start += own.size
            if name in self.counts:
                sums[name] = self._joined(own, silos, 0).reshape(self.counts[name])
            elif name in self.wholes:
                offset = silos * digits.offset(planes)
                sums[name] = self._joined(own, silos, offset).reshape(self.wholes[name])
            elif name in self.reals:
                sums[name] = self._reals(own, silos).reshape(self.reals[name])
            else:
                offset = silos * digits.offset(digits.whole)
                sums[name] = np.empty(self.histograms[name])
                sums[name].reshape(-1, cells)[0] = self._joined(own[: digits.count], silos, 0)
                for place, found in enumerate(sums[name].reshape(-1, cells)[1:]):
                    first = digits.count + place * digits.whole
                    found[:] = self._joined(own[first : first + digits.whole], silos, offset)
        return sums

    def _joined(self, mean: Singles, silos: int, offset: int) -> Doubles:
        found = join_digits(mean, self.digits.bits, silos, offset)
        if found is None:
            raise AggregationError(
                "the sums of the round are none that its silos' digits can have: one of them sent something "
                "else than an answer to the analysis"
            )
        return found

    def _reals(self, mean: Singles, silos: int) -> Doubles:
        each = [self._joined(plane[None], silos, 0) for plane in mean]
        bits, offset = self.digits.bits, silos * self.digits.offset(len(mean))
        found = []
        for own in zip(*(plane.tolist() for plane in each), strict=True):
            number = sum(int(digit) << place * bits for place, digit in enumerate(own)) - offset
            # Python divides integers with one rounding.
            found.append(number / (1 << _FRACTION_BITS))
        return np.array(found, dtype=np.float64)


def _beyond(name: str) -> InvalidUpdate:
    return InvalidUpdate("range", f"the sum {name!r} of an analysis is beyond what its digits hold")


@dataclass(frozen=True)
class PublicPlaces:
    """The public numbers of an analysis: shapes of arrays by name."""

    shapes: Mapping[str, Shape]

    @cached_property
    def size(self) -> int:
        """Values of the vector: three for each number."""
        return FLOATS * sum(map(prod, self.shapes.values()))

    def pack(self, numbers: Arrays) -> Tensor:
        """The numbers as float32 [size]. AggregationError for one that is not finite."""
        out, start = np.empty((FLOATS, self.size // FLOATS), dtype=np.float32), 0
        for name in self.shapes:
            values = numbers[name]
            stop = start + values.size
            if not part_doubles(values, out[:, start:stop]):
                raise AggregationError("the sums of the round lead to numbers that are not finite")
            start = stop
        return torch.from_numpy(out.reshape(-1))

    def unpack(self, vector: Tensor) -> dict[str, Doubles]:
        """The numbers again."""
        flat = whole_doubles(vector.numpy().reshape(FLOATS, -1))
        numbers, start = {}, 0
        for name, shape in self.shapes.items():
            stop = start + prod(shape)
            numbers[name] = flat[start:stop].reshape(shape)
            start = stop
        return numbers
