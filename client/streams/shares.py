"""Who shares the reading of a stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadingShare:
    """The part of each step's examples that is read here: that of `rank` among `ranks`."""

    rank: int
    ranks: int


WHOLE = ReadingShare(0, 1)
