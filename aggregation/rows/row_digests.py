"""Rows hashed as they are read: what a rule was given is what arrived, or the pass over it fails.

A digest that was right when a file arrived says nothing of what the disk gives back when the file is read.
So the very bytes that are handed on are hashed, with BLAKE3, in every pass from the first column to the last;
the last block of a pass is handed on only if all rows are what they should be. A model is made of whole
passes. What is read otherwise, samples of columns for the diagnosis, is not hashed: no model depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from roundtable.core.errors import StorageError


class DamagedRows(StorageError):
    """Rows whose bytes, as they were read, are not those of their digests."""

    def __init__(self, digests: tuple[str, ...]) -> None:
        super().__init__(
            f"{len(digests)} updates have changed on the disk since they arrived: "
            + ", ".join(digest[:12] for digest in digests)
        )
        self.digests = digests


class RowDigests:
    """The digests of rows of `size` bytes each, and how far the present pass over them has come."""

    def __init__(self, digests: Sequence[str], size: int) -> None:
        self.digests = tuple(digests)
        self._size = size
        self._next = 0
        self._hashes = [blake3() for _ in self.digests]

    def take(self, position: int, pieces: Sequence[memoryview]) -> None:
        """Hashes the bytes of each row from `position` on. DamagedRows where they end a pass that is wrong.

        Position 0 begins a pass; what does not go on where the last piece ended is no part of one.
        """
        if position == 0:
            self._next = 0
            self._hashes = [blake3() for _ in self.digests]
        if position != self._next:
            return
        for hasher, piece in zip(self._hashes, pieces, strict=True):
            hasher.update(piece)
            self._next = position + len(piece)
        if self._next == self._size:
            found = [hasher.hexdigest() for hasher in self._hashes]
            wrong = tuple(want for want, got in zip(self.digests, found, strict=True) if want != got)
            if wrong:
                raise DamagedRows(wrong)
