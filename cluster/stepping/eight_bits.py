"""Values in 8 bits, in blocks with a scale each: dynamic quantisation, block by block.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", sections 2.1 and 2.2. The levels are
those of bitsandbytes and torchao. Two things differ. A block's scale is its largest value with that one's
sign, not its magnitude: the largest value is then exact whatever its sign (there is a level 1, and none at
−1), and coding what was decoded gives the same codes, so that a checkpoint in float32 loses nothing. And of
values without a sign only 0 becomes 0, as Li et al. 2023 have it, "Memory Efficient Optimizers with 4-bit
States": where a second moment is rounded to 0 and the next gradient is 0, as of a word that is not in the
batch, AdamW divides by its ε alone, and the weight jumps.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Values that share a scale.
BLOCK = 256
# Values that are coded at once: as many as stay in a CPU's cache, and keep a GPU at work.
_CHUNK = {"cpu": 1 << 16}
_LONG_CHUNK = 1 << 22
# A block below this in magnitude is zeros: scales near the smallest float lose bits.
_LEAST = 1e-30
_DECADES = 7
_SMALLEST = 2.0**-149


def levels(*, signed: bool) -> tuple[float, ...]:
    """The 256 levels, ascending from −0.993 (from 0 without a sign) to 1.

    In each decade 10^(i − 7) to 10^(i − 6), i = 0 … 6, 2^i means of neighbours on an even grid (2^(i + 1)
    without a sign), then 0 and 1: what the exponent leaves of 8 bits is the fraction.
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 1 << (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, count + 1)
        means = ((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - _DECADES + 1)).tolist()
        found += means
        if signed:
            found += [-value for value in means]
    return tuple(sorted(found))


class Levels:
    """The levels where values are, and what finds the nearest one there."""

    def __init__(self, like: Tensor, *, signed: bool) -> None:
        """For values of the type of `like` and on its device."""
        known = torch.tensor(levels(signed=signed))
        between = (known[1:] + known[:-1]) / 2
        if not signed:
            between[0] = _SMALLEST
        self.values = known.to(like.dtype).to(like.device, non_blocking=True)
        self._between = between.to(like.device, non_blocking=True)
        self._cells: Tensor | None = None
        if like.device.type == "cpu":
            # Of float32 the upper 16 bits name a cell in which at most one level gives way to the next.
            upper = torch.arange(1 << 16, dtype=torch.int32) << 16
            ends = upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)
            least = torch.minimum(*ends).nan_to_num(2.0, 2.0, -2.0)
            self._cells = torch.bucketize(least, between, right=True).to(torch.uint8)
            self._next = torch.cat((between, between.new_full((1,), torch.inf)))

    def nearest(self, values: Tensor) -> Tensor:
        """The places [n] of the levels next to float32 `values` [n] within −1 and 1."""
        if self._cells is None:
            return torch.bucketize(values, self._between, right=True, out_int32=True)
        cell = (values.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        below = self._cells.index_select(0, cell)
        return below.add_(values >= self._next.index_select(0, below.int()))


def encode(values: Tensor, codes: Tensor, scales: Tensor, table: Levels) -> None:
    """Codes floating `values` [n · BLOCK] into uint8 `codes` [n · BLOCK] and `scales` [n], of their type.

    Each value becomes the nearest level times its block's scale. Zeros and what is not finite of a block with
    a value that is not finite are decoded as NaN.
    """
    size = _CHUNK.get(values.device.type, _LONG_CHUNK)
    for first in range(0, len(values), size):
        blocks = values[first : first + size].view(-1, BLOCK)
        low, high = blocks.aminmax(dim=1)
        scale = torch.where(high >= -low, high, low)
        scale.masked_fill_(scale.abs() < _LEAST, 0.0)
        part = blocks / torch.where(scale == 0, torch.inf, scale)[:, None]
        codes[first : first + size].copy_(table.nearest(part.view(-1).float()))
        scales[first // BLOCK : (first + size) // BLOCK].copy_(scale)


def decode(codes: Tensor, scales: Tensor, table: Levels) -> Tensor:
    """The values [n · BLOCK] that `encode` coded so, in the scales' type."""
    values = torch.empty(codes.shape, dtype=scales.dtype, device=codes.device)
    size = _CHUNK.get(values.device.type, _LONG_CHUNK)
    for first in range(0, len(codes), size):
        part = values[first : first + size]
        torch.index_select(table.values, 0, codes[first : first + size].int(), out=part)
        part.view(-1, BLOCK).mul_(scales[first // BLOCK : (first + size) // BLOCK, None])
    return values
