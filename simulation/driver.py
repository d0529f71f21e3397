"""The round engine driven in virtual time: it says whom to ask, the devices say when each would answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor

from roundtable.core.errors import AggregationError, InvalidUpdate, RoundtableError, TaskError
from roundtable.core.models import Model, model_digest
from roundtable.engine import (
    RoundEngine,
    Rows,
    combine,
    initial_server_state,
    try_rule,
)
from roundtable.engine import messages as m
from roundtable.engine.combining.new_model import held_note
from roundtable.engine.policies.buffered import WORK
from roundtable.engine.state import chosen_chain
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import SeededNoise
from roundtable.simulation.backend import Backend, Failed, Work, World
from roundtable.simulation.checkpoint import Checkpoint
from roundtable.simulation.client_updates import ClientUpdates
from roundtable.simulation.client_work import ClientWork, failure_event
from roundtable.simulation.event_queue import AnswerDue, EventQueue, Leaves, PlacesOffered
from roundtable.simulation.first_trial import nothing_done
from roundtable.simulation.ledger import SimulatedLedger
from roundtable.simulation.pacing import BufferedPacing, Pacing, SynchronousPacing
from roundtable.simulation.world.central_test import CentralTest
from roundtable.simulation.world.devices import Transfer
from roundtable.simulation.world.fleet import Fleet
from roundtable.simulation.world.regions import Regions
from roundtable.simulation.world.simulated_clients import trusted_data


class Listener(Protocol):
    """Who hears what happens: the run directory, the progress bar."""

    def committed(self, record: m.RoundRecord, model: Model, checkpoint: Callable[[], Checkpoint]) -> None:
        """A round is done and has made `model`; what must be durable is so when this returns."""

    def note(self, note: m.Note, now: float) -> None:
        """Something happened, at a virtual time in seconds."""

    def answered(self, step: m.Step, done: int, total: int) -> None:
        """So many of the clients that are being run for this step have answered."""


class Driver:
    """One run of one job."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        backend: Backend,
        fleet: Fleet,
        listener: Listener,
        central: CentralTest,
    ) -> None:
        self.world = world
        self.plan = plan
        self.fleet = fleet
        self.listener = listener
        self._central = central
        self.status = m.StatusChanged("waiting", "not started")
        self.history: list[m.RoundRecord] = []
        self.model = world.initial
        self.server = initial_server_state(plan, world.layout.size)
        self._next = (self.model, self.server)
        self._earlier: Mapping[int, Tensor] = {}
        self._ledger = SimulatedLedger(world.job, plan)
        self._trusted = trusted_data(world) if plan.aggregation.takes("root_update") else None
        self._queue = EventQueue()
        self._updates = ClientUpdates(world, backend, self._ledger)
        self._updates.chain_of = self._chain_of
        self._regions = Regions.of(world)
        if self._regions is not None:
            self._updates.starts = self._starts
        self._work = ClientWork(world, fleet, self._updates, self._queue, listener.answered)
        self._pacing: Pacing = (
            BufferedPacing(world, fleet, self._updates, self._queue)
            if world.job.round.mode == "buffered"
            else SynchronousPacing(self._updates, self._queue)
        )
        start = model_digest(world.initial)
        self._engine = RoundEngine.begin(
            world.job, start, world.job.seed, fleet, plan.separation, plan.strategy
        )

    def _chain_of(self, client: str) -> str:
        return chosen_chain(self._engine.state, client) or self.world.job.writes.up

    def _starts(self, vector: Tensor, indices: Sequence[int]) -> Iterable[tuple[Tensor, Sequence[int]]]:
        assert self._regions is not None
        return self._regions.starts(vector, self.server.regions, indices)

    def run(self) -> None:
        """From the start, or from where `resume` left it, to the end of the job.

        Raises RoundtableError if the round waits for clients that will never come.
        """
        if not self._queue:
            self._queue.push(self._queue.now, m.Start())
        while self.status.status not in (*m.FINAL, "paused"):
            if not self._queue:
                self._wait_for_somebody()
                continue
            event = self._queue.pop()
            self.fleet.now = self._queue.now
            match event:
                case None:
                    pass
                case AnswerDue():
                    self._deliver(event)
                case Leaves(index, step):
                    client = self.world.names[index]
                    if self._engine.works_on(client, step):
                        self._handle(m.ClientLeft(client))
                case PlacesOffered():
                    if not self._queue:
                        self.fleet.gone.clear()  # As where nothing at all is due.
                    self._handle(m.DeadlinePassed(WORK))
                case _:
                    self._handle(event)
        self._work.finish()

    def resume(self, checkpoint: Checkpoint, history: Sequence[m.RoundRecord]) -> None:
        """Puts everything back to `checkpoint`; `history` ends with its round.

        What was under way is worked out again: who answers when follows from when it was asked, and an
        update from its model.
        """
        self._queue.now = self.fleet.now = checkpoint.now
        self.history = list(history)
        self._updates.local = dict(checkpoint.local)
        self._ledger.resume(history)
        self._next = (checkpoint.model, checkpoint.server)
        self._earlier = checkpoint.earlier
        self._engine = RoundEngine.restore(
            self.world.job, checkpoint.engine, self.history[:-1], self.fleet, self.plan.strategy
        )
        state, index_of = self._engine.state, self.world.names.index_of
        for name, update in state.buffer.items():
            assert update.asked is not None
            asked = m.Step(*update.asked, m.TRAIN)
            vector = self._earlier[asked.round - 1]
            for _ in self._updates.train(asked, vector, [index_of(name)], [update.row], paid=True):
                pass
        for name, given in state.ready.items():
            index, vector = index_of(name), self._vector_of(given.step)
            held = {row for row, _ in self._work.prepared.values()}
            rows = self._updates.free_rows(1, {*held, *(each.row for each in state.buffer.values())})
            for row, answer in self._updates.train(given.step, vector, [index], rows, paid=True):
                assert not isinstance(answer, Failed), "it was trained before"
                self._work.prepared[index] = row, answer
        there = {index_of(name): given for name, given in state.at_work.items() if not given.away}
        for index, assignment in there.items():
            self._work.ask_to_train(assignment.step, [index], [assignment.since])
        assert state.attempt is not None
        assert state.attempt.record is not None
        self._commit(state.attempt.record)

    def work_of_all(self) -> list[Work]:
        """Every client with what it has kept, as a next round would find it."""
        return list(self._updates.work(range(len(self.world.names))))

    def _handle(self, event: m.Event) -> None:
        self._perform(self._engine.handle(event, self._queue.now))
        self._pacing.event_handled(self._engine.state)

    def _perform(self, actions: Iterable[m.Action]) -> None:
        instructed: dict[m.Step, list[int]] = {}
        for action in actions:
            match action:
                case m.Instruct():
                    self._note_asked(action, instructed)
                case m.Withdraw():
                    self._work.withdraw(self.world.names.index_of(action.client), action.step)
                case m.SetTimer():
                    self._queue.set_timer(action.timer, action.at)
                case m.Authorize():
                    self._queue.push(self._queue.now, self._ledger.authorize(action.step))
                case m.Aggregate():
                    self._aggregate(action)
                case m.Commit():
                    self._commit(action.record)
                case m.Note():
                    self.listener.note(action, self._queue.now)
                case m.StatusChanged():
                    self.status = action
        for step, indices in instructed.items():
            self._instruct(step, indices)

    def _note_asked(self, action: m.Instruct, instructed: dict[m.Step, list[int]]) -> None:
        """Has the client mask what it keeps, or notes it among those that work on one step together."""
        index = self.world.names.index_of(action.client)
        if action.prepared is not None:
            self._work.mask(action.step, index)
            return
        instructed.setdefault(action.step, []).append(index)
        if action.steps is not None:
            self._updates.steps[index] = action.steps

    def _instruct(self, step: m.Step, indices: Sequence[int]) -> None:
        attempt = self._engine.state.attempt
        assert attempt is not None
        self._work.finish()
        if step.phase == m.EVALUATE:
            left_out = attempt.aggregated.excluded if attempt.aggregated is not None else {}
            used = {self.world.names.index_of(name) for name in attempt.updates if name not in left_out}
            self._work.evaluate(step, self._next[0].vector, indices, used)
        else:
            self._pacing.training_begins(step, len(attempt.cohort))
            self._work.ask_to_train(step, indices, [self._queue.now] * len(indices))

    def _deliver(self, due: AnswerDue) -> None:
        """Hands an answer that is due to the engine, unless it does not matter any more."""
        if not self._work.awaits(due):
            return
        if not self._work.go_on(due.index):
            self._train(due)
            self._work.go_on(due.index)
        row, answer = self._work.take_answer(due.index)
        if isinstance(answer, Failed):
            self._handle(failure_event(answer, due.step))
            return
        if due.step.phase == m.PREPARE:
            self._work.prepared[due.index] = row, answer
            self._handle(m.UpdateReady(answer.client, due.step))
            return
        transfer = self._updates.transfer_of(answer.client)
        if transfer is not None:
            sizes = Transfer(transfer.down, transfer.up)
            down, up = self.fleet.devices.way_seconds(due.index, due.step.round, sizes)
            transfer = replace(transfer, down_seconds=down, up_seconds=up)
        reference = m.RowReference(row)
        update = m.Update(
            answer.client, reference, answer.examples, answer.loss, answer.metrics, transfer=transfer
        )
        self._handle(m.UpdateArrived(due.step, update))

    def _vector_of(self, step: m.Step) -> Tensor:
        """The model that clients train from who were asked for this step."""
        made = step.round - 1
        return self.model.vector if made == len(self.history) else self._earlier[made]

    def _train(self, due: AnswerDue) -> None:
        """Begins to run the client whose answer is due, with as many others as the round still wants."""
        state, vector = self._engine.state, self._vector_of(due.step)
        assert state.attempt is not None
        wanted = state.attempt.target - len(state.attempt.updates) - len(self._work.answers)
        held = {update.row for update in (*state.attempt.updates.values(), *state.buffer.values())}
        self._work.train(due.step, vector, max(self._pacing.least_together, wanted), held)
        if self.history or state.attempt.updates:
            return
        self._work.finish()
        if failure := self._work.shared_failure():
            # To ask others, and these again, would show the same once for each of them.
            raise TaskError(
                f"{nothing_done(self.world.job)} fails at each of the {len(self._work.answers)} clients that "
                f"were tried. {failure.client}: {failure.detail}\n{failure.trace}".rstrip()
            )

    def _aggregate(self, action: m.Aggregate) -> None:
        step, seed = action.step, self.world.job.seed
        self._work.finish()
        try:
            received = self._updates.collect(action, partial(self._tried, action.step))
            if self._regions is not None and isinstance(received, Rows):
                received = self._regions.mean(
                    self.plan.aggregation, received, self.model.vector, self.server.regions, step.round
                )
            if self._updates.unmasks:
                self._queue.push(self._queue.now, m.Unmasking(step, self._ledger.spending(step)))
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
                population=action.population,
                attempt=step.attempt,
            )
        except (AggregationError, InvalidUpdate) as error:
            self._queue.push(self._queue.now, m.AggregationFailed(step, str(error)))
            return
        guarantee = self._ledger.spending(step)
        metadata = {**self.model.metadata, "round": str(step.round), **held_note(self.world.job)}
        if guarantee:
            metadata["privacy"] = self._ledger.statement()
        model = Model(self.world.layout, combined.vector, self.model.local, metadata)
        self._next = (model, combined.state)
        made = combined.event(step, model_digest(model), f"round-{step.round}", guarantee)
        central = self._central.measure(step.round, model.vector)
        self._queue.push(self._queue.now, replace(made, central=central))

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
            used = [self.world.names.index_of(name) for name in record.contributors]
            self._keep_models({**self._earlier, record.round - 1: before})
            self.history.append(record)
            self.listener.committed(record, self.model, partial(self._checkpoint, used))
            self._work.forget_prepared(used)
            waiting = map(self.world.names.index_of, self._engine.state.buffer)
            self._updates.keep(used, [*self._work.answers, *self._work.prepared, *waiting])
            self._ledger.committed()
        self._pacing.round_ended(self._work)
        self.fleet.gone.clear()
        self._queue.push(self._queue.now, m.Committed(record.round))

    def _keep_models(self, known: Mapping[int, Tensor]) -> None:
        """Of the models that a new one replaces, those stay that somebody works from."""
        state = self._engine.state
        needed = {given.round - 1 for given in (*state.at_work.values(), *state.ready.values())}
        needed |= {update.asked[0] - 1 for update in state.buffer.values() if update.asked}
        self._earlier = {made: known[made] for made in sorted(needed)}

    def _checkpoint(self, used: Sequence[int]) -> Checkpoint:
        pending = self._updates.pending
        local = {index: pending[index] for index in used if index in pending}
        engine = self._engine.snapshot()
        return Checkpoint(self._queue.now, engine, self.model, self.server, local, self._earlier)

    def _wait_for_somebody(self) -> None:
        """Nothing is due: time passes until a client comes online, or those that dropped out return."""
        if self.fleet.gone:
            self.fleet.gone.clear()
            self._queue.now += self.world.job.cohort.grace
        else:
            at = self.fleet.devices.next_arrival(self._queue.now)
            if at is None:
                waiting = self._engine.view().waiting_for
                raise RoundtableError(f"round {len(self.history) + 1} waits for ever: {waiting}")
            self._queue.now = at
        self.fleet.now = self._queue.now
        there = self.fleet.free()
        if len(there):
            self._queue.push(self._queue.now, m.ClientJoined(self.fleet.info(there[0])))
