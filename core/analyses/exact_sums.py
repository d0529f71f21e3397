"""Numbers as digits that add up exactly, and doubles as floats that travel exactly.

An update is a float32 vector, which holds whole numbers up to 2^24. So a number is cut into digits of
`DIGIT_BITS` bits, each a value of its own: those of up to `MOST_SILOS` silos add up below 2^23, and their
float32 mean times the number of silos, rounded, is their sum. Under secure aggregation the digits themselves
are masked.

    count   a whole number of up to 39 bits: 3 digits
    whole   a whole number within ± 2^51: 4 digits
    real    fixed point with 56 bits behind the point, within ± 2^34: 7 digits; rounded once, by 2^-57 at most

Public numbers go down as doubles, each as three floats whose sum it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ldexp, prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roundtable.core.errors import AggregationError, InvalidUpdate

Doubles = npt.NDArray[np.float64]
Digits = npt.NDArray[np.int64]
Arrays = Mapping[str, Doubles]
Shape = tuple[int, ...]

DIGIT_BITS = 13
LARGEST_DIGIT = (1 << DIGIT_BITS) - 1
MOST_SILOS = (1 << 23 - DIGIT_BITS) - 1
COUNT_DIGITS, WHOLE_DIGITS, REAL_DIGITS, FRACTION_BITS = 3, 4, 7, 56
_OFFSET = 1 << (REAL_DIGITS * DIGIT_BITS - 1)
_WHOLE_OFFSET = 1 << (WHOLE_DIGITS * DIGIT_BITS - 1)
_LARGEST_REAL = float(1 << REAL_DIGITS * DIGIT_BITS - 1 - FRACTION_BITS)
_FLOATS = 3


@dataclass(frozen=True)
class SumPlaces:
    """The sums that a silo sends: shapes of arrays by name, of counts, of reals and of whole numbers."""

    counts: Mapping[str, Shape] = field(default_factory=dict)
    reals: Mapping[str, Shape] = field(default_factory=dict)
    wholes: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Values of the vector."""
        counts, reals, wholes = (
            sum(map(prod, shapes.values())) for shapes in (self.counts, self.reals, self.wholes)
        )
        return COUNT_DIGITS * counts + REAL_DIGITS * reals + WHOLE_DIGITS * wholes

    def encode(self, sums: Arrays) -> Tensor:
        """The digits of one silo's sums, float32 [size]; what is not among them is 0.

        InvalidUpdate for a sum that is not finite or beyond the range, with its name.
        """
        parts = [
            _cut(sums.get(name), prod(shape), COUNT_DIGITS, 0, name) for name, shape in self.counts.items()
        ]
        integers: list[int] = []
        for name, shape in self.reals.items():
            values = sums[name].ravel() if name in sums else np.zeros(prod(shape))
            if not (np.abs(values) < _LARGEST_REAL).all():
                raise InvalidUpdate(
                    "range",
                    f"the sum {name!r} of an analysis is beyond ± 2^34 in units of its columns: the columns' "
                    "least and most are too narrow, or the analysis does not converge",
                )
            integers.extend(round(ldexp(float(value), FRACTION_BITS)) + _OFFSET for value in values)
        cut = [
            number >> place * DIGIT_BITS & LARGEST_DIGIT
            for number in integers
            for place in range(REAL_DIGITS)
        ]
        parts.append(np.array(cut, dtype=np.float32))
        for name, shape in self.wholes.items():
            parts.append(_cut(sums.get(name), prod(shape), WHOLE_DIGITS, _WHOLE_OFFSET, name))
        return torch.from_numpy(np.concatenate(parts))

    def decode(self, mean: Tensor, silos: int) -> dict[str, Doubles]:
        """The sums over so many silos, of the mean of their digits [size]. AggregationError for what no
        digits of theirs add up to."""
        scaled = mean.numpy().astype(np.float64) * silos
        totals = np.rint(scaled)
        if (
            np.abs(scaled - totals).max(initial=0.0) > 0.5
            or not ((totals >= 0) & (totals <= silos * LARGEST_DIGIT)).all()
        ):
            raise AggregationError(
                "the sums of the round are none that its silos' digits can have: one of them sent something "
                "else than an answer to the analysis"
            )
        digits = totals.astype(np.int64)
        sums, start = {}, 0
        for name, shape in self.counts.items():
            sums[name], start = _added(digits, start, shape, COUNT_DIGITS, 0)
        for name, shape in self.reals.items():
            whole, start = _joined(digits, start, prod(shape), REAL_DIGITS)
            # Python divides integers with one rounding.
            values = [(number - silos * _OFFSET) / (1 << FRACTION_BITS) for number in whole]
            sums[name] = np.array(values, dtype=np.float64).reshape(shape)
        for name, shape in self.wholes.items():
            sums[name], start = _added(digits, start, shape, WHOLE_DIGITS, silos * _WHOLE_OFFSET)
        return sums


