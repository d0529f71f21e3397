"""The phase in which silos measure the model that a round has made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from roundtable.core.errors import MODEL_MISMATCH, SiteFailure
from roundtable.core.observability.released import Tells, is_told
from roundtable.engine import messages as m
from roundtable.engine.context import JobContext

MOST_MEASURED = 200
"""Clients of a round whose evaluation's time is told: a page shows no more."""


class EvaluationPhase:
    """The phase `evaluate`. `commit` ends the round."""

    def __init__(self, context: JobContext, commit: Callable[[float], None]) -> None:
        self._context = context
        self._job = context.job
        self._state = context.state
        self._population = context.population
        self._commit = commit

    def due(self, number: int) -> bool:
        """Whether the model of round `number` is asked for: every so many rounds, and after the last.

        Never where the secure sum of the next round says how good it is.
        """
        every = self._job.evaluation.every
        return (
            every > 0
            and not self._job.evaluation.bounds
            and (number % every == 0 or number == self._job.rounds)
        )

    def begin(self, now: float) -> None:
        """Asks for the new model's metrics: clients that are free, and those that have just delivered.

        After a restart nobody is there yet, and the latter are on their way back. One that is held finishes
        the round that it was asked for, and no later one.
        """
        attempt, held = self._context.attempt(), self._population.held()
        pool = attempt.cohort if self._job.evaluation.clients == "cohort" else self._population.free()
        # Whoever refuses to train in this attempt, or has another model, would say the same again.
        same = ("refused", MODEL_MISMATCH)
        refused = {name for name, failure in attempt.failures.items() if failure.kind in same}
        there = (name for name in pool if self._population.is_free(name) and name not in refused)
        # Of a secret cohort nobody is asked who would not be otherwise.
        known = sorted(attempt.updates) if is_told(self._job.privacy, Tells.COHORT) else ()
        delivered = (name for name in known if name not in held or attempt.updates[name].asked is None)
        idle = (name for name in (*there, *delivered) if self._state.given(name) is None)
        attempt.awaited = dict.fromkeys(idle)
        attempt.phase, attempt.lines = m.EVALUATE, {}
        attempt.deadline = now + self._job.evaluation.deadline
        self._context.set_timer("deadline", attempt.deadline)
        self._context.instruct(attempt.awaited, now)
        self.proceed(now)

    def joined(self, client: str, now: float) -> None:
        """Asks one again that has come back."""
        if client in self._context.attempt().awaited:
            self._context.instruct([client], now)

    def answered(self, client: str, metrics: Mapping[str, tuple[float, int]], now: float) -> None:
        """A client's metrics of the new model are here."""
        attempt, record = self._context.attempt(), self._context.record(client)
        attempt.evaluations[client] = dict(metrics)
        del attempt.awaited[client]
        if record.state == "evaluating" and len(attempt.measured) < MOST_MEASURED:
            attempt.measured[client] = record.since, now
        self._context.mark(client, "done", now)
        self.proceed(now)

    def failed(self, failure: SiteFailure, now: float) -> None:
        """The model is measured without this client."""
        self._context.drop(failure, now)
        self.proceed(now)

    def proceed(self, now: float) -> None:
        """Ends the round once all have answered; waits for those that are offline for the grace time only."""
        if not self._context.attempt().awaited:
            self._commit(now)
        elif not self._context.awaits_somebody_online():
            self._context.set_timer("grace", now + self._job.cohort.grace)

    def timer_fired(self, timer: str, now: float) -> None:
        """Commits without the metrics of those that are offline after the grace time, or late."""
        if timer == self._context.timer("deadline"):
            late = self._context.late(now)
            if len(late) < len(self._context.attempt().awaited):
                self._leave_out_late(late, now)
                return
            self._context.withdraw_awaited("the evaluation's deadline has passed")
            self._commit(now)
        elif timer == self._context.timer("grace") and not self._context.awaits_somebody_online():
            self._commit(now)

    def restore(self, now: float) -> None:
        """Asks those again who have not answered."""
        self._context.extend_deadline(self._job.evaluation.deadline, now)
        self._context.instruct(self._context.attempt().awaited, now)
        self.proceed(now)

    def _leave_out_late(self, late: Sequence[str], now: float) -> None:
        """Goes on waiting for those whose work stood in line at their silos."""
        attempt = self._context.attempt()
        for name in late:
            self._context.out.append(m.Withdraw(name, attempt.step, "the evaluation's deadline has passed"))
            del attempt.awaited[name]
        self._context.watch_deadlines(now)
