"""What browsers are shown while it happens: each topic is followed once for all sessions of a party.

A topic is "overview", or "job:" with a job's identifier. What is followed are the operators' own calls, as
that party: two parties share nothing, since what a call answers depends on who asks.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.foreign_text import printable
from roundtable.page.board import Board, BoardReader
from roundtable.page.values import values_of
from roundtable.proto import operator_pb2
from roundtable.server.auth.principals import Principal
from roundtable.server.dashboard import PageCalls

log = logging.getLogger("roundtable.page.live")

LOOK_SECONDS = 1.0
QUEUE_EVERY, SILOS_EVERY, STATUS_EVERY = 2, 4, 10
AGAIN_SECONDS = 5.0
EVENTS_OF_A_JOB, EVENTS_OF_EACH = 500, 20
MOST_FOLLOWED = 24
"""Living jobs whose events the overview tells."""
MOST_TOPICS = 8
OVERVIEW = "overview"
LIVING = ("waiting", "running", "paused")
_TOPIC = re.compile(r"overview|job:[0-9A-Za-z-]{1,64}")


def topics_of(text: str) -> tuple[str, ...]:
    """The topics that an address names, with commas between. ConfigError for what is none."""
    topics = tuple(dict.fromkeys(each for each in text.split(",") if each))
    if not topics or len(topics) > MOST_TOPICS or not all(_TOPIC.fullmatch(each) for each in topics):
        raise ConfigError(
            f"{printable(text, 80)!r} names no topics: overview, or job:IDENTIFIER, at most eight"
        )
    return topics


class LiveTopics:
    """All boards with somebody before them, and who follows what they show."""

    def __init__(self, calls: PageCalls) -> None:
        self._calls = calls
        self._boards: dict[tuple[str, str], Board] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.closing = False

    def join(self, who: Principal, address: str, topics: Iterable[str]) -> BoardReader:
        """A stream of these topics; `leave` ends it."""
        reader = BoardReader()
        for topic in topics:
            key = who.label, topic
            if key not in self._boards:
                self._boards[key] = Board(topic)
                follows = self._follow(who, address, self._boards[key])
                self._tasks[key] = asyncio.get_running_loop().create_task(follows)
            self._boards[key].join(reader)
        return reader

    def leave(self, reader: BoardReader) -> None:
        """The reader is gone; what nobody looks at any more is followed no more."""
        for board in reader.boards:
            board.leave(reader)
        for key in [key for key, board in self._boards.items() if not board.readers]:
            del self._boards[key]
            self._tasks.pop(key).cancel()

    async def close(self) -> None:
        """Follows nothing any more, and wakes all who wait, to see that it is closing."""
        self.closing = True
        for board in self._boards.values():
            board.wake()
        tasks, self._tasks = list(self._tasks.values()), {}
        self._boards.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, who: Principal, address: str, board: Board) -> None:
        """Shows on the board what goes on; where that fails, says why there and tries again."""
        follower = _Follower(self._calls, who, address, board)
        while True:
            try:
                if board.topic == OVERVIEW:
                    await follower.overview()
                else:
                    await follower.job(board.topic.partition(":")[2])
                return
            except RoundtableError as error:
                board.show("problem", {"": printable(error, 300)})
            except Exception:
                log.exception("the topic %s of %s is followed anew", board.topic, who.label)
                board.show("problem", {"": "the coordinator failed at this; its log says why"})
            await asyncio.sleep(AGAIN_SECONDS)


class _Follower:
    def __init__(self, calls: PageCalls, who: Principal, address: str, board: Board) -> None:
        self._calls = calls
        self._who = who
        self._address = address
        self._board = board
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._details: dict[str, dict[str, Any]] = {}
        self._shown_silos: dict[str, tuple[bytes, dict[str, Any]]] = {}

    async def job(self, job: str) -> None:
        """Follows one job until it is over."""
        self._board.show("clients", {})
        async for update in self._updates(job, EVENTS_OF_A_JOB, operator_pb2.CHANGED_CLIENTS):
            shown = values_of(update.detail)
            self._board.change("clients", {client["client"]: client for client in shown.pop("clients")})
            self._board.show("job", {"": shown.pop("job")})
            self._board.show("detail", {"": shown})
            self._board.show("problem", {})
            self._board.add([values_of(event) for event in update.events])

    async def overview(self) -> None:
        """Follows everything, a little of each."""
        turn = 0
        try:
            while True:
                jobs = await self._ask("Operators/ListJobs", operator_pb2.ListJobsRequest())
                rows = _by("id", jobs["jobs"])
                self._board.show("jobs", rows)
                self._attend([job for job, row in rows.items() if row["status"] in LIVING])
                if turn % QUEUE_EVERY == 0:
                    await self._queue(any(row["status"] == "waiting" for row in rows.values()))
                if turn % SILOS_EVERY == 0:
                    await self._silos()
                if turn % STATUS_EVERY == 0:
                    status = await self._ask("Operators/Status", operator_pb2.StatusRequest())
                    self._board.show("status", {"": {key: status[key] for key in _STATUS}})
                self._board.show("details", {job: self._details[job] for job in rows if job in self._details})
                self._board.show("problem", {})
                turn += 1
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in self._followed.values():
                task.cancel()

    async def _silos(self) -> None:
        """Shows the silos; of thousands few have changed since they were shown."""
        request = operator_pb2.ListClientsRequest()
        told = await self._calls.call(self._who, self._address, "Operators/ListClients", request)
        shown = {}
        for client in told.clients:
            if client.online:  # When one that is here was heard of last changes all the time.
                client.last_seen = 0.0
            line, before = client.SerializeToString(deterministic=True), self._shown_silos.get(client.name)
            shown[client.name] = before if before and before[0] == line else (line, values_of(client))
        self._shown_silos = shown
        self._board.show("silos", {name: row for name, (_, row) in shown.items()})

    async def _queue(self, waiting: bool) -> None:
        """Shows who waits for what; where nobody waits, nobody is asked."""
        told: dict[str, Any] = {"jobs": ()}
        if waiting:
            told = await self._ask("Operators/ListQueue", operator_pb2.ListQueueRequest())
        self._board.show("queue", {row["job"]["id"]: _turn(row) for row in told["jobs"]})

    def _attend(self, living: Sequence[str]) -> None:
        """Follows the events of living jobs, each in a task of its own."""
        for job in [job for job, task in self._followed.items() if task.done()]:
            if job not in living:
                del self._followed[job]
        for job in living[:MOST_FOLLOWED]:
            if job not in self._followed:
                run: Coroutine[Any, Any, None] = self._events(job)
                self._followed[job] = asyncio.get_running_loop().create_task(run)

    async def _events(self, job: str) -> None:
        with suppress(RoundtableError):
            async for update in self._updates(job, EVENTS_OF_EACH, operator_pb2.NO_CLIENTS):
                detail = values_of(update.detail)
                self._details[job] = {key: detail[key] for key in _DETAIL}
                self._board.add([{**values_of(event), "job": job} for event in update.events])

    async def _updates(self, job: str, newest: int, clients: operator_pb2.ListedClients.ValueType) -> Any:
        request = operator_pb2.WatchJobRequest(job=job, newest=newest, clients=clients)
        async for update in self._calls.stream(self._who, self._address, "Operators/WatchJob", request):
            yield update

    async def _ask(self, name: str, request: Any) -> dict[str, Any]:
        return values_of(await self._calls.call(self._who, self._address, name, request))


_STATUS = ("version", "coordinator", "database", "disk_free")
_DETAIL = ("round", "attempt", "phase", "deadline", "waiting_for")


def _by(key: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {row[key]: row for row in rows}


def _turn(row: Mapping[str, Any]) -> dict[str, Any]:
    """A job's place in the queue; the job itself is in another table."""
    return {**row, "job": row["job"]["id"]}
