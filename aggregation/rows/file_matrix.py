"""Updates kept as files, one row each: for rounds whose clients × parameters do not fit in memory.

Rows are read with positioned reads into two buffers that take turns: while a rule works on one block, a
thread fills the other. What stays in memory is two blocks, however large the files are; the pages that the
system caches belong to nobody and go when memory is needed. A file that is cut short while it is being read
raises an error, where a mapping of it would end the process with SIGBUS. Rows that come with a digest are
hashed as they are read (`row_digests.py`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from typing_extensions import override

from roundtable.aggregation.rows.matrix import (
    BLOCK_BYTES,
    Block,
    SelectedRows,
    UpdateMatrix,
    block_ranges,
    block_width,
)
from roundtable.aggregation.rows.row_digests import RowDigests
from roundtable.core.errors import InvalidUpdate
from roundtable.core.machine.file_access import PLAIN_READ, read_into
from roundtable.core.paths import AnyPath

ROW_COLUMNS = 1 << 20
"""Columns of a block at most: few rows are read fast enough in pieces of 4 MiB, and more is only memory."""

_STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class FileRows(ABC):
    """Rows that lie in files, one in each: those that are not chosen need not be read."""

    @property
    @abstractmethod
    def rows(self) -> int: ...

    @property
    @abstractmethod
    def columns(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @abstractmethod
    def block(self, start: int, stop: int) -> torch.Tensor: ...

    @abstractmethod
    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]: ...

    @abstractmethod
    def subset(self, indices: Sequence[int]) -> FileRows:
        """The rows named by `indices` as a matrix of their own: the other files are not read at all."""

    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        return SelectedFiles(self, indices, self.subset(indices))


class FileMatrix(FileRows):
    """Rows of little-endian values in files: row i is `columns` values from byte `offset` of file i.

    `digests` are the BLAKE3 of each row's bytes; where they are given, every pass over the rows ends with
    DamagedRows unless it has read these. Raises InvalidUpdate (`layout`) where a file is missing or shorter
    than its row.
    """

    def __init__(
        self,
        paths: Sequence[AnyPath],
        columns: int,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        offset: int = 0,
        digests: Sequence[str] = (),
    ) -> None:
        if dtype not in _STORED:
            raise InvalidUpdate("layout", f"rows are stored as float32, bfloat16 or float16, not {dtype!r}")
        self._paths = [Path(path) for path in paths]
        self._columns = columns
        self._stored = _STORED[dtype]
        self._offset = offset
        if digests and len(digests) != len(paths):
            raise InvalidUpdate("layout", f"{len(digests)} digests for {len(paths)} rows")
        self._digests = tuple(digests)
        self._here = self._pass()
        needed = offset + columns * self._stored.itemsize
        for path in self._paths:
            size = path.stat().st_size if path.is_file() else -1
            if size < needed:
                state = f"has {size} bytes" if size >= 0 else "is missing"
                raise InvalidUpdate(
                    "layout", f"update {path} {state}; {columns} values of {dtype} need {needed} bytes"
                )

    @property
    @override
    def rows(self) -> int:
        return len(self._paths)

    @property
    @override
    def columns(self) -> int:
        return self._columns

    @override
    def block(self, start: int, stop: int) -> torch.Tensor:
        with ExitStack() as stack:
            files = self._open(stack)
            buffer = torch.empty(self.rows, stop - start, dtype=self._stored)
            return self._read(files, buffer, start, stop, self._here)

    @override
    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        width = min(block_width(self.rows, 4, budget_bytes // 2), ROW_COLUMNS, max(self.columns, 1))
        ranges = list(block_ranges(self.columns, width))
        buffers = [torch.empty(self.rows, width, dtype=self._stored) for _ in range(min(2, len(ranges)))]
        with ExitStack() as stack:
            files = self._open(stack)
            reader = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="updates"))
            own = self._pass()
            ahead: Future[torch.Tensor] | None = None
            for index, (start, stop) in enumerate(ranges):
                values = ahead.result() if ahead else self._read(files, buffers[0], start, stop, own)
                if index + 1 < len(ranges):
                    following = buffers[(index + 1) % 2]
                    ahead = reader.submit(self._read, files, following, *ranges[index + 1], own)
                yield start, stop, values.float()

    @override
    def subset(self, indices: Sequence[int]) -> FileMatrix:
        chosen = object.__new__(FileMatrix)
        chosen._paths = [self._paths[index] for index in indices]
        chosen._columns, chosen._stored, chosen._offset = self._columns, self._stored, self._offset
        chosen._digests = tuple(self._digests[index] for index in indices) if self._digests else ()
        chosen._here = chosen._pass()
        return chosen

    def _pass(self) -> RowDigests | None:
        """What hashes one pass over the rows; None where nothing says what they should be."""
        size = self._columns * self._stored.itemsize
        return RowDigests(self._digests, size) if self._digests else None

    def _open(self, stack: ExitStack) -> list[int]:
        files = []
        for path in self._paths:
            file = os.open(path, PLAIN_READ)
            stack.callback(os.close, file)
            files.append(file)
        return files

    def _read(
        self, files: list[int], buffer: torch.Tensor, start: int, stop: int, hashed: RowDigests | None
    ) -> torch.Tensor:
        values = buffer[:, : stop - start]
        begin = start * self._stored.itemsize
        position = self._offset + begin
        pieces = [memoryview(row) for row in values.view(torch.uint8).numpy()]
        for file, path, view in zip(files, self._paths, pieces, strict=True):
            done = 0
            while done < len(view):
                count = read_into(file, view[done:], position + done)
                if count == 0:
                    raise InvalidUpdate("layout", f"update {path} was cut short while it was read")
                done += count
        if hashed is not None:
            hashed.take(begin, pieces)
        return values


class SelectedFiles(SelectedRows):
    """Some rows of `FileRows`; the files of the others are not read."""

    def __init__(self, base: UpdateMatrix, indices: Sequence[int], files: FileRows) -> None:
        super().__init__(base, indices)
        self.files = files

    @override
    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.files.block(start, stop)

    @override
    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        return self.files.blocks(budget_bytes)

    @override
    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        return SelectedFiles(self, indices, self.files.subset(indices))
