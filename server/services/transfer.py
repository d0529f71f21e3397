"""Bytes in chunks, both ways: files are read and written in threads, beside the network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from blake3 import blake3

from roundtable.core.errors import StorageError
from roundtable.core.failpoints import failpoint
from roundtable.core.machine.file_access import PLAIN_READ, read_at
from roundtable.proto import CHUNK_BYTES, agent_pb2
from roundtable.proto.pieces import Piece
from roundtable.server.auth.access import Context, Refusal
from roundtable.server.door.from_operators import DownloadWish
from roundtable.server.storage.artifact_store import ArtifactStore, DamagedArtifact
from roundtable.server.storage.blobs import BlobWriter

Result = TypeVar("Result")

MAX_CHUNK_BYTES = 2 << 20
# Chunks that one visit to a thread reads or writes: on a busy machine each visit waits for its turn.
AT_ONCE = 4


class Seen:
    """An upload's messages, with its header kept for the lines of the log."""

    def __init__(self, parts: AsyncIterator[Piece | agent_pb2.UploadHeader | None]) -> None:
        self._parts = aiter(parts)
        self.header = agent_pb2.UploadHeader()

    def __aiter__(self) -> AsyncIterator[Piece | agent_pb2.UploadHeader | None]:
        return self

    async def __anext__(self) -> Piece | agent_pb2.UploadHeader | None:
        part = await anext(self._parts)
        if isinstance(part, agent_pb2.UploadHeader):
            self.header = part
        return part

    def place(self) -> dict[str, object]:
        """The fields that log lines about this upload carry."""
        step = self.header.step
        return {"job": step.job, "round": step.round, "attempt": step.attempt, "phase": step.phase}


