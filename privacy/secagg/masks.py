"""Ring elements, and masks expanded from 32-byte keys by AES-256 in counter mode, in cache-sized pieces.

A ring of 2^b is computed in the smallest word that holds it (uint8, uint16 or uint32), whose wrap-around
is a multiple of 2^b; on the wire an element takes b bits, little-endian: two of 12 bits take three bytes,
and a last one that is left over two. A key is used for one mask of one attempt, so the counter always
starts at the same block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from roundtable.core.errors import PrivacyError, ProtocolError

PIECE_BYTES = 1 << 18
"""Bytes of keystream expanded at a time: a piece, its mask and the sum stay in the second-level cache."""
RING_BITS = (8, 12, 16, 24, 32)
MASKED = "masked"
"""The encoding that an upload of masked numbers names."""
_ADDED_AT_ONCE = 1 << 20
"""Elements of a vector: enough that the calls do not count, and an even number."""

Ring: TypeAlias = npt.NDArray[Any]
"""Unsigned ring elements, shape (length,): uint8, uint16 or uint32, see `ring_dtype`."""
_WORDS = {8: "<u1", 12: "<u2", 16: "<u2", 24: "<u4", 32: "<u4"}


class VectorSource(Protocol):
    """A vector of ring elements that is read once, from front to back, in blocks."""

    def __len__(self) -> int: ...

    def block(self, start: int, stop: int) -> Ring:
        """The elements from `start` to `stop`, in an array that the caller may overwrite."""
        ...


class ArraySource:
    """An array (or memory map) of integers that are ring elements already."""

    def __init__(self, values: npt.NDArray[np.integer]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def block(self, start: int, stop: int) -> Ring:
        """The elements from `start` to `stop`; negative integers stand for their residue."""
        return self.values[start:stop].astype(np.uint32)


def ring_dtype(ring_bits: int) -> np.dtype[Any]:
    """The dtype that sums modulo 2^ring_bits are computed in."""
    if ring_bits not in RING_BITS:
        raise PrivacyError(f"a ring of {ring_bits} bits is not supported; use one of {RING_BITS}")
    return np.dtype(_WORDS[ring_bits])


def piece_length(ring_bits: int) -> int:
    """Ring elements in one piece of keystream."""
    return PIECE_BYTES // ring_dtype(ring_bits).itemsize


class MaskSum:
    """The signed sum of many masks, added to a vector piece by piece, in order.

    `plus` and `minus` hold one 32-byte key for each mask that is added or subtracted.
    """

    def __init__(self, ring_bits: int, plus: Iterable[bytes], minus: Iterable[bytes]) -> None:
        self._dtype = ring_dtype(ring_bits)
        self._plus = [_keystream(key) for key in plus]
        self._minus = [_keystream(key) for key in minus]
        self._zeros = memoryview(bytes(PIECE_BYTES))
        # The cipher asks for one block of room behind its output.
        self._mask = bytearray(PIECE_BYTES + 16)

    def add_to(self, piece: Ring) -> None:
        """Add the next `len(piece)` elements of every mask to `piece`, in place.

        Every piece but the last must be a multiple of 16 bytes long.
        """
        size = piece.nbytes
        zeros = self._zeros[:size]
        mask = np.frombuffer(self._mask, dtype=self._dtype, count=len(piece))
        for stream in self._plus:
            stream.update_into(zeros, self._mask)
            np.add(piece, mask, out=piece)
        for stream in self._minus:
            stream.update_into(zeros, self._mask)
            np.subtract(piece, mask, out=piece)

    def erase(self) -> None:
        """Drop the cipher states and clear the last piece of keystream."""
        self._plus.clear()
        self._minus.clear()
        self._mask[:] = bytes(len(self._mask))


def _keystream(key: bytes) -> CipherContext:
    """AES-256-CTR from counter block 2 on: what GCM encrypts with under a nonce of zeros (SP 800-38D, 7.1).

    OpenSSL has wider vector code for GCM than for CTR, and so GCM is faster although it also hashes what it
    encrypts. The tag is never asked for.
    """
    return Cipher(AES(key), GCM(bytes(12))).encryptor()


def wire_bytes(length: int, ring_bits: int) -> int:
    """Bytes that so many ring elements take on the wire."""
    return (length * ring_bits + 7) // 8


def pack(values: Ring, ring_bits: int) -> memoryview:
    """The wire form of ring elements, `wire_bytes` long. No copy for 8, 16 and 32 bits.

    An odd number of elements of 12 bits cannot be followed by others.
    """
    if ring_bits == 12:
        return _pack_pairs(values)
    if ring_bits == 24:
        raw = values.view(np.uint8).reshape(-1, 4)[:, :3]
        return np.ascontiguousarray(raw).data.cast("B")
    return values.data.cast("B")


def unpack(data: memoryview, ring_bits: int) -> Ring:
    """Ring elements from their wire form; a view where that is possible. ProtocolError for another form."""
    length = len(data) * 8 // ring_bits
    if len(data) != wire_bytes(length, ring_bits):
        raise ProtocolError(f"{len(data)} bytes are not a whole number of {ring_bits}-bit ring elements")
    if ring_bits == 12:
        return _unpack_pairs(data, length)
    if ring_bits != 24:
        return np.frombuffer(data, dtype=ring_dtype(ring_bits))
    wide = np.zeros((length, 4), dtype=np.uint8)
    wide[:, :3] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
    return wide.reshape(-1).view("<u4")


def _pack_pairs(values: Ring) -> memoryview:
    pairs, odd = divmod(len(values), 2)
    packed = np.empty(wire_bytes(len(values), 12), dtype=np.uint8)
    first, second = values[0 : 2 * pairs : 2], values[1::2]
    triples = packed[: 3 * pairs].reshape(-1, 3)
    triples[:, 0] = first & 0xFF
    triples[:, 1] = (first >> 8) | (second & 0xF) << 4
    triples[:, 2] = second >> 4
    if odd:
        packed[-2:] = values[-1] & 0xFF, values[-1] >> 8
    return packed.data.cast("B")


def _unpack_pairs(data: memoryview, length: int) -> Ring:
    raw = np.frombuffer(data, dtype=np.uint8)
    pairs, odd = divmod(length, 2)
    triples = raw[: 3 * pairs].reshape(-1, 3).astype(np.uint16)
    values = np.empty(length, dtype=ring_dtype(12))
    values[0 : 2 * pairs : 2] = triples[:, 0] | (triples[:, 1] & 0xF) << 8
    values[1::2] = triples[:, 1] >> 4 | triples[:, 2] << 4
    if odd:
        if raw[-1] >> 4:
            raise ProtocolError("the four bits behind the last ring element are not zero")
        values[-1] = int(raw[-2]) | int(raw[-1]) << 8
    return values


def add_wire(total: Ring, data: memoryview, ring_bits: int) -> None:
    """Add a vector in its wire form to `total`, in place; `reduce_ring` follows the last one.

    ProtocolError, and perhaps a part of it added, for another form than that of `len(total)` elements.
    """
    if len(data) != wire_bytes(len(total), ring_bits):
        raise ProtocolError(f"{len(data)} bytes are not {len(total)} ring elements of {ring_bits} bits")
    step, place = wire_bytes(_ADDED_AT_ONCE, ring_bits), 0
    for start in range(0, len(data), step):
        piece = unpack(data[start : start + step], ring_bits)
        here = total[place : place + len(piece)]
        np.add(here, piece, out=here)
        place += len(piece)


def reduce_ring(values: Ring, ring_bits: int) -> None:
    """Bring sums computed in a wider word back below 2^ring_bits, in place."""
    if ring_bits in (12, 24):
        np.bitwise_and(values, values.dtype.type((1 << ring_bits) - 1), out=values)
