"""Reads tar shards: lanes dealt out to those who share the reading, each of whom opens its own shards
alone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from roundtable.client.streams.kept_position import DAMAGED, Position, is_count
from roundtable.client.streams.lane_feeds import LaneFeed, LaneStart, WorkerFeed
from roundtable.client.streams.lanes import MOST_MARKS, LanePlace, StreamSeed
from roundtable.client.streams.random_state import DataRandomness
from roundtable.client.streams.shard_marks import ShardMark
from roundtable.client.streams.shares import WHOLE, ReadingShare, sharers
from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.streams.workers import Workers
from roundtable.core.errors import EncodingError, NoExamples, TaskError


class ShardReader:
    """A `StreamReader` of tar shards.

    Rank r reads the lanes r, r + ranks, …; where there are fewer lanes than ranks, those who share one take
    its records in turn and pass over the bytes of the others'. `decode` finds the global generators seeded
    for its example, so that it draws the same wherever and whenever the example is read.
    """

    def __init__(
        self,
        source: TarShards,
        seed: StreamSeed,
        position: Position | None,
        share: ReadingShare = WHOLE,
        workers: Workers = Workers(),  # noqa: B008 - a frozen value
    ) -> None:
        self._source = source
        self._share = share
        taken, places = _checked(source, position)
        self._taken = taken
        self._last: list[Any] = []
        self._places = {lane: places[lane] for lane in share.lanes(source.lanes)}
        lanes = [
            LaneStart(lane, place, share.turn(lane, source.lanes)) for lane, place in self._places.items()
        ]
        self._feed: LaneFeed | WorkerFeed
        if workers.count:
            self._feed = WorkerFeed(source, seed, taken, lanes, workers)
        else:
            self._feed = LaneFeed(source, seed, taken, lanes)

    @property
    def epoch(self) -> int:
        return min(place.shard for place in self._places.values()) // len(self._source.urls) + 1

    def counts(self, examples: int) -> list[int]:
        counts = [0] * self._share.ranks
        for number in range(self._taken, self._taken + examples):
            counts[_owner(number, self._source.lanes, self._share.ranks)] += 1
        return counts

    def take(self, examples: int) -> list[Any]:
        own = []
        with DataRandomness():
            for number in range(self._taken, self._taken + examples):
                lane = number % self._source.lanes
                if lane in self._places:
                    fed = self._feed.next(number)
                    self._places[lane] = fed.place
                    if fed.mine:
                        own.append(fed.example)
        self._taken += examples
        self._last = own[-1:] or self._last
        return own

    def filler(self) -> Any:
        if not self._last:
            # Once at most: whoever has none of its own yet reads the first there is.
            with DataRandomness():
                self._last = list(islice(self._source, 1))
            if not self._last:
                raise NoExamples(f"the {len(self._source.urls)} shards of the training data hold no record")
        return self._last[0]

    def position(self) -> Position:
        lanes = {str(lane): _plain(place) for lane, place in self._places.items()}
        return {"shards": self._source.definition, "taken": self._taken, "lanes": lanes}

    def close(self) -> None:
        self._feed.close()


def merged(positions: Iterable[Position]) -> Position:
    """The whole position, from those of all who share the reading; without lanes each knows all."""
    whole: Position = {}
    for position in positions:
        lanes = {**whole.get("lanes", {}), **position.get("lanes", {})}
        whole = {**position, "lanes": lanes} if lanes else position
    return whole


def _plain(place: LanePlace) -> list[Any]:
    return [place.shard, place.offset, *(mark.plain for mark in place.marks)]


def _owner(number: int, lanes: int, ranks: int) -> int:
    """The rank that takes example `number` of the whole."""
    lane = number % lanes
    if ranks <= lanes:
        return lane % ranks
    return lane + lanes * (number // lanes % sharers(lane, lanes, ranks))


def _checked(source: TarShards, position: Position | None) -> tuple[int, list[LanePlace]]:
    """(examples taken, each lane's place). Raises TaskError for a position in other data."""
    if position is None:
        return 0, [LanePlace(lane, 0) for lane in range(source.lanes)]
    if position.get("shards") != source.definition:
        raise TaskError(
            "the training data are other shards, or are read otherwise, than those in which this job's "
            "position is kept: keep their names, `lanes` and `shuffle` as they were, or remove the job's "
            "folder from the agent's state folder to begin anew"
        )
    taken, lanes = position.get("taken"), position.get("lanes")
    wanted = {str(lane) for lane in range(source.lanes)}
    if not (is_count(taken) and isinstance(lanes, dict) and set(lanes) == wanted):
        raise EncodingError(DAMAGED)
    places = []
    for lane in range(source.lanes):
        place = lanes[str(lane)]
        if not (isinstance(place, list) and len(place) >= 2 and all(map(is_count, place[:2]))):
            raise EncodingError(DAMAGED)
        if place[0] % source.lanes != lane or place[1] % 512:
            raise EncodingError(DAMAGED)
        marks = tuple(ShardMark.from_plain(each, DAMAGED) for each in place[2 : 2 + MOST_MARKS])
        places.append(LanePlace(place[0], place[1], marks))
    return taken, places
