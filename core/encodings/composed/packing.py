"""The entropy stage: what a chain writes, packed by zstd, plane by plane."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import zstandard
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.encoding import (
    NO_KEY,
    ByteSource,
    Encoding,
    Memory,
    StreamKey,
    VectorReader,
)
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.toml_tables import Table

CHUNK = 1 << 20
"""Bytes that are packed at a time, and the most that a receiver unpacks at a time."""

_COUNT = struct.Struct("<I")


class ZstdTable(Table):
    """Parameters of zstd."""

    level: int = Field(1, ge=1, le=9, description="of effort; more is slower and hardly smaller")


class Packed(Encoding):
    """What `inner` writes, in chunks of 1 MiB that zstd packs (RFC 8878); it comes back to the bit.

    Chunks of float32, bfloat16 and float16 are split into planes of first bytes, of second bytes and so on,
    each packed by itself: those of exponents shrink, those of mantissas are left as they are. A chunk is its
    length, and for each plane the length of its frame and the frame; 0 and the plane itself where packing
    saves nothing. Error, lengthening and memory are those of `inner`. A receiver unpacks no frame that claims
    another size than the chunk has room for, so it never holds more than a chunk.
    """

    def __init__(self, chain: str, table: ZstdTable, inner: Encoding, width: int) -> None:
        self.chain = chain
        self.table = table
        self.inner = inner
        self.width = width
        self.traits = replace(inner.traits, size_tells=True)
        self.keeps = inner.keeps

    @override
    def over(self, layout: Layout) -> Packed:
        return Packed(self.chain, self.table, self.inner.over(layout), self.width)

    @override
    def size_bound(self, elements: int) -> int:
        inner = self.inner.size_bound(elements)
        return inner + -(-inner // CHUNK) * _COUNT.size * (1 + self.width)

    @override
    def encoded_size(self, elements: int) -> int | None:
        return None

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        packer = zstandard.ZstdCompressor(level=self.table.level, write_content_size=True)
        held = bytearray()
        for block in self.inner.encode(vector, key, memory):
            held += block.cast("B")
            while len(held) >= CHUNK:
                yield self._packed(packer, held[:CHUNK])
                del held[:CHUNK]
        if held:
            yield self._packed(packer, held)

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return _Reader(_Unpacked(source, self.width), self.inner, elements, key)

    def _packed(self, packer: zstandard.ZstdCompressor, chunk: bytearray) -> memoryview:
        parts = [_COUNT.pack(len(chunk))]
        for plane in np.frombuffer(chunk, np.uint8).reshape(-1, self.width).T:
            raw = plane.tobytes()
            frame = packer.compress(raw)
            parts += (_COUNT.pack(len(frame)), frame) if len(frame) < len(raw) else (_COUNT.pack(0), raw)
        return memoryview(b"".join(parts))


class _Unpacked:
    """A ByteSource over packed bytes: at most one chunk of them is unpacked."""

    def __init__(self, source: ByteSource, width: int) -> None:
        self._source = source
        self._width = width
        self._chunk = memoryview(b"")
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=CHUNK)

    @property
    def held(self) -> int:
        """Unpacked bytes that have not been read."""
        return len(self._chunk)

    def read(self, count: int) -> memoryview:
        if count <= len(self._chunk):
            taken, self._chunk = self._chunk[:count], self._chunk[count:]
            return taken
        parts = bytearray()
        while len(parts) < count:
            if not self._chunk:
                self._unpack()
            parts += self.read(min(count - len(parts), len(self._chunk)))
        return memoryview(parts)

    def skip(self, count: int) -> None:
        while count:
            count -= len(self.read(min(count, CHUNK)))

    def _unpack(self) -> None:
        size = self._number()
        if not 0 < size <= CHUNK or size % self._width:
            raise EncodingError(f"a chunk of {size} bytes; they have 1 to {CHUNK}, whole values")
        planes = [self._plane(size // self._width) for _ in range(self._width)]
        self._chunk = memoryview(np.stack(planes, 1).reshape(-1).data).cast("B")

    def _plane(self, size: int) -> np.ndarray:
        packed = self._number()
        if packed >= size and packed:
            raise EncodingError(f"{packed} packed bytes for a plane of {size}")
        data = self._source.read(packed or size)
        return np.frombuffer(self._opened(bytes(data), size) if packed else bytes(data), np.uint8)

    def _opened(self, frame: bytes, size: int) -> bytes:
        """What a frame holds, exactly `size` bytes; nothing is allocated for one that claims another size."""
        try:
            claimed = zstandard.get_frame_parameters(frame)
            if claimed.content_size != size or claimed.window_size > CHUNK or claimed.dict_id:
                raise EncodingError(f"a frame that is not of the {size} bytes of its plane")
            raw = self._unpacker.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise EncodingError(f"a frame cannot be unpacked: {error}") from None
        if len(raw) != size:
            raise EncodingError(f"a frame of {len(raw)} bytes for a plane of {size}")
        return raw

    def _number(self) -> int:
        return int(_COUNT.unpack(self._source.read(_COUNT.size))[0])


class _Reader:
    """Reads what was packed, and refuses bytes that are left of a chunk."""

    def __init__(self, source: _Unpacked, inner: Encoding, elements: int, key: StreamKey) -> None:
        self._source = source
        self._reader = inner.reader(source, elements, key)
        self._left = elements

    def read(self, out: torch.Tensor) -> None:
        self._reader.read(out)
        self._left -= len(out)
        if not self._left and self._source.held:
            raise EncodingError(f"{self._source.held} unpacked bytes follow the last value of the update")
