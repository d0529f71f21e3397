"""One bit for each value: its sign, with the mean magnitude of the block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_codec import BlockCodec
from roundtable.core.encodings.block_tables import BlockTable
from roundtable.core.encodings.encoding import Traits
from roundtable.core.encodings.torch_blocks import (
    kept_scales,
    mean_magnitudes,
    pack_bits,
    read_scales,
    scale_bytes,
    unpack_bits,
)


class Signs(BlockCodec):
    """mean|x| · sign(x), zero counting as positive, in blocks of 4,096 unless given.

    ‖C(x)−x‖² = (1 − ‖x‖₁²/(B‖x‖₂²))·‖x‖² ≤ (1 − 1/B)·‖x‖² for a block of B, up to the rounding of the scale.
    Never longer than x. Without error feedback it loses points that feedback brings back.
    """

    kernel = "signs"

    def __init__(self, table: BlockTable) -> None:
        self.unit = table.block or 4096
        self.wide = table.scales == "float32"
        # A scale above the mean by a factor 1 + ε adds ε² of the energy that the mean holds.
        worst = (1 - (1 - 2**-13) / self.unit) ** 0.5
        self.traits = Traits("bounded", lambda n: worst, lambda n: 1 + 2**-7, feedback=True)

    @override
    def block_size(self, count: int) -> int:
        return (4 if self.wide else 2) + -(-count // 8)

    @override
    def encoding_arguments(self, first: int, key: int) -> tuple[int | np.ndarray, ...]:
        return (self.wide,)

    @override
    def decoding_arguments(self) -> tuple[int | np.ndarray, ...]:
        return (self.wide,)

    @override
    def to_rows(self, block: Tensor, at: int, key: int) -> Tensor:
        scales = kept_scales(mean_magnitudes(block), self.wide)
        return torch.cat((scale_bytes(scales, self.wide), pack_bits(~torch.signbit(block))), 1)

    @override
    def from_rows(self, raw: Tensor, out: Tensor) -> None:
        scales = read_scales(raw, self.wide)[:, None]
        positive = unpack_bits(raw[:, 4 if self.wide else 2 :], out.shape[1])
        torch.where(positive, scales, -scales, out=out)
