"""NF4 and FP4: codes of 4 bits that stand for 16 values, with a scale for each block."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_codec import BlockCodec
from roundtable.core.encodings.block_tables import FLAWS, BlockTable
from roundtable.core.encodings.encoding import Traits
from roundtable.core.encodings.torch_blocks import (
    divided,
    inverse_of,
    kept_scales,
    pack,
    read_scales,
    scale_bytes,
)
from roundtable.core.errors import EncodingError

NF4 = np.array(
    [
        "-1",
        "-0.6961928009986877",
        "-0.5250730514526367",
        "-0.39491748809814453",
        "-0.28444138169288635",
        "-0.18477343022823334",
        "-0.09105003625154495",
        "0",
        "0.07958029955625534",
        "0.16093020141124725",
        "0.24611230194568634",
        "0.33791524171829224",
        "0.44070982933044434",
        "0.5626170039176941",
        "0.7229568362236023",
        "1",
    ],
    dtype=np.float32,
)
"""Quantiles of the normal distribution, with an exact zero (Dettmers et al. 2023, appendix E)."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
"""Magnitudes of a float of 2 exponent bits and 1 of the mantissa (OCP MX 1.0, section 5.3.3)."""


class Table4(BlockCodec):
    """The nearest of 16 values times s = max|x|/peak of the block (64 unless given).

    Error ≤ half the widest gap, in units of max|x|: 0.152 for NF4, 1/6 for FP4. Ties: NF4 to the lower value,
    FP4 to the even code.
    """

    kernel = "table"

    def __init__(self, name: str, table: BlockTable) -> None:
        self.magnitudes = name == "fp4"
        self.unit = table.block or 64
        self.wide = table.scales == "float32"
        levels = E2M1 if self.magnitudes else NF4
        bounds = (levels[1:].astype(np.float64) + levels[:-1]) / 2
        self.bounds = bounds.astype(np.float32)
        if self.magnitudes:
            # A tie goes to the even code: where that is the upper one, the bound counts as passed.
            self.bounds[1::2] = np.nextafter(self.bounds[1::2], np.float32(0))
            levels = np.concatenate((levels, -levels))
        self.values = levels.astype(np.float32)
        of_code, every = torch.from_numpy(self.values.copy()), torch.arange(256)
        if self.magnitudes:
            of_code[8] = torch.nan  # no encoder writes a negative zero
        self._of_byte = torch.cat((of_code[every & 15], of_code[every >> 4]))
        self.peak = np.array([6.0 if self.magnitudes else 1.0], dtype=np.float32)
        gap = 1 / 6 if self.magnitudes else 0.152
        worst = min(self.unit**0.5 * gap * (1 + 2**-7), (1 - 0.9 / self.unit) ** 0.5)
        self.traits = Traits("bounded", lambda n: worst, lambda n: 1 + worst)

    @override
    def block_size(self, count: int) -> int:
        return (4 if self.wide else 2) + -(-count // 2)

    @override
    def encoding_arguments(self, first: int, key: int) -> tuple[int | np.ndarray, ...]:
        return self.bounds, self.magnitudes, self.peak, self.wide

    @override
    def decoding_arguments(self) -> tuple[int | np.ndarray, ...]:
        return self.values, self.magnitudes, self.wide

    @override
    def to_rows(self, block: Tensor, at: int, key: int) -> Tensor:
        scales = kept_scales(divided(block.abs().amax(1), self.peak[0]), self.wide, float(self.peak[0]))
        codes = self.codes(block * inverse_of(scales))
        return torch.cat((scale_bytes(scales, self.wide), pack(codes, 4)), 1)

    def codes(self, scaled: Tensor) -> Tensor:
        """The codes (uint8) of values in units of their scale."""
        bounds = torch.from_numpy(self.bounds).to(scaled.device)
        if not self.magnitudes:
            return torch.bucketize(scaled, bounds).to(torch.uint8)
        codes = torch.bucketize(scaled.abs(), bounds).to(torch.uint8)
        return codes | (((scaled < 0) & (codes > 0)).to(torch.uint8) << 3)

    @override
    def from_rows(self, raw: Tensor, out: Tensor) -> None:
        scales, size = read_scales(raw, self.wide, float(self.peak[0]))[:, None], out.shape[1]
        packed = raw[:, 4 if self.wide else 2 :]
        if size % 2 and bool((packed[:, -1] >> 4).any()):
            raise EncodingError(FLAWS[3])
        # One table for both halves of a byte, straight to where values go: faster than to take codes apart.
        places = torch.empty(len(raw), 2, packed.shape[1], dtype=torch.int32, device=raw.device)
        places[:, 0] = packed
        torch.add(places[:, 0], 256, out=places[:, 1])
        values = out if size % 2 == 0 else raw.new_empty(len(raw), 2 * packed.shape[1], dtype=torch.float32)
        torch.index_select(self._of_byte.to(raw.device), 0, places.view(-1), out=values.view(-1))
        if self.magnitudes and math.isnan(float(values.sum())):
            raise EncodingError(FLAWS[2])
        torch.mul(values[:, :size], scales, out=out)
