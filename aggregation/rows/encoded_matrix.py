"""Updates kept as encoded files, decoded as they are read: rules see decoded rows, a block at a time.

An update stays the bytes that its silo signed. Each pass over the rows decodes them again, which is about as
fast as reading the float32 values would be, and takes no memory beyond one block of the matrix.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

import torch
from blake3 import blake3
from typing_extensions import override

from roundtable.aggregation.rows.file_matrix import FileMatrix, FileRows
from roundtable.aggregation.rows.matrix import BLOCK_BYTES, Block, block_ranges, block_width
from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.core.encodings import GRID, Encoding, StreamKey, VectorReader
from roundtable.core.errors import EncodingError, InvalidUpdate
from roundtable.core.machine.file_access import PLAIN_READ
from roundtable.core.paths import AnyPath

_READ = 4 << 20

DECODED_BYTES = 8 << 20
"""Decoded values of all rows that are held at a time, as long as that is some whole grids of each."""


class FileBytes:
    """The bytes of a file in order, as a ByteSource; hashed where that is asked for."""

    def __init__(self, path: AnyPath, *, hashed: bool = False) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, PLAIN_READ)
        self._left = os.fstat(self._file).st_size
        self._hash = blake3() if hashed else None

    def read(self, count: int) -> memoryview:
        self._take(count)
        parts = bytearray()
        while len(parts) < count:
            part = os.read(self._file, count - len(parts))
            if not part:
                raise EncodingError(f"{self.path.name} was cut short while it was read")
            parts += part
        if self._hash is not None:
            self._hash.update(parts)
        return memoryview(parts)

    def skip(self, count: int) -> None:
        if self._hash is not None:
            while count:
                count -= len(self.read(min(count, _READ)))
            return
        self._take(count)
        os.lseek(self._file, count, os.SEEK_CUR)

    def digest(self) -> str:
        """The digest of the whole file, which is read to its end."""
        assert self._hash is not None
        self.skip(self._left)
        return self._hash.hexdigest()

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return self._left

    def close(self) -> None:
        """Closes the file; twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _take(self, count: int) -> None:
        if count > self._left:
            raise EncodingError(f"the update ends {count - self._left} bytes too early")
        self._left -= count


