"""Replicas as groups of ranks of their own: one that is lost costs its part of a step, not the round."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from roundtable.client.failures import WorkFailed
from roundtable.cluster.agent.membership import MOST_TRIES, Membership
from roundtable.cluster.agent.rank_group import RankGroup
from roundtable.cluster.train.orders import Verdict

_log = logging.getLogger("roundtable.agent")
_LOOK_SECONDS = 5.0
_CONNECT_SECONDS = 20.0
_STOP_SECONDS = 5.0
_SETTLE_SECONDS = 0.5
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Start = Callable[[int, list[int]], Awaitable[RankGroup]]


class AllLost(Exception):
    """No replica is left, or they cannot agree: the round begins anew, or goes on from a checkpoint."""


@dataclass
class _Replica:
    """One replica's ranks: their devices, the group that they are, and rank 0's line once it is there."""

    index: int
    devices: list[int]
    group: RankGroup
    line: Line | None = None
    heard: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(frozen=True)
class _Event:
    """What has happened to a replica: a message of its rank 0, its line, or nothing any more."""

    index: int
    message: dict[str, Any] | None
    line: Line | None = None
    group: RankGroup | None = None
    silent: bool = False


class ReplicaGroups:
    """Starts replicas, tells each the same verdicts, and starts lost ones again while a round goes on."""

    def __init__(
        self,
        size: int,
        timeout: float,
        usable: Callable[[], Awaitable[Sequence[int]]],
        start: Start,
        learn: Callable[[int, list[int], RankGroup, str], str],
    ) -> None:
        """`size` devices make a replica; `usable` are those of now; `start` makes a replica's ranks.

        `learn` is told why a replica was lost, advises the next start and gives a sentence of it; it raises
        WorkFailed where the task is to blame. `timeout` in seconds is that of a collective.
        """
        self._size = size
        self._timeout = timeout
        self._usable = usable
        self._start = start
        self._learn = learn
        self._replicas: dict[int, _Replica] = {}
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._round: Membership | None = None
        self.launches = 0
        self.losses: list[str] = []
        self.verdicts: list[Verdict] = []

    @property
    def started(self) -> int:
        """How many replicas there are."""
        return len(self._replicas)

    async def called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes the call of a replica's rank 0, whose first line says which it is."""
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), _CONNECT_SECONDS))
            index = int(hello["replica"])
        except (TimeoutError, ValueError, KeyError, TypeError, ConnectionError):
            writer.close()
            return
        await self._events.put(_Event(index, None, line=(reader, writer)))

    async def evaluate(self, command: dict[str, Any]) -> dict[str, Any]:
        """One replica's answer to a command that needs no other; AllLost where it does not come."""
        await self._grow(restarts=1)
        while (one := next((r for r in self._replicas.values() if r.line), None)) is None:
            lost = await self._take(await self._event(300.0))
            if lost is not None and not self._replicas:
                raise AllLost(lost)
        assert one.line is not None
        _write(one.line, command)
        try:
            return await self._answer_of(one, command)
        except asyncio.CancelledError:
            _write(one.line, {"do": "stop", "number": command["number"]})
            try:
                await asyncio.shield(asyncio.wait_for(self._answer_of(one, command), _STOP_SECONDS))
            except (TimeoutError, AllLost, WorkFailed):
                await self.end()
            raise

    async def _answer_of(self, one: _Replica, command: dict[str, Any]) -> dict[str, Any]:
        while True:
            event = await self._event(2 * self._timeout + 300.0)
            message = event.message
            if (
                event.index == one.index
                and message is not None
                and message.get("number") == command["number"]
            ):
                return message
            await self._take(event)
            if one.index not in self._replicas:
                raise AllLost("the replica that evaluated was lost")

    async def train(
        self,
        command: dict[str, Any],
        restarts: int,
        seen: Callable[[dict[str, Any]], None],
        trouble: Callable[[str, str], None],
    ) -> dict[str, Any]:
        """The answer of the replica that delivers the round's update.

        `seen` gets the steps as the first member tells them; `trouble` what was lost, and what was done.
        """
        await self._grow(restarts)
        self._round = current = Membership(expected=set(self._replicas))
        self.losses, self.verdicts = [], []
        training = _Training(self, current, command, seen)
        for one in self._replicas.values():
            training.order(one)
        try:
            return await self._pump(training, current, restarts, trouble)
        except asyncio.CancelledError:
            current.stop = True
            withdrawn = self._pump(training, current, -1, lambda lost, action: None)
            try:
                await asyncio.shield(asyncio.wait_for(withdrawn, _STOP_SECONDS))
            except (TimeoutError, AllLost, WorkFailed):
                await self.end()
            raise
        finally:
            self._round = None

    async def _pump(
        self,
        training: _Training,
        current: Membership,
        restarts: int,
        trouble: Callable[[str, str], None],
    ) -> dict[str, Any]:
        """Takes what happens until a replica gives the round's result."""
        looked = asyncio.get_running_loop().time()
        while True:
            event = await self._event(self._patience(current))
            if event.message is not None:
                answer = training.hears(event.index, event.message)
                if answer is not None:
                    return answer
            elif (lost := await self._take(event)) is not None:
                were = current.members
                current.lost(event.index)
                training.lost(event.index)
                self.losses.append(lost)
                left = len(current.members) or self.started
                went_on = f"{left} replica{'s' if left > 1 else ''}"
                trouble(lost, f"went on with {went_on}; the lost one joins once it is back")
                if were == (event.index,) or not self._replicas:
                    raise AllLost(lost)
                looked = -math.inf
            elif event.line is not None and event.index in self._replicas:
                training.order(self._replicas[event.index])
            training.decide()
            now = asyncio.get_running_loop().time()
            if now - looked > _LOOK_SECONDS:
                looked = now
                await self._grow(restarts - len(self.losses))

    async def end(self) -> None:
        """Ends all replicas."""
        replicas, self._replicas = list(self._replicas.values()), {}
        for one in replicas:
            await _end(one)

    def tell(self, members: Sequence[int], message: dict[str, Any]) -> None:
        """Tells some replicas the same."""
        for index in members:
            if (one := self._replicas.get(index)) is not None and one.line is not None:
                _write(one.line, message)

    async def _event(self, patience: float) -> _Event:
        """The next event; silence for so long makes every silent member, or everybody, a loss."""
        try:
            return await asyncio.wait_for(self._events.get(), min(patience, _LOOK_SECONDS))
        except TimeoutError:
            return await self._silence(patience)

    async def _silence(self, patience: float) -> _Event:
        silent = self._round.silent if self._round is not None else ()
        loop = asyncio.get_running_loop()
        began = loop.time() - _LOOK_SECONDS
        while loop.time() - began < patience:
            if not self._events.empty():
                return self._events.get_nowait()
            await asyncio.sleep(0.05)
        index = next((one for one in silent if one in self._replicas), next(iter(self._replicas), None))
        if index is None:
            raise AllLost("no replica is left")
        return _Event(index, None, group=self._replicas[index].group, silent=True)

    def _patience(self, current: Membership) -> float:
        if not current.members:
            return 300.0 + self._timeout
        return self._timeout + 5.0 if current.silent else 2 * self._timeout + 5.0

    async def _take(self, event: _Event) -> str | None:
        """Takes a new line, or what a replica is lost by, and then why it was."""
        one = self._replicas.get(event.index)
        if event.line is not None:
            if one is None or one.line is not None:
                event.line[1].close()
            else:
                one.line = event.line
                self._listen(one, self._hear(event.index, one.group, event.line[0]))
            return None
        if event.message is not None or one is None or one.group is not event.group:
            return None
        del self._replicas[event.index]
        # Its first rank's line may break a moment before the rest of it has ended, and has said why.
        gone = not event.silent and await one.group.settled(_SETTLE_SECONDS)
        await _end(one)
        said = f"replica {event.index} {'is gone' if gone else 'stood still, and was ended'}"
        why = self._learn(event.index, one.devices, one.group, said)
        _log.warning("cluster: replica %d is lost: %s", event.index, why)
        return why

    async def _grow(self, restarts: int) -> None:
        """Starts replicas on devices that are free, as long as so many restarts are left in the round."""
        if restarts < 0:
            return
        usable = await self._usable()
        busy = {device for one in self._replicas.values() for device in one.devices}
        free = [device for device in usable if device not in busy]
        while len(free) >= self._size:
            index = next(i for i in range(len(usable) + len(busy) + 1) if i not in self._replicas)
            devices, free = free[: self._size], free[self._size :]
            group = await self._start(index, devices)
            self.launches += 1
            one = self._replicas[index] = _Replica(index, devices, group)
            self._listen(one, self._mourn(index, group))
        if not self._replicas:
            raise WorkFailed("gpu_error", f"fewer devices are usable than a replica has ({self._size})")

    def _listen(self, one: _Replica, work: Any) -> None:
        task = asyncio.create_task(work)
        one.heard.add(task)

    async def _mourn(self, index: int, group: RankGroup) -> None:
        await group.ended()
        await self._events.put(_Event(index, None, group=group))

    async def _hear(self, index: int, group: RankGroup, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                await self._events.put(_Event(index, json.loads(line)))
        except (ConnectionError, ValueError):
            pass
        await self._events.put(_Event(index, None, group=group))


class _Training:
    """One round's talk with the replicas."""

    def __init__(
        self,
        groups: ReplicaGroups,
        current: Membership,
        command: dict[str, Any],
        seen: Callable[[dict[str, Any]], None],
    ) -> None:
        self._groups = groups
        self._current = current
        self._command = command
        self._number = command["number"]
        self._seen = seen
        self._plan = ""
        self._delivers: int | None = None

    def order(self, one: _Replica) -> None:
        """Gives the round's order to a replica that is there."""
        if one.line is not None:
            _write(one.line, self._command)

    def lost(self, index: int) -> None:
        """The one that was to deliver is gone: the next does."""
        if index == self._delivers:
            self._delivers = None

    def hears(self, index: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """Takes a replica's message; the result, once the one that delivers gives it."""
        current = self._current
        if "step" in message:
            if current.members[:1] == (index,):
                self._seen(message["step"])
        elif message.get("number") != self._number:
            return None
        elif "ready" in message:
            self._compare(index, message["plan"])
            current.ready(index, int(message["ready"]))
        elif "reduced" in message:
            current.reduced(index, int(message["epoch"]), whole=bool(message["reduced"]))
        elif "ended" in message:
            current.ended(index)
        elif index == self._delivers or "stopped" in message:
            others = [one for one in current.members if one != index]
            self._groups.tell(others, {"do": "verdict", "number": self._number, "deliver": False})
            return message
        return None

    def decide(self) -> None:
        """Tells all members what follows, where that is known."""
        current = self._current
        if current.over:
            if self._delivers is None:
                self._delivers = current.members[0]
                told = {"do": "verdict", "number": self._number, "deliver": True}
                self._groups.tell([self._delivers], told)
            return
        if (verdict := current.verdict()) is None:
            return
        if current.tries > MOST_TRIES:
            raise AllLost(f"step {verdict.steps + 1} was reduced {current.tries} times and never whole")
        self._groups.verdicts.append(verdict)
        if verdict.joining:
            _log.info("cluster: replicas %s join after step %d", verdict.joining, verdict.steps)
        plain = {"do": "verdict", "number": self._number, "verdict": asdict(verdict)}
        self._groups.tell(verdict.members, plain)

    def _compare(self, index: int, plan: str) -> None:
        self._plan = self._plan or plan
        if plan != self._plan:
            raise WorkFailed(
                "protocol_violation",
                f"replica {index} has the plan {plan!r} and another {self._plan!r}; fix [cluster.strategy]",
            )


async def _end(one: _Replica) -> None:
    for task in one.heard:
        task.cancel()
    if one.line is not None:
        one.line[1].close()
    await one.group.end()


def _write(line: Line, message: dict[str, Any]) -> None:
    if not line[1].is_closing():
        line[1].write(json.dumps(message).encode() + b"\n")
