"""int8, int4, int2: whole numbers with a scale for each block (absolute maximum quantisation)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_tables import FLAWS, BlockTable, block_bytes, refusal
from roundtable.core.encodings.codec import Codec
from roundtable.core.encodings.compiled import load
from roundtable.core.encodings.encoding import Traits
from roundtable.core.encodings.torch_blocks import kept_scales, read_blocks, write_blocks
from roundtable.core.encodings.torch_draws import draw_uniform
from roundtable.core.errors import EncodingError


class IntegerTable(BlockTable):
    """Parameters of int8, int4 and int2."""

    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest", description="stochastic: up with the probability that makes it unbiased"
    )


class BlockIntegers(Codec):
    """q = round(x/s) in −L..L with L = 2^(bits−1) − 1 and s = max|x|/L of the block; decoded as q·s.

    Nearest (ties to even): error ≤ s/2 of each value, so ‖C(x)−x‖ ≤ √B/(2L)·‖x‖ for a block of B. Stochastic
    (⌊x/s + u⌋): unbiased, variance p(1−p)s², E‖C(x)−x‖² ≤ min(B/(4L²), √B/L)·‖x‖². A block
    whose scale would be below 2⁻¹⁰⁰ becomes zeros. bfloat16 scales are rounded up, so no value is clamped
    and q·s is exact in float32.
    """

    SIZES: ClassVar[dict[int, int]] = {8: 256, 4: 64, 2: 64}

    def __init__(self, bits: int, table: IntegerTable) -> None:
        self.bits = bits
        self.levels = (1 << bits - 1) - 1
        self.unit = table.block or self.SIZES[bits]
        self.stochastic = table.rounding == "stochastic"
        self.wide = table.scales == "float32"
        self._of_scale = 4 if self.wide else 2
        worst, grows = self._bounds(self.unit, self.levels)
        self.traits = Traits("unbiased" if self.stochastic else "bounded", lambda n: worst, lambda n: grows)

    def _bounds(self, block: int, levels: int) -> tuple[float, float]:
        """(worst error, largest lengthening), both relative to the norm."""
        up = 1 + 2**-7
        if self.stochastic:
            variance = min(block / 4 / levels**2, block**0.5 / levels)
            return variance**0.5 * up, 1 + block**0.5 / levels * up
        # No value is worse off than as zero, and the block's largest is nearly exact.
        worst = min(block**0.5 / 2 / levels * up, (1 - 0.7 / block) ** 0.5)
        return worst, 1 + worst

    @override
    def size(self, count: int) -> int:
        return block_bytes(count, self.unit, self._of_scale, self.bits)

    @override
    def encode(self, values: Tensor, first: int, key: int) -> np.ndarray:
        kernels = load()
        if kernels is None or values.device.type != "cpu":
            return self._in_torch(values, first, key)
        out = np.empty(self.size(len(values)), dtype=np.uint8)
        how = (self.unit, self.bits, self.wide, self.stochastic, key, first)
        bad = kernels.call("encode_integers", values, len(values), *how, out)
        if bad >= 0:
            raise refusal(first + bad * self.unit, self.unit)
        return out

    @override
    def decode(self, data: memoryview, out: Tensor) -> None:
        kernels = load()
        if kernels is None or not len(out):
            self._from_torch(data, out)
            return
        flaw = kernels.call("decode_integers", data, len(out), self.unit, self.bits, self.wide, out)
        if flaw:
            raise EncodingError(FLAWS[flaw])

    def _in_torch(self, values: Tensor, first: int, key: int) -> np.ndarray:
        def codes(block: Tensor, at: int) -> tuple[Tensor, Tensor]:
            scales = kept_scales(block.abs().amax(1) / self.levels, self.wide)
            inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
            q = block * inverse[:, None]
            if self.stochastic:
                u = draw_uniform(key, at, block.numel(), block.device).view_as(block)
                q = torch.floor(q + u)
            else:
                q = torch.round(q)
            q = q.clamp(-self.levels, self.levels).to(torch.int8)
            return scales, q if self.bits == 8 else q + (1 << self.bits - 1)

        return write_blocks(values, first, self.unit, codes, self.bits, self.wide)

    def _from_torch(self, data: memoryview, out: Tensor) -> None:
        middle = 0 if self.bits == 8 else 1 << self.bits - 1

        def values(scales: Tensor, codes: Tensor) -> Tensor:
            q = codes.view(torch.int8) if self.bits == 8 else codes.to(torch.int8) - middle
            return q.float() * scales[:, None]

        outside = 0x80 if self.bits == 8 else 0
        read_blocks(data, out, self.unit, values, self.bits, self.wide, outside)
