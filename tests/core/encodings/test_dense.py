"""Vectors as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core import get_encoding
from roundtable.core.encodings import BLOCK_ELEMENTS
from roundtable.core.errors import EncodingError

VECTORS = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=50).map(torch.tensor)


def encoded(name: str, vector: torch.Tensor) -> bytes:
    return b"".join(get_encoding(name).encode(vector))


@given(VECTORS)
def test_float32_is_the_plain_little_endian_array(vector: torch.Tensor) -> None:
    vector = vector.float()
    data = encoded("float32", vector)
    assert np.array_equal(np.frombuffer(data, dtype="<f4"), vector.numpy())
    out = torch.empty_like(vector)
    get_encoding("float32").decode(data, out)
    assert torch.equal(out, vector)


@given(VECTORS)
def test_bfloat16_is_the_nearest_bfloat16(vector: torch.Tensor) -> None:
    vector = vector.float()
    out = torch.empty_like(vector)
    get_encoding("bfloat16").decode(memoryview(encoded("bfloat16", vector)), out)
    assert torch.equal(out, vector.bfloat16().float())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("elements", [0, 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1])
def test_blocks_add_up_to_the_stated_size(name: str, elements: int) -> None:
    vector = torch.arange(elements, dtype=torch.float32) % 50_000
    encoding = get_encoding(name)
    blocks = [bytes(block) for block in encoding.encode(vector)]
    assert max(map(len, blocks), default=0) <= 4 * BLOCK_ELEMENTS
    data = b"".join(blocks)
    assert len(data) == encoding.encoded_size(elements)
    out = torch.empty(elements)
    encoding.decode(data, out)
    assert encoding.dense_dtype is not None
    assert torch.equal(out, vector.to(encoding.dense_dtype).float())


@pytest.mark.parametrize("change", [-1, 1, 4])
def test_bytes_of_another_length(change: int) -> None:
    data = (encoded("float32", torch.ones(8)) + bytes(8))[: 32 + change]
    with pytest.raises(EncodingError, match="float32 of 8 elements is 32 bytes, got"):
        get_encoding("float32").decode(data, torch.empty(8))


def test_a_view_in_wider_items_counts_bytes() -> None:
    data = memoryview(encoded("float32", torch.arange(8.0))).cast("d")
    out = torch.empty(8)
    get_encoding("float32").decode(data, out)
    assert torch.equal(out, torch.arange(8.0))


@pytest.mark.parametrize("vector", [torch.ones(2, 2), torch.ones(4, dtype=torch.float64)])
def test_only_flat_float32_is_encoded(vector: torch.Tensor) -> None:
    with pytest.raises(EncodingError, match="only flat float32"):
        list(get_encoding("float32").encode(vector))


def test_unknown_encoding_lists_the_known() -> None:
    with pytest.raises(EncodingError, match="unknown encoding 'float8'; known: float32, bfloat16"):
        get_encoding("float8")
