"""The round engine: a state machine without I/O, threads or clock.

    select → train → aggregate → evaluate → commit → the next round
       ↑        │         │
       └────────┴─────────┘  an attempt that fails is made again with a new cohort

`handle(event, now)` takes what happened and returns what is to be done. The coordinator drives it
with gRPC and a database, the simulation in virtual time, the tests with Hypothesis: the same object,
the same behaviour. Events that are late, doubled or out of order change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from roundtable.core.config import JobConfig
from roundtable.core.errors import SiteFailure
from roundtable.core.seeds import numpy_generator
from roundtable.engine import messages as m
from roundtable.engine.metrics import add_up, means
from roundtable.engine.population import Population, Roster
from roundtable.engine.selection import STRATEGIES, Candidate, least_for_selection, quorum
from roundtable.engine.state import Attempt, ClientRecord, EngineState, from_plain, to_plain
from roundtable.engine.stopping import stop_reason
from roundtable.engine.view import EngineView, view


class RoundEngine:
    """One job's rounds.

    `model` is the digest of the initial model. `selection_seed` seeds the choice of cohorts: the
    job's seed in a simulation; secret and drawn from the operating system at a coordinator, because
    amplification by sampling holds only against those who cannot predict the sample.
    """

    def __init__(
        self, job: JobConfig, model: str, selection_seed: int, population: Population | None = None
    ) -> None:
        self.job = job
        self.population: Population = population or Roster()
        self.state = EngineState(model, selection_seed)
        self._out: list[m.Action] = []
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.Start: self._on_start,
            m.ClientJoined: self._on_joined,
            m.ClientLeft: self._on_left,
            m.WorkStarted: self._on_work_started,
            m.UpdateArrived: self._on_update,
            m.Evaluated: self._on_evaluated,
            m.ClientFailed: self._on_client_failed,
            m.DeadlinePassed: self._on_deadline,
            m.Aggregated: self._on_aggregated,
            m.AggregationFailed: self._on_aggregation_failed,
            m.Committed: self._on_committed,
            m.Authorized: self._on_authorized,
            m.Denied: self._on_denied,
            m.Cancel: self._on_cancel,
            m.Pause: self._on_pause,
            m.Resume: self._on_resume,
        }

    @property
    def _amplified(self) -> bool:
        """Whether an accountant relies on the draw being from the whole population, whoever is there."""
        return bool(self.job.privacy) and self.job.cohort.strategy == "uniform"

    def handle(self, event: m.Event, now: float) -> list[m.Action]:
        """What is to be done after `event` at time `now` (seconds); never raises for a stale event."""
        self._handlers[type(event)](event, now)
        out, self._out = self._out, []
        return out

    def snapshot(self) -> dict[str, Any]:
        """A JSON-able form from which `restore` goes on; the history is kept by the driver."""
        return to_plain(self.state)

    @classmethod
    def restore(
        cls,
        job: JobConfig,
        snapshot: Mapping[str, Any],
        history: Iterable[m.RoundRecord],
        population: Population | None = None,
    ) -> RoundEngine:
        """The engine of the snapshot; nobody counts as online until `ClientJoined` says so."""
        state = from_plain(snapshot, list(history))
        engine = cls(job, state.model, state.selection_seed, population)
        engine.state = state
        return engine

    def outstanding(self, now: float) -> list[m.Action]:
        """After `restore`: the actions that may have been lost with the process. All are idempotent.

        Deadlines are extended by the grace time, so that agents can find their way back.
        """
        attempt = self.state.attempt
        if attempt is None or self.state.status not in ("waiting", "running"):
            return []
        match attempt.phase:
            case m.AUTHORIZE:
                self._out.append(m.Authorize(attempt.step))
            case m.SELECT:
                attempt.settled = False
                self._try_select(now)
            case m.TRAIN | m.EVALUATE:
                attempt.deadline = max(attempt.deadline or 0.0, now + self.job.cohort.grace)
                self._out.append(m.SetTimer(self._timer("deadline"), attempt.deadline))
                self._instruct(attempt.awaited, now)
            case m.AGGREGATE:
                self._out.append(self._aggregate_action(attempt))
            case m.COMMIT:
                assert attempt.record is not None
                self._out.append(m.Commit(attempt.record))
        out, self._out = self._out, []
        return out

    def wants(self, client: str, step: m.Step) -> Literal["wanted", "duplicate", "stale"]:
        """What an upload of `client` for `step` would be: asked before a byte of it is accepted."""
        attempt = self.state.attempt
        if (
            attempt is None
            or (attempt.round, attempt.number) != (step.round, step.attempt)
            or step.phase != m.TRAIN
        ):
            return "stale"
        if client in attempt.updates:
            return "duplicate"
        return "wanted" if attempt.phase == m.TRAIN and client in attempt.awaited else "stale"

    def view(self) -> EngineView:
        """The job as people see it."""
        return view(self.job, self.state, self.population)

    def _on_start(self, event: m.Start, now: float) -> None:
        if self.state.started is not None:
            return
        self.state.started = now
        self._next_round(now)

    def _on_joined(self, event: m.ClientJoined, now: float) -> None:
        name = event.info.name
        self.population.join(event.info, event.online)
        attempt = self.state.attempt
        if not event.online or attempt is None:
            return
        if attempt.phase == m.SELECT:
            self._try_select(now)
        elif name in attempt.awaited and attempt.phase in (m.TRAIN, m.EVALUATE):
            self._instruct([name], now)

    def _on_left(self, event: m.ClientLeft, now: float) -> None:
        self.population.leave(event.client)
        attempt = self.state.attempt
        if event.client in self.state.clients:
            self._mark(event.client, "offline", now)
        if attempt is not None and event.client in attempt.awaited:
            self._note("client_offline", f"{event.client} is offline; it can still deliver", event.client)
            self._check(now)

    def _on_work_started(self, event: m.WorkStarted, now: float) -> None:
        attempt = self.state.attempt
        if attempt is not None and event.step == attempt.step and event.client in attempt.awaited:
            self._mark(event.client, event.state, now)

    def _on_update(self, event: m.UpdateArrived, now: float) -> None:
        client = event.update.client
        if self.wants(client, event.step) != "wanted":
            return
        attempt = self._attempt()
        attempt.updates[client] = event.update
        del attempt.awaited[client]
        self._mark(client, "done", now)
        record = self.state.clients[client]
        record.examples = event.update.examples
        detail = {"examples": event.update.examples, "digest": event.update.digest}
        self._note("update_received", f"{client} delivered its update", client, detail)
        self._check(now)

    def _on_client_failed(self, event: m.ClientFailed, now: float) -> None:
        attempt, failure = self.state.attempt, event.failure
        if attempt is None or event.step != attempt.step or failure.site not in attempt.awaited:
            return
        if attempt.phase == m.TRAIN:
            attempt.failures[failure.site] = failure
        self._drop(failure, now)
        self._check(now)

    def _on_evaluated(self, event: m.Evaluated, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or event.step != attempt.step or event.client not in attempt.awaited:
            return
        attempt.evaluations[event.client] = dict(event.metrics)
        del attempt.awaited[event.client]
        self._mark(event.client, "done", now)
        self._check(now)

    def _on_deadline(self, event: m.DeadlinePassed, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or not event.timer.endswith(_suffix(attempt.step)):
            return
        kind = event.timer.split(":")[0]
        if attempt.phase == m.SELECT and kind == "wait":
            attempt.settled = True
            self._try_select(now)
        elif attempt.phase == m.TRAIN and kind == "grace":
            self._end_training_if_only_offline(now)
        elif attempt.phase in (m.TRAIN, m.EVALUATE) and kind == "deadline":
            self._deadline_of_phase(attempt, now)

    def _on_aggregated(self, event: m.Aggregated, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or event.step != attempt.step:
            return
        attempt.aggregated = event
        for client, reason in sorted(event.excluded.items()):
            self._note("update_excluded", f"the update of {client} was left out: {reason}", client)
        if self._evaluation_due(attempt.round):
            self._begin_evaluation(now)
        else:
            self._commit(now)

    def _on_aggregation_failed(self, event: m.AggregationFailed, now: float) -> None:
        if self.state.attempt is not None and event.step == self.state.attempt.step:
            self._fail_attempt(event.reason, now)

    def _on_committed(self, event: m.Committed, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or attempt.phase != m.COMMIT or attempt.round != event.round:
            return
        assert attempt.record is not None
        self.state.history.append(attempt.record)
        self._note("round_committed", f"round {attempt.round} is committed", detail=_figures(attempt.record))
        reason = stop_reason(self.job.stop, self.state.history, now - self._started)
        if reason is not None:
            self._finish("finished", reason)
        else:
            self._next_round(now)

    def _on_authorized(self, event: m.Authorized, now: float) -> None:
        attempt = self.state.attempt
        if attempt is not None and event.step == attempt.step:
            self._begin_selection(now)

    def _on_denied(self, event: m.Denied, now: float) -> None:
        if self.state.attempt is not None and event.step == self.state.attempt.step:
            self._note("budget_spent", event.reason)
            self._finish("finished", event.reason)

    def _on_cancel(self, event: m.Cancel, now: float) -> None:
        if self.state.status not in m.FINAL:
            self._withdraw_awaited("the job was cancelled")
            self._finish("cancelled", event.reason)

    def _on_pause(self, event: m.Pause, now: float) -> None:
        if self.state.status in ("waiting", "running"):
            self._pause(event.reason)

    def _on_resume(self, event: m.Resume, now: float) -> None:
        if self.state.status == "paused":
            attempt = self.state.attempt
            number = attempt.number + 1 if attempt else 1
            self._begin_attempt(len(self.state.history) + 1, number, now)

    def _next_round(self, now: float) -> None:
        done = len(self.state.history)
        if done >= self.job.rounds:
            self._finish("finished", f"all {done} rounds are done")
        else:
            self._begin_attempt(done + 1, 1, now)

    def _begin_attempt(self, number: int, attempt: int, now: float) -> None:
        phase = m.AUTHORIZE if self.job.privacy else m.SELECT
        self.state.attempt = Attempt(number, attempt, phase, now)
        self._status("running" if self.state.history or attempt > 1 else "waiting", "selecting clients")
        if phase == m.AUTHORIZE:
            self._out.append(m.Authorize(self._attempt().step))
        else:
            self._begin_selection(now)

    def _begin_selection(self, now: float) -> None:
        self._attempt().phase = m.SELECT
        self._try_select(now)

    def _try_select(self, now: float) -> None:
        """Draws the cohort if enough clients are there; waits for more otherwise, saying so once."""
        attempt, cohort = self._attempt(), self.job.cohort
        sampled = cohort.strategy == "poisson" or self._amplified
        candidates = self.population.known() if sampled else self.population.online()
        if len(candidates) < least_for_selection(cohort, attempt.settled):
            if attempt.deadline is None:
                attempt.deadline = now + cohort.wait
                self._out.append(m.SetTimer(self._timer("wait"), attempt.deadline))
                self._note("waiting_for_clients", self.view().waiting_for)
            return
        wanted = min(cohort.size or len(candidates), len(candidates))
        ask = min(math.ceil(wanted * cohort.over_selection), len(candidates))
        chance = numpy_generator(self.state.selection_seed, attempt.round, attempt.number, "selection")
        chosen = STRATEGIES[cohort.strategy](candidates, ask, chance, self._candidate, cohort)
        attempt.cohort = tuple(sorted(chosen))
        attempt.target = len(chosen) if sampled else wanted
        attempt.minimum = quorum(cohort, attempt.target)
        self._begin_training(now)

    def _begin_training(self, now: float) -> None:
        attempt = self._attempt()
        attempt.phase = m.TRAIN
        attempt.deadline = now + self.job.cohort.deadline
        self._status("running", f"round {attempt.round} of {self.job.rounds}")
        for name in attempt.cohort:
            record = self._record(name)
            record.selected += 1
            record.last_round = attempt.round
        detail = {"cohort": list(attempt.cohort), "minimum": attempt.minimum}
        who = ", ".join(attempt.cohort[:8]) + (" …" if len(attempt.cohort) > 8 else "") or "nobody"
        self._note("round_started", f"round {attempt.round}: {who}", detail=detail)
        self._out.append(m.SetTimer(self._timer("deadline"), attempt.deadline))
        attempt.awaited = dict.fromkeys(attempt.cohort)
        self._instruct(attempt.cohort, now)
        self._check(now)

    def _instruct(self, names: Iterable[str], now: float) -> None:
        attempt = self._attempt()
        assert attempt.deadline is not None
        model = attempt.aggregated.model if attempt.aggregated else self.state.model
        for name in names:
            if self.population.is_online(name):
                self._mark(name, "available", now)
                self._out.append(m.Instruct(name, attempt.step, model, attempt.deadline))
            else:
                self._mark(name, "offline", now)

    def _check(self, now: float) -> None:
        attempt = self._attempt()
        if attempt.phase == m.TRAIN:
            self._check_training(attempt, now)
        elif attempt.phase == m.EVALUATE and not attempt.awaited:
            self._commit(now)

    def _check_training(self, attempt: Attempt, now: float) -> None:
        arrived, awaited = len(attempt.updates), attempt.awaited
        if arrived >= attempt.target or (not awaited and arrived >= attempt.minimum):
            self._end_training("the round has the updates that it needs", now)
        elif arrived + len(awaited) < attempt.minimum:
            self._fail_attempt(self._quorum_missed(attempt), now)
        elif arrived >= attempt.minimum and not any(map(self.population.is_online, awaited)):
            self._out.append(m.SetTimer(self._timer("grace"), now + self.job.cohort.grace))

    def _end_training_if_only_offline(self, now: float) -> None:
        attempt = self._attempt()
        if len(attempt.updates) >= attempt.minimum and not any(
            map(self.population.is_online, attempt.awaited)
        ):
            self._give_up_on_awaited("still offline after the grace time", now)
            self._end_training("the round goes on without those that are offline", now)

    def _deadline_of_phase(self, attempt: Attempt, now: float) -> None:
        if attempt.phase == m.EVALUATE:
            self._withdraw_awaited("the evaluation's deadline has passed")
            self._commit(now)
            return
        self._withdraw_awaited("the round's deadline has passed")
        self._give_up_on_awaited("no update before the deadline", now)
        if len(attempt.updates) >= attempt.minimum:
            self._end_training("the deadline has passed", now)
        else:
            self._fail_attempt(self._quorum_missed(attempt), now)

    def _give_up_on_awaited(self, detail: str, now: float) -> None:
        attempt = self._attempt()
        for name in list(attempt.awaited):
            kind = "slow_node" if self.population.is_online(name) else "node_failure"
            failure = SiteFailure(name, attempt.round, attempt.number, attempt.phase, kind, detail)
            attempt.failures[name] = failure
            self._drop(failure, now)

    def _drop(self, failure: SiteFailure, now: float) -> None:
        """The site is no longer waited for in this phase."""
        del self._attempt().awaited[failure.site]
        self._mark(failure.site, "dropped", now, failure.detail)
        self._note("client_failed", str(failure), failure.site, {"kind": failure.kind})

    def _end_training(self, reason: str, now: float) -> None:
        self._withdraw_awaited(reason)
        attempt = self._attempt()
        attempt.phase, attempt.deadline, attempt.awaited = m.AGGREGATE, None, {}
        for name in attempt.updates:
            self._record(name).completed += 1
        self._out.append(self._aggregate_action(attempt))

    def _aggregate_action(self, attempt: Attempt) -> m.Aggregate:
        updates = tuple(attempt.updates[name] for name in sorted(attempt.updates))
        return m.Aggregate(attempt.step, self.state.model, self.state.optimizer, updates, attempt.cohort)

    def _evaluation_due(self, number: int) -> bool:
        every = self.job.evaluation.every
        return every > 0 and (number % every == 0 or number == self.job.rounds)

    def _begin_evaluation(self, now: float) -> None:
        attempt = self._attempt()
        pool = attempt.cohort if self.job.evaluation.clients == "cohort" else self.population.online()
        attempt.awaited = {name: None for name in pool if self.population.is_online(name)}
        attempt.phase = m.EVALUATE
        attempt.deadline = now + self.job.evaluation.deadline
        self._out.append(m.SetTimer(self._timer("deadline"), attempt.deadline))
        self._instruct(attempt.awaited, now)
        self._check(now)

    def _commit(self, now: float) -> None:
        attempt, aggregated = self._attempt(), self._attempt().aggregated
        assert aggregated is not None
        attempt.phase, attempt.deadline, attempt.awaited = m.COMMIT, None, {}
        contributors = tuple(n for n in sorted(attempt.updates) if n not in aggregated.excluded)
        attempt.record = m.RoundRecord(
            round=attempt.round,
            attempt=attempt.number,
            model=aggregated.model,
            optimizer=aggregated.optimizer,
            cohort=attempt.cohort,
            contributors=contributors,
            failures={name: failure.detail for name, failure in sorted(attempt.failures.items())},
            excluded=dict(aggregated.excluded),
            weights=dict(aggregated.weights),
            training=add_up(_training_sums(attempt.updates[name]) for name in contributors),
            evaluation=add_up(attempt.evaluations[name] for name in sorted(attempt.evaluations)),
            client_metrics={name: attempt.evaluations[name] for name in sorted(attempt.evaluations)},
            diagnosis=dict(aggregated.diagnosis),
            charge=dict(aggregated.charge),
            started=attempt.started,
            ended=now,
        )
        self.state.model, self.state.optimizer = aggregated.model, aggregated.optimizer
        self._out.append(m.Commit(attempt.record))

    def _fail_attempt(self, reason: str, now: float) -> None:
        attempt = self._attempt()
        self._withdraw_awaited("the attempt has failed")
        self._note("attempt_failed", f"round {attempt.round}, attempt {attempt.number} failed: {reason}")
        if attempt.number > self.job.cohort.retries:
            self._pause(f"round {attempt.round} failed {attempt.number} times; the last reason: {reason}")
        else:
            self._begin_attempt(attempt.round, attempt.number + 1, now)

    def _pause(self, reason: str) -> None:
        self._withdraw_awaited("the job was paused")
        attempt = self.state.attempt
        if attempt is not None:
            # Only the numbers live on, so that a resumed round never reuses an attempt's key.
            self.state.attempt = Attempt(attempt.round, attempt.number, "", attempt.started)
        self._note("job_paused", reason)
        self._status("paused", reason)

    def _finish(self, status: m.JobStatus, reason: str) -> None:
        self.state.attempt = None
        self._note(f"job_{status}", reason)
        self._status(status, reason)

    def _withdraw_awaited(self, reason: str) -> None:
        attempt = self.state.attempt
        if attempt is None or attempt.phase not in (m.TRAIN, m.EVALUATE):
            return
        self._out.extend(m.Withdraw(name, attempt.step, reason) for name in attempt.awaited)

    def _quorum_missed(self, attempt: Attempt) -> str:
        reasons = "; ".join(f"{name}: {failure.detail}" for name, failure in sorted(attempt.failures.items()))
        return (
            f"{len(attempt.updates)} of at least {attempt.minimum} updates ({reasons or 'nobody answered'})"
        )

    def _candidate(self, name: str) -> Candidate:
        record, info = self.state.clients.get(name), self.population.info(name)
        if record is None:
            return Candidate(info)
        if info.examples is None:
            info = replace(info, examples=record.examples)
        return Candidate(info, record.selected, record.completed, record.last_round)

    def _record(self, name: str) -> ClientRecord:
        return self.state.clients.setdefault(name, ClientRecord())

    def _mark(self, name: str, state: m.ClientState, now: float, note: str = "") -> None:
        record = self._record(name)
        if record.state != state or record.note != note:
            record.state, record.since, record.note = state, now, note

    @property
    def _started(self) -> float:
        assert self.state.started is not None
        return self.state.started

    def _attempt(self) -> Attempt:
        assert self.state.attempt is not None
        return self.state.attempt

    def _timer(self, kind: str) -> str:
        return f"{kind}:{_suffix(self._attempt().step)}"

    def _note(
        self, kind: str, message: str, client: str = "", detail: Mapping[str, Any] | None = None
    ) -> None:
        attempt = self.state.attempt
        where = (attempt.round, attempt.number) if attempt else (len(self.state.history), 0)
        self._out.append(m.Note(kind, message, *where, client, detail or {}))

    def _status(self, status: m.JobStatus, reason: str) -> None:
        changed = self.state.status != status
        self.state.status, self.state.reason = status, reason
        if changed:
            self._out.append(m.StatusChanged(status, reason))


def _suffix(step: m.Step) -> str:
    return f"{step.round}.{step.attempt}.{step.phase}"


def _training_sums(update: m.Update) -> dict[str, tuple[float, int]]:
    sums = dict(update.metrics)
    if update.loss is not None:
        sums["loss"] = (update.loss * update.examples, update.examples)
    return sums


def _figures(record: m.RoundRecord) -> dict[str, Any]:
    """What somebody who watches wants to see of a committed round."""
    return {
        "training": means(record.training),
        "evaluation": means(record.evaluation),
        "cohort": len(record.cohort),
        "contributors": len(record.contributors),
        "seconds": record.ended - record.started,
    }
