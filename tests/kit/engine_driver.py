"""A driver for tests: performs the engine's actions in virtual time and keeps all that it was told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from roundtable.core import parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import SiteFailure
from roundtable.engine import RoundEngine, record_from_plain, record_to_plain
from roundtable.engine import messages as m
from roundtable.engine.state import to_plain


def job(text: str = "", rounds: int = 2) -> JobConfig:
    """A small job; `text` adds tables."""
    return parse_job(f'task = "t"\nrounds = {rounds}\n{text}')


@dataclass
class Driver:
    """Commits and aggregates at once unless told not to; clients answer only when a test says so."""

    job: JobConfig
    automatic: bool = True
    now: float = 0.0
    separation: int = 1
    engine: RoundEngine = field(init=False)
    timers: dict[str, float] = field(default_factory=dict)
    instructions: list[m.Instruct] = field(default_factory=list)
    withdrawn: list[m.Withdraw] = field(default_factory=list)
    aggregates: list[m.Aggregate] = field(default_factory=list)
    records: list[m.RoundRecord] = field(default_factory=list)
    notes: list[m.Note] = field(default_factory=list)
    statuses: list[m.StatusChanged] = field(default_factory=list)
    said: list[m.Action] = field(default_factory=list)
    pending: list[m.Aggregate | m.Commit | m.Authorize] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = RoundEngine.begin(self.job, "model-0", selection_seed=7, separation=self.separation)

    def send(self, *events: m.Event) -> None:
        for event in events:
            self._perform(self.engine.handle(event, self.now))

    def restart(self) -> None:
        """Throws the engine away and goes on from its snapshot, through JSON as a database would hold it."""
        snapshot = json.loads(json.dumps(self.engine.snapshot()))
        assert snapshot == json.loads(json.dumps(to_plain(self.engine.state)))
        history = [record_from_plain(json.loads(json.dumps(record_to_plain(r)))) for r in self.records]
        online = self.engine.population.free()
        self.timers.clear()
        self.pending.clear()
        self.engine = RoundEngine.restore(self.job, snapshot, history)
        self._perform(self.engine.outstanding(self.now))
        for name in online:
            self.send(m.ClientJoined(m.ClientInfo(name)))

    def join(self, *names: str) -> None:
        self.send(*(m.ClientJoined(m.ClientInfo(name)) for name in names))

    def advance(self, seconds: float) -> None:
        """Time passes; timers fire in order."""
        end = self.now + seconds
        while due := [(at, timer) for timer, at in self.timers.items() if at <= end]:
            at, timer = min(due)
            del self.timers[timer]
            self.now = max(self.now, at)
            self.send(m.DeadlinePassed(timer))
        self.now = end

    def step(self) -> m.Step:
        assert self.engine.state.attempt is not None
        return self.engine.state.attempt.step

    def update(self, client: str, step: m.Step | None = None, examples: int = 10, loss: float = 1.0) -> None:
        step = step or self.step()
        digest = f"{client}-{step.round}-{step.attempt}"
        self.send(
            m.UpdateArrived(
                step, m.Update(client, m.BlobReference(digest), examples, loss, {"accuracy": (5.0, examples)})
            )
        )

    def fail(self, client: str, kind: str = "task_error", detail: str = "it broke") -> None:
        step = self.step()
        self.send(
            m.ClientFailed(step, SiteFailure(client, step.round, step.attempt, step.phase, kind, detail))
        )

    def evaluate(self, client: str, right: float = 8.0, total: int = 10) -> None:
        self.send(m.Evaluated(client, self.step(), {"accuracy": (right, total)}))

    def cohort(self) -> tuple[str, ...]:
        assert self.engine.state.attempt is not None
        return self.engine.state.attempt.cohort

    def kinds(self) -> list[str]:
        return [note.kind for note in self.notes]

    def finish_pending(self) -> None:
        """Aggregation, commits and authorisations that were asked for are done now."""
        while self.pending:
            action = self.pending.pop(0)
            if isinstance(action, m.Aggregate):
                self.send(m.Aggregated(action.step, f"model-{action.step.round}"))
            elif isinstance(action, m.Authorize):
                self.send(m.Authorized(action.step))
            else:
                if action.record.round > len(self.records):
                    self.records.append(action.record)
                self.send(m.Committed(action.record.round))

    def _counted(self, instruct: m.Instruct) -> tuple[int, int] | None:
        """By the history: which of the client's updates is the newest in the model that it is given."""
        made = {(record.round, record.attempt): record.contributors for record in self.records}
        if instruct.step.phase == m.EVALUATE:
            made[instruct.step.round, instruct.step.attempt] = (instruct.client,)
        # Of a step that was combined again, because an update was damaged, the last counts.
        last = {(action.step.round, action.step.attempt): action for action in self.aggregates}
        for at, action in reversed(last.items()):
            for update in action.updates:
                if update.client == instruct.client in made.get(at, ()):
                    return update.asked or at
        return None

    def _perform(self, actions: list[m.Action]) -> None:
        self.said.extend(actions)
        for action in actions:
            match action:
                case m.SetTimer():
                    self.timers[action.timer] = action.at
                case m.Instruct():
                    self.instructions.append(action)
                    assert action.counted == self._counted(action)
                case m.Withdraw():
                    self.withdrawn.append(action)
                case m.Note():
                    self.notes.append(action)
                case m.StatusChanged():
                    self.statuses.append(action)
                case m.Aggregate() | m.Commit() | m.Authorize():
                    self.pending.append(action)
                    if isinstance(action, m.Aggregate):
                        self.aggregates.append(action)
        if self.automatic:
            self.finish_pending()
