"""The transitions of a round: select → train → aggregate → evaluate → commit, and what ends it otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roundtable.core.errors import SiteFailure
from roundtable.core.seeds import numpy_generator
from roundtable.engine import messages as m
from roundtable.engine.context import Context
from roundtable.engine.records import record_of, record_without_model, shown
from roundtable.engine.selection import STRATEGIES, least_for_selection, quorum, rested
from roundtable.engine.state import Attempt
from roundtable.engine.stopping import missing_metric, stop_reason
from roundtable.engine.validation.secure_feasibility import fewest, fewest_updates
from roundtable.engine.view import view

MOST_REPEATS = 2


class Phases:
    """Moves a job from phase to phase; which event may do so is decided in `RoundEngine`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._job = context.job
        self._state = context.state
        self._population = context.population

    @property
    def _amplified(self) -> bool:
        """Whether an accountant relies on the draw being from the whole population, whoever is there."""
        return bool(self._job.privacy.get("level") == "client") and self._job.cohort.strategy == "uniform"

    @property
    def _private(self) -> bool:
        return bool(self._job.privacy.get("level", "none") != "none")

    def next_round(self, now: float) -> None:
        """Begins the next round, or ends the job after the last."""
        chronicle = self._state.chronicle
        done, closed = chronicle.done, chronicle.closed
        if done < self._job.rounds:
            self.begin_attempt(done + 1, 1, now)
        elif done and done == closed:
            self._stop_now("failed", f"none of the {done} rounds has made a model; the history says why")
        else:
            without = f", {closed} of them without a model" if closed else ""
            self._stop_now("finished", f"all {done} rounds are done{without}")

    def begin_attempt(self, number: int, attempt: int, now: float) -> None:
        """Begins an attempt at a round: with leave of the ledger first, where there is a budget."""
        phase = m.AUTHORIZE if self._job.privacy else m.SELECT
        self._state.attempt = Attempt(number, attempt, phase, now)
        self._context.status(
            "running" if self._state.chronicle.done or attempt > 1 else "waiting", "selecting clients"
        )
        if phase == m.AUTHORIZE:
            self._context.out.append(m.Authorize(self._context.attempt().step))
        else:
            self.begin_selection(now)

    def begin_selection(self, now: float) -> None:
        """Looks for a cohort."""
        self._context.attempt().phase = m.SELECT
        self.try_select(now)

    def try_select(self, now: float) -> None:
        """Draws the cohort if enough clients are there; waits for more otherwise, saying so once."""
        attempt, cohort = self._context.attempt(), self._job.cohort
        sampled = cohort.strategy == "poisson" or self._amplified
        candidates = rested(self._population.known() if sampled else self._population.online(), self._state)
        if len(candidates) < max(least_for_selection(cohort, attempt.settled), fewest(self._job)):
            if attempt.deadline is None:
                attempt.deadline = now + cohort.wait
                self._context.out.append(m.SetTimer(self._context.timer("wait"), attempt.deadline))
                self._context.note(
                    "waiting_for_clients", view(self._job, self._state, self._population).waiting_for
                )
            return
        wanted = min(cohort.size or len(candidates), len(candidates))
        ask = min(math.ceil(wanted * cohort.over_selection), len(candidates))
        chance = numpy_generator(self._state.selection_seed, attempt.round, attempt.number, "selection")
        chosen = STRATEGIES[cohort.strategy](candidates, ask, chance, self._context.candidate, cohort)
        attempt.cohort = tuple(sorted(chosen))
        attempt.target = len(chosen) if sampled else wanted
        attempt.minimum = max(quorum(cohort, attempt.target), fewest_updates(self._job, attempt.target))
        self._begin_training(now)

    def _begin_training(self, now: float) -> None:
        attempt = self._context.attempt()
        attempt.phase = m.TRAIN
        attempt.deadline = attempt.due = now + self._job.cohort.deadline
        self._context.status("running", f"round {attempt.round} of {self._job.rounds}")
        for name in attempt.cohort:
            record = self._context.record(name)
            record.selected += 1
            record.last_round = attempt.round
        detail = {"cohort": list(attempt.cohort), "minimum": attempt.minimum}
        who = ", ".join(attempt.cohort[:8]) + (" …" if len(attempt.cohort) > 8 else "") or "nobody"
        self._context.note("round_started", f"round {attempt.round}: {who}", detail=detail)
        self._context.out.append(m.SetTimer(self._context.timer("deadline"), attempt.deadline))
        attempt.awaited = dict.fromkeys(attempt.cohort)
        self._context.instruct(attempt.cohort, now)
        self.check(now)

    def check(self, now: float) -> None:
        """Whether the phase that runs has what it needs, or never will; called after every answer."""
        attempt = self._context.attempt()
        if attempt.phase == m.TRAIN:
            self._check_training(attempt, now)
        elif attempt.phase == m.EVALUATE and not attempt.awaited:
            self.commit(now)
        elif attempt.phase == m.EVALUATE and not self._awaits_somebody_online(attempt):
            self._context.out.append(m.SetTimer(self._context.timer("grace"), now + self._job.cohort.grace))

    def _awaits_somebody_online(self, attempt: Attempt) -> bool:
        return any(map(self._population.is_online, attempt.awaited))

    def _check_training(self, attempt: Attempt, now: float) -> None:
        arrived, awaited = len(attempt.updates), attempt.awaited
        if arrived >= attempt.target or (not awaited and arrived >= attempt.minimum):
            self._end_training("the round has the updates that it needs", now)
        elif arrived + len(awaited) < attempt.minimum:
            self.fail_attempt(self._quorum_missed(attempt), now)
        elif arrived >= attempt.minimum and not self._awaits_somebody_online(attempt):
            self._context.out.append(m.SetTimer(self._context.timer("grace"), now + self._job.cohort.grace))

    def go_on_without_those_offline(self, now: float) -> None:
        """The grace time is over: those that are offline are given up, in training if there is a quorum."""
        attempt = self._context.attempt()
        if self._awaits_somebody_online(attempt):
            return
        if attempt.phase == m.EVALUATE:
            self.commit(now)
        elif len(attempt.updates) >= attempt.minimum:
            self._give_up_on_awaited("still offline after the grace time", now)
            self._end_training("the round goes on without those that are offline", now)

    def deadline_of_phase(self, attempt: Attempt, now: float) -> None:
        """Goes on with what has arrived, if that is a quorum."""
        if attempt.phase == m.EVALUATE:
            self._context.withdraw_awaited("the evaluation's deadline has passed")
            self.commit(now)
            return
        self._context.withdraw_awaited("the round's deadline has passed")
        self._give_up_on_awaited("no update before the deadline", now)
        if len(attempt.updates) >= attempt.minimum:
            self._end_training("the deadline has passed", now)
        else:
            self.fail_attempt(self._quorum_missed(attempt), now)

    def _give_up_on_awaited(self, detail: str, now: float) -> None:
        attempt = self._context.attempt()
        for name in list(attempt.awaited):
            kind = "slow_node" if self._population.is_online(name) else "node_failure"
            said, action = detail, ""
            if name in attempt.lost:
                kind, said = "data_corruption", f"its update is damaged and was not sent again: {detail}"
                action = "asked the silo to send it again, then excluded the update"
            failure = SiteFailure(name, attempt.round, attempt.number, attempt.phase, kind, said)
            attempt.failures[name] = failure
            self._context.drop(failure, now, action)

    def _end_training(self, reason: str, now: float) -> None:
        self._context.withdraw_awaited(reason)
        attempt = self._context.attempt()
        attempt.phase, attempt.deadline, attempt.awaited = m.AGGREGATE, None, {}
        for name in attempt.updates:
            self._context.record(name).completed += 1
        self._context.out.append(self.aggregate_action(attempt))

    def replace_damaged(self, damaged: Mapping[str, str], now: float) -> None:
        """Back to training, for updates that were accepted and are damaged: their silos send them again.

        Until the round's deadline, or for the grace time if that is later; after so many times without them.
        """
        attempt = self._context.attempt()
        failures = self.take_out(damaged)
        attempt.phase, attempt.deadline = m.TRAIN, max(attempt.due, now + self._job.cohort.grace)
        self._context.out.append(m.SetTimer(self._context.timer("deadline"), attempt.deadline))
        for failure in failures:
            name, asked = failure.site, attempt.repeats.get(failure.site, 0)
            attempt.awaited[name] = None
            if asked < MOST_REPEATS:
                attempt.repeats[name] = asked + 1
                self._context.trouble(failure, "asked the silo to send it again")
            else:
                attempt.failures[name] = failure
                said = f"asked the silo {asked} times to send it again, then excluded the update"
                self._context.drop(failure, now, said)
        self._context.instruct(attempt.awaited, now)
        self.check(now)

    def take_out(self, damaged: Mapping[str, str]) -> list[SiteFailure]:
        """Takes damaged updates out of those that are to be combined; nobody's work is done any more."""
        attempt = self._context.attempt()
        for name in attempt.updates:
            self._context.record(name).completed -= 1
        found = []
        for name, detail in sorted(damaged.items()):
            attempt.lost[name] = attempt.updates.pop(name)
            found.append(SiteFailure(name, attempt.round, attempt.number, m.TRAIN, "data_corruption", detail))
        return found

    def aggregate_action(self, attempt: Attempt) -> m.Aggregate:
        """The updates in the order of names, so that the order of arrival changes no bit."""
        updates = tuple(attempt.updates[name] for name in sorted(attempt.updates))
        return m.Aggregate(attempt.step, self._state.model, self._state.optimizer, updates, attempt.cohort)

    def evaluation_due(self, number: int) -> bool:
        """Every so many rounds, and after the last."""
        every = self._job.evaluation.every
        return every > 0 and (number % every == 0 or number == self._job.rounds)

    def begin_evaluation(self, now: float) -> None:
        """Asks those who are there for the new model's metrics, and those who have just delivered: after a
        restart nobody is there yet, and they are on their way back."""
        attempt = self._context.attempt()
        pool = attempt.cohort if self._job.evaluation.clients == "cohort" else self._population.online()
        there = (name for name in pool if self._population.is_online(name))
        idle = (name for name in (*there, *sorted(attempt.updates)) if name not in self._state.at_work)
        attempt.awaited = dict.fromkeys(idle)
        attempt.phase = m.EVALUATE
        attempt.deadline = now + self._job.evaluation.deadline
        self._context.out.append(m.SetTimer(self._context.timer("deadline"), attempt.deadline))
        self._context.instruct(attempt.awaited, now)
        self.check(now)

    def commit(self, now: float) -> None:
        """Writes the round's record and asks for it to be made durable."""
        record = record_of(self._context.attempt(), now, self._private)
        self._state.model, self._state.optimizer = record.model, record.optimizer
        self._close(record)

    def close_round(self, reason: str, now: float) -> None:
        """Ends a round without a model, because clients may have unmasked its sum and that is not to be had.

        Another attempt would be a second sum over the same training of other clients.
        """
        attempt, state = self._context.attempt(), self._state
        self._close(record_without_model(attempt, state.model, state.optimizer, reason, now))

    def _close(self, record: m.RoundRecord) -> None:
        attempt = self._context.attempt()
        attempt.phase, attempt.deadline, attempt.awaited = m.COMMIT, None, {}
        attempt.record = record
        self._context.out.append(self.commit_action(record))

    def commit_action(self, record: m.RoundRecord) -> m.Commit:
        """After a round no update of it is wanted: the next one has another model."""
        return m.Commit(record, settled=record.round)

    def fail_attempt(self, reason: str, now: float) -> None:
        """Tries again with a new cohort, or pauses the job after so many tries."""
        attempt = self._context.attempt()
        if attempt.spent is not None:
            self.close_round(reason, now)
            return
        self._context.withdraw_awaited("the attempt has failed")
        self._context.note(
            "attempt_failed", f"round {attempt.round}, attempt {attempt.number} failed: {reason}"
        )
        if attempt.number > self._job.cohort.retries:
            said = f"round {attempt.round} failed {attempt.number} times; the last reason: {reason}"
            self.stop("paused", said, now)
        else:
            self.begin_attempt(attempt.round, attempt.number + 1, now)

    def end_round(self, now: float) -> None:
        """The record is durable: on to the next round, unless something asks to stop."""
        attempt = self._context.attempt()
        assert attempt.record is not None
        assert self._state.started is not None
        self._state.chronicle.add(attempt.record, self._job.stop, self._state.separation)
        closed, on_end = attempt.record.closed, self._state.chronicle.on_end
        if closed:
            said = f"round {attempt.round} is closed without a model, because its sum may be known: {closed}"
            self._context.note("round_closed", said)
        else:
            said = f"round {attempt.round} is committed"
            self._context.note("round_committed", said, detail=shown(attempt.record))
        if self._state.stopping is not None:
            status, reason = self._state.stopping
            self._state.stopping = None
            self._stop_now(status, reason)
            return
        self._warn_of_the_metric(attempt.record)
        enough = stop_reason(self._job.stop, self._state.chronicle.trend, now - self._state.started)
        if enough is not None:
            self._stop_now("finished", enough)
        elif closed and on_end > self._job.cohort.retries and attempt.round < self._job.rounds:
            said = f"{on_end} rounds on end were closed without a model; the last reason: {closed}"
            self._stop_now("paused", said)
        else:
            self.next_round(now)

    def _warn_of_the_metric(self, record: m.RoundRecord) -> None:
        """Once, after the first round whose figures show that the metric to stop by is not there."""
        every = self._job.evaluation.every
        if record.round != max(1, every):
            return
        measured = record.evaluation or ({} if every else record.training)
        if said := missing_metric(self._job.stop, self._state.chronicle.trend, measured):
            self._context.note("metric_missing", f"warning: {said}")

    def stop(self, status: m.JobStatus, reason: str, now: float) -> None:
        """Ends or pauses the job; a commit that is under way is completed first.

        So is a round that cannot be repeated: with the model that it has made, or else without one.
        """
        attempt = self._state.attempt
        if attempt is not None and attempt.spent is not None:
            if attempt.phase == m.EVALUATE:
                self._context.withdraw_awaited(f"the job is {status}")
                self.commit(now)
            elif attempt.phase == m.AGGREGATE:
                self.close_round(f"the job was {status} while it was unmasked: {reason}", now)
        if attempt is not None and attempt.phase == m.COMMIT:
            self._state.stopping = (status, reason)
            return
        self._context.withdraw_awaited(f"the job is {status}")
        self._stop_now(status, reason)

    def _stop_now(self, status: m.JobStatus, reason: str) -> None:
        attempt = self._state.attempt
        if status == "paused" and attempt is not None:
            # Only the numbers live on, so that a resumed round never reuses an attempt's key.
            self._state.attempt = Attempt(attempt.round, attempt.number, "", attempt.started)
        else:
            self._state.attempt = None
        self._context.note(f"job_{status}", reason)
        self._context.status(status, reason)

    def _quorum_missed(self, attempt: Attempt) -> str:
        reasons = "; ".join(f"{name}: {failure.detail}" for name, failure in sorted(attempt.failures.items()))
        return (
            f"{len(attempt.updates)} of at least {attempt.minimum} updates ({reasons or 'nobody answered'})"
        )
