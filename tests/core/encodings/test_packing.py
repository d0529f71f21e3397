"""The entropy stage: what it saves, and frames that were made to fill a receiver's memory."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import torch
import zstandard

from roundtable.core.encodings import GRID, get_encoding
from roundtable.core.encodings.composed.packing import CHUNK
from roundtable.core.encodings.encoding import HeldBytes
from roundtable.core.errors import EncodingError


@pytest.mark.parametrize(
    ("chain", "share"), [("bfloat16", 0.8), ("float32", 0.93), ("int8", 0.95), ("int4", 0.98)]
)
def test_values_come_back_to_the_bit_over_several_chunks_and_take_less(chain: str, share: float) -> None:
    """Updates have heavy tails: exponents are few, and a block's scale leaves most codes small."""
    count = 3 * CHUNK // 4 + 11
    chance = torch.Generator().manual_seed(0)
    vector = torch.randn(count, generator=chance) * torch.randn(count, generator=chance).pow(2) * 1e-3
    plain, packed = get_encoding(chain), get_encoding(f"{chain} | zstd")
    data = b"".join(packed.encode(vector))
    raw = b"".join(plain.encode(vector))
    assert len(data) < share * len(raw)
    out, expected = torch.empty(count), torch.empty(count)
    plain.decode(raw, expected)
    reader = packed.reader(HeldBytes(data), count)
    for start in range(0, count, 5 * GRID):
        reader.read(out[start : start + 5 * GRID])
    assert torch.equal(out, expected)


def test_noise_is_left_as_it_is() -> None:
    """Uniform bytes do not shrink: the stage adds heads and nothing else."""
    vector = torch.empty(CHUNK // 2).uniform_(generator=torch.Generator().manual_seed(0))
    vector = (vector * 65536 - 32768).round()
    encoding = get_encoding("int8 | zstd")
    size = len(b"".join(encoding.encode(vector)))
    assert size <= encoding.size_bound(len(vector))
    assert encoding.size_bound(len(vector)) - get_encoding("int8").size_bound(len(vector)) <= 16


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def frame(raw: bytes, *, sized: bool = True) -> bytes:
    made = zstandard.ZstdCompressor(write_content_size=sized).compress(raw)
    return number(len(made)) + made


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (number(1 << 31) + number(0), "a chunk of 2147483648 bytes"),
        (number(0), "a chunk of 0 bytes"),
        (number(CHUNK) + frame(bytes(1 << 26)), "not of the 1048576 bytes"),
        (number(CHUNK) + frame(bytes(CHUNK), sized=False), "not of the 1048576 bytes"),
        (number(260) + number(260) + bytes(260), "260 packed bytes for a plane of 260"),
        (number(260) + number(20) + b"\x28\xb5\x2f\xfd" + bytes(16), "cannot be unpacked|not of the 260"),
        (number(260) + number(20) + bytes(20), "cannot be unpacked"),
        (
            number(260) + number(12) + b"\x50\x2a\x4d\x18\x04\0\0\0" + bytes(4),
            "cannot be unpacked|not of the 260|a frame of 0",
        ),
        (number(260) + frame(bytes(260))[:-3], "too early"),
        (number(300) + frame(bytes(300)), "40 unpacked bytes follow"),
        (number(260) + frame(bytes(260)) + b"\0", "1 bytes follow"),
    ],
)
def test_frames_that_nobody_packed_are_refused_within_a_chunk(data: bytes, said: str) -> None:
    """An update of 258 bytes of int8 and a scale of 2; whatever is claimed, no more than a chunk is held."""
    encoding, out = get_encoding("int8 | zstd"), torch.empty(258)
    encoding = get_encoding("int8(block=4096) | zstd")
    list(encoding.encode(torch.zeros(3)))
    tracemalloc.start()
    try:
        with pytest.raises(EncodingError, match=said):
            encoding.decode(data, out)
        assert tracemalloc.get_traced_memory()[1] < 3 * CHUNK
    finally:
        tracemalloc.stop()


def test_where_the_stage_goes() -> None:
    for chain, said in [
        ("zstd", "packs what a chain writes"),
        ("zstd | int8", "goes last"),
        ("int8 | zstd | zstd", "goes last"),
        ("int8 | zstd(level=22)", "level = 22"),
    ]:
        with pytest.raises(EncodingError, match=said):
            get_encoding(chain)
