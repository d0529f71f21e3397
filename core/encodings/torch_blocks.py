"""Blocks in torch: what the kernels do, with the same bits, for machines without a compiler and for GPUs.

On a CPU in pieces that stay in the cache between one operation and the next; on a GPU in long ones, which
keep it at work, and only the bytes leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from roundtable.core.encodings.block_tables import FLAWS, SMALLEST_SCALE, refusal
from roundtable.core.errors import EncodingError

PIECE, READ_PIECE = 1 << 16, 1 << 18
"""Values that are written, and read, at a time: reading keeps less beside them."""
DEVICE_PIECE = 1 << 24
"""Values that are written and read at a time on another device than the CPU."""
LARGEST = 3.4e38
"""Safely below what is infinite in float32."""

ToRows = Callable[[Tensor, int], Tensor]
"""(finite values [blocks, size], place of the first) to bytes [blocks, size of a block]."""

FromRows = Callable[[Tensor, Tensor], None]
"""Decodes bytes [blocks, size of a block] into values [blocks, size]."""


def piece_on(device: torch.device, piece: int) -> int:
    """Values at a time on a device: `piece` on a CPU."""
    return piece if device.type == "cpu" else DEVICE_PIECE


def write_blocks(values: Tensor, first: int, unit: int, to_rows: ToRows) -> np.ndarray:
    """The bytes of blocks of `unit` values and of a shorter last one."""
    parts = []
    for start, block in _grids(values, unit, piece_on(values.device, PIECE)):
        if not all(bool(torch.isfinite(end)) for end in torch.aminmax(block)):
            raise refusal(first + start, block.numel())
        parts.append(to_rows(block, first + start).reshape(-1).cpu().numpy())
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


def read_blocks(data: memoryview, out: Tensor, unit: int, size: Callable[[int], int], rows: FromRows) -> None:
    """Decodes such bytes, of which a block of n values has `size(n)`; EncodingError for what is none."""
    at = 0
    for _, block in _grids(out, unit, piece_on(out.device, READ_PIECE)):
        end = at + len(block) * size(block.shape[1])
        raw = torch.frombuffer(bytearray(data[at:end]), dtype=torch.uint8).view(len(block), -1)
        rows(raw.to(block.device), block)
        at = end


def kept_scales(scales: Tensor, wide: bool, peak: float = 1.0) -> Tensor:
    """Scales as they will be read: bfloat16 rounded up unless `wide`; those that are too small are zero.

    `peak` times a scale has to be finite.
    """
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    if not wide:
        scales = ((scales.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    if not bool(torch.isfinite(scales * peak).all()):
        raise refusal(0, 0)
    return scales


def divided(values: Tensor, by: float) -> Tensor:
    """values / by, rounded once on every device: of a plain number a GPU multiplies by the reciprocal."""
    return values / torch.full((1,), by, dtype=values.dtype, device=values.device)


def inverse_of(scales: Tensor) -> Tensor:
    """1/s [blocks, 1], and 0 for 0."""
    return torch.where(scales > 0, 1.0 / scales, 0.0)[:, None]


def scale_bytes(scales: Tensor, wide: bool) -> Tensor:
    """Kept scales as bytes [blocks, 2 or 4]."""
    kept = scales.contiguous() if wide else scales.to(torch.bfloat16)
    return kept.view(torch.uint8).view(len(scales), -1)


def read_scales(raw: Tensor, wide: bool, peak: float = 1.0) -> Tensor:
    """The scales at the beginning of blocks, checked."""
    of_scale = 4 if wide else 2
    kept = raw[:, :of_scale].reshape(-1).view(torch.float32 if wide else torch.bfloat16).float()
    # Both ends of them tell of nearly all: a comparison of each costs more than to decode a block.
    least, most = map(float, torch.aminmax(kept))
    if least >= SMALLEST_SCALE and most * peak < LARGEST:
        return kept
    sound = (kept >= SMALLEST_SCALE) & torch.isfinite(kept * peak)
    if not bool((sound | (kept.view(torch.int32) == 0)).all()):
        raise EncodingError(FLAWS[1])
    return kept


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [blocks, size] packed as the kernels do: see packing.h."""
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


def pack_bits(ones: Tensor) -> Tensor:
    """Booleans [blocks, size] as bits, lowest first."""
    if ones.device.type != "cpu":
        eights = torch.nn.functional.pad(ones, (0, -ones.shape[1] % 8)).view(len(ones), -1, 8)
        return (eights.to(torch.uint8) << _bits_on(ones.device)).sum(2, dtype=torch.uint8)
    return torch.from_numpy(np.packbits(ones.numpy(), axis=1, bitorder="little"))


def unpack_bits(raw: Tensor, size: int) -> Tensor:
    """The booleans again; EncodingError where bits behind the last are set."""
    if raw.device.type != "cpu":
        bits = ((raw[:, :, None] >> _bits_on(raw.device)) & 1).bool().view(len(raw), -1)
    else:
        bits = torch.from_numpy(np.unpackbits(raw.numpy(), axis=1, bitorder="little").astype(bool))
    if bool(bits[:, size:].any()):
        raise EncodingError(FLAWS[3])
    return bits[:, :size]


def _bits_on(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def exact_unit(block: Tensor) -> Tensor:
    """A power of two for each block with all its magnitudes in [0, 2); float64, 0 where it is all zeros."""
    most = block.abs().amax(1).contiguous()
    return (most.view(torch.int32) & 0x7F800000).view(torch.float32).double()


def exact_sum(terms: Tensor) -> Tensor:
    """Σ of float64 terms below 4 in each row, rounded to multiples of 2⁻³⁸: the same bits in any order."""
    return ((terms + 1.5 * 2.0**14) - 1.5 * 2.0**14).sum(1)


def mean_magnitudes(block: Tensor) -> Tensor:
    """Mean |x| of each block, up to rounding: `mean_of` of scales.h."""
    unit = exact_unit(block)
    inverse = torch.where(unit > 0, 1.0 / unit, 0.0)[:, None]
    return (divided(exact_sum(block.abs().double() * inverse), block.shape[1]) * unit).float()


def norms(block: Tensor) -> Tensor:
    """The norm of each block, never too small: `norm_of` of scales.h."""
    unit = exact_unit(block)
    scaled = block.double() * torch.where(unit > 0, 1.0 / unit, 0.0)[:, None]
    return (exact_sum(scaled * scaled).sqrt() * unit * (1 + 2.0**-22)).float()


def _grids(values: Tensor, unit: int, piece: int) -> Iterator[tuple[int, Tensor]]:
    """(start, blocks [n, unit]) in pieces, and the shorter last block."""
    whole = len(values) // unit * unit
    for start in range(0, whole, piece):
        yield start, values[start : min(start + piece, whole)].view(-1, unit)
    if whole < len(values):
        yield whole, values[whole:].view(1, -1)
