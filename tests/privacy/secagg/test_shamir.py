"""Secret sharing: any t shares give the secret, t − 1 give nothing, and the field is the field."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg import shamir

symbols = st.integers(0, 0xFFFF)


def product_by_hand(a: int, b: int) -> int:
    """Carry-less multiplication and reduction, bit by bit: no tables."""
    result = 0
    while b:
        result ^= a if b & 1 else 0
        b >>= 1
        a <<= 1
        a ^= 0x1100B if a & 0x10000 else 0
    return result


@given(symbols, symbols)
def test_products_are_those_of_the_field(a: int, b: int) -> None:
    assert int(shamir.multiply(a, b)) == product_by_hand(a, b)


def test_every_element_but_zero_is_a_power_of_the_generator() -> None:
    exp, _ = shamir._tables()
    assert sorted(exp[: shamir.POINTS].tolist()) == list(range(1, shamir.POINTS + 1))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_threshold_of_shares_gives_the_secret(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    t = data.draw(st.integers(1, n))
    secret = data.draw(st.binary(min_size=2, max_size=64).filter(lambda raw: len(raw) % 2 == 0))
    points = data.draw(st.lists(st.integers(1, shamir.POINTS), min_size=n, max_size=n, unique=True))
    shares = dict(zip(points, shamir.share(secret, t, points), strict=True))
    chosen = data.draw(st.permutations(points))[:t]
    assert shamir.combine(shamir.lagrange(chosen), [shares[point] for point in chosen]) == secret


def test_shares_at_other_points_are_interpolated() -> None:
    shares = shamir.share(b"a secret", 3, range(1, 8))
    for point in range(1, 8):
        coefficients = shamir.lagrange([2, 5, 7], at=point)
        assert shamir.combine(coefficients, [shares[1], shares[4], shares[6]]) == shares[point - 1]


@given(st.binary(min_size=2, max_size=2), st.binary(min_size=2, max_size=2))
@settings(max_examples=30, deadline=None)
def test_below_the_threshold_every_secret_is_as_possible(secret: bytes, other: bytes) -> None:
    """Two shares of three are consistent with any secret whatever: a third share exists for each."""
    shares = shamir.share(secret, 3, [1, 2, 3])
    through_zero = shamir.lagrange([1, 2, shamir.POINTS], at=0)
    known = shamir.combine(through_zero[:2], shares[:2])
    gap = int.from_bytes(known, "little") ^ int.from_bytes(other, "little")
    products = shamir.multiply(np.arange(1 << 16), int(through_zero[2]))
    assert np.count_nonzero(products == gap) == 1


def test_a_single_share_is_uniform_whatever_the_secret() -> None:
    """Chi-square over 256 buckets, two secrets; the bound is the 1 − 10^-6 quantile."""
    for secret in (b"\0\0", b"\xff\xff"):
        drawn = [shamir.share(secret, 2, [9, 10])[0] for _ in range(10000)]
        counts = np.bincount([raw[0] for raw in drawn], minlength=256)
        chi_square = ((counts - 10000 / 256) ** 2 / (10000 / 256)).sum()
        assert chi_square < 373


@pytest.mark.parametrize(
    ("threshold", "points", "words"),
    [
        (0, [1, 2], "threshold of 0"),
        (3, [1, 2], "threshold of 3"),
        (1, [1, 1], "distinct"),
        (1, [0, 1], "distinct"),
        (1, [1, 65536], "distinct"),
        (1, [], "distinct"),
    ],
)
def test_impossible_sharings_are_refused(threshold: int, points: list[int], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        shamir.share(b"ab", threshold, points)


def test_secrets_of_odd_length_and_ragged_shares_are_refused() -> None:
    with pytest.raises(ProtocolError, match="3 bytes"):
        shamir.share(b"abc", 1, [1])
    with pytest.raises(ProtocolError, match="one length"):
        shamir.combine(shamir.lagrange([1, 2]), [b"ab", b"abcd"])
    with pytest.raises(ProtocolError, match="threshold"):
        shamir.combine(shamir.lagrange([1, 2]), [b"ab"])
