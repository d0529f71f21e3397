"""Who shares the reading of a stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class ReadingShare:
    """The part of each step's examples that is read here: that of `rank` among `ranks`."""

    rank: int
    ranks: int

    def lanes(self, lanes: int) -> range:
        """Those of so many lanes that it reads: its own, or one that it shares where there are fewer than
        ranks."""
        if self.ranks <= lanes:
            return range(self.rank, lanes, self.ranks)
        return range(self.rank % lanes, self.rank % lanes + 1)

    def turn(self, lane: int, lanes: int) -> tuple[int, int]:
        """(its turn, how many take turns) in one of its lanes."""
        return self.rank // lanes, sharers(lane, lanes, self.ranks)


def sharers(lane: int, lanes: int, ranks: int) -> int:
    """How many ranks share a lane."""
    return max(1, -(-(ranks - lane) // lanes))


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
