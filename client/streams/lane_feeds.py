"""Where a share's examples of tar shards come from: lanes read here, or by processes that are ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from roundtable.client.streams.lanes import Lane, LanePlace, StreamSeed
from roundtable.client.streams.random_state import seed_generators
from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.streams.workers import Workers


class Fed(NamedTuple):
    """A lane's next example, where it is this share's (`mine`), and the lane's place after it."""

    mine: bool
    example: Any
    place: LanePlace


@dataclass(frozen=True)
class LaneStart:
    """A lane to read: its number, the place that it goes on from, and (part, parts) of its records."""

    number: int
    place: LanePlace
    share: tuple[int, int]


class LaneFeed:
    """Examples `first`, … of the whole that lie on these lanes, read in this process."""

    def __init__(self, source: TarShards, seed: StreamSeed, first: int, lanes: list[LaneStart]) -> None:
        self._source = source
        self._seed = seed
        self._lanes = {
            lane.number: Lane(
                source, seed, lane.number, lane.place, _before(first, lane.number, source.lanes), lane.share
            )
            for lane in lanes
        }

    def next(self, number: int) -> Fed:
        """Example `number` of the whole, the next of its lane; within a `DataRandomness`."""
        lane = self._lanes[number % self._source.lanes]
        record = lane.take()
        if record is None:
            return Fed(False, None, lane.place)
        seed_generators(self._seed.number("decode", number))
        return Fed(True, self._source.decoded(record), lane.place)

    def close(self) -> None:
        """Closes shards."""
        for lane in self._lanes.values():
            lane.close()


class WorkerFeed:
    """The same from `workers.count` processes, or as many of them as divide the number of lanes.

    Each worker has lanes of its own, so that none reads what another one does.
    """

    def __init__(
        self, source: TarShards, seed: StreamSeed, first: int, lanes: list[LaneStart], workers: Workers
    ) -> None:
        turn = sorted(lanes, key=lambda lane: (lane.number - first) % source.lanes)
        self._count = max(n for n in range(1, min(workers.count, len(turn)) + 1) if len(turn) % n == 0)
        self._place_of = {lane.number: place % self._count for place, lane in enumerate(turn)}
        self._lanes = source.lanes
        self._waiting: list[deque[Fed]] = [deque() for _ in range(self._count)]
        told = replace(workers, count=self._count)
        self._cycles = told.read(_LaneCycles(source, seed, first, turn), seed.number("workers", first))
        self._arrived = 0

    def next(self, number: int) -> Fed:
        """Example `number` of the whole, the next of its lane."""
        waiting = self._waiting[self._place_of[number % self._lanes]]
        while not waiting:
            # The loader takes its workers in turn.
            self._waiting[self._arrived % self._count].extend(next(self._cycles))
            self._arrived += 1
        return waiting.popleft()

    def close(self) -> None:
        """Ends the processes."""
        self._cycles = iter(())


class _LaneCycles(IterableDataset[list[Fed]]):
    """In a worker: the next example of each of its lanes, again and again."""

    def __init__(self, source: TarShards, seed: StreamSeed, first: int, turn: list[LaneStart]) -> None:
        self._source = source
        self._seed = seed
        self._first = first
        self._turn = turn

    @override
    def __iter__(self) -> Iterator[list[Fed]]:
        worker = get_worker_info()
        assert worker is not None
        own = self._turn[worker.id :: worker.num_workers]
        feed = LaneFeed(self._source, self._seed, self._first, own)
        lanes = self._source.lanes
        numbers = [self._first + (lane.number - self._first) % lanes for lane in own]
        while True:
            yield [feed.next(number) for number in numbers]
            numbers = [number + lanes for number in numbers]


def _before(number: int, lane: int, lanes: int) -> int:
    """How many of the examples before `number` were the lane's."""
    return max(0, -(-(number - lane) // lanes))
