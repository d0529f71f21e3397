"""Every encoding: the same bits with kernels and in torch, its stated bound, what is refused; fuzz."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import zstandard
from encoded_vectors import CHAINS, KEY, UNBIASED, encoding_over, layout_of, values
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.encodings import GRID, Encoding, StreamKey, compiled, get_encoding, sparse
from roundtable.core.encodings.composed.packing import Packed
from roundtable.core.encodings.encoding import HeldBytes
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout

DETERMINISTIC = [chain for chain in CHAINS if chain not in UNBIASED and not chain.startswith("randomk")]


@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=40)
@given(count=st.integers(0, 70) | st.integers(4000, 9000), seed=st.integers(0, 99))
def test_kernels_and_torch_write_and_read_the_same_bits(chain: str, count: int, seed: int) -> None:
    encoding, vector = encoding_over(chain, count), values(count, seed)
    data = b"".join(encoding.encode(vector, KEY))
    assert encoding.encoded_size(count) in (None, len(data))
    assert len(data) <= encoding.size_bound(count)
    out, other = torch.full((count,), 7.0), torch.full((count,), 7.0)
    encoding.decode(data, out, KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "load", lambda: None)
        assert b"".join(encoding.encode(vector, KEY)) == data
        encoding.decode(data, other, KEY)
    assert torch.equal(out, other)


@pytest.mark.parametrize("chain", DETERMINISTIC)
@settings(max_examples=40)
@given(count=st.integers(1, 70) | st.integers(4000, 5000), seed=st.integers(0, 99))
def test_the_error_and_the_lengthening_are_within_what_is_stated(chain: str, count: int, seed: int) -> None:
    encoding, vector, out = encoding_over(chain, count), values(count, seed), torch.empty(count)
    encoding.decode(b"".join(encoding.encode(vector, KEY)), out, KEY)
    norm = float(vector.double().norm())
    if "threshold" not in chain or "layer" in chain:
        assert float((out.double() - vector.double()).norm()) <= encoding.traits.worst(count) * norm * (
            1 + 1e-6
        )
    assert float(out.double().norm()) <= encoding.traits.lengthens(count) * norm * (1 + 1e-6)


@pytest.mark.parametrize("chain", [*UNBIASED, "randomk(ratio=0.1)"])
def test_unbiased_ones_are_and_vary_as_stated(chain: str) -> None:
    encoding, vector = get_encoding(chain), torch.randn(500, generator=torch.Generator().manual_seed(0))
    draws = torch.empty(1500, 500)
    for round, row in enumerate(draws):
        key = StreamKey(0, "a", round, 0)
        encoding.decode(b"".join(encoding.encode(vector, key)), row, key)
    error = draws.double() - vector
    rare = 6 * draws.diff(dim=0).abs().max() / 1500  # A step that is taken so seldom shows no deviation.
    assert bool((error.mean(0).abs() <= 5.5 * error.std(0) / math.sqrt(1500) + rare).all())
    stated = float(encoding.traits.worst(500)) ** 2 * float(vector.double().square().sum())
    assert float(error.square().sum(1).mean()) <= stated * 1.02


def test_the_largest_values_are_taken_and_ties_by_the_lowest_place() -> None:
    for count in (1, 9, 1000, 40 * GRID + 3):
        vector = values(count, count).round()
        encoding, out = get_encoding("topk(ratio=0.05)"), torch.empty(count)
        encoding.decode(b"".join(encoding.encode(vector)), out)
        kept = torch.argsort(vector.abs(), descending=True, stable=True)[: math.ceil(0.05 * count)]
        expected = torch.zeros(count)
        expected[kept] = vector[kept]
        assert torch.equal(out, expected)


def test_per_layer_the_largest_of_each_tensor_are_taken_across_frames() -> None:
    layout = Layout.of({name: torch.empty(size) for name, size in (("a", 3), ("b", 40 * GRID), ("c", 999))})
    vector, out = values(layout.size, 5).round(), torch.empty(layout.size)
    encoding = get_encoding("topk(ratio=0.01, per=layer)").over(layout)
    encoding.decode(b"".join(encoding.encode(vector)), out)
    for name, part in layout.unflatten(vector).items():
        kept = torch.argsort(part.abs(), descending=True, stable=True)[: math.ceil(0.01 * len(part))]
        expected = torch.zeros(len(part))
        expected[kept] = part[kept]
        assert torch.equal(layout.unflatten(out)[name], expected)
    with pytest.raises(EncodingError, match="chooses in each tensor"):
        get_encoding("topk(ratio=0.01, per=layer)").size_bound(layout.size)


def test_a_warm_up_comes_down_to_the_ratio_and_no_earlier_round_may_send_as_much() -> None:
    encoding, vector, out = (
        get_encoding("topk(ratio=0.001, warmup=4)"),
        values(10_000, 1),
        torch.empty(10_000),
    )
    shares = []
    for number in range(1, 8):
        key = StreamKey(1, "a", number)
        data = b"".join(encoding.encode(vector, key))
        encoding.decode(data, out, key)
        shares.append(int((out != 0).sum()) / 10_000)
        with pytest.raises(EncodingError, match="of the update's are left"):
            encoding.decode(
                b"".join(encoding.encode(vector, StreamKey(1, "a", 1))), out, StreamKey(1, "a", 9)
            )
    assert shares == pytest.approx([0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001, 0.001], abs=1e-4)


@pytest.mark.parametrize("per", ["vector", "layer"])
def test_rescaled_values_have_the_norm_of_what_they_stand_for(per: str) -> None:
    vector, out = values(5000, 2), torch.empty(5000)
    encoding = encoding_over(f"topk(ratio=0.03, per={per}, rescale=true)", 5000)
    encoding.decode(b"".join(encoding.encode(vector)), out)
    for part, sent in zip(*(layout_of(5000).unflatten(each).values() for each in (vector, out)), strict=True):
        if per == "layer":
            assert float(sent.norm()) == pytest.approx(float(part.norm()), rel=1e-5)
    assert float(out.norm()) == pytest.approx(float(vector.norm()), rel=1e-5)


def test_small_frames_of_a_reader_are_the_whole_vector() -> None:
    count = 37 * GRID + 11
    vector = values(count, 3)
    for chain in ("topk(ratio=0.05) | int8", "randomk(ratio=0.03)", "nf4"):
        encoding, whole = get_encoding(chain), torch.empty(count)
        data = b"".join(encoding.encode(vector, KEY))
        encoding.decode(data, whole, KEY)
        reader, out = encoding.reader(HeldBytes(data), count, KEY), torch.empty(count)
        for start in range(0, count, 3 * GRID):
            reader.read(out[start : start + 3 * GRID])
        assert torch.equal(out, whole)


@pytest.mark.parametrize("chain", [chain for chain in CHAINS if not chain.startswith("float")])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_encoded(chain: str, bad: float) -> None:
    vector = values(300, 1)
    vector[:] = bad
    with pytest.raises(EncodingError, match="NaN, infinite or beyond"):
        list(encoding_over(chain, 300).encode(vector))


def frame(count: int, gaps: bytes, codes: bytes) -> bytes:
    return count.to_bytes(4, "little") + len(gaps).to_bytes(4, "little") + gaps + codes


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame(9, b"", b""), "9 values in a frame of 8"),
        (frame(3, b"\0", b""), "where 2 of the update's are left"),
        (frame(1, b"\xff\xff\xff\xff", bytes(4)), "out of range|too few or many"),
        (frame(1, b"\xff" * 200, bytes(4)), "200 bytes for 1 places"),
        (frame(1, b"\x00\x00", bytes(4)), "too few or many"),
        (frame(1, b"", bytes(4)), "too few or many"),
        (frame(1, b"\xfe", bytes(4)), "too few or many"),
        (frame(1, b"\x00", bytes(5)), "1 bytes follow"),
        (frame(1, b"\x00", b"\0\0\xc0\x7f"), "NaN or infinite"),
        (b"\1\0\0", "too early"),
    ],
)
def test_sparse_bytes_that_nobody_wrote(
    data: bytes, said: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(compiled, "load", lambda: None)
    with pytest.raises(EncodingError, match=said):
        get_encoding("topk(ratio=0.25)").decode(data, torch.empty(8))


def _attacked(data: bytes, chance: np.random.Generator) -> bytes:
    """A change of the kind that a hostile silo would make: bits, bytes, lengths, other words."""
    raw = bytearray(data)
    for _ in range(int(chance.integers(1, 4))):
        kind, place = chance.integers(5), int(chance.integers(max(1, len(raw))))
        if kind == 0 and raw:
            raw[place] ^= 1 << int(chance.integers(8))
        elif kind == 1 and raw:
            raw[place] = int(chance.choice([0, 0x7F, 0x80, 0xFF]))
        elif kind == 2:
            del raw[place:]
        elif kind == 3:
            raw[place:place] = chance.bytes(int(chance.integers(1, 9)))
        else:
            raw[place : place + 4] = chance.bytes(4)
    return bytes(raw)


def _hostile(encoding: Encoding, vector: torch.Tensor, chance: np.random.Generator) -> bytes:
    """Changed bytes of a vector; of packed ones every other time those within sound frames are changed."""
    if not isinstance(encoding, Packed) or chance.integers(2):
        return _attacked(b"".join(encoding.encode(vector, KEY)), chance)
    inner = _attacked(b"".join(encoding.inner.encode(vector, KEY)), chance)
    inner = inner[: len(inner) // encoding.width * encoding.width]
    packed = inner and len(inner).to_bytes(4, "little")
    for place in range(encoding.width if inner else 0):
        plane = inner[place :: encoding.width]
        data = zstandard.ZstdCompressor(level=1).compress(plane)
        length, data = (len(data), data) if len(data) < len(plane) else (0, plane)
        packed += length.to_bytes(4, "little") + data
    return packed


@pytest.mark.fuzz
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("chain", CHAINS)
def test_changed_bytes_are_refused_or_decode_to_finite_values(
    chain: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 changed updates for each encoding with kernels, and 1,000 without."""
    if not kernels:
        monkeypatch.setattr(compiled, "load", lambda: None)
    chance, refused = np.random.default_rng(1), 0
    for number in range(10_000 if kernels else 1_000):
        count = int(chance.integers(1, 300))
        encoding = encoding_over(chain, count)
        refused += not _taken(encoding, _hostile(encoding, values(count, number % 50), chance), count)
    assert refused


def _taken(encoding: Encoding, data: bytes, count: int) -> bool:
    """Whether bytes are decoded; all values are finite then, and none stands behind the end."""
    room = torch.full((count + 64,), 7.0)
    try:
        encoding.decode(data, room[:count], KEY)
    except EncodingError:
        return False
    finally:
        # A kernel that writes too far is seen.
        assert bool((room[count:] == 7.0).all())
    assert bool(torch.isfinite(room).all()), data.hex()
    return True


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "chain", [chain for chain in CHAINS if chain.startswith(("topk", "randomk", "multi"))]
)
def test_changed_bytes_of_several_frames_are_refused_or_decode_to_finite_values(
    chain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 changed updates for each encoding in frames, which are shorter here."""
    monkeypatch.setattr(sparse, "FRAME", GRID)
    chance, refused = np.random.default_rng(2), 0
    counts = [int(count) for count in chance.integers(1, 4 * GRID, 10)]
    encodings = [encoding_over(chain, count) for count in counts]
    for number in range(500):
        count, encoding = counts[number % 10], encodings[number % 10]
        refused += not _taken(encoding, _hostile(encoding, values(count, number % 50), chance), count)
    assert refused