class EncodedMatrix(FileRows):
    """Rows of `columns` values, encoded in files: row i as `encodings[i]` with the stream key `keys[i]`.

    `digests` are the BLAKE3 of each file; where they are given, every pass over the rows ends with
    DamagedRows unless it has read these. Raises InvalidUpdate (`layout`) where a file is missing, or is no
    such update.
    """

    def __init__(
        self,
        paths: Sequence[AnyPath],
        columns: int,
        encodings: Sequence[Encoding],
        keys: Sequence[StreamKey],
        digests: Sequence[str] = (),
    ) -> None:
        if not len(keys) == len(encodings) == len(paths) or (digests and len(digests) != len(paths)):
            raise InvalidUpdate(
                "layout", f"{len(keys)} keys and {len(digests)} digests for {len(paths)} rows"
            )
        self._paths = [Path(path) for path in paths]
        self._columns = columns
        self._encodings = tuple(encodings)
        self._keys = tuple(keys)
        self._digests = tuple(digests)
        self._here: _Pass | None = None
        for path in self._paths:
            if not path.is_file():
                raise InvalidUpdate("layout", f"update {path} is missing")

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
        if self._here is None or start < self._here.begin:
            self._close()
            self._here = self._pass()
        values = self._here.window(start, stop)
        if stop == self._columns:
            self._close()
        return values

    @override
    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        # What is decoded is read again at once, from the cache; but each row by some whole grids.
        budget = min(budget_bytes, max(DECODED_BYTES, self.rows * 4 * 8 * GRID))
        width = min(block_width(self.rows, 4, budget), -(-self._columns // GRID) * GRID)
        one = self._pass()
        try:
            for start, stop in block_ranges(self._columns, max(width, GRID)):
                yield start, stop, one.window(start, stop)
        finally:
            one.close()

    @override
    def subset(self, indices: Sequence[int]) -> EncodedMatrix:
        digests = [self._digests[index] for index in indices] if self._digests else ()
        paths, keys = [self._paths[i] for i in indices], [self._keys[i] for i in indices]
        encodings = [self._encodings[i] for i in indices]
        return EncodedMatrix(paths, self._columns, encodings, keys, digests)

    def _pass(self) -> _Pass:
        return _Pass(self._paths, self._columns, self._encodings, self._keys, self._digests)

    def _close(self) -> None:
        if self._here is not None:
            self._here.close()
        self._here = None


class _Pass:
    """One way through the columns of all rows. What has been decoded last stays until the next window."""

    def __init__(
        self,
        paths: Sequence[Path],
        columns: int,
        encodings: Sequence[Encoding],
        keys: Sequence[StreamKey],
        digests: Sequence[str],
    ) -> None:
        self._columns = columns
        self._digests = digests
        self._sources = [FileBytes(path, hashed=bool(digests)) for path in paths]
        opened = zip(encodings, self._sources, keys, strict=True)
        self._readers: list[VectorReader] = [
            encoding.reader(file, columns, key) for encoding, file, key in opened
        ]
        self._held = torch.empty(len(paths), 0)
        self.begin = 0
        self._end = 0

    def window(self, start: int, stop: int) -> torch.Tensor:
        """Columns start to stop, none of them before `begin`; the last ones end the pass."""
        while self._end < start // GRID * GRID:
            self._advance(self._end, min(self._end + 16 * GRID, start // GRID * GRID))
        upto = min(-(-stop // GRID) * GRID, self._columns)
        if upto > self._end or start < self.begin:
            self._advance(start // GRID * GRID, upto)
        if self._end == self._columns:
            self._check()
        return self._held[:, start - self.begin : stop - self.begin]

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _advance(self, begin: int, end: int) -> None:
        """Holds the columns from `begin`, of which some may be there already, to `end`."""
        kept = self._held[:, begin - self.begin :] if begin < self._end else self._held[:, :0]
        following = torch.empty(len(self._readers), end - begin)
        following[:, : kept.shape[1]] = kept
        for row, (reader, source) in enumerate(zip(self._readers, self._sources, strict=True)):
            try:
                reader.read(following[row, kept.shape[1] :])
            except EncodingError as error:
                self._damaged()
                raise InvalidUpdate("layout", f"update {source.path.name}: {error}") from error
        self._held, self.begin, self._end = following, begin, end

    def _check(self) -> None:
        for source in self._sources:
            if source.left:
                self._damaged()
                raise InvalidUpdate("layout", f"update {source.path.name}: {source.left} bytes too many")
        self._damaged()

    def _damaged(self) -> None:
        """Raises DamagedRows where files are not those of their digests."""
        if not self._digests:
            return
        found = [source.digest() for source in self._sources]
        wrong = tuple(want for want, got in zip(self._digests, found, strict=True) if want != got)
        if wrong:
            raise DamagedRows(wrong)


def rows_in_files(
    paths: Sequence[AnyPath],
    columns: int,
    encodings: Sequence[Encoding],
    keys: Sequence[StreamKey],
    digests: Sequence[str] = (),
) -> FileRows:
    """Updates in files as a matrix, row i as `encodings[i]`: mapped as they lie where all are plain arrays of
    one kind."""
    kinds = {encoding.dense_dtype for encoding in encodings} or {torch.float32}
    if len(kinds) > 1 or None in kinds:
        return EncodedMatrix(paths, columns, encodings, keys, digests)
    name = str(kinds.pop()).removeprefix("torch.")
    return FileMatrix(
        paths, columns, cast("Literal['float32', 'bfloat16', 'float16']", name), digests=digests
    )
