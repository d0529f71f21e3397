"""Who shares the reading of a stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class ReadingShare:
    """The part of each step's examples that is read here: that of `rank` among `ranks`."""

    rank: int
    ranks: int


def largest_share(examples: int, ranks: int, lanes: int = 0) -> int:
    """The most of so many examples in a row that one of `ranks` takes.

    `lanes` are those of tar shards, which come in turn and belong to one rank or several; 0 where examples
    are shared out evenly.
    """
    if not lanes:
        return -(-examples // ranks)
    if ranks > lanes:
        of_lane = -(-examples // lanes)
        return -(-of_lane // (ranks // lanes))
    owners = [lane % ranks for lane in range(lanes)]
    rounds, rest = divmod(examples, lanes)
    whole = Counter(owners * rounds)
    return max(max((whole + Counter((owners * 2)[i : i + rest])).values(), default=0) for i in range(lanes))


WHOLE = ReadingShare(0, 1)
