"""Blocks of a scale and codes in torch: what the kernels do, for machines without a compiler and for GPUs.

In pieces of 64 K values, which stay in the cache between one operation and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from roundtable.core.encodings.block_tables import FLAWS, SMALLEST_SCALE, block_bytes, refusal
from roundtable.core.errors import EncodingError

PIECE = 1 << 16

ToCodes = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(values [blocks, size], place of the first) to (scales [blocks], codes of 8 bits [blocks, size])."""

ToValues = Callable[[Tensor, Tensor], Tensor]
"""(scales [blocks], codes [blocks, size] of uint8) to values."""


def kept_scales(scales: Tensor, wide: bool) -> Tensor:
    """Scales as they will be read: bfloat16 rounded up unless `wide`; those that are too small are zero."""
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    if wide:
        return scales
    up = scales.contiguous().view(torch.int32) + 0xFFFF
    return (up & -0x10000).view(torch.float32)


def write_blocks(
    values: Tensor, first: int, unit: int, to_codes: ToCodes, bits: int, wide: bool
) -> np.ndarray:
    """The bytes of blocks of `unit` values and of a shorter last one."""
    parts = []
    for start, block in _grids(values, unit):
        if not all(bool(torch.isfinite(end)) for end in torch.aminmax(block)):
            raise refusal(first + start, block.numel())
        scales, codes = to_codes(block, first + start)
        if not bool(torch.isfinite(scales).all()):
            raise refusal(first + start, block.numel())
        head = scales.contiguous() if wide else scales.to(torch.bfloat16)
        head = head.view(torch.uint8).view(len(block), -1)
        parts.append(torch.cat((head, pack(codes.view(torch.uint8), bits)), 1).reshape(-1).cpu().numpy())
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


def read_blocks(
    data: memoryview, out: Tensor, unit: int, to_values: ToValues, bits: int, wide: bool, outside: int | None
) -> None:
    """Decodes such bytes; `outside` is the code that no encoder writes. EncodingError for what is none."""
    of_scale, at = 4 if wide else 2, 0
    for _, block in _grids(out, unit):
        rows, size = block.shape
        end = at + rows * block_bytes(size, unit, of_scale, bits)
        raw = torch.frombuffer(bytearray(data[at:end]), dtype=torch.uint8).view(rows, -1)
        at = end
        scales = read_scales(raw[:, :of_scale], wide)
        codes = unpack(raw[:, of_scale:], size, bits)
        if outside is not None and bool((codes == outside).any()):
            raise EncodingError(FLAWS[2])
        block.copy_(to_values(scales, codes))


def read_scales(raw: Tensor, wide: bool) -> Tensor:
    """The scales of blocks, checked."""
    scales = raw.reshape(-1).view(torch.float32 if wide else torch.bfloat16).float()
    sound = (scales >= SMALLEST_SCALE) & torch.isfinite(scales)
    if not bool((sound | (scales.view(torch.int32) == 0)).all()):
        raise EncodingError(FLAWS[1])
    return scales


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [blocks, size] packed as the kernels do: see block_integers.h."""
    if bits == 8:
        return codes
    parts, size = 8 // bits, codes.shape[1]
    height = -(-size // parts)
    if parts * height > size:
        codes = torch.nn.functional.pad(codes, (0, parts * height - size))
    split = codes.view(len(codes), parts, height)
    packed = split[:, 0].clone()
    for part in range(1, parts):
        packed |= split[:, part] << part * bits
    return packed


def unpack(raw: Tensor, size: int, bits: int) -> Tensor:
    """The codes [blocks, size] again; EncodingError where bits behind the last are set."""
    if bits == 8:
        return raw
    mask = (1 << bits) - 1
    codes = torch.cat([(raw >> part * bits) & mask for part in range(8 // bits)], 1)
    if codes.shape[1] > size and bool(codes[:, size:].any()):
        raise EncodingError(FLAWS[3])
    return codes[:, :size]


def _grids(values: Tensor, unit: int) -> Iterator[tuple[int, Tensor]]:
    """(start, blocks [n, unit]) in pieces, and the shorter last block."""
    whole = len(values) // unit * unit
    for start in range(0, whole, PIECE):
        yield start, values[start : min(start + PIECE, whole)].view(-1, unit)
    if whole < len(values):
        yield whole, values[whole:].view(1, -1)
