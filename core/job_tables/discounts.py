"""What staleness leaves of an update: the discounts of buffered rounds.

Staleness is the number of models made since the update's client was asked. All factors are 1 at 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

Discount = Callable[[int], float]
"""The factor at a staleness."""
DISCOUNTED_BY = {
    "polynomial": {"staleness_exponent"},
    "hinge": {"staleness_slope", "staleness_free"},
}
"""The keys of `[round]` that each discount looks at."""


def make_discount(name: str, exponent: float, slope: float, free: int) -> Discount:
    """The discount of this name in `[round] staleness`."""
    if name == "hinge":
        return partial(hinge, slope=slope, free=free)
    return constant if name == "constant" else partial(polynomial, exponent=exponent)


def constant(age: int) -> float:
    """An old update counts as much as a new one."""
    return 1.0


def polynomial(age: int, *, exponent: float) -> float:
    """(1 + s)^-a: FedBuff's (Nguyen et al. 2022, section 5; a = 1/2), and of Xie et al. 2019, section 5.2."""
    return float((1.0 + age) ** -exponent)


def hinge(age: int, *, slope: float, free: int) -> float:
    """1 for s ≤ b, else 1/(1 + a (s − b)) (Xie et al. 2019, section 5.2); with b = 0 it is 1/(1 + a s)."""
    return 1.0 / (1.0 + slope * max(0, age - free))
