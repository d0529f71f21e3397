"""Caches downloaded models by digest."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from roundtable.client.agent.connection import Backoff, Link, calling
from roundtable.client.arriving_file import ArrivingFile
from roundtable.client.door import outgoing
from roundtable.client.door.model_names import ArtifactName, ModelHop
from roundtable.client.durable_files import digest_of, explained
from roundtable.client.model_route import ModelRoute
from roundtable.core.errors import EncodingError, ResourceError, TransferError, UnavailableError
from roundtable.core.failpoints import failpoint
from roundtable.core.model_delta import NAME_LENGTH, apply_delta
from roundtable.core.observability.logs import request_metadata
from roundtable.core.observability.transfer_figures import ModelArrival
from roundtable.proto import agent_pb2_grpc

_log = logging.getLogger("roundtable.agent")
_FREE_BYTES = 16 << 20
_DAMAGED_COPIES = 3

Received = Callable[[int, int], None]


class ModelCache:
    """Keeps the newest few artifacts in a folder, and the partial files of those being downloaded."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._turn = asyncio.Lock()
        self._arrived = ModelArrival()
        folder.mkdir(parents=True, exist_ok=True)

    async def obtain(
        self,
        link: Link,
        artifact: ArtifactName,
        received: Received,
        users: Callable[[], int],
        route: ModelRoute | None = None,
    ) -> Path:
        """What `fetch` gives, over as many connections as it takes; TransferError at a third bad copy."""
        backoff, damaged = Backoff(), 0
        while True:
            stub = await link.stub()
            try:
                with calling("the model could not be downloaded"):
                    return await self.fetch(stub, artifact, received, users(), route)
            except UnavailableError as error:
                _log.info("%s: the download is resumed: %s", artifact.digest[:12], error)
            except TransferError as error:
                damaged += 1
                if damaged == _DAMAGED_COPIES:
                    raise
                _log.warning("%s: %s", artifact.digest[:12], error)
            await asyncio.sleep(backoff.next())

    async def fetch(
        self,
        stub: agent_pb2_grpc.AgentsAsyncStub,
        artifact: ArtifactName,
        received: Received,
        users: int = 1,
        route: ModelRoute | None = None,
    ) -> Path:
        """The artifact's file, downloaded from where an earlier attempt stopped, and verified.

        With a `route` from a model that is here, what changed is downloaded in the place of the whole.

        `received` is called with (bytes here, bytes in all); while `users` steps are under way, the
        models that they may still read are kept. Raises TransferError for bytes that are
        not the artifact's, ResourceError for a full disk, and grpc's error for a lost connection.
        """
        async with self._turn:
            path = self._folder / f"{artifact.digest}.safetensors"
            if not path.is_file() or not await asyncio.to_thread(self._have, path):
                by_hops = route is not None and await self._follow(stub, route, artifact, received, users)
                if not by_hops:
                    # Before and not after: the pages of memory that the oldest file had serve the new one.
                    self._prune(max(self._keep, users) - 1)
                    await self._download(stub, artifact, path, received)
            os.utime(path)
            return path

    def arrived(self, before: ModelArrival) -> ModelArrival:
        """`before` and what has arrived since this was asked last."""
        here, self._arrived = self._arrived, ModelArrival()
        return ModelArrival(before.size + here.size, before.seconds + here.seconds)

    def check(self, path: Path) -> None:
        """TransferError unless a file that `fetch` gave is still whole: what came of it must not leave.
        Blocks."""
        if not _is_whole(path):
            raise TransferError(
                f"the model {path.stem[:12]} was damaged on the silo's own disk while it was used: nothing "
                "that came of it is sent, and the next step downloads it again; check the disk"
            )

    def _have(self, path: Path) -> bool:
        """Whether the file is here and whole; a damaged one is removed. Blocks."""
        # What was whole once may have been cut short by a crash, or have rotted since.
        whole = _is_whole(path)
        if not whole and path.is_file():
            _log.warning("the cached model %s is damaged and is downloaded again", path.stem[:12])
            path.unlink()
        return whole

    async def _follow(
        self,
        stub: agent_pb2_grpc.AgentsAsyncStub,
        route: ModelRoute,
        artifact: ArtifactName,
        received: Received,
        users: int,
    ) -> bool:
        """Makes the model of one that is here; False where there is no such way, or it does not lead
        there."""
        here = {file.stem[:NAME_LENGTH]: file for file in self._folder.glob("*.safetensors")}
        hops = route.to(artifact, here.__contains__)
        if not hops:
            return False
        base = here[hops[0].base]
        # The newest of all, so that it stays while others make room.
        os.utime(base)
        self._prune(max(self._keep, users, 2) - 1)
        for hop in hops:
            try:
                base = await self._hop(stub, route, base, hop, received)
            except EncodingError as error:
                _log.warning("%s is downloaded whole: %s", artifact.digest[:12], error)
                await asyncio.to_thread(self._have, base)
                return False
        return base.stem == artifact.digest

    async def _hop(
        self,
        stub: agent_pb2_grpc.AgentsAsyncStub,
        route: ModelRoute,
        base: Path,
        hop: ModelHop,
        received: Received,
    ) -> Path:
        """The next model's file, made while what changed arrives; EncodingError where another one comes
        out."""
        delta = self._folder / f"{hop.delta.digest}.delta"
        arriving = ArrivingFile(delta.with_suffix(".partial"), hop.delta.size)

        def here(count: int, size: int) -> None:
            arriving.has(count)
            received(count, size)

        making = asyncio.create_task(asyncio.to_thread(self._step, route, base, arriving, hop))
        try:
            await self._download(stub, hop.delta, delta, here)
            return await asyncio.shield(making)
        finally:
            arriving.give_up()
            await asyncio.wait([making])
            if not making.cancelled():
                making.exception()
            arriving.close()
            delta.unlink(missing_ok=True)

    def _step(self, route: ModelRoute, base: Path, delta: ArrivingFile, hop: ModelHop) -> Path:
        """The next model's file; EncodingError where another one comes out. Blocks."""
        made = self._folder / f"{hop.delta.digest}.made"
        try:
            self._check_space(base.stat().st_size)
            digest = apply_delta(route.encoding, base, delta, made)
            if digest[:NAME_LENGTH] != hop.model:
                raise EncodingError(
                    f"what changed since {base.stem[:12]} makes {digest[:12]} of it, not {hop.model[:12]}"
                )
            path = self._folder / f"{digest}.safetensors"
            made.replace(path)
            return path
        except OSError as error:
            raise explained(error, made) from error
        finally:
            made.unlink(missing_ok=True)

    async def _download(
        self,
        stub: agent_pb2_grpc.AgentsAsyncStub,
        artifact: ArtifactName,
        path: Path,
        received: Received,
    ) -> None:
        partial = path.with_suffix(".partial")
        have = partial.stat().st_size if partial.exists() else 0
        if have > artifact.size:
            partial.unlink()
            have = 0
        self._check_space(artifact.size - have)
        digest = blake3()
        if have:
            await asyncio.to_thread(digest.update_mmap, partial)
        began = time.monotonic()
        try:
            await _receive(stub, artifact, partial, have, digest, received)
        except OSError as error:
            raise explained(error, partial) from error
        before = self._arrived
        taken = before.seconds + time.monotonic() - began
        self._arrived = ModelArrival(before.size + artifact.size - have, taken)
        if digest.hexdigest() != artifact.digest:
            partial.unlink()
            raise TransferError(
                f"the model {artifact.digest[:12]} arrived with other bytes than its digest says; "
                "it is downloaded again from the beginning at the next attempt"
            )
        partial.replace(path)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < needed + _FREE_BYTES:
            raise ResourceError(
                f"the silo's disk is full: {free / 1e6:,.1f} MB are free, the model needs "
                f"{needed / 1e6:,.1f} MB and {_FREE_BYTES / 1e6:.0f} MB stay free beside it; "
                "free some space in the agent's state folder"
            )

    def _prune(self, keep: int) -> None:
        files = sorted(self._folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[: max(0, len(files) - keep)]:
            file.unlink()


def _is_whole(path: Path) -> bool:
    """Whether a file is here and has the bytes of the digest in its name."""
    return path.is_file() and digest_of(path) == path.stem


async def _receive(
    stub: agent_pb2_grpc.AgentsAsyncStub,
    artifact: ArtifactName,
    partial: Path,
    have: int,
    digest: blake3,
    received: Received,
) -> None:
    with partial.open("ab") as file:
        if have:
            received(have, artifact.size)
        if have < artifact.size:
            call = stub.Download(outgoing.download(artifact.digest, have), metadata=request_metadata())
            async for chunk in call:
                if chunk.offset != have or have + len(chunk.data) > artifact.size:
                    call.cancel()
                    raise TransferError(
                        f"the model came with a piece at {chunk.offset} of {artifact.size} bytes, "
                        f"expected at {have}"
                    )
                file.write(chunk.data)
                file.flush()
                digest.update(chunk.data)
                have += len(chunk.data)
                received(have, artifact.size)
                failpoint("model_part")
    if have != artifact.size:
        raise TransferError(f"the model ended after {have} of {artifact.size} bytes")
