"""Which client has which rows of a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Split:
    """All clients' rows in one array: client i has `rows[offsets[i]:offsets[i + 1]]`, ascending.

    `names` are what the partition calls the clients, unchecked; None where it does not.
    """

    rows: np.ndarray
    offsets: np.ndarray
    names: tuple[str, ...] | None = None

    def of(self, index: int) -> np.ndarray:
        """Row numbers of one client, int64."""
        return self.rows[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """Number of rows of each client."""
        return np.diff(self.offsets)

    @classmethod
    def from_owners(cls, owners: np.ndarray, count: int, names: tuple[str, ...] | None = None) -> Split:
        """From the client's number of each row."""
        narrow = np.int32 if len(owners) < 2**31 else np.int64
        rows = np.argsort(owners, kind="stable").astype(narrow)
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(owners, minlength=count), out=offsets[1:])
        return cls(rows, offsets, names)
