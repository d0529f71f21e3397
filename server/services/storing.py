"""Artifacts that operators store: what is taken, how much of it, without a word of what is secretly there.

Updates of silos and the state of noise and optimizers are not for operators to read, so no answer may tell
whether such bytes are here either: they are taken like any others. Who has shown all bytes of an artifact may
read it from then on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from blake3 import blake3
from sqlalchemy.engine import Connection

from roundtable.core.errors import TransferError
from roundtable.proto import operator_pb2
from roundtable.proto.pieces import Piece
from roundtable.server.auth.access import Refusal, principal
from roundtable.server.auth.quotas import Quotas
from roundtable.server.door.from_operators import StoredBlob, header_of
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.services import transfer
from roundtable.server.storage.retention import STORED_BY
from roundtable.server.store import ArtifactRow
from roundtable.server.store.artifacts import is_readable, note_upload

LEFT_FOR_JOBS = 0.05


class Storing:
    """Takes artifacts of operators, within their quotas."""

    def __init__(
        self, services: JobServices, threads: ThreadPoolExecutor, max_bytes: int, quotas: Quotas
    ) -> None:
        self._services = services
        self._threads = threads
        self._max_bytes = max_bytes
        self._quotas = quotas
        self._arriving: dict[tuple[str, str], int] = {}

    async def receive(self, requests: AsyncIterator[operator_pb2.PutPart]) -> operator_pb2.PutReply:
        """Takes an artifact, or the rest of it. Refusal, QuotaExceeded or TransferError for what is not."""
        content, who = await self._header(requests), principal().label
        database = self._services.database
        if await database.read(lambda connection: is_readable(connection, content.digest)):
            await self._mention(content)
            return operator_pb2.PutReply(offset=content.size, complete=True)
        # A name of an identity provider can hold anything, a file's name cannot.
        owner = f"{STORED_BY}{blake3(who.encode()).hexdigest()[:32]}"
        place = owner, content.digest
        if place in self._arriving:
            raise Refusal(
                grpc.StatusCode.ABORTED,
                f"{who} stores the artifact {content.digest[:12]} over another call already",
            )
        self._arriving[place] = content.size
        try:
            await transfer.in_thread(self._threads, self._make_room, who, owner)
            return await self._take(content, who, owner, requests)
        finally:
            del self._arriving[place]

    async def _take(
        self,
        content: StoredBlob,
        who: str,
        owner: str,
        requests: AsyncIterator[operator_pb2.PutPart],
    ) -> operator_pb2.PutReply:
        artifacts = self._services.artifacts
        writer = artifacts.receive(owner, content.digest, content.size)
        try:
            await transfer.in_thread(self._threads, writer.open)
            await transfer.receive(self._chunks(requests, who), writer, content.size, self._threads)
            if writer.offset < content.size:
                return operator_pb2.PutReply(offset=writer.offset)
            await transfer.in_thread(artifacts.threads(self._threads), writer.finish)
        finally:
            writer.close()
        try:
            await self._mention(content)
        finally:
            artifacts.unpin([content.digest])
        return operator_pb2.PutReply(offset=content.size, complete=True)

    def _make_room(self, who: str, owner: str) -> None:
        """Drops the oldest of what this operator left half stored; QuotaExceeded if all of it arrives now."""
        artifacts, most = self._services.artifacts, self._quotas.table.unfinished
        arriving = {digest for each, digest in self._arriving if each == owner}
        if len(arriving) > most:
            raise self._quotas.exceeded(
                who,
                "unfinished",
                f"{who} stores {most} artifacts at this moment: let one of them come to its end",
            )
        left = [digest for digest in artifacts.unfinished(owner) if digest not in arriving]
        for digest in left[: max(0, len(left) + len(arriving) - most)]:
            artifacts.drop(owner, digest)

    async def _chunks(self, requests: AsyncIterator[operator_pb2.PutPart], who: str) -> AsyncIterator[Piece]:
        async for part in requests:
            if part.WhichOneof("part") != "chunk":
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "after the header only chunks follow")
            self._quotas.store(who, len(part.chunk.data))
            yield Piece(part.chunk.offset, part.chunk.data)

    async def _header(self, requests: AsyncIterator[operator_pb2.PutPart]) -> StoredBlob:
        async for part in requests:
            if part.WhichOneof("part") != "header":
                break
            content = header_of(part)
            # What arrives at this moment takes its place, too; the rest is for everybody's jobs.
            free = self._services.artifacts.free_bytes() - sum(self._arriving.values())
            room = max(0, free - round(LEFT_FOR_JOBS * self._services.artifacts.disk_bytes()))
            if content.size > min(self._max_bytes, room):
                raise Refusal(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"an artifact of {content.size} bytes does not fit here: the limit is {self._max_bytes}, "
                    f"on the disk there is room for {room}; a twentieth of it is left for jobs",
                )
            return content
        raise Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            "a transfer begins with a header: BLAKE3 digest in 64 hexadecimal digits",
        )

    async def _mention(self, content: StoredBlob) -> None:
        row = ArtifactRow(content.digest, content.size, "upload", self._services.clock())

        def note(connection: Connection) -> None:
            # Within the transaction: what nobody mentions is deleted in the turn of another.
            size = self._services.artifacts.size(content.digest)
            if size != content.size:
                raise TransferError(
                    f"artifact {content.digest[:12]} has {size} bytes here, announced were {content.size}"
                )
            note_upload(connection, row)

        await self._services.database.write(note)
