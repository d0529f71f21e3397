"""The draws of `draws.h` in torch: the same bits for the same key and place."""

from __future__ import annotations

import torch
from torch import Tensor

_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def draw_bits(key: int, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """32 bits, as int32, for each of `count` places from `first` on; all of them in the same 2³² places."""
    mixed = (key + (first >> 32) * 0x9E3779B97F4A7C15) & (1 << 64) - 1
    places = torch.arange(count, dtype=torch.int32, device=device)
    h = places + _signed((first & 0xFFFFFFFF) + (mixed & 0xFFFFFFFF))
    h = (h ^ ((h >> 16) & 0xFFFF)) * _M1
    h = h ^ _signed(mixed >> 32)
    h = (h ^ ((h >> 15) & 0x1FFFF)) * _M2
    return h ^ ((h >> 16) & 0xFFFF)


def draw_uniform(key: int, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """Uniform in [0, 1), float32 of 24 bits, for each of `count` places."""
    return ((draw_bits(key, first, count, device) >> 8) & 0xFFFFFF).float() * 2.0**-24
