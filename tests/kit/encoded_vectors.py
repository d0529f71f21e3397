"""Chains of every kind, layouts with uneven tensors, and vectors to encode."""

from __future__ import annotations

import math

import torch

from roundtable.core.encodings import Encoding, StreamKey, get_encoding
from roundtable.core.layout import Layout

UNBIASED = [
    "qsgd",
    "qsgd(levels=7)",
    "qsgd(levels=1, scales=float32)",
    "natural",
    "int4(rounding=stochastic)",
]
CHAINS = [
    *UNBIASED,
    "int8",
    "int2(block=64)",
    "nf4",
    "nf4(scales=float32, block=256)",
    "fp4",
    "sign",
    "sign(block=64)",
    "minmax(bits=16)",
    "minmax(bits=8)",
    "minmax(bits=4, block=64)",
    "minmax(bits=2, block=128)",
    "topk(ratio=0.05)",
    "topk(ratio=0.01) | int8",
    "topk(threshold=0.5) | nf4",
    "topk(ratio=1.0) | sign",
    "topk(ratio=0.05, per=layer, warmup=5)",
    "multilevel(small=20, large=300, ratio=0.1)",
    "multilevel(small=0, large=4000, variance=0, threshold=0.5) | zstd",
    "lowrank(rank=2)",
    "float32 | zstd",
    "int4 | zstd(level=3)",
    "topk(ratio=0.05) | int8 | zstd",
    "lowrank(rank=3, warm=false) | bfloat16",
    "lowrank(rank=4) | int8",
    "topk(threshold=0.25, per=layer) | int8",
    "topk(ratio=0.02, rescale=true)",
    "topk(ratio=0.02, per=layer, rescale=true) | nf4",
    "randomk(ratio=0.1)",
    "randomk(ratio=0.1, indices=cohort, scaled=false) | int8",
]
KEY = StreamKey(1, "a", 2, 3)


def layout_of(count: int) -> Layout:
    """Tensors of uneven sizes, matrices among them, with so many values in all; one has none."""
    shapes, left = [(0,)], count
    for shape in [(5,), (9, 7), (), (40, 3, 3), (60, 50), (12,)] * (count // 3000 + 1):
        if math.prod(shape) <= left:
            shapes.append(shape)
            left -= math.prod(shape)
    return Layout.of({f"t{number}": torch.empty(shape) for number, shape in enumerate([*shapes, (left,)])})


def encoding_over(chain: str, count: int) -> Encoding:
    """A chain's encoding of so many values in such a layout."""
    return get_encoding(chain).over(layout_of(count))


def values(count: int, seed: int) -> torch.Tensor:
    """Values over many magnitudes, some of them zero, some alike."""
    chance = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, generator=chance) * torch.exp(3 * torch.randn(count, generator=chance))
    return torch.where(torch.rand(count, generator=chance) < 0.2, wide.round(), wide)
