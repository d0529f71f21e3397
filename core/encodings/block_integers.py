"""int8, int4, int2: whole numbers with a scale for each block; and QSGD, whose scale is the block's norm."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_codec import BlockCodec
from roundtable.core.encodings.block_tables import FLAWS, BlockTable
from roundtable.core.encodings.encoding import Traits
from roundtable.core.encodings.torch_blocks import (
    divided,
    inverse_of,
    kept_scales,
    norms,
    pack,
    read_scales,
    scale_bytes,
    unpack,
)
from roundtable.core.encodings.torch_draws import draw_uniform
from roundtable.core.errors import EncodingError

NEAREST, STOCHASTIC, MAGNITUDE = 0, 1, 2
_UP = 1 + 2**-7


class IntegerTable(BlockTable):
    """Parameters of int8, int4 and int2."""

    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest", description="stochastic: up with the probability that makes it unbiased"
    )


class QsgdTable(BlockTable):
    """Parameters of qsgd."""

    levels: int = Field(
        127, ge=1, le=127, description="steps from 0 to the block's norm: 2, 4 or 8 bits hold them"
    )


class BlockIntegers(BlockCodec):
    """q = round(x/s) in −L..L with L = 2^(bits−1) − 1 and s = max|x|/L of the block; decoded as q·s.

    Nearest (ties to even): error ≤ s/2 of each value, so ‖C(x)−x‖ ≤ √B/(2L)·‖x‖ for a block of B. Stochastic
    (⌊x/s + u⌋): unbiased, variance p(1−p)s², E‖C(x)−x‖² ≤ min(B/(4L²), √B/L)·‖x‖². A block whose scale would
    be below 2⁻¹⁰⁰ becomes zeros. bfloat16 scales are rounded up, so no value is clamped and q·s is exact in
    float32.
    """

    kernel = "integers"
    SIZES: ClassVar[dict[int, int]] = {8: 256, 4: 64, 2: 64}

    def __init__(self, bits: int, table: IntegerTable) -> None:
        self.bits = bits
        self.levels = (1 << bits - 1) - 1
        self.unit = table.block or self.SIZES[bits]
        self.rounding = STOCHASTIC if table.rounding == "stochastic" else NEAREST
        self.wide = table.scales == "float32"
        self.traits = self._traits()

    def _traits(self) -> Traits:
        block, levels = self.unit, self.levels
        if self.rounding == STOCHASTIC:
            variance = min(block / 4 / levels**2, block**0.5 / levels)
            longer = 1 + block**0.5 / levels * _UP
            return Traits("unbiased", lambda n: variance**0.5 * _UP, lambda n: longer)
        # No value is worse off than as zero, and the block's largest is nearly exact.
        worst = min(block**0.5 / 2 / levels * _UP, (1 - 0.7 / block) ** 0.5)
        return Traits("bounded", lambda n: worst, lambda n: 1 + worst)

    def scale_of(self, block: Tensor) -> Tensor:
        """Of each block, before it is rounded."""
        return divided(block.abs().amax(1), self.levels)

    @override
    def block_size(self, count: int) -> int:
        return (4 if self.wide else 2) + -(-count * self.bits // 8)

    @override
    def encoding_arguments(self, first: int, key: int) -> tuple[int | np.ndarray, ...]:
        of_norm = self.rounding == MAGNITUDE
        return self.bits, self.levels, of_norm, self.wide, self.rounding, key, first

    @override
    def decoding_arguments(self) -> tuple[int | np.ndarray, ...]:
        return self.bits, self.levels, self.wide

    @override
    def to_rows(self, block: Tensor, at: int, key: int) -> Tensor:
        draws = None if self.rounding == NEAREST else draw_uniform(key, at, block.numel(), block.device)
        scales, q = self.codes(block, draws)
        codes = q if self.bits == 8 else q + (1 << self.bits - 1)
        return torch.cat((scale_bytes(scales, self.wide), pack(codes.view(torch.uint8), self.bits)), 1)

    def codes(self, block: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """(kept scales [blocks], whole numbers [blocks, size] int8), with the given draws from [0, 1)."""
        scales = kept_scales(self.scale_of(block), self.wide, self.levels)
        q = block * inverse_of(scales)
        if draws is None:
            q = torch.round(q)
        elif self.rounding == STOCHASTIC:
            q = torch.floor(q + draws.view_as(q))
        else:
            q = torch.copysign(torch.floor(q.abs() + draws.view_as(q)), q)
        return scales, q.clamp(-self.levels, self.levels).to(torch.int8)

    @override
    def from_rows(self, raw: Tensor, out: Tensor) -> None:
        scales = read_scales(raw, self.wide, self.levels)
        codes = unpack(raw[:, 4 if self.wide else 2 :], out.shape[1], self.bits)
        q = codes.view(torch.int8) if self.bits == 8 else codes.to(torch.int8) - (1 << self.bits - 1)
        # Both ends and no comparison of each, which takes torch ten times as long.
        if any(abs(int(end)) > self.levels for end in torch.aminmax(q)):
            raise EncodingError(FLAWS[2])
        torch.mul(q.float(), scales[:, None], out=out)


class Qsgd(BlockIntegers):
    """‖x‖₂ · sign(x) · ⌊s|x|/‖x‖₂ + u⌋/s in blocks of 512 (Alistarh et al. 2017, equation 3.1).

    Unbiased, E‖C(x)−x‖² ≤ min(B/s², √B/s)·‖x‖². Its steps are of the norm: on real updates 7 levels lose more
    than the update holds, where int4 (stochastic), with steps of the maximum, loses 0.17.
    """

    def __init__(self, table: QsgdTable) -> None:
        bits = next(bits for bits in (2, 4, 8) if (1 << bits - 1) - 1 >= table.levels)
        super().__init__(bits, IntegerTable(block=table.block or 512, scales=table.scales))
        self.levels = table.levels
        self.rounding = MAGNITUDE
        self.traits = self._traits()

    @override
    def _traits(self) -> Traits:
        block, levels = self.unit, self.levels
        variance = min(block / levels**2, block**0.5 / levels)
        return Traits("unbiased", lambda n: variance**0.5 * _UP, lambda n: 1 + block**0.5 / levels * _UP)

    @override
    def scale_of(self, block: Tensor) -> Tensor:
        return divided(norms(block), self.levels)
