"""What changed from model to model: the same bits at whoever adds it up, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.encodings import get_encoding
from roundtable.core.encodings.encoding import HeldBytes
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.model_delta import apply_delta, delta_blocks, published
from roundtable.core.models import Model, model_digest, save_model
from roundtable.core.seeds import torch_generator


def model_of(vector: torch.Tensor, round: int) -> Model:
    layout = Layout.of({"w": torch.empty(len(vector))})
    return Model(layout, vector, metadata={"round": str(round), "note": "x" * round})


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch_generator(seed))


@pytest.mark.parametrize("chain", ["int4", "int8(block=256)", "bfloat16", "float16"])
def test_a_silo_ends_with_the_published_bits(tmp_path: Path, chain: str) -> None:
    encoding, held, exact = get_encoding(chain), drawn(20_001, 1), drawn(20_001, 1)
    save_model(tmp_path / "0", model_of(held, 0))
    for round in range(1, 4):
        exact = exact + 0.01 * drawn(20_001, round + 1)
        held, data = published(encoding, held, exact)
        model = model_of(held, round)
        delta = HeldBytes(b"".join(delta_blocks(model, data)))
        digest = apply_delta(encoding, tmp_path / str(round - 1), delta, tmp_path / str(round))
        assert digest == model_digest(model)
        assert len(data) == encoding.encoded_size(20_001)
    # Nothing is lost for good: what silos hold stays within one encoding's error of the exact model.
    assert (held - exact).norm() < 0.2 * 0.01 * 20_001**0.5


@given(seed=st.integers(0, 1 << 20), rounds=st.integers(1, 12), size=st.floats(1e-6, 1e3))
@settings(max_examples=30, deadline=None)
def test_what_is_left_out_never_adds_up(seed: int, rounds: int, size: float) -> None:
    """However many rounds: the error is that of one encoding of the last change and what was left before."""
    encoding = get_encoding("int4(block=64)")
    exact = drawn(500, seed) * size
    held = exact.clone()
    for round in range(rounds):
        exact = exact + size * drawn(500, seed + round + 1)
        before = (exact - held).norm()
        held, _ = published(encoding, held, exact)
        assert (exact - held).norm() <= 0.5 * before + 1e-4 * size


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:5], "head would have 0 bytes"),
        (lambda data: (1 << 40).to_bytes(8, "little") + data[8:], "head would have"),
        (lambda data: data[:-1], "bytes, not"),
        (lambda data: data + b"\0", "bytes, not"),
        (lambda data: data[:40], "head would have"),
    ],
)
def test_bytes_that_are_no_difference_are_refused(tmp_path: Path, spoil, words: str) -> None:
    encoding, held = get_encoding("int4"), drawn(3000, 1)
    save_model(tmp_path / "base", model_of(held, 0))
    new, data = published(encoding, held, held + 1)
    whole = b"".join(delta_blocks(model_of(new, 1), data))
    with pytest.raises(EncodingError, match=words):
        apply_delta(encoding, tmp_path / "base", HeldBytes(spoil(whole)), tmp_path / "out")


def test_another_base_makes_another_digest(tmp_path: Path) -> None:
    encoding, held = get_encoding("int8"), drawn(3000, 1)
    save_model(tmp_path / "base", model_of(held + 1, 0))
    new, data = published(encoding, held, held * 1.1)
    delta = HeldBytes(b"".join(delta_blocks(model_of(new, 1), data)))
    digest = apply_delta(encoding, tmp_path / "base", delta, tmp_path / "out")
    assert digest != model_digest(model_of(new, 1))
