"""Bytes in chunks, both ways: files are read and written in threads, one chunk ahead of the network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from roundtable.core.errors import StorageError
from roundtable.proto import CHUNK_BYTES
from roundtable.proto.common_pb2 import Chunk
from roundtable.server.access import Context, Refusal
from roundtable.server.blobs import BlobWriter

MAX_CHUNK_BYTES = 2 * CHUNK_BYTES


async def send(context: Context, path: Path, offset: int, threads: ThreadPoolExecutor) -> None:
    """Writes the file's chunks from `offset` onwards; waits whenever the network does."""
    loop = asyncio.get_running_loop()
    file = os.open(path, os.O_RDONLY)
    ahead: asyncio.Future[bytes] | None = None
    try:
        size = os.fstat(file).st_size
        if offset > size:
            raise Refusal(
                grpc.StatusCode.OUT_OF_RANGE, f"offset {offset} is beyond the end: there are {size} bytes"
            )
        while offset < size:
            data = await (ahead or loop.run_in_executor(threads, os.pread, file, CHUNK_BYTES, offset))
            if not data:
                raise StorageError(f"{path} was cut short while it was read: check the disk")
            after = offset + len(data)
            ahead = (
                loop.run_in_executor(threads, os.pread, file, CHUNK_BYTES, after) if after < size else None
            )
            await context.write(Chunk(offset=offset, data=data))
            offset = after
    finally:
        if ahead is not None:
            await asyncio.wait([ahead])
        os.close(file)


async def receive(
    chunks: AsyncIterator[Chunk], writer: BlobWriter, size: int, threads: ThreadPoolExecutor
) -> None:
    """Appends chunks to the writer; each is written while the next one arrives.

    Refuses a chunk that does not follow on, is larger than agreed, or goes beyond the announced size.
    """
    loop = asyncio.get_running_loop()
    pending: asyncio.Future[None] | None = None
    expected = writer.offset
    try:
        async for chunk in chunks:
            if chunk.offset != expected:
                raise Refusal(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"a chunk at offset {chunk.offset} came where {expected} was expected; go on from there",
                )
            # Each access of the field copies it.
            data = chunk.data
            expected += len(data)
            if len(data) > MAX_CHUNK_BYTES or expected > size:
                raise Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"a chunk of {len(data)} bytes at {chunk.offset}: chunks hold at most "
                    f"{MAX_CHUNK_BYTES}, and {size} were announced in all",
                )
            if pending is not None:
                await pending
            pending = loop.run_in_executor(threads, writer.write, data)
        if pending is not None:
            await pending
            pending = None
    finally:
        if pending is not None:
            await asyncio.wait([pending])
            pending.exception()
