"""Before round 1: whether the silos that are there make the job's model.

What is frozen in a model, a pretrained base with its tokenizer above all, does not travel: the layout names
its digests, and each silo has its own. So they are asked to make their model once, before anybody trains.

    authorize → check → train

A silo whose model is another takes no part in round 1. What else fails in making it, round 1 is told. Where
too few are left for that round, the job is paused, and each of them is named with what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roundtable.core.errors import MODEL_MISMATCH, SiteFailure
from roundtable.core.observability.released import IN_THE_LOG, Tells, is_told
from roundtable.engine import messages as m
from roundtable.engine.context import JobContext
from roundtable.engine.selection import least_for_selection, quorum

_SHOWN = 5
"""Silos that a reason names; each is an event of its own."""

Stop = Callable[[m.JobStatus, str, float], None]


class ModelCheck:
    """The phase `check` of the job's first attempt. `go_on` begins its training, `stop` pauses the job."""

    def __init__(self, context: JobContext, go_on: Callable[[float], None], stop: Stop) -> None:
        self._context = context
        self._job = context.job
        self._state = context.state
        self._population = context.population
        self._go_on = go_on
        self._stop = stop

    def begin(self, now: float) -> None:
        """Asks all who are free."""
        attempt = self._context.attempt()
        attempt.phase, attempt.lines = m.CHECK, {}
        attempt.awaited = dict.fromkeys(self._population.free())
        attempt.deadline = now + self._job.cohort.deadline
        self._context.status("running", "the silos compare their models with the job's")
        self._context.set_timer("deadline", attempt.deadline)
        self._context.instruct(attempt.awaited, now)
        self.proceed(now)

    def joined(self, client: str, now: float) -> None:
        """Asks a client that has come, or come back, and has not answered."""
        attempt = self._context.attempt()
        if self._population.is_free(client) and client not in {**attempt.evaluations, **attempt.failures}:
            attempt.awaited[client] = None
            self._context.instruct([client], now)

    def answered(self, client: str, metrics: Mapping[str, tuple[float, int]], now: float) -> None:
        """The client's model is the job's, or could not be made, which it says again once it is to train."""
        attempt = self._context.attempt()
        del attempt.awaited[client]
        attempt.evaluations[client] = {}
        self._context.mark(client, "available", now)
        self.proceed(now)

    def failed(self, failure: SiteFailure, now: float) -> None:
        """The client's model is another; or else see `answered`."""
        if failure.kind != MODEL_MISMATCH:
            self.answered(failure.site, {}, now)
            return
        self._context.drop(failure, now)
        self.proceed(now)

    def proceed(self, now: float) -> None:
        """Ends the phase once all have answered; waits for those that are offline for the grace time only."""
        attempt = self._context.attempt()
        if attempt.awaited:
            if not self._context.awaits_somebody_online():
                self._context.set_timer("grace", now + self._job.cohort.grace)
        elif attempt.evaluations or attempt.failures:
            self._end(now)

    def timer_fired(self, timer: str, now: float) -> None:
        """Goes on without whoever has not answered."""
        attempt = self._context.attempt()
        if timer == self._context.timer("grace") and not self._context.awaits_somebody_online():
            self._end(now)
        elif timer == self._context.timer("deadline"):
            for name in self._context.late(now):
                reason = "the time to compare models has passed"
                self._context.out.append(m.Withdraw(name, attempt.step, reason))
                del attempt.awaited[name]
                attempt.evaluations[name] = {}
            self._context.watch_deadlines(now)
            self.proceed(now)

    def restore(self, now: float) -> None:
        """Asks again, after a restart, those who have not answered."""
        self._context.extend_deadline(self._job.cohort.deadline, now)
        self._context.instruct(self._context.attempt().awaited, now)
        self.proceed(now)

    def _end(self, now: float) -> None:
        attempt, cohort = self._context.attempt(), self._job.cohort
        apart = attempt.failures
        others = [name for name in self._population.free() if name not in apart]
        wanted = len(others) + len(apart)
        least = quorum(cohort, min(cohort.size or wanted, wanted))
        if apart and len(others) < max(least, least_for_selection(cohort, True, self._population)):
            known = is_told(self._job.privacy, Tells.COHORT, Tells.UPDATE)
            first = sorted(apart.items())[:_SHOWN]
            said = "; ".join(f"{name}: {each.detail}" for name, each in first)
            said += f"; and {len(apart) - _SHOWN} more silos" if len(apart) > _SHOWN else ""
            reason = f"round {attempt.round} does not begin before a silo has the job's model: "
            self._stop("paused", reason + (said if known else IN_THE_LOG), now)
            return
        self._state.unchecked = False
        attempt.awaited, attempt.evaluations, attempt.deadline = {}, {}, None
        self._go_on(now)