class Turnstile:
    """Lets a few uploads work at a time, each for a moment.

    Thousands of short ones that come at once would otherwise fill the event loop, and every other call would
    wait until all are done. One that takes longer, on a slow line, gives its place back and goes on.
    """

    def __init__(self, places: int = 8, seconds: float = 0.1) -> None:
        self._places = asyncio.Semaphore(places)
        self.free = places
        self._seconds = seconds

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Waits for a place, and holds it for the block or for a moment, whichever ends first."""
        await self._places.acquire()
        self.free -= 1
        given_back = False

        def give_back() -> None:
            nonlocal given_back
            if not given_back:
                given_back = True
                self.free += 1
                self._places.release()

        moment = asyncio.get_running_loop().call_later(self._seconds, give_back)
        try:
            yield
        finally:
            moment.cancel()
            give_back()


class NewestCalls(Generic[Result]):
    """Of the calls that bring one and the same thing the newest goes on, once an older one has ended."""

    def __init__(self) -> None:
        self._active: dict[str, asyncio.Task[Result]] = {}

    async def run(self, name: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """What the work returns. Refusal where a newer call has taken its place."""
        while (older := self._active.get(name)) is not None:
            older.cancel()
            await asyncio.wait([older])
            if self._active.get(name) is older:
                del self._active[name]
        task = self._active[name] = asyncio.get_running_loop().create_task(work())
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            if self._active.get(name) is not task:
                raise Refusal(
                    grpc.StatusCode.ABORTED, "another call with the same has taken the place of this one"
                ) from None
            raise
        finally:
            if self._active.get(name) is task:
                del self._active[name]


async def in_thread(threads: ThreadPoolExecutor, work: Callable[..., Result], *arguments: object) -> Result:
    """Runs blocking work on a file. Cancelled, it ends only after the thread has let go of the file."""
    future = asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await _let_go(future)
        raise


async def _let_go(future: asyncio.Future[Any]) -> None:
    """Waits for the end of what nobody wants any more, and asks what came of it, or asyncio logs that."""
    await asyncio.wait([future])
    future.exception()


async def send_artifact(
    context: Context, artifacts: ArtifactStore, wish: DownloadWish, threads: ThreadPoolExecutor
) -> int:
    """Sends an artifact from the wished offset onwards, and counts the bytes. DamagedArtifact if it is whole
    nowhere.

    One that was damaged as it was read is mended, and the caller told to ask again.
    """
    loop, blocking = asyncio.get_running_loop(), artifacts.threads(threads)
    path = artifacts.known(wish.digest)
    if path is None:
        path = await loop.run_in_executor(blocking, artifacts.path, wish.digest)
    try:
        return await send(context, path, wish.digest, wish.offset, threads)
    except DamagedArtifact as error:
        await loop.run_in_executor(blocking, artifacts.mend, wish.digest)
        raise Refusal(
            grpc.StatusCode.UNAVAILABLE, f"{error}; it is whole again: ask for it from the start"
        ) from error


async def send(context: Context, path: Path, digest: str, offset: int, threads: ThreadPoolExecutor) -> int:
    """Writes the file's chunks from `offset` onwards, and counts the bytes; waits whenever the network does.

    What goes out from the first byte on is hashed, and its last chunks are kept back if it is not the
    artifact: DamagedArtifact. Who goes on from the middle checks the whole, and begins anew if that is wrong.
    """
    loop = asyncio.get_running_loop()
    hasher = None if offset else blake3()
    file, first = os.open(path, PLAIN_READ), offset
    ahead: asyncio.Future[list[bytes]] | None = None
    try:
        size = os.fstat(file).st_size
        if offset > size:
            raise Refusal(
                grpc.StatusCode.OUT_OF_RANGE, f"offset {offset} is beyond the end: there are {size} bytes"
            )
        while offset < size:
            ahead = ahead or loop.run_in_executor(threads, _read, file, offset, hasher)
            pieces = await asyncio.shield(ahead)
            if not pieces:
                raise StorageError(f"{path} was cut short while it was read: check the disk")
            after = offset + sum(map(len, pieces))
            ahead = loop.run_in_executor(threads, _read, file, after, hasher) if after < size else None
            if ahead is None and hasher is not None and (found := hasher.hexdigest()) != digest:
                raise DamagedArtifact(digest, f"artifact {digest} was read with the digest {found}")
            for data in pieces:
                await context.write(Piece(offset, data))
                offset += len(data)
                failpoint("model_part_sent")
        return offset - first
    finally:
        if ahead is not None:
            await _let_go(ahead)
        os.close(file)


async def receive(
    pieces: AsyncIterator[Piece], writer: BlobWriter, size: int, threads: ThreadPoolExecutor
) -> None:
    """Appends chunks to the writer; they are written while the next ones arrive.

    Refuses a chunk that does not follow on, is larger than agreed, or goes beyond the announced size.
    """
    loop = asyncio.get_running_loop()
    pending: asyncio.Future[None] | None = None
    waiting: list[bytes | memoryview] = []
    expected = writer.offset
    try:
        async for piece in pieces:
            if piece.offset != expected:
                raise Refusal(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"a chunk at offset {piece.offset} came where {expected} was expected; go on from there",
                )
            data = piece.data
            expected += len(data)
            if not 0 < len(data) <= MAX_CHUNK_BYTES or expected > size:
                raise Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"a chunk of {len(data)} bytes at {piece.offset}: chunks hold between 1 and "
                    f"{MAX_CHUNK_BYTES}, and {size} were announced in all",
                )
            waiting.append(data)
            if pending is None or pending.done() or len(waiting) == AT_ONCE:
                if pending is not None:
                    await asyncio.shield(pending)
                pending = loop.run_in_executor(threads, _write, writer, waiting)
                waiting = []
        if pending is not None:
            await asyncio.shield(pending)
        if waiting:
            pending = loop.run_in_executor(threads, _write, writer, waiting)
            await asyncio.shield(pending)
    finally:
        if pending is not None:
            await _let_go(pending)


def _read(file: int, offset: int, hasher: blake3 | None) -> list[bytes]:
    pieces = []
    for _ in range(AT_ONCE):
        data = read_at(file, CHUNK_BYTES, offset)
        if not data:
            break
        if hasher is not None:
            hasher.update(data)
        pieces.append(data)
        offset += len(data)
    return pieces


def _write(writer: BlobWriter, pieces: list[bytes | memoryview]) -> None:
    for data in pieces:
        writer.write(data)
