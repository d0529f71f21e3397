"""Levels without a common step: from a block's least to its greatest value, and powers of two."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_codec import BlockCodec
from roundtable.core.encodings.block_tables import FLAWS, SMALLEST_SCALE, BlockSize, refusal
from roundtable.core.encodings.encoding import Traits
from roundtable.core.encodings.torch_blocks import divided, pack, pack_bits, unpack, unpack_bits
from roundtable.core.encodings.torch_draws import draw_bits
from roundtable.core.errors import EncodingError
from roundtable.core.toml_tables import Table


class RangeTable(Table):
    """Parameters of minmax."""

    bits: Literal[2, 4, 8, 16] = Field(8, description="of each value")
    block: BlockSize = Field(None, description="values that share a range: a power of two, 64 to 4,096")


class Range(BlockCodec):
    """q = round((x − min)/s) with s = (max − min)/(2ᵇ − 1) of the block (4,096 unless given); min + q·s.

    Error ≤ s/2 of each value, beside rounding in float32. Zero is no level: on updates whose largest
    values are rare 4 bits lose half of the update and more, where int4 loses 0.12.
    """

    kernel = "range"

    def __init__(self, table: RangeTable) -> None:
        self.bits = table.bits
        self.unit = table.block or 4096
        self.steps = float((1 << table.bits) - 1)
        worst = self.unit**0.5 / self.steps * (1 + 2**-7)
        self.traits = Traits("bounded", lambda n: worst, lambda n: 1 + worst)

    @override
    def block_size(self, count: int) -> int:
        return 8 + -(-count * self.bits // 8)

    @override
    def encoding_arguments(self, first: int, key: int) -> tuple[int | np.ndarray, ...]:
        return (self.bits,)

    @override
    def decoding_arguments(self) -> tuple[int | np.ndarray, ...]:
        return (self.bits,)

    @override
    def to_rows(self, block: Tensor, at: int, key: int) -> Tensor:
        low, high = block.amin(1) + 0.0, block.amax(1)
        step = divided(high.double() - low.double(), self.steps).float()
        step = torch.where(step < SMALLEST_SCALE, 0.0, step)
        if not bool(torch.isfinite(step).all()):
            raise refusal(at, block.numel())
        inverse = torch.where(step > 0, 1.0 / step, 0.0)[:, None]
        q = torch.round((block - low[:, None]) * inverse).clamp(0.0, self.steps).to(torch.int32)
        head = torch.stack((low, step), 1).contiguous().view(torch.uint8)
        if self.bits == 16:
            halves = torch.stack((q & 255, q >> 8), 2).to(torch.uint8)
            return torch.cat((head, halves.view(len(block), -1)), 1)
        return torch.cat((head, pack(q.to(torch.uint8), self.bits)), 1)

    @override
    def from_rows(self, raw: Tensor, out: Tensor) -> None:
        size = out.shape[1]
        low, step = raw[:, :8].reshape(-1).view(torch.float32).view(-1, 2).unbind(1)
        sound = torch.isfinite(low + self.steps * step) & ((step >= SMALLEST_SCALE) | (step == 0))
        whole = step.contiguous().view(torch.int32), low.contiguous().view(torch.int32)
        if not bool((sound & (whole[0] >= 0) & (whole[1] != -(1 << 31))).all()):
            raise EncodingError(FLAWS[1])
        if self.bits == 16:
            halves = raw[:, 8:].reshape(len(raw), size, 2).to(torch.int32)
            q = (halves[:, :, 0] | halves[:, :, 1] << 8).float()
        else:
            q = unpack(raw[:, 8:], size, self.bits).float()
        torch.add(low[:, None], q * step[:, None], out=out)


class NaturalPowers(BlockCodec):
    """A power of two: 2^⌊log₂|x|⌋, or twice that with probability |x|/2^⌊log₂|x|⌋ − 1 (Horváth et al. 2019).

    9 bits. Unbiased, E‖C(x)−x‖² ≤ ‖x‖²/8; magnitudes below 2⁻¹²⁶ become zero.
    """

    kernel = "natural"
    unit = 64

    def __init__(self) -> None:
        self.traits = Traits("unbiased", lambda n: 8**-0.5, lambda n: 2.0)

    @override
    def block_size(self, count: int) -> int:
        return count + -(-count // 8)

    @override
    def encoding_arguments(self, first: int, key: int) -> tuple[int | np.ndarray, ...]:
        return key, first

    @override
    def decoding_arguments(self) -> tuple[int | np.ndarray, ...]:
        return ()

    @override
    def to_rows(self, block: Tensor, at: int, key: int) -> Tensor:
        bits = (draw_bits(key, at, block.numel(), block.device) >> 9) & 0x7FFFFF
        exponents = self.exponents(block, bits.view_as(block))
        if bool((exponents >= 255).any()):
            raise refusal(at, block.numel())
        negative = torch.signbit(block) & (exponents > 0)
        return torch.cat((exponents.to(torch.uint8), pack_bits(negative)), 1)

    def exponents(self, block: Tensor, draws: Tensor) -> Tensor:
        """The exponent bits (int32) that are sent, with draws of 23 bits."""
        words = block.contiguous().view(torch.int32)
        exponents = (words >> 23) & 255
        return exponents + ((exponents > 0) & (draws < (words & 0x7FFFFF)))

    @override
    def from_rows(self, raw: Tensor, out: Tensor) -> None:
        size = out.shape[1]
        exponents, negative = raw[:, :size].to(torch.int32), unpack_bits(raw[:, size:], size)
        if bool(((exponents == 255) | (negative & (exponents == 0))).any()):
            raise EncodingError(FLAWS[2])
        values = (exponents << 23).view(torch.float32)
        torch.where(negative, -values, values, out=out)
