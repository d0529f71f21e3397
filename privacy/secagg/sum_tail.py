"""Weights, example counts, the clip bit and metric sums, as coordinates of the masked vector.

None of them may travel in the clear beside it. An integer is written in digits small enough that the
digits of all silos add up within the ring, so sums of 40-bit numbers come back exactly from a ring
of any size. A metric is a real number within a stated bound, in fixed point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roundtable.core.errors import PrivacyError
from roundtable.privacy.secagg.masks import Ring, ring_dtype
from roundtable.privacy.secagg.parameters import SecAggParameters

NUMBER_BITS = 40
WEIGHT, EXAMPLES, CLIPPED = "weight", "examples", "clipped"
_COUNTERS = (WEIGHT, EXAMPLES, CLIPPED)


@dataclass(frozen=True)
class Tally:
    """The layout of the tail: three counters, and a bound for each metric sum.

    `metrics` holds `(name, bound)` pairs; a value beyond ± bound is clipped to it, for the bound is
    what differential privacy would be told. Decoded sums of metrics of m silos are off by at most
    m · bound · 2^-40.
    """

    ring_bits: int
    capacity: int
    metrics: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.metrics]
        if len({*names, *_COUNTERS}) != len(names) + len(_COUNTERS):
            raise PrivacyError(f"the metrics {names} repeat a name or use one of {_COUNTERS}")
        if not all(0 < bound < np.inf for _, bound in self.metrics):
            raise PrivacyError(f"every metric needs a positive finite bound: {self.metrics}")

    @classmethod
    def of(cls, parameters: SecAggParameters, metrics: tuple[tuple[str, float], ...] = ()) -> Tally:
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
        return self.digits * (len(_COUNTERS) + len(self.metrics))

    def encode(self, counters: Mapping[str, int], metrics: Mapping[str, float] | None = None) -> Ring:
        """The tail of one silo, shape (len(self),). PrivacyError for values that do not fit."""
        given = metrics or {}
        if set(counters) != set(_COUNTERS) or set(given) != {name for name, _ in self.metrics}:
            raise PrivacyError(f"the tally needs {_COUNTERS} and the metrics {self.metrics}")
        numbers = [counters[name] for name in _COUNTERS]
        for name, number in zip(_COUNTERS, numbers, strict=True):
            if not 0 <= number < 1 << NUMBER_BITS:
                raise PrivacyError(f"{name} = {number} is not a number of up to {NUMBER_BITS} bits")
        numbers += [_to_fixed(name, given[name], bound) for name, bound in self.metrics]
        mask = (1 << self.digit_bits) - 1
        digits = [
            number >> (place * self.digit_bits) & mask for number in numbers for place in range(self.digits)
        ]
        return np.array(digits, dtype=ring_dtype(self.ring_bits))

    def decode(self, total: Ring, survivors: int) -> tuple[dict[str, int], dict[str, float]]:
        """The sums of the counters and of the metrics over `survivors` silos."""
        rows = np.asarray(total).reshape(-1, self.digits).tolist()
        sums = [sum(digit << (place * self.digit_bits) for place, digit in enumerate(row)) for row in rows]
        counters = dict(zip(_COUNTERS, sums, strict=False))
        scale = (1 << NUMBER_BITS) - 1
        metrics = {
            name: bound * (2 * fixed / scale - survivors)
            for (name, bound), fixed in zip(self.metrics, sums[len(_COUNTERS) :], strict=True)
        }
        return counters, metrics


def _to_fixed(name: str, value: float, bound: float) -> int:
    if not np.isfinite(value):
        raise PrivacyError(f"the metric {name} is {value}; only finite values can be summed")
    clipped = min(max(value, -bound), bound)
    return round((clipped / bound + 1) / 2 * ((1 << NUMBER_BITS) - 1))
