"""The round engine driven in virtual time: a heap of events, and backends that do the work.

The engine says whom to ask; the devices say when each would answer. Clients are trained only when
the first answer that the round still wants falls due, as many at once as it wants: who drops out,
comes too late or is withdrawn costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from roundtable.core.encodings import get_encoding
from roundtable.core.errors import AggregationError, InvalidUpdate, RoundtableError, SiteFailure
from roundtable.core.models import Model, model_digest
from roundtable.engine import (
    RoundEngine,
    Rows,
    ServerState,
    combine,
    initial_server_state,
    try_rule,
)
from roundtable.engine import messages as m
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import SeededNoise
from roundtable.simulation.attempt import LocalState, Workshop
from roundtable.simulation.backend import Backend, Failed, Trained, World
from roundtable.simulation.ledger import SimulatedLedger
from roundtable.simulation.world.devices import Transfer
from roundtable.simulation.world.dropouts import Fault, Faults
from roundtable.simulation.world.fleet import Fleet
from roundtable.simulation.world.simulated_clients import trusted_data


@dataclass(frozen=True)
class Arrived:
    """The answer of client number `index` to `step` is due."""

    index: int
    step: m.Step


@dataclass(frozen=True)
class Gone:
    """Client number `index` goes away while it is at work on `step`."""

    index: int
    step: m.Step


@dataclass(frozen=True)
class Checkpoint:
    """All that a run goes on from: its state at the commit of a round, before the engine knows of it.

    `local` holds the clients' own tensors, of those that took part in the round alone when a
    checkpoint is written, and of all when one is resumed from. `earlier` are the vectors of older models
    that clients are still at work on, by their rounds.
    """

    now: float
    engine: Mapping[str, Any]
    model: Model
    server: ServerState
    local: Mapping[int, LocalState]
    earlier: Mapping[int, Tensor] = field(default_factory=dict)


class Listener(Protocol):
    """Who hears what happens: the run directory, the progress bar."""

    def committed(self, record: m.RoundRecord, checkpoint: Callable[[], Checkpoint]) -> None:
        """A round is done; what must be durable is so when this returns."""

    def note(self, note: m.Note, now: float) -> None:
        """Something happened, at a virtual time in seconds."""

    def answered(self, step: m.Step, done: int, total: int) -> None:
        """So many of the clients that are being run for this step have answered."""


class Driver:
    """One run of one job."""

    def __init__(self, world: World, plan: Plan, backend: Backend, fleet: Fleet, listener: Listener) -> None:
        self.world = world
        self.plan = plan
        self.fleet = fleet
        self.listener = listener
        self.now = 0.0
        self.status = m.StatusChanged("waiting", "not started")
        self.history: list[m.RoundRecord] = []
        self.model = world.initial
        self.server = initial_server_state(plan, world.layout.size)
        self._ledger = SimulatedLedger(world.job, plan)
        self._workshop = Workshop(world, backend, self._ledger)
        self._trusted = trusted_data(world)
        self._faults = Faults.of(world.job)
        start = model_digest(world.initial)
        self._engine = RoundEngine.begin(world.job, start, world.job.seed, fleet, separation=plan.separation)
        self._heap: list[tuple[float, int, m.Event | Arrived | Gone]] = []
        self._sequence = itertools.count()
        self._timers: dict[str, float] = {}
        self._step = m.Step(0, 0, "")
        self._due: dict[int, float] = {}
        self._answers: dict[int, tuple[int, Trained | Failed]] = {}
        self._next = (self.model, self.server)
        up = get_encoding(world.job.transfer.encoding).encoded_size(world.layout.size)
        self._transfer = Transfer(4 * world.layout.size, up or 4 * world.layout.size)

    def run(self) -> None:
        """From the start, or from where `resume` left it, to the end of the job.

        Raises RoundtableError if the round waits for clients that will never come.
        """
        if not self._heap:
            self._push(self.now, m.Start())
        while self.status.status not in (*m.FINAL, "paused"):
            if not self._heap:
                self._wait_for_somebody()
                continue
            self.now, _, event = heapq.heappop(self._heap)
            self.fleet.now = self.now
            if isinstance(event, Arrived):
                self._answer(event)
            elif isinstance(event, Gone):
                self._leave(event)
            elif not isinstance(event, m.DeadlinePassed) or self._timers.get(event.timer) == self.now:
                self._handle(event)

    def resume(self, checkpoint: Checkpoint, history: Sequence[m.RoundRecord]) -> None:
        """Puts everything back to `checkpoint`; `history` ends with its round."""
        self._restore(checkpoint, history)
        self._perform(self._engine.outstanding(self.now))

    def _restore(self, checkpoint: Checkpoint, history: Sequence[m.RoundRecord]) -> None:
        self.now = self.fleet.now = checkpoint.now
        self.history = list(history)
        self._workshop.local = dict(checkpoint.local)
        self._ledger.resume(history)
        self._next = (checkpoint.model, checkpoint.server)
        self._engine = RoundEngine.restore(
            self.world.job, checkpoint.engine, self.history[:-1], population=self.fleet
        )

    def _push(self, at: float, event: m.Event | Arrived | Gone) -> None:
        heapq.heappush(self._heap, (at, next(self._sequence), event))

    def _handle(self, event: m.Event) -> None:
        self._perform(self._engine.handle(event, self.now))

    def _perform(self, actions: Iterable[m.Action]) -> None:
        instructed: list[int] = []
        step = self._step
        for action in actions:
            match action:
                case m.Instruct():
                    instructed.append(self.world.names.index_of(action.client))
                    step = action.step
                case m.Withdraw():
                    index = self.world.names.index_of(action.client)
                    self._due.pop(index, None)
                    self._answers.pop(index, None)
                case m.SetTimer():
                    self._timers[action.timer] = action.at
                    self._push(action.at, m.DeadlinePassed(action.timer))
                case m.Authorize():
                    self._push(self.now, self._ledger.authorize(action.step))
                case m.Aggregate():
                    self._aggregate(action)
                case m.Commit():
                    self._commit(action.record)
                case m.Note():
                    self.listener.note(action, self.now)
                case m.StatusChanged():
                    self.status = action
        if instructed:
            self._instruct(step, instructed)

    def _instruct(self, step: m.Step, indices: Sequence[int]) -> None:
        if step.phase == m.EVALUATE:
            self._evaluate(step, indices)
            return
        if step != self._step:
            self._step, self._due, self._answers = step, {}, {}
            self._workshop.begin(len(self._engine.state.attempt.cohort))  # type: ignore[union-attr]
        for index, examples in zip(indices, self._examples(indices), strict=True):
            self._schedule(index, step, examples, self.now)

    def _examples(self, indices: Sequence[int]) -> list[int]:
        """Examples that each client will process; not asked for where it makes no difference."""
        algorithm = self.world.job.algorithm
        if self.fleet.devices.instant:
            return [0] * len(indices)
        if algorithm.steps is not None:
            return [algorithm.steps * algorithm.batch_size] * len(indices)
        return [algorithm.passes * count for count in self._workshop.examples(indices)]

    def _schedule(self, index: int, step: m.Step, examples: int, asked: float) -> None:
        """When the client will answer that was asked at time `asked`, or how it will not."""
        seconds = self.fleet.devices.seconds(index, step.round, examples, self._transfer)
        leaves = self.fleet.devices.leaves_at(index, asked)
        fault = self._faults.of_training(step, index)
        if fault is not None and fault.kind == "dropout":
            leaves = min(leaves, asked + fault.share * seconds)
        elif fault is not None and asked + fault.share * seconds < leaves:
            self._crash(index, step, fault, asked + fault.share * seconds)
            return
        if leaves <= asked + seconds:
            self._push(leaves, Gone(index, step))
            return
        self._due[index] = asked + seconds
        self._push(asked + seconds, Arrived(index, step))

    def _crash(self, index: int, step: m.Step, fault: Fault, at: float) -> None:
        self._push(at, _failed(Failed(self.world.names[index], "node_failure", fault.detail), step))

    def _leave(self, event: Gone) -> None:
        self._handle(m.ClientLeft(self.world.names[event.index]))

    def _answer(self, event: Arrived) -> None:
        if event.step != self._step or event.index not in self._due:
            return
        if event.index not in self._answers:
            self._train()
        del self._due[event.index]
        self._deliver(event.step, *self._answers.pop(event.index))

    def _deliver(self, step: m.Step, place: int, answer: Trained | Failed) -> None:
        if isinstance(answer, Failed):
            self._handle(_failed(answer, step))
            return
        update = m.Update(answer.client, m.RowReference(place), answer.examples, answer.loss, answer.metrics)
        self._handle(m.UpdateArrived(step, update))

    def _train(self) -> None:
        """Runs the clients due next, as many as the round still wants."""
        attempt = self._engine.state.attempt
        assert attempt is not None
        wanted = max(1, attempt.target - len(attempt.updates) - len(self._answers))
        waiting = (index for index in self._due if index not in self._answers)
        chosen = sorted(heapq.nsmallest(wanted, waiting, key=self._due.__getitem__))
        answers = self._workshop.train(self._step.round, self.model.vector, chosen)
        for done, (place, answer) in enumerate(answers, start=1):
            self._answers[self.world.names.index_of(answer.client)] = (place, answer)
            self.listener.answered(self._step, done, len(chosen))

    def _evaluate(self, step: m.Step, indices: Sequence[int]) -> None:
        """All at once; it takes the time of the model's way to the client."""
        there = []
        for index in indices:
            fault = self._faults.of_evaluation(step, index)
            if fault is None:
                there.append(index)
            else:
                self._crash(index, step, fault, self.now)
        transfer = Transfer(self._transfer.down, 0)
        answers = self._workshop.evaluate(self._next[0].vector, there)
        for done, answer in enumerate(answers, start=1):
            index = self.world.names.index_of(answer.client)
            at = self.now + self.fleet.devices.seconds(index, step.round, 0, transfer)
            event = (
                _failed(answer, step)
                if isinstance(answer, Failed)
                else m.Evaluated(answer.client, step, answer.metrics)
            )
            self._push(at, event)
            self.listener.answered(step, done, len(there))

    def _aggregate(self, action: m.Aggregate) -> None:
        step, seed = action.step, self.world.job.seed
        try:
            received = self._workshop.collect(action, partial(self._tried, action.step))
            if self._workshop.unmasks:
                self._push(self.now, m.Unmasking(step, self._ledger.told(step)))
            combined = combine(
                self.plan,
                received,
                self.model.vector,
                self.server,
                round=step.round,
                seed=seed,
                # Seeded, so that a run can be repeated; what it charges says that no guarantee rests on it.
                noise=SeededNoise(seed, step.round, step.attempt, "noise"),
                diagnose=self.world.job.aggregation.diagnosis,
                root_update=self._root_update(step),
            )
        except (AggregationError, InvalidUpdate) as error:
            self._push(self.now, m.AggregationFailed(step, str(error)))
            return
        guarantee = self._ledger.told(step)
        metadata = {**self.model.metadata, "round": str(step.round)}
        if guarantee:
            metadata["privacy"] = self._ledger.statement()
        model = Model(self.world.layout, combined.vector, self.model.local, metadata)
        self._next = (model, combined.state)
        self._push(self.now, combined.event(step, model_digest(model), f"round-{step.round}", guarantee))

    def _tried(self, step: m.Step, rows: Rows) -> Tensor:
        """What the rule would give: attackers who know it may ask."""
        return try_rule(
            self.plan,
            rows,
            self.server,
            round=step.round,
            seed=self.world.job.seed,
            root_update=self._root_update(step),
        )

    def _root_update(self, step: m.Step) -> Tensor | None:
        """What the coordinator's own training gives from the same model."""
        if self._trusted is None:
            return None
        return self._trusted.update(self.world.job, self.world.layout, self.model.vector, step.round)

    def _commit(self, record: m.RoundRecord) -> None:
        before = self.model.vector
        self.model, self.server = self._next
        if not self.history or self.history[-1].round < record.round:
            self._replaced(record, before)
            self.history.append(record)
            self.listener.committed(record, self._checkpoint)
            self._settle()
            self._ledger.committed()
        self._end_round()
        self.fleet.gone.clear()
        self._push(self.now, m.Committed(record.round))

    def _replaced(self, record: m.RoundRecord, vector: Tensor) -> None:
        """The round's model takes the place of `vector`, which nobody needs any more."""

    def _settle(self) -> None:
        """The round is durable: its clients keep what it left with them."""
        self._workshop.commit()

    def _end_round(self) -> None:
        """Nothing that was under way in the round matters after it."""
        self._step = m.Step(0, 0, "")
        self._due, self._answers = {}, {}
        self._timers.clear()
        self._heap.clear()

    def _checkpoint(self) -> Checkpoint:
        engine = self._engine.snapshot()
        return Checkpoint(self.now, engine, self.model, self.server, self._workshop.pending)

    def _wait_for_somebody(self) -> None:
        """Nothing is due: time passes until a client comes online, or those that dropped out return."""
        if self.fleet.gone:
            self.fleet.gone.clear()
            self.now += self.world.job.cohort.grace
        else:
            at = self.fleet.devices.next_arrival(self.now)
            if at is None:
                waiting = self._engine.view().waiting_for
                raise RoundtableError(f"round {len(self.history) + 1} waits for ever: {waiting}")
            self.now = at
        self.fleet.now = self.now
        there = self.fleet.online()
        if len(there):
            self._push(self.now, m.ClientJoined(self.fleet.info(there[0])))


def _failed(answer: Failed, step: m.Step) -> m.ClientFailed:
    failure = SiteFailure(
        answer.client, step.round, step.attempt, step.phase, answer.kind, answer.detail, answer.trace
    )
    return m.ClientFailed(step, failure)
