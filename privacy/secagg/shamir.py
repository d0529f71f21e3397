"""Shamir secret sharing over GF(2^16), vectorised: a secret of 2m bytes is m field symbols shared alike.

Every symbol gets its own random polynomial of degree t − 1, so t − 1 shares are independent of the
secret (perfect secrecy, Shamir 1979), and because every 16-bit word is a field element there is no
rejection sampling and no bias. A field of 65,535 non-zero points is room for every cohort.

Products are table look-ups in the logarithmic domain. `LOG[0]` points into a stretch of zeros of
`EXP`, so that multiplication needs no branch for zero.
"""

from __future__ import annotations

import functools
import os
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from roundtable.core.errors import ProtocolError

POINTS = 65535
"""The largest evaluation point, and so the largest number of holders."""
_POLYNOMIAL = 0x1100B

Symbols: TypeAlias = npt.NDArray[np.uint16]


@functools.cache
def _tables() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    exp = np.zeros(4 * POINTS + 1, dtype=np.uint16)
    log = np.zeros(POINTS + 1, dtype=np.int64)
    element = 1
    for power in range(POINTS):
        exp[power] = element
        log[element] = power
        element <<= 1
        if element > POINTS:
            element ^= _POLYNOMIAL
    exp[POINTS : 2 * POINTS] = exp[:POINTS]
    log[0] = 2 * POINTS
    return exp, log


def multiply(a: npt.ArrayLike, b: npt.ArrayLike) -> Symbols:
    """The field product, element by element, with NumPy's broadcasting."""
    exp, log = _tables()
    product: Symbols = exp[log[np.asarray(a, dtype=np.uint16)] + log[np.asarray(b, dtype=np.uint16)]]
    return product


def share(secret: bytes | bytearray, threshold: int, points: npt.ArrayLike) -> list[bytes]:
    """One share of `secret` (an even number of bytes) for each of the distinct non-zero `points`.

    The coefficients come from the operating system. Raises ProtocolError where the threshold or the
    points cannot be used.
    """
    x = _checked_points(points)
    if not 1 <= threshold <= len(x):
        raise ProtocolError(f"a threshold of {threshold} cannot be met by {len(x)} holders")
    if len(secret) % 2:
        raise ProtocolError(f"a secret of {len(secret)} bytes is not a whole number of 16-bit symbols")
    symbols = np.frombuffer(secret, dtype="<u2")
    random = np.frombuffer(os.urandom((threshold - 1) * len(secret)), dtype="<u2")
    exp, log = _tables()
    shift = log[x][:, None]
    values = np.zeros((len(x), len(symbols)), dtype=np.uint16)
    for row in random.reshape(threshold - 1, len(symbols)):
        values ^= row
        values = exp[log[values] + shift]
    values ^= symbols
    return [row.tobytes() for row in values.astype("<u2")]


def lagrange(points: npt.ArrayLike, at: int = 0) -> Symbols:
    """The coefficients that turn the values at `points` into the value at `at`: once per responder set."""
    x = _checked_points(points)
    exp, log = _tables()
    apart = log[x[:, None] ^ x[None, :]]
    np.fill_diagonal(apart, 0)
    gap = x ^ np.uint16(at)
    if not gap.all():
        one_of_them: Symbols = np.equal(gap, 0).astype(np.uint16)
        return one_of_them
    gaps = log[gap]
    coefficients: Symbols = exp[(gaps.sum() - gaps - apart.sum(axis=1)) % POINTS]
    return coefficients


def combine(coefficients: Symbols, shares: list[bytes]) -> bytes:
    """The secret (or the share at another point) from as many shares as there are coefficients."""
    if len(shares) != len(coefficients) or len({len(piece) for piece in shares}) != 1:
        raise ProtocolError("shares of one secret must be as many as the threshold and of one length")
    values = np.frombuffer(b"".join(shares), dtype="<u2").reshape(len(shares), -1)
    terms = multiply(values, coefficients[:, None])
    secret: Symbols = np.bitwise_xor.reduce(terms, axis=0)
    return secret.astype("<u2").tobytes()


def _checked_points(points: npt.ArrayLike) -> Symbols:
    x = np.asarray(points, dtype=np.int64)
    if len(x) == 0 or x.min() < 1 or x.max() > POINTS or len(np.unique(x)) != len(x):
        raise ProtocolError(f"evaluation points must be distinct and between 1 and {POINTS}")
    return x.astype(np.uint16)
