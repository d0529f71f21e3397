"""The phases of a round: authorize → train → aggregate → evaluate → commit, and how else it can end.

How training goes, from the choice of clients to the last update, is the job's `TrainingPolicy`.
"""

from __future__ import annotations

from dataclasses import replace

from roundtable.core.errors import MODEL_MISMATCH
from roundtable.core.measures.columns import CENTRAL
from roundtable.core.observability.metric_sums import means, worked_out
from roundtable.core.observability.released import IN_THE_LOG, Tells, is_told
from roundtable.core.privacy_table import NoPrivacy
from roundtable.engine import messages as m
from roundtable.engine.context import JobContext
from roundtable.engine.policies.asking import Asking
from roundtable.engine.policies.evaluation_phase import EvaluationPhase
from roundtable.engine.policies.model_check import ModelCheck
from roundtable.engine.policies.training_policy import CheckModels, Combine, Decision, GiveUp, TrainingPolicy
from roundtable.engine.records import record_of, record_without_model, shown
from roundtable.engine.state import Attempt, hops_after, in_queue
from roundtable.engine.stopping import missing_metric, stop_reason
from roundtable.engine.validation.secure_feasibility import sums_exactly


class Phases:
    """Moves a job from phase to phase; `RoundEngine` decides which event may do so."""

    def __init__(self, context: JobContext, policy: TrainingPolicy) -> None:
        self._context = context
        self._policy = policy
        self._job = context.job
        self._state = context.state
        self._population = context.population
        self.evaluation = EvaluationPhase(context, self.commit)
        self._check = ModelCheck(context, self.begin_training, self.stop)
        self.asking: dict[str, Asking] = {m.CHECK: self._check, m.EVALUATE: self.evaluation}

    def next_round(self, now: float) -> None:
        """Begins the next round, or ends the job after the last."""
        summary = self._state.summary
        done, closed = summary.done, summary.closed
        if done < self._job.rounds:
            self.begin_attempt(self._following, 1, now)
        elif done and done == closed:
            self._stop_now("failed", f"none of the {done} rounds has made a model; the history says why")
        else:
            without = f", {closed} of them without a model" if closed else ""
            self._stop_now("finished", f"all {done} rounds are done{without}{self._of_the_best()}")

    @property
    def _following(self) -> int:
        """The next round that happens here: those within regions happen at relays."""
        done = self._state.summary.done
        return self._job.regions.goes_up(done, self._job.rounds) if self._state.regional else done + 1

    def begin_attempt(self, number: int, attempt: int, now: float) -> None:
        """Begins an attempt at a round; the ledger authorises it first, where there is a privacy budget."""
        phase = m.SELECT if isinstance(self._job.privacy, NoPrivacy) else m.AUTHORIZE
        self._state.attempt = Attempt(number, attempt, phase, now)
        self._context.status(
            "running" if self._state.summary.done or attempt > 1 else "waiting", "selecting clients"
        )
        if phase == m.AUTHORIZE:
            self._context.out.append(m.Authorize(self._context.attempt().step))
        else:
            self.begin_training(now)

    def begin_training(self, now: float) -> None:
        """Starts collecting updates."""
        self.follow(self._policy.begin(now), now)

    def follow(self, decision: Decision, now: float) -> None:
        """Does what the training policy has decided."""
        match decision:
            case Combine(reason):
                self._end_training(reason, now)
            case GiveUp(reason):
                self.fail_attempt(reason, now)
            case CheckModels():
                self._check.begin(now)

    def received(self, update: m.Update, now: float) -> None:
        """A client's update that is wanted is here; `proceed` follows."""
        client, attempt = update.client, self._context.attempt()
        assignment = self._state.at_work.pop(client, None) or attempt.group.get(client)
        asked_in = update.asked if assignment is None else (assignment.round, assignment.attempt)
        attempt.awaited.pop(client, None)
        steps = self._context.see_pace(client, now)
        if (asked_in, steps) != (update.asked, update.steps):
            update = replace(update, asked=asked_in, steps=steps)
        lost = attempt.lost.pop(client, None)
        (attempt.updates if attempt.phase == m.TRAIN else self._state.buffer)[client] = lost or update
        course = self._context.done(client, lost or update, now)
        if not lost and client not in attempt.group:
            took = self._state.clients[client].took
            took(now, assignment.line if assignment else attempt.lines.get(client), update)
        asked = {} if update.asked is None else {"asked": update.asked[0]}
        detail = {"examples": update.examples, **vars(update.vector), **asked, "course": course}
        way = f" in a sum of the relay {update.relay}" if update.relay else " again" if lost else ""
        self._context.note("update_received", f"{client} delivered its update{way}", client, detail)

    def prepared(self, client: str, now: float) -> None:
        """A client at work keeps its finished update; a group is looked for in training only."""
        given = self._state.at_work.pop(client)
        record = self._context.record(client)
        record.seconds, record.failed = max(0.0, now - record.called - given.line.until(now)), 0
        self._state.ready[client] = given
        self._context.mark(client, "ready", now)
        self._context.note("update_ready", f"{client} has trained from model {given.round - 1}", client)
        self.proceed(m.TRAIN, now)

    def proceed(self, phase: str, now: float) -> None:
        """Called after every answer that belongs to `phase`: ends it, if it runs and has what it needs."""
        attempt = self._context.attempt()
        if attempt.phase != phase:
            return
        if phase == m.TRAIN:
            self.follow(self._policy.proceed(now), now)
        else:
            self.asking[phase].proceed(now)

    def _end_training(self, reason: str, now: float) -> None:
        attempt = self._context.attempt()
        self._policy.close(reason, now)
        attempt.phase, attempt.deadline = m.AGGREGATE, None
        attempt.population = max(1, len(self._population.known()))
        for name in attempt.updates:
            self._context.record(name).completed += 1
        self._context.out.append(self.aggregate_action(attempt))

    def aggregate_action(self, attempt: Attempt) -> m.Aggregate:
        """The updates in the order of names, so that the order of arrival changes no bit."""
        updates = tuple(attempt.updates[name] for name in sorted(attempt.updates))
        return m.Aggregate(
            attempt.step,
            self._state.model,
            self._state.optimizer,
            updates,
            attempt.cohort,
            attempt.population,
        )

    def work_began(self, step: m.Step, now: float) -> None:
        """The turn of a client's work has come at its silo."""
        if step.phase in self.asking:
            self._context.watch_deadlines(now)
        else:
            self._policy.watch_deadlines(now)

    def commit(self, now: float) -> None:
        """Writes the round's record and asks for it to be made durable."""
        private = not isinstance(self._job.privacy, NoPrivacy)
        record = record_of(self._context.attempt(), now, private, self._job.metrics)
        aggregated = self._context.attempt().aggregated
        directions = aggregated.directions if aggregated is not None else {}
        for name in record.contributors:
            client = self._context.record(name)
            client.counted = self._context.counted(name)
            client.direction = directions.get(name, client.direction)
        self._state.hops = hops_after(self._state)
        self._state.model, self._state.optimizer = record.model, record.optimizer
        self._state.summed, self._state.barred = (), ()
        self._close(record)

    def close_round(self, reason: str, now: float) -> None:
        """Ends a round without a model, because clients may have unmasked its sum and that is not to be had.

        Another attempt would be a second sum over the same training of other clients. So would the next
        round from the same model, unless its clients are the same or there is noise in each sum.
        """
        attempt, state = self._context.attempt(), self._state
        if sums_exactly(self._job) and attempt.source in ("", state.model):
            clients = tuple(sorted(attempt.updates))
            state.summed = state.summed or clients
            state.barred = (*state.barred, *(name for name in clients if name not in state.summed))
        self._close(record_without_model(attempt, state.model, state.optimizer, reason, now))

    def _close(self, record: m.RoundRecord) -> None:
        attempt = self._context.attempt()
        attempt.phase, attempt.deadline, attempt.awaited = m.COMMIT, None, {}
        attempt.record = record
        self._context.out.append(self.commit_action(record))

    def commit_action(self, record: m.RoundRecord) -> m.Commit:
        """Makes the record durable."""
        return m.Commit(record, settled=self._policy.settled(record.round))

    def fail_attempt(self, reason: str, now: float) -> None:
        """Tries the round again, or pauses the job after so many tries."""
        attempt = self._context.attempt()
        if attempt.spent is not None:
            self.close_round(reason, now)
            return
        self._policy.attempt_failed()
        self._context.withdraw_awaited("the attempt has failed")
        told = reason if is_told(self._job.privacy, Tells.COHORT, Tells.UPDATE) else IN_THE_LOG
        self._context.note(
            "attempt_failed", f"round {attempt.round}, attempt {attempt.number} failed: {reason}"
        )
        apart = {name for name, failure in attempt.failures.items() if failure.kind == MODEL_MISMATCH}
        others = len(self._population.known()) - len(apart.union(self._population.held()))
        if apart and others < attempt.minimum:
            message = f"round {attempt.round} is not tried again before a silo has the job's model: {told}"
            self.stop("paused", message, now)
        elif attempt.number > self._job.cohort.retries and self._job.cohort.on_failure == "skip":
            self._close(record_without_model(attempt, self._state.model, self._state.optimizer, reason, now))
        elif attempt.number > self._job.cohort.retries:
            message = f"round {attempt.round} failed {attempt.number} times; the last reason: {told}"
            self.stop("paused", message, now)
        elif self._state.yielding:
            self.wait_in_line(self._state.yielding, now)
        else:
            self.begin_attempt(attempt.round, attempt.number + 1, now)

    def end_round(self, now: float) -> None:
        """The record is durable: begins the next round, unless there is a reason to stop."""
        attempt = self._context.attempt()
        assert attempt.record is not None
        assert self._state.started is not None
        self._state.summary.add(attempt.record, self._job, self._state.separation)
        closed, on_end = attempt.record.closed, self._state.summary.on_end
        skips = bool(closed) and attempt.spent is None
        if skips:
            reason = f"is skipped after {attempt.number} attempts, the model stays: {closed}"
            self._context.note("round_skipped", f"round {attempt.round} {reason}")
        elif closed:
            reason = f"is closed without a model, because its sum may be known: {closed}"
            self._context.note("round_closed", f"round {attempt.round} {reason}")
        else:
            detail = shown(attempt.record)
            # How long before: the history has a clock of its own.
            spans = {name: [now - began, now - ended] for name, (began, ended) in attempt.measured.items()}
            detail |= {"measured": spans} if spans else {}
            self._context.note("round_committed", f"round {attempt.round} is committed", detail=detail)
        if self._state.stopping is not None:
            status, reason = self._state.stopping
            self._state.stopping = None
            self._stop_now(status, reason)
            return
        if attempt.unmeasured and not attempt.evaluations:
            reason = f"no client could evaluate the model of round {attempt.round}; {attempt.unmeasured}"
            self._stop_now("paused", reason)
            return
        self._warn_of_the_metric(attempt.record)
        self._warn_of_the_undefined(attempt.record)
        where = " before the round" if self._job.evaluation.bounds else ""
        enough = stop_reason(self._job.stop, self._state.summary.trend, now - self._state.started, where)
        if enough is not None:
            self._stop_now("finished", enough + self._of_the_best())
        elif closed and not skips and on_end > self._job.cohort.retries and attempt.round < self._job.rounds:
            message = f"{on_end} rounds on end were closed without a model; the last reason: {closed}"
            self._stop_now("paused", message)
        elif self._state.yielding and attempt.round < self._job.rounds:
            self.wait_in_line(self._state.yielding, now)
        else:
            self.next_round(now)

    def _of_the_best(self) -> str:
        """Which model the job gives, where it is not simply its last."""
        if not self._job.keep.best:
            return "; the model is the last" if self._job.stop.patience else ""
        best, metric = self._state.summary.best, self._job.stop.metric or ""
        return f"; {best.told(metric) if best else f'no round has measured {metric}: the model is the last'}"

    def wait_in_line(self, reason: str, now: float) -> None:
        """Gives up the turn between two attempts: nothing is asked of anybody before the next `Start`."""
        self._state.queued, self._state.yielding = now, ""
        self._stop_now("waiting", reason)

    def stand_in_line(self, now: float) -> None:
        """Operators hold the job no more: it waits for its turn from now on, if it has none."""
        if in_queue(self._state):
            self._state.queued = now
        self._context.note("job_released", "the job may have its turn again")

    def take_turn(self, now: float) -> None:
        """Begins with the first round, or goes on where the job gave up its turn or was paused."""
        attempt, following = self._state.attempt, self._following
        if self._state.summary.done >= self._job.rounds:
            self.next_round(now)
            return
        number = attempt.number + 1 if attempt and attempt.round == following else 1
        self.begin_attempt(following, number, now)

    def _warn_of_the_metric(self, record: m.RoundRecord) -> None:
        """Once, after the first round whose figures show that the metric to stop by is not there."""
        table = self._job.evaluation
        every = self._job.simulation.test_every if self._job.stop.central else table.every
        if record.round != (1 if table.bounds else max(1, every)):
            return
        measured = means(record.evaluation or record.before or ({} if table.every else record.training))
        measured |= {f"{CENTRAL}{name}": value for name, value in means(record.central).items()}
        if warning := missing_metric(self._job.stop, self._state.summary.trend, measured):
            self._context.note("metric_missing", f"warning: {warning}")

    def _warn_of_the_undefined(self, record: m.RoundRecord) -> None:
        """Each figure that the job works out and that these sums do not give."""
        for sums in (record.evaluation, record.before):
            for name, why in worked_out(sums, self._job.metrics)[1].items():
                self._context.note("metric_undefined", f"round {record.round}: {name} is not defined: {why}")

    def stop(self, status: m.JobStatus, reason: str, now: float) -> None:
        """Ends or pauses the job; a commit that is under way is completed first.

        So is a round whose model clients have been given: made again it would be a second release of the same
        round, which nobody has paid for. A round whose sum may be known and gave no model is closed.
        """
        attempt = self._state.attempt
        if attempt is not None and attempt.phase == m.EVALUATE:
            self._context.withdraw_awaited(f"the job is {status}")
            self.commit(now)
        elif attempt is not None and attempt.phase == m.AGGREGATE and attempt.spent is not None:
            self.close_round(f"the job was {status} while it was unmasked: {reason}", now)
        if attempt is not None and attempt.phase == m.COMMIT:
            self._state.stopping = (status, reason)
            return
        self._context.withdraw_awaited(f"the job is {status}")
        self._stop_now(status, reason)

    def _stop_now(self, status: m.JobStatus, reason: str) -> None:
        attempt = self._state.attempt
        for name, given in {**self._state.at_work, **self._state.ready}.items():
            self._context.out.append(m.Withdraw(name, given.step, f"the job is {status}"))
        self._state.at_work, self._state.buffer, self._state.ready = {}, {}, {}
        if status in ("paused", "waiting") and attempt is not None:
            # Only the numbers live on, so that a resumed round never reuses an attempt's key.
            self._state.attempt = Attempt(attempt.round, attempt.number, "", attempt.started)
        else:
            self._state.attempt = None
        self._context.note(f"job_{status}", reason)
        self._context.status(status, reason)