def _cut(values: Doubles | None, count: int, width: int, offset: int, name: str) -> npt.NDArray[np.float32]:
    """The digits of whole numbers, float32 [count · width]; all are 0 where there are no numbers."""
    if values is None:
        numbers = np.full(count, offset, dtype=np.int64)
    elif not (np.abs(values) < (offset or 1 << width * DIGIT_BITS)).all():
        raise InvalidUpdate("range", f"the sum {name!r} of an analysis is beyond what its digits hold")
    else:
        numbers = values.ravel().astype(np.int64) + offset
    cut = np.empty((count, width), dtype=np.float32)
    for place in range(width):
        cut[:, place] = numbers >> place * DIGIT_BITS & LARGEST_DIGIT
    return cut.ravel()


def _added(digits: Digits, start: int, shape: Shape, width: int, offset: int) -> tuple[Doubles, int]:
    """The whole numbers whose added digits begin there, and where they end."""
    stop = start + prod(shape) * width
    numbers = (digits[start:stop].reshape(-1, width) << np.arange(width) * DIGIT_BITS).sum(axis=1) - offset
    return numbers.astype(np.float64).reshape(shape), stop


def _joined(digits: Digits, start: int, count: int, width: int) -> tuple[list[int], int]:
    stop = start + count * width
    numbers = [
        sum(digit << place * DIGIT_BITS for place, digit in enumerate(each))
        for each in digits[start:stop].reshape(-1, width).tolist()
    ]
    return numbers, stop


@dataclass(frozen=True)
class PublicPlaces:
    """The public numbers of an analysis: shapes of arrays by name."""

    shapes: Mapping[str, Shape]

    @property
    def size(self) -> int:
        """Values of the vector: three for each number."""
        return _FLOATS * sum(map(prod, self.shapes.values()))

    def pack(self, numbers: Arrays) -> Tensor:
        """The numbers as float32 [size]. AggregationError for one that is not finite."""
        flat = np.concatenate([np.zeros(0), *(np.ravel(numbers[name]) for name in self.shapes)])
        if not np.isfinite(flat).all():
            raise AggregationError("the sums of the round lead to numbers that are not finite")
        parts = []
        rest = flat
        with np.errstate(over="raise"):
            for _ in range(_FLOATS):
                part = rest.astype(np.float32)
                parts.append(part)
                rest = rest - part.astype(np.float64)
        return torch.from_numpy(np.stack(parts, axis=1).ravel())

    def unpack(self, vector: Tensor) -> dict[str, Doubles]:
        """The numbers again."""
        parts = vector.numpy().astype(np.float64).reshape(-1, _FLOATS)
        flat = parts[:, 0] + (parts[:, 1] + parts[:, 2])
        numbers, start = {}, 0
        for name, shape in self.shapes.items():
            numbers[name] = flat[start : start + prod(shape)].reshape(shape).copy()
            start += prod(shape)
        return numbers
