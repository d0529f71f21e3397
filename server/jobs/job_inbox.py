"""Events on their way to one job's engine, and the signal that people can see something new."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from roundtable.core.errors import UnavailableError
from roundtable.engine import messages as m
from roundtable.server.store import ArtifactRow, EventRow, RelayedSumRow, UpdateRow

Verdict = Literal["wanted", "duplicate", "stale"]

MOST = 256
"""Events of a job that are held in memory."""


@dataclass
class Arrival:
    """An event, the rows that belong to it, and who waits for it to be durable."""

    event: m.Event
    updates: tuple[UpdateRow, ...] = ()
    artifacts: tuple[ArtifactRow, ...] = ()
    sums: tuple[RelayedSumRow, ...] = ()
    done: asyncio.Future[Verdict] | None = None
    verdict: Verdict = "wanted"


class JobInbox:
    """The queue of events for a job's driver. Everybody writes to it, only the driver reads it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Events that the driver has not looked at yet."""
        return self._queue.qsize()

    def post(self, event: m.Event) -> None:
        """Sends an event whose outcome nobody waits for."""
        self._queue.put_nowait(Arrival(event))

    async def tell(
        self,
        event: m.Event,
        artifacts: tuple[ArtifactRow, ...] = (),
        updates: tuple[UpdateRow, ...] = (),
        sums: tuple[RelayedSumRow, ...] = (),
    ) -> Verdict:
        """Sends an event; returns once it is durable. The verdict is about the updates that arrived: "wanted"
        only if each of them is."""
        if self._closed:
            return "stale"
        done: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(Arrival(event, updates, artifacts, sums, done))
        return await done

    async def arrivals(self) -> list[Arrival]:
        """Waits for the next event and returns it with all that are there by then, oldest first."""
        return [await self._queue.get(), *self._rest()]

    def answer(self, arrivals: Iterable[Arrival]) -> None:
        """Returns their verdicts to those who wait: everything about them is durable."""
        for arrival in arrivals:
            if arrival.done is not None and not arrival.done.done():
                arrival.done.set_result(arrival.verdict)

    def abandon(self, arrivals: Iterable[Arrival]) -> None:
        """Ends the queue of a driver that has failed: who waits is to come again, once there is another."""
        self._closed = True
        for arrival in (*arrivals, *self._rest()):
            if arrival.done is not None and not arrival.done.done():
                arrival.done.set_exception(
                    UnavailableError("the job's driver has failed and begins anew; send it again")
                )

    def close(self) -> None:
        """Ends the queue of a job that is over: who still waits, or sends later, gets the verdict stale."""
        self._closed = True
        rest = self._rest()
        for arrival in rest:
            arrival.verdict = "stale"
        self.answer(rest)

    def notify(self) -> None:
        """Wakes those who follow the job: something has changed that they can see."""
        self._changed.set()
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Set at the next change of anything that people can see."""
        return self._changed

    def _rest(self) -> list[Arrival]:
        rest = []
        while not self._queue.empty():
            rest.append(self._queue.get_nowait())
        return rest


def client_of(event: m.Event) -> str:
    """The client that the event is of; empty if it is of none."""
    failed = event.failure.site if isinstance(event, m.ClientFailed | m.Troubled) else ""
    update = event.update.client if isinstance(event, m.UpdateArrived) else ""
    client = failed or update or getattr(event, "client", "")
    return client.name if isinstance(client, m.ClientInfo) else client


class EventTail:
    """Durable events of a job, the newest `MOST` since it was taken up at `sequence`."""

    def __init__(self, sequence: int) -> None:
        self._first = sequence + 1
        self._rows: deque[EventRow] = deque(maxlen=MOST)

    def add(self, rows: Iterable[EventRow]) -> None:
        """Events that have become durable, in order."""
        for row in rows:
            if len(self._rows) == MOST:
                self._first = self._rows[0].sequence + 1
            self._rows.append(row)

    def since(self, sequence: int, most: int) -> list[EventRow] | None:
        """At most so many events from this number on; None where the oldest of them are no longer held."""
        if sequence < self._first:
            return None
        return [row for row in self._rows if row.sequence >= sequence][:most]
