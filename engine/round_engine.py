"""The round engine: a state machine without I/O, threads or clock.

    authorize → check → train → aggregate → evaluate → commit → the next round
                 ↑         │
                 └─────────┘  an attempt that fails is made again

`handle(event, now)` takes what happened and returns what is to be done. The coordinator drives it
with gRPC and a database, the simulation in virtual time, the tests with Hypothesis: the same object,
the same behaviour. Events that are late, doubled or out of order change nothing. Whom a round asks to train,
and which updates it waits for, its `TrainingPolicy` decides: synchronous or buffered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from roundtable.core.config import JobConfig
from roundtable.engine import messages as m
from roundtable.engine.context import JobContext
from roundtable.engine.foreign_selection import find_strategy
from roundtable.engine.phases import Phases
from roundtable.engine.policies.policy_choice import policy_of
from roundtable.engine.population import Population, Roster
from roundtable.engine.records import note_faults
from roundtable.engine.selection import SelectionFailed, Strategy, least_for_selection
from roundtable.engine.state import EngineState, PlainClients, from_plain, in_queue, to_plain
from roundtable.engine.validation.secure_feasibility import fewest
from roundtable.engine.view import WHO_HELD, EngineView, view


class RoundEngine:
    """One job's rounds, from `state` on, with the training policy of the job's `[round] mode`."""

    def __init__(
        self, job: JobConfig, state: EngineState, population: Population | None, strategy: Strategy | None
    ) -> None:
        self.job = job
        self.state = state
        self.population: Population = population or Roster()
        strategy = strategy or find_strategy(job.cohort)
        self._context = JobContext(job, state, self.population, strategy)
        self._policy = policy_of(self._context)
        self._plain_clients: PlainClients = {}
        self._phases = Phases(self._context, self._policy)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.Start: self._on_start,
            m.ClientJoined: self._on_joined,
            m.ClientLeft: self._on_left,
            m.ClientHeld: self._on_held,
            m.WorkStarted: self._on_work_started,
            m.UpdateReady: self._on_prepared,
            m.UpdateArrived: self._on_update,
            m.SumArrived: self._on_sum,
            m.Evaluated: self._on_evaluated,
            m.ClientFailed: self._on_client_failed,
            m.Troubled: self._on_troubled,
            m.DeadlinePassed: self._on_deadline,
            m.Unmasking: self._on_unmasking,
            m.Aggregated: self._on_aggregated,
            m.AggregationFailed: self._on_aggregation_failed,
            m.Committed: self._on_committed,
            m.Authorized: self._on_authorized,
            m.Denied: self._on_denied,
            m.Cancel: self._on_cancel,
            m.Pause: self._on_pause,
            m.Resume: self._on_resume,
            m.Yield: self._on_yield,
            m.MovedInQueue: self._on_moved,
        }

    @classmethod
    def begin(
        cls,
        job: JobConfig,
        model: str,
        selection_seed: int,
        population: Population | None = None,
        separation: int = 1,
        strategy: Strategy | None = None,
        *,
        regional: bool = False,
        unchecked: bool = False,
    ) -> RoundEngine:
        """The engine of a job that has not started.

        `model` is the digest of the initial model. `selection_seed` seeds the choice of cohorts: the
        job's seed in a simulation; secret and drawn from the operating system at a coordinator, because
        amplification by sampling holds only against those who cannot predict the sample. `separation` is
        the plan's: the least number of rounds from one contribution of a client to its next. `strategy` is
        the plan's too; left out, the job's is found by its name. `regional`, `unchecked`: see `EngineState`.
        """
        state = EngineState(
            model, selection_seed, separation=separation, regional=regional, unchecked=unchecked
        )
        return cls(job, state, population, strategy)

    def handle(self, event: m.Event, now: float) -> list[m.Action]:
        """What is to be done after `event` at time `now` (seconds); never raises for a stale event."""
        with self._pausing(now):
            self._handlers[type(event)](event, now)
        return self._context.take_actions()

    def snapshot(self) -> dict[str, Any]:
        """A JSON-able form from which `restore` goes on; the history is kept by the driver."""
        return to_plain(self.state, self._plain_clients)

    @classmethod
    def restore(
        cls,
        job: JobConfig,
        snapshot: Mapping[str, Any],
        history: Iterable[m.RoundRecord],
        population: Population | None = None,
        strategy: Strategy | None = None,
    ) -> RoundEngine:
        """The engine of the snapshot; nobody counts as online until `ClientJoined` says so."""
        state = from_plain(snapshot)
        for record in history:
            state.summary.add(record, job, state.separation)
        return cls(job, state, population, strategy)

    @contextmanager
    def _pausing(self, now: float) -> Iterator[None]:
        """Pauses the job where its strategy cannot choose: somebody has to look at that."""
        try:
            yield
        except SelectionFailed as error:
            self._phases.stop("paused", str(error), now)

    def outstanding(self, now: float) -> list[m.Action]:
        """After `restore`: the actions that may have been lost with the process. All are idempotent.

        Deadlines are extended by the grace time, so that agents can find their way back, and never lie
        further ahead than when the phase began, should the clock have been set back meanwhile.
        """
        attempt = self.state.attempt
        if attempt is None or self.state.status not in ("waiting", "running"):
            return []
        match attempt.phase:
            case m.AUTHORIZE:
                self._context.out.append(m.Authorize(attempt.step))
            case m.CHECK | m.EVALUATE:
                self._phases.asking[attempt.phase].restore(now)
            case m.AGGREGATE:
                self._context.out.append(self._phases.aggregate_action(attempt))
            case m.COMMIT:
                assert attempt.record is not None
                self._context.out.append(self._phases.commit_action(attempt.record))
        with self._pausing(now):
            self._phases.follow(self._policy.restore(now), now)
        return self._context.take_actions()

    def works_on(self, client: str, step: m.Step) -> bool:
        """Whether the client was asked for this step and has neither answered nor failed."""
        return self._context.works_on(client, step)

    def wants(self, client: str, step: m.Step) -> Literal["wanted", "duplicate", "stale"]:
        """What an upload of `client` for `step` would be: asked before a byte of it is accepted."""
        if step.phase != m.TRAIN:
            return "stale"
        if self._context.works_on(client, step):
            return "wanted"
        attempt = self.state.attempt
        held = self.state.buffer.get(client) or (attempt.updates.get(client) if attempt else None)
        if held is None or attempt is None:
            return "stale"
        asked = held.asked or (attempt.round, attempt.number)
        return "duplicate" if asked == (step.round, step.attempt) else "stale"

    def lost(self, client: str, step: m.Step) -> m.Update | None:
        """The update of this step that was accepted once, was damaged since and is to be sent again."""
        attempt = self.state.attempt
        if attempt is None or (attempt.round, attempt.number) != (step.round, step.attempt):
            return None
        return attempt.lost.get(client)

    def refusal(self, client: str, step: m.Step) -> str:
        """Why an update that `wants` calls stale is not taken."""
        return self._policy.refusal(client, step)

    @property
    def queued(self) -> bool:
        """Whether the job waits for its turn, which `Start` gives."""
        return in_queue(self.state)

    @property
    def starved(self) -> bool:
        """Whether an attempt runs for which nobody was asked yet: it waits for clients to connect."""
        attempt = self.state.attempt
        if attempt is None or attempt.phase == m.SELECT:
            return attempt is not None
        if attempt.phase == m.CHECK:
            return not (attempt.awaited or attempt.evaluations or attempt.failures)
        given = self.state.at_work or self.state.ready
        return attempt.phase == m.TRAIN and not (attempt.awaited or attempt.updates or given)

    @property
    def least(self) -> int:
        """The fewest clients with which a round can begin once the time to wait for more has passed."""
        return max(least_for_selection(self.job.cohort, True, self.population), fewest(self.job))

    def view(self, *, with_clients: bool = True) -> EngineView:
        """The job as people see it, with or without what each client does."""
        return view(self.job, self.state, self.population, with_clients=with_clients)

    def _on_start(self, event: m.Start, now: float) -> None:
        if not in_queue(self.state) or self.state.hold:
            return
        if self.state.started is None:
            self.state.started = now
        self._phases.take_turn(now)

    def _on_joined(self, event: m.ClientJoined, now: float) -> None:
        name = event.info.name
        self.population.join(event.info, event.online)
        attempt = self.state.attempt
        if not event.online or attempt is None:
            return
        if attempt.phase in self._phases.asking:
            self._phases.asking[attempt.phase].joined(name, now)
        self._phases.follow(self._policy.client_joined(name, now), now)

    def _on_left(self, event: m.ClientLeft, now: float) -> None:
        client, attempt = event.client, self.state.attempt
        self.population.leave(client)
        if client in self.state.clients:
            self._context.mark(client, "offline", now)
            self._context.forget_time([client])
        assignment = self.state.given(client)
        if assignment is not None:
            assignment.away = True
        if client in self.state.ready:
            self.state.ready[client].deadline = now + self.job.cohort.grace
        awaited = attempt is not None and client in attempt.awaited
        if assignment is None and not awaited:
            return
        self._context.note("client_offline", f"{client} is offline; it can still deliver", client)
        self._phases.proceed(self._context.attempt().phase if awaited else m.TRAIN, now)

    def _on_held(self, event: m.ClientHeld, now: float) -> None:
        name, info = event.client, self.population.info(event.client)
        if info.held == event.held:
            return
        online = self.population.is_online(name)
        self.population.join(replace(info, held=event.held), online)
        said = f"{name} may be asked again"
        if event.held is not None:
            said = f"{name} is {WHO_HELD[event.held]}: it is asked for nothing new"
        self._context.note("client_held", said, detail={"silo": name, "held": event.held or ""})
        if self.state.attempt is None:
            return
        # Of one that is held a round that waits for its cohort learns that it need not wait for it.
        if self.state.attempt.phase == m.SELECT or (event.held is None and online):
            self._phases.follow(self._policy.client_joined(name, now), now)

    def _on_work_started(self, event: m.WorkStarted, now: float) -> None:
        if self._context.works_on(event.client, event.step) and event.client not in self.state.ready:
            self._context.mark(event.client, event.state, now)
            if self._context.stands_in_line(event.client, event.step, event.state == "queued", now):
                self._phases.work_began(event.step, now)

    def _on_prepared(self, event: m.UpdateReady, now: float) -> None:
        given = self.state.at_work.get(event.client)
        if event.step.phase == m.PREPARE and given is not None and given.step == event.step:
            self._phases.prepared(event.client, now)

    def _on_update(self, event: m.UpdateArrived, now: float) -> None:
        self._take((event.update,), event.step, now)

    def _on_sum(self, event: m.SumArrived, now: float) -> None:
        self._take(event.updates, event.step, now, event.within)

    def _take(
        self, updates: Sequence[m.Update], step: m.Step, now: float, within: m.Within | None = None
    ) -> None:
        """Takes all or, where one of them is not wanted, none: a sum cannot be taken apart."""
        if all(self.wants(update.client, step) == "wanted" for update in updates):
            for update in updates:
                self._phases.received(update, now)
            self._context.attempt().within.update(within or {})
            self._phases.proceed(m.TRAIN, now)

    def _on_client_failed(self, event: m.ClientFailed, now: float) -> None:
        step, failure = event.step, event.failure
        if self._context.works_on(failure.site, step):
            failure = replace(failure, round=step.round, attempt=step.attempt, phase=step.phase)
            if step.phase in self._phases.asking:
                self._phases.asking[step.phase].failed(failure, now)
            else:
                failure = replace(failure, phase=m.TRAIN)
                self._phases.follow(self._policy.client_failed(failure, now), now)

    def _on_troubled(self, event: m.Troubled, now: float) -> None:
        if self.state.attempt is not None and self._context.works_on(event.failure.site, event.step):
            self._context.trouble(event.failure, event.action)

    def _on_evaluated(self, event: m.Evaluated, now: float) -> None:
        asking = self._phases.asking.get(event.step.phase)
        if asking is not None and self._context.works_on(event.client, event.step):
            asking.answered(event.client, event.metrics, now)

    def _on_deadline(self, event: m.DeadlinePassed, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None:
            return
        if attempt.phase in self._phases.asking:
            self._phases.asking[attempt.phase].timer_fired(event.timer, now)
        self._phases.follow(self._policy.timer_fired(event.timer, now), now)

    def _on_unmasking(self, event: m.Unmasking, now: float) -> None:
        attempt = self.state.attempt
        if attempt is not None and event.step == attempt.step and attempt.phase == m.AGGREGATE:
            attempt.spent = dict(event.charge)
            self._context.out.append(m.Unmask(event.step))

    def _on_aggregated(self, event: m.Aggregated, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or event.step != attempt.step:
            return
        attempt.aggregated = event
        note_faults(event, self._context.note)
        if self._phases.evaluation.due(attempt.round):
            self._phases.evaluation.begin(now)
        else:
            self._phases.commit(now)

    def _on_aggregation_failed(self, event: m.AggregationFailed, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or event.step != attempt.step:
            return
        damaged = {name: detail for name, detail in event.damaged.items() if name in attempt.updates}
        if damaged and attempt.spent is None:
            self._phases.follow(self._policy.reopen(damaged, now), now)
        else:
            self._phases.fail_attempt(event.reason, now)

    def _on_committed(self, event: m.Committed, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or attempt.phase != m.COMMIT or attempt.round != event.round:
            return
        self._phases.end_round(now)

    def _on_authorized(self, event: m.Authorized, now: float) -> None:
        attempt = self.state.attempt
        if attempt is not None and event.step == attempt.step:
            self._phases.begin_training(now)

    def _on_denied(self, event: m.Denied, now: float) -> None:
        if self.state.attempt is not None and event.step == self.state.attempt.step:
            self._context.note("budget_spent", event.reason)
            self._phases.stop("finished", event.reason, now)

    def _on_cancel(self, event: m.Cancel, now: float) -> None:
        if self.state.status not in m.FINAL:
            self._phases.stop("cancelled", event.reason, now)

    def _on_pause(self, event: m.Pause, now: float) -> None:
        if self.state.status in ("waiting", "running"):
            self._phases.stop("paused", event.reason, now)

    def _on_resume(self, event: m.Resume, now: float) -> None:
        if self.state.status != "paused":
            return
        if event.queued:
            self.state.queued, self.state.yielding = now, ""
            self._context.status("waiting", "resumed; it waits for its turn")
        else:
            self._phases.take_turn(now)

    def _on_yield(self, event: m.Yield, now: float) -> None:
        attempt = self.state.attempt
        if attempt is None or self.state.status not in ("waiting", "running") or self.queued:
            return
        if self.starved:
            if attempt.phase == m.SELECT:
                attempt.number -= 1  # Nobody was asked for it: it is no attempt that has failed.
            self._phases.wait_in_line(event.reason, now)
        else:
            self.state.yielding = event.reason

    def _on_moved(self, event: m.MovedInQueue, now: float) -> None:
        if event.priority is not None:
            self.state.priority = event.priority
            self._context.note("job_moved", f"the job has priority {event.priority}")
        if event.hold is None or event.hold == self.state.hold:
            return
        self.state.hold = event.hold
        if event.hold:
            self._context.note("job_held", f"the job is held in the queue: {event.hold}")
            self._on_yield(m.Yield(event.hold), now)
        else:
            self._phases.stand_in_line(now)
