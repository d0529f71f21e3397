"""int8, int4, int2: what comes back, the same bits from kernels and torch, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core.encodings import GRID, StreamKey, compiled, get_encoding
from roundtable.core.encodings.codec import CodecEncoding
from roundtable.core.errors import EncodingError

CHAINS = [
    f"{name}(block={block}, rounding={rounding}, scales={scales})"
    for name in ("int8", "int4", "int2")
    for block, rounding, scales in [
        (64, "nearest", "bfloat16"),
        (256, "stochastic", "bfloat16"),
        (4096, "nearest", "float32"),
        (128, "stochastic", "float32"),
    ]
]
SIZES = st.integers(0, 3) | st.integers(60, 300) | st.integers(4000, 4200)


def values(count: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Values over many magnitudes, some of them zero."""
    chance = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(count, generator=chance))
    return torch.randn(count, generator=chance) * size * (torch.rand(count, generator=chance) > 0.1)


KEY = StreamKey(1, "a", 2, 3)


def travelled(chain: str, vector: torch.Tensor, key: StreamKey = KEY) -> torch.Tensor:
    encoding, out = get_encoding(chain), torch.empty_like(vector)
    encoding.decode(b"".join(encoding.encode(vector, key)), out, key)
    return out


@pytest.mark.parametrize("chain", CHAINS)
@given(count=SIZES, seed=st.integers(0, 99))
def test_kernels_and_torch_write_and_read_the_same_bits(chain: str, count: int, seed: int) -> None:
    encoding, vector, key = get_encoding(chain), values(count, seed), StreamKey(seed, "silo", 7, 1)
    data = b"".join(encoding.encode(vector, key))
    assert len(data) == encoding.encoded_size(count)
    out, other = torch.empty(count), torch.empty(count)
    encoding.decode(data, out, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "load", lambda: None)
        assert b"".join(encoding.encode(vector, key)) == data
        encoding.decode(data, other, key)
    assert torch.equal(out, other)


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7), ("int2", 1)])
@given(count=SIZES, seed=st.integers(0, 99))
def test_the_error_is_at_most_half_a_step_and_within_the_stated_bound(
    name: str, levels: int, count: int, seed: int
) -> None:
    vector = values(count, seed)
    error = (travelled(f"{name}(block=64)", vector) - vector).abs()
    for block, wrong in zip(vector.split(64), error.split(64), strict=True):
        step = max(block.abs().tolist(), default=0.0) / levels * (1 + 2**-7)
        assert bool((wrong <= step / 2 * (1 + 1e-5)).all())
    worst = get_encoding(f"{name}(block=64)").traits.worst(count)
    assert error.double().norm() <= worst * vector.double().norm()


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    vector = values(256, 5, spread=0.3)
    chain = f"{name}(rounding=stochastic)"
    draws = torch.stack([travelled(chain, vector, StreamKey(0, "a", round, 0)) for round in range(2000)])
    error = draws.double().mean(0) - vector
    rare = 5 * draws.diff(dim=0).abs().max() / 2000  # A step that is taken so seldom shows no deviation.
    assert bool((error.abs() <= 5 * draws.double().std(0) / math.sqrt(2000) + rare).all())


def test_bytes_are_a_function_of_the_key_and_the_place() -> None:
    """A stream that is resumed, or cut into other blocks, goes on with the same bytes."""
    encoding = get_encoding("int4(rounding=stochastic)")
    assert isinstance(encoding, CodecEncoding)
    vector, key = values(3 * GRID, 1), StreamKey(1, "a", 2, 3)
    whole = b"".join(encoding.encode(vector, key))
    parts = [encoding.codec.encode(part, i * GRID, key.own) for i, part in enumerate(vector.split(GRID))]
    assert b"".join(part.tobytes() for part in parts) == whole
    for other in (
        StreamKey(2, "a", 2, 3),
        StreamKey(1, "b", 2, 3),
        StreamKey(1, "a", 3, 3),
        StreamKey(1, "a", 2, 4),
    ):
        assert b"".join(encoding.encode(vector, other)) != whole


@pytest.mark.parametrize("scale", [1e-5, 1e-6, 1e-7, 1e-20])
def test_small_updates_keep_their_digits(scale: float) -> None:
    """float16 scales would lose them: the error of int8 was 0.5 at 1e-6."""
    vector = values(4096, 3, spread=0.5) * scale
    assert (travelled("int8", vector) - vector).norm() < 0.02 * vector.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_not_finite_is_not_encoded(
    bad: float, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(compiled, "load", lambda: None)
    vector = values(200, 1)
    vector[130] = bad
    with pytest.raises(EncodingError, match=r"NaN, infinite or beyond 3e38, between"):
        list(get_encoding("int4").encode(vector))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("name", "scale", "codes", "said"),
    [
        ("int8", b"\x80\xbf", b"\1", "a scale"),  # -1
        ("int8", b"\xc0\x7f", b"\1", "a scale"),  # NaN
        ("int8", b"\x80\x7f", b"\1", "a scale"),  # infinite
        ("int8", b"\x00\x80", b"\1", "a scale"),  # -0
        ("int8", b"\x01\x00", b"\1", "a scale"),  # below the smallest
        ("int8", b"\x80\x3f", b"\x80", "a code"),
        ("int4", b"\x80\x3f", b"\x00", "a code"),
        ("int2", b"\x80\x3f", b"\x00", "a code"),
        ("int4", b"\x80\x3f", b"\x19", "bits behind"),
        ("int2", b"\x80\x3f", b"\x12", "bits behind"),
    ],
)
def test_what_no_encoder_writes_is_refused(
    name: str, scale: bytes, codes: bytes, said: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(compiled, "load", lambda: None)
    with pytest.raises(EncodingError, match=said):
        get_encoding(name).decode(scale + codes, torch.empty(1))


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ("int8(block=100)", "block = 100: 100 is not a power of two"),
        ("int8(block=32)", "greater than or equal to 64"),
        ("int8(size=64)", "no parameter 'size'; known: block, scales, rounding"),
        ("int8(rounding=up)", "'nearest' or 'stochastic'"),
        ("float32(block=64)", "it takes none"),
        ("int8(", "is not a stage"),
        ("int8(block)", "is not key=value"),
        ("int8 | int8", "cannot follow"),
        ("int8(block=64, block=128)", "given twice"),
        ("", "is not a stage"),
    ],
)
def test_a_chain_that_means_nothing(chain: str, said: str) -> None:
    with pytest.raises(EncodingError, match=said):
        get_encoding(chain)
