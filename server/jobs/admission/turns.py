"""Gives jobs their turns, and asks for them back, as `schedule` decides.

Nothing of it is stored: who has a turn is what the engines of the jobs say, so that a coordinator that
starts, or takes over, goes on with the same turns and the same order. One task decides; it waits until an
engine has made its turn durable before it decides again, so that no silo is given away twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from roundtable.core.errors import RoundtableError
from roundtable.engine import messages as m
from roundtable.server.door.to_operators import QueuePlace
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.queue.contenders import amounts_of
from roundtable.server.queue.decision import basis_of_turns, schedule
from roundtable.server.queue.queue_rules import QueueRules
from roundtable.server.queue.standing import Contender, Standing
from roundtable.server.queue.timeline import Amounts
from roundtable.server.store import FINAL, AgentRow

log = logging.getLogger("roundtable.server.jobs.turns")

LOOK_SECONDS = 5.0
"""How long nothing may happen before the queue is looked at again: waiting raises jobs, and times come."""
BUSY_SHARE = 0.1
"""The most of this process's time that deciding may take."""


class Turns:
    """The queue of all jobs that are not over; `look` tells it that something may have changed.

    `runners` are those that there are; `statuses` reads of jobs, by identifier, how they stand and since
    when; `rules` are the operators' for the queue.
    """

    def __init__(
        self,
        runners: Callable[[], Iterable[JobRunner]],
        statuses: Callable[[frozenset[str]], Awaitable[Mapping[str, tuple[str, float]]]],
        clock: Callable[[], float],
        rules: QueueRules,
    ) -> None:
        self._runners = runners
        self._statuses = statuses
        self._clock = clock
        self._rules = rules
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._capacities: dict[str, Amounts] = {}
        self._learnt = 0
        self._stand: dict[str, tuple[str, float]] = {}
        self._decided: list[Standing] = []
        self._decided_on: object = None

    def look(self) -> None:
        """Something has happened that may change who has a turn."""
        self._wake.set()

    def learn(self, silo: AgentRow) -> None:
        """Notes what a silo that is connected has, which counts as what it had once it is away; and looks."""
        amounts = amounts_of(silo)
        if self._capacities.get(silo.name) != amounts:
            self._capacities[silo.name] = amounts
            self._learnt += 1
        self.look()

    def start(self) -> None:
        """Begins to decide."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="turns of jobs")
        self.look()

    async def stop(self) -> None:
        """Decides nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def places(self) -> list[tuple[str, QueuePlace]]:
        """How things stand, by job: those with a turn, then those that wait, in their order.

        As last decided, unless something has happened since: among thousands of silos it takes long.
        """
        now, contenders = self._clock(), {each.job: each for each in self.contenders()}
        standings = self._decided
        if self._wake.is_set() or {each.job for each in standings} != contenders.keys():
            standings = self._schedule(list(contenders.values()), now)
        return [
            (standing.job, self._place(contenders[standing.job], standing, now)) for standing in standings
        ]

    def _place(self, contender: Contender, standing: Standing, now: float) -> QueuePlace:
        return QueuePlace(
            place=standing.place,
            project=contender.project,
            priority=contender.priority,
            level=contender.level(now, self._rules.ageing),
            since=contender.since,
            reason=standing.reason,
            expected=standing.expected,
            silos=len(contender.silos),
            connected=contender.there,
            least=contender.least,
        )

    def contenders(self) -> list[Contender]:
        """The jobs that are neither over nor paused, as the queue sees them."""
        found = (self._contender(runner) for runner in self._runners())
        return [each for each in found if each is not None]

    def _schedule(self, contenders: list[Contender], now: float) -> list[Standing]:
        return schedule(contenders, self._capacities, now, self._rules)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            began = time.monotonic()
            try:
                await self._decide()
            except RoundtableError as error:
                log.warning("the queue of jobs cannot be looked at: %s; it is tried again", error)
            except Exception:
                # All jobs wait for this task: it outlives what is wrong with one of them.
                log.exception("the queue of jobs has failed; it is tried again")
            await asyncio.sleep((time.monotonic() - began) * (1 / BUSY_SHARE - 1))
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _decide(self) -> None:
        before = {job for runner in self._runners() if runner.waits for job in runner.after}
        living = {runner.row.id for runner in self._runners()}
        over = {job for job, (status, _) in self._stand.items() if status in FINAL}
        if unknown := frozenset(before - living - over):
            self._stand |= await self._statuses(unknown)
        # Only now: jobs may have come meanwhile.
        runners = {runner.row.id: runner for runner in self._runners()}
        orders = []
        self._decided = self._standings()
        for standing in self._decided:
            runner = runners[standing.job]
            if runner.standing is None or runner.standing.reason != standing.reason:
                runner.inbox.notify()
            runner.standing = standing
            if standing.verdict == "begins":
                orders.append(runner.inbox.tell(m.Start()))
            elif standing.verdict == "yields" and standing.reason:
                orders.append(runner.inbox.tell(m.Yield(standing.reason)))
        for outcome in await asyncio.gather(*orders, return_exceptions=True):
            if isinstance(outcome, RoundtableError):
                log.warning("a turn could not be given or taken back: %s; it is tried again", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _standings(self) -> list[Standing]:
        """As `schedule` decides; as before where nobody waits and nothing that counts then has changed."""
        contenders = self.contenders()
        basis = basis_of_turns(contenders, self._learnt)
        if basis is not None and basis == self._decided_on:
            return self._decided
        self._decided_on = basis
        return self._schedule(contenders, self._clock())

    def _contender(self, runner: JobRunner) -> Contender | None:
        freed = max((self._stand[job][1] for job in runner.after if job in self._stand), default=0.0)
        return runner.contender(self._unmet(runner) if runner.waits else "", freed)

    def _unmet(self, runner: JobRunner) -> str:
        """Which job this one still comes after; "" for none."""
        living = {other.row.id: other.row.name for other in self._runners()}
        for job in runner.after:
            if job in living:
                return f"it comes after {living[job]}, which is not finished"
            status, _ = self._stand.get(job, (None, 0.0))
            if status is None:
                return f"it comes after job {job[:8]}, and how that stands is being looked up"
            if status not in FINAL:
                # Nobody drives it: it could not be taken up.
                return f"it comes after job {job[:8]}, which is {status}"
            if status != "finished":
                return (
                    f"it comes after job {job[:8]}, which is {status}: cancel this one, or submit both again"
                )
        return ""
