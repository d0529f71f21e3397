"""The files that a round's new vectors go to as they are made: the coordinator holds some blocks of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from roundtable.core.machine.file_access import PLAIN_WRITE, write_part
from roundtable.core.machine.resident_memory import drop_pages
from roundtable.core.models import Model, model_head, model_tail
from roundtable.engine.combining.vector_places import placed
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.blobs import BlobWriter, os_error

SMALL_BYTES = 64 << 10
"""What is written at once: a thread costs more than so few bytes."""
WAITING = 2
"""Blocks that wait to be written while the next one is made."""
RELEASED_BYTES = 4 << 20


class RoundFiles:
    """Places for one round's vectors: the new model's file, and scratch files for the state.

    `model` says what the new model is but for its vector. What is written goes to the files in a thread of
    its own, in order; an error there is raised from the next call. All methods but `finish` are the
    combining thread's.
    """

    def __init__(self, artifacts: ArtifactStore, model: Model) -> None:
        self._artifacts = artifacts
        self._model = model
        self._mapped: list[tuple[int, int]] = []
        self._waiting: deque[Future[None]] = deque()
        self._files = ExitStack()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="new-model")
        self._new: _ModelFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        self._files.close()

    def maps(self, vectors: Iterable[Tensor]) -> None:
        """These lie in files that do not change: `passed` may drop their pages."""
        self._mapped.extend((v.data_ptr(), v.data_ptr() + v.nbytes) for v in vectors if v.numel())

    def model(self, columns: int) -> _ModelFile:
        self._new = _ModelFile(self, self._artifacts, self._files, model_head(self._model))
        return self._new

    def state(self, columns: int) -> _ScratchVector:
        path = self._files.enter_context(self._artifacts.scratch())
        return _ScratchVector(self, path, columns, self._files)

    def keep(self, vector: Tensor) -> Tensor:
        return placed(vector, self.model(vector.numel()))

    def passed(self, part: Tensor) -> None:
        place = part.data_ptr()
        if any(start <= place < stop for start, stop in self._mapped):
            drop_pages(part)

    def released(self, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The same bytes in slices, whose pages go once the next slice is asked for."""
        for block in blocks:
            whole = memoryview(block)
            for start in range(0, len(whole), RELEASED_BYTES):
                part = whole[start : start + RELEASED_BYTES]
                yield part
                if isinstance(block, memoryview):
                    self.passed(torch.from_numpy(np.frombuffer(part, dtype=np.uint8)))

    def finish(self) -> tuple[str, int]:
        """The new model's digest and size, once it is durable and pinned. Any thread may call it, once."""
        assert self._new is not None
        return self._new.finish(model_tail(self._model))

    def write(self, work: Callable[[], None], size: int) -> None:
        """Has the thread write `size` bytes, once little enough waits before them."""
        if size <= SMALL_BYTES and not self._waiting:
            work()
            return
        while len(self._waiting) >= WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(work))

    def settle(self) -> None:
        """Waits until all of it is written."""
        while self._waiting:
            self._waiting.popleft().result()


class _ModelFile:
    """The new model's artifact: head, then the vector as it comes."""

    def __init__(self, files: RoundFiles, artifacts: ArtifactStore, stack: ExitStack, head: bytes) -> None:
        self._files = files
        self._artifacts = artifacts
        self._stack = stack
        self._head = head
        self._open = ExitStack()
        self._writer: BlobWriter | None = None

    def begin(self) -> None:
        self._files.settle()
        self._open.close()
        self._open = self._stack.enter_context(ExitStack())
        self._writer = self._open.enter_context(self._artifacts.creating())
        self._writer.append(self._head)

    def take(self, start: int, values: Tensor) -> None:
        writer = self._writer
        assert writer is not None
        data = _bytes_of(values)
        self._files.write(lambda: writer.append(data), len(data))

    def end(self) -> Tensor:
        self._files.settle()
        return torch.empty(0)

    def finish(self, tail: Iterable[memoryview]) -> tuple[str, int]:
        assert self._writer is not None
        for block in tail:
            self._writer.append(block)
        return self._writer.finish()


class _ScratchVector:
    """A vector in a file that lasts as long as the round is combined."""

    def __init__(self, files: RoundFiles, path: Path, columns: int, stack: ExitStack) -> None:
        self._files = files
        self._path = path
        self._columns = columns
        try:
            self._file = os.open(path, PLAIN_WRITE | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise os_error(error, path) from error
        stack.callback(os.close, self._file)

    def begin(self) -> None:
        return

    def take(self, start: int, values: Tensor) -> None:
        data = _bytes_of(values)
        self._files.write(lambda: self._write(data, 4 * start), len(data))

    def end(self) -> Tensor:
        self._files.settle()
        if not self._columns:
            return torch.empty(0)
        vector = torch.from_numpy(np.memmap(self._path, dtype=np.float32, mode="c", shape=(self._columns,)))
        self._files.maps([vector])
        return vector

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                written = write_part(self._file, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise os_error(error, self._path) from error


def _bytes_of(values: Tensor) -> memoryview:
    return values.detach().float().contiguous().view(torch.uint8).numpy().data
