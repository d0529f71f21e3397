"""Weights, example counts, the clip bit and metrics, as coordinates of the masked vector.

None of them may travel in the clear beside it. An integer is written in digits small enough that the
digits of all silos add up within the ring, so sums of 40-bit numbers come back exactly from a ring
of any size. A metric is two numbers: over how many examples it was measured, and its sum over them as a
real number within a stated bound, in fixed point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roundtable.core.errors import AggregationError, PrivacyError
from roundtable.privacy.secagg.masks import Ring, ring_dtype
from roundtable.privacy.secagg.parameters import SecAggParameters

NUMBER_BITS = 40
WEIGHT, EXAMPLES, CLIPPED = "weight", "examples", "clipped"
_COUNTERS = (WEIGHT, EXAMPLES, CLIPPED)


_LARGEST = (1 << NUMBER_BITS) - 1


@dataclass(frozen=True)
class Metric:
    """The layout of one metric: a silo's mean counts for at most ± `bound`, over at most `most` examples.

    More examples count as so many. The decoded sum over m silos is off by at most m · bound · most · 2^-40.
    """

    name: str
    bound: float
    most: int = 1


@dataclass(frozen=True)
class Tally:
    """The layout of the tail: three counters, and two numbers for each metric.

    A mean beyond its bound is clipped to it, so that no silo weighs more than its examples allow.
    """

    ring_bits: int
    capacity: int
    metrics: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        if self.digit_bits < 1:
            raise PrivacyError(
                f"a ring of 2^{self.ring_bits} cannot hold a sum of {self.capacity} silos; use a larger ring"
            )
        names = [metric.name for metric in self.metrics]
        if len(set(names)) != len(names):
            raise PrivacyError(f"the metrics {names} repeat a name")
        for metric in self.metrics:
            if not (0 < metric.bound * metric.most < np.inf and 1 <= metric.most <= _LARGEST):
                raise PrivacyError(
                    f"the metric {metric.name} needs a positive finite bound, and a largest number of "
                    f"examples of up to {NUMBER_BITS} bits: {metric}"
                )

    @classmethod
    def of(cls, parameters: SecAggParameters, metrics: tuple[Metric, ...] = ()) -> Tally:
        return cls(parameters.ring_bits, parameters.capacity, metrics)

    @property
    def digit_bits(self) -> int:
        """Bits of one digit: `capacity` of them add up below 2^ring_bits."""
        return self.ring_bits - self.capacity.bit_length()

    @property
    def digits(self) -> int:
        return -(-NUMBER_BITS // self.digit_bits)

    def __len__(self) -> int:
        """Ring elements that the tail takes."""
        return self.digits * (len(_COUNTERS) + 2 * len(self.metrics))

    def encode(
        self, counters: Mapping[str, int], measured: Mapping[str, tuple[float, int]] | None = None
    ) -> Ring:
        """The tail of one silo, shape (len(self),); `measured` are (mean, examples) by name.

        What is not among them adds nothing. PrivacyError for values that do not fit.
        """
        given = dict(measured or {})
        if set(counters) != set(_COUNTERS):
            raise PrivacyError(f"the tally needs {_COUNTERS}, not {tuple(counters)}")
        numbers = []
        for name in _COUNTERS:
            if not 0 <= counters[name] <= _LARGEST:
                raise PrivacyError(f"{name} = {counters[name]} is not a number of up to {NUMBER_BITS} bits")
            numbers.append(counters[name])
        for metric in self.metrics:
            numbers += _numbers(metric, *given.pop(metric.name, (0.0, 0)))
        if given:
            raise PrivacyError(f"the tally has no place for the metrics {sorted(given)}")
        mask = (1 << self.digit_bits) - 1
        digits = [
            number >> (place * self.digit_bits) & mask for number in numbers for place in range(self.digits)
        ]
        return np.array(digits, dtype=ring_dtype(self.ring_bits))

    def decode(self, total: Ring, survivors: int) -> tuple[dict[str, int], dict[str, tuple[float, int]]]:
        """The sums of the counters over `survivors` silos, and (sum, examples) of what any has measured.

        AggregationError for sums that so many honest silos cannot make.
        """
        rows = np.asarray(total).reshape(-1, self.digits).tolist()
        sums = [sum(digit << (place * self.digit_bits) for place, digit in enumerate(row)) for row in rows]
        pairs = iter(sums[len(_COUNTERS) :])
        decoded = {
            metric.name: _total(metric, count, fixed, survivors)
            for metric, count, fixed in zip(self.metrics, pairs, pairs, strict=True)
        }
        metrics = {name: (value, count) for name, (value, count) in decoded.items() if count}
        return dict(zip(_COUNTERS, sums, strict=False)), metrics


def _numbers(metric: Metric, mean: float, examples: int) -> tuple[int, int]:
    """A silo's two numbers: its examples, and its sum in fixed point, where 0 stands for the least."""
    if not np.isfinite(mean):
        raise PrivacyError(f"the metric {metric.name} is {mean}; only finite values can be summed")
    if examples < 0:
        raise PrivacyError(f"the metric {metric.name} is over {examples} examples")
    count = min(examples, metric.most)
    share = min(max(mean / metric.bound, -1.0), 1.0) * count / metric.most
    return count, round((share + 1) / 2 * _LARGEST)


def _total(metric: Metric, count: int, fixed: int, survivors: int) -> tuple[float, int]:
    unit = metric.bound * metric.most
    total = unit * (2 * fixed / _LARGEST - survivors)
    error = survivors * unit * 2.0**-39
    if count > survivors * metric.most or abs(total) > metric.bound * count + error:
        raise AggregationError(
            f"{survivors} silos give {total:.6g} as the sum of the metric {metric.name!r} over {count} "
            "examples, which no honest silos can: one of them submitted something else than an update"
        )
    return total, count
