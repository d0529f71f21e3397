"""What the engine remembers, and its form in JSON: a snapshot restores to the same behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from roundtable.core.errors import SiteFailure
from roundtable.core.model_delta import Hop
from roundtable.core.observability.transfer_figures import TransferFigures
from roundtable.engine.encoding_choice import EncodingChoice
from roundtable.engine.messages import (
    TRAIN,
    Aggregated,
    BlobReference,
    ClientState,
    JobStatus,
    RoundRecord,
    RowReference,
    Step,
    Update,
)
from roundtable.engine.round_summary import RoundSummary

_LONGEST_COURSE = 16


@dataclass
class ClientRecord:
    """What is remembered of a client that was asked at least once.

    `counted`: (round, attempt) in which its newest update that is in a committed model was asked for.
    `failed`: failures in training since its last update. `called` is when it was chosen to train, `seconds`
    what its last update took since then, without time in line, `loss` the training loss that came with it.
    By speed: `pace` is its seconds per step as far as known, `given` (round, steps) what it was last given,
    `asked` when it was asked for them; None once it has answered, or where the time between tells nothing.
    `choice`: how its updates are encoded, where that is chosen. `course`: the states that it went through
    since it was asked last, with when each began. `direction`: a sketch of its newest update that is in a
    committed model, where the job chooses by that.
    """

    state: ClientState = "available"
    since: float = 0.0
    note: str = ""
    selected: int = 0
    completed: int = 0
    last_round: int = 0
    examples: int | None = None
    failed: int = 0
    called: float = 0.0
    seconds: float | None = None
    loss: float | None = None
    counted: tuple[int, int] | None = None
    pace: float | None = None
    given: tuple[int, int] | None = None
    asked: float | None = None
    choice: EncodingChoice | None = None
    course: tuple[tuple[str, float], ...] = ()
    direction: str = ""

    def turn(self, state: ClientState, now: float) -> None:
        """It goes on to this state: a course begins where it is asked, and is over with its answer."""
        if state in ("done", "dropped"):
            self.course = ()
        elif (self.course or state == "available") and [state] != [each for each, _ in self.course[-1:]]:
            self.course = (*self.course, (state, now))[-_LONGEST_COURSE:]

    def passed(self, now: float) -> list[list[Any]]:
        """[state, seconds] of its course until now, one after the other, as far as they took any time."""
        ends = [*(began for _, began in self.course[1:]), now]
        both = zip(self.course, ends, strict=False)
        return [[state, end - began] for (state, began), end in both if end > began]

    def took(self, now: float, line: InLine | None, update: Update) -> None:
        """Its update has arrived, after it stood in `line` at the client."""
        waited = 0.0 if line is None else line.until(now)
        self.seconds, self.failed = max(0.0, now - self.called - waited), 0
        self.examples = update.examples or self.examples
        self.loss = self.loss if update.loss is None else update.loss


@dataclass
class InLine:
    """How long a step stood in line at its silo: `seconds`, and now again where there is a `since`."""

    since: float | None = None
    seconds: float = 0.0

    def turn(self, waits: bool, now: float) -> None:
        """The step stands in line from now on, or no longer."""
        self.seconds = self.until(now)
        self.since = now if waits else None

    def until(self, now: float) -> float:
        """Seconds in line so far."""
        return self.seconds + (max(0.0, now - self.since) if self.since is not None else 0.0)


@dataclass
class Assignment:
    """What a client trains while rounds go by: asked at `since` for the step (round, attempt, train).

    `away`: its connection is gone; it may come back and deliver until the deadline. `phase`: `prepare`, where
    the client keeps its update until it is masked in a group.
    """

    round: int
    attempt: int
    model: str
    since: float
    deadline: float
    away: bool = False
    line: InLine = field(default_factory=InLine)
    phase: str = TRAIN

    @property
    def step(self) -> Step:
        """The key of the work."""
        return Step(self.round, self.attempt, self.phase)


BUSY = "busy"
"""The kind of failure of a client whose turn at its silo did not come: nobody is blamed for it."""
MOST_HOPS = 8
"""More changes of 4 bits and their like would be as long as the model."""


@dataclass
class Attempt:
    """The attempt at a round that is under way.

    - `cohort`: everybody who was asked to train; `target`: updates wanted, `minimum`: the quorum.
    - `deadline`: of the phase that runs; `due`: of training, also when that is over.
    - `settled`: whether the time to wait for a whole cohort, or for anybody, has passed.
    - `awaited`: who has neither answered nor failed in the phase that runs, in order: a dict without values,
      because cohorts can be large and every event looks a name up.
    - `spent`: what the round costs once clients may have been asked to unmask its sum; None before.
    - `lost`: updates that were accepted and damaged since, until they are sent again; `repeats`: how often
      clients were asked to send them.
    - `troubles`: how many failures each client has reported that it dealt with.
    - `unmeasured`: the first error of the task in an evaluation, "" until there is one: where no client has
      measured anything, the job stops for it.
    - `replacements`: failed client → the one asked in its place.
    - `population`: how many clients there were when training ended.
    - `lines`: of those whose work in the phase that runs stood in line at them, for how long.
    - `measured`: when clients began and ended to measure the round's model, as far as they told.
    - `within`: of relays the rounds within their regions, as their sums told.
    - `group`: who masks its update now, with the work that it is of, which was all from the model `source`.
    """

    round: int
    number: int
    phase: str
    started: float
    cohort: tuple[str, ...] = ()
    target: int = 0
    minimum: int = 0
    deadline: float | None = None
    settled: bool = False
    awaited: dict[str, None] = field(default_factory=dict)
    updates: dict[str, Update] = field(default_factory=dict)
    failures: dict[str, SiteFailure] = field(default_factory=dict)
    aggregated: Aggregated | None = None
    evaluations: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    record: RoundRecord | None = None
    due: float = 0.0
    lost: dict[str, Update] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    troubles: dict[str, int] = field(default_factory=dict)
    spent: dict[str, Any] | None = None
    replacements: dict[str, str] = field(default_factory=dict)
    unmeasured: str = ""
    population: int = 1
    lines: dict[str, InLine] = field(default_factory=dict)
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    within: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Assignment] = field(default_factory=dict)
    source: str = ""

    @property
    def step(self) -> Step:
        """The key of the phase that runs."""
        return Step(self.round, self.number, self.phase)


@dataclass
class EngineState:
    """A whole job. `stopping` is what was asked for while a commit was under way; `separation` the least
    number of rounds from one contribution of a client to its next. `regional`: rounds within regions happen
    at relays, and only those that go up happen here. `unchecked`: silos were not asked yet for their model.

    In buffered rounds `at_work` are those who train, in the order in which they were asked; `buffer` are
    updates that came while a model was being made, for the next; `draws` counts draws of clients. Under masks
    `ready` are those who keep a finished update, in the order in which they said so, and `owed` those whose
    last one no group could be found for.

    `queued` is when the job began to wait for its turn, `priority` what operators made of the job's own,
    `hold` why they keep it from its turn, and `yielding` why it gives that up when its round ends.

    `summed` are the clients of a closed round whose sum without noise may be known: until the model changes
    all of them and nobody else, or none of them, are asked. Nobody in another such sum, who is `barred`, is.
    `hops` lead from the newest models to the next, the latest last, where the job encodes the way down.
    """

    model: str
    selection_seed: int
    optimizer: str = ""
    status: JobStatus = "waiting"
    reason: str = "not started"
    started: float | None = None
    attempt: Attempt | None = None
    stopping: tuple[JobStatus, str] | None = None
    separation: int = 1
    regional: bool = False
    unchecked: bool = False
    clients: dict[str, ClientRecord] = field(default_factory=dict)
    at_work: dict[str, Assignment] = field(default_factory=dict)
    buffer: dict[str, Update] = field(default_factory=dict)
    ready: dict[str, Assignment] = field(default_factory=dict)
    owed: tuple[str, ...] = ()
    draws: int = 0
    summed: tuple[str, ...] = ()
    barred: tuple[str, ...] = ()
    queued: float = 0.0
    priority: int | None = None
    hold: str = ""
    yielding: str = ""
    hops: tuple[Hop, ...] = ()
    summary: RoundSummary = field(default_factory=RoundSummary)

    def given(self, client: str) -> Assignment | None:
        """What a client was given to train while rounds go by, and no round has used or given up yet."""
        return self.at_work.get(client) or self.ready.get(client)


def chosen_chain(state: EngineState, client: str) -> str:
    """The encoding that was chosen for the client's updates; "" where the job's is everybody's."""
    record = state.clients.get(client)
    return record.choice.encoding if record is not None and record.choice is not None else ""


def hops_after(state: EngineState) -> tuple[Hop, ...]:
    """The hops, with that to the model of the attempt that runs once it has made one."""
    made = state.attempt.aggregated if state.attempt is not None else None
    if made is None or not made.delta or made.model == state.model:
        return state.hops
    return (*state.hops, Hop.between(state.model, made.model, made.delta))[-MOST_HOPS:]


def in_queue(state: EngineState) -> bool:
    """Whether the job waits for its turn: no attempt runs, and none begins before `Start`."""
    return state.status == "waiting" and (state.attempt is None or not state.attempt.phase)


PlainClients = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""Of each client the values of its record, and the plain form that was made of them."""


def to_plain(state: EngineState, made: PlainClients | None = None) -> dict[str, Any]:
    """A JSON-able form, without the summary: it follows from the records that the driver keeps.

    `made` keeps, from one call to the next, the forms of clients: few of thousands change between two.
    """
    others = (name for name in _fields(EngineState) if name not in ("summary", "clients"))
    plain = {name: _plain(getattr(state, name)) for name in others}
    kept = {} if made is None else made
    return plain | {
        "clients": {name: _plain_client(name, each, kept) for name, each in state.clients.items()}
    }


def _plain_client(name: str, record: ClientRecord, made: PlainClients) -> dict[str, Any]:
    """What of the record is not as in one that was never asked."""
    values = _VALUES(record)
    before = made.get(name)
    if before is None or before[0] != values or record.choice is not None:  # A choice changes within.
        told = zip(_fields(ClientRecord), values, _NEVER_ASKED, strict=True)
        made[name] = before = values, {key: _plain(each) for key, each, usual in told if each != usual}
    return before[1]


_SINGLE = frozenset({str, int, float, bool, type(None)})


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields; empty for any other type."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


_VALUES = attrgetter(*_fields(ClientRecord))
_NEVER_ASKED = _VALUES(ClientRecord())


def _plain(value: Any) -> Any:
    """As `asdict` does it, without copying what cannot change.

    It is done with every batch of updates, for all clients, and most of what it meets are single values:
    these are told by their type alone, without a call.
    """
    kind: Any = type(value)
    if kind in _SINGLE:
        return value
    if names := _fields(kind):
        found = {}
        for name in names:
            each = getattr(value, name)
            found[name] = each if type(each) in _SINGLE else _plain(each)
        return found
    if kind is dict or isinstance(value, Mapping):
        return {key: each if type(each) in _SINGLE else _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [each if type(each) in _SINGLE else _plain(each) for each in value]
    return value


def from_plain(plain: Mapping[str, Any]) -> EngineState:
    """The state that `to_plain` described; its summary is still to be written."""
    values = dict(plain)
    values["attempt"] = _attempt(values["attempt"]) if values["attempt"] else None
    values["stopping"] = tuple(values["stopping"]) if values["stopping"] else None
    values["clients"] = {name: _client(record) for name, record in values["clients"].items()}
    for key in ("at_work", "ready"):
        values[key] = {name: _assignment(given) for name, given in values.get(key, {}).items()}
    values |= {key: tuple(values.get(key, ())) for key in ("summed", "barred", "owed")}
    values["buffer"] = _updates(values.get("buffer", {}))
    values["hops"] = tuple(Hop(**hop) for hop in values.get("hops", ()))
    return EngineState(**values)


def record_to_plain(record: RoundRecord) -> dict[str, Any]:
    """A round's record in a JSON-able form."""
    return asdict(record)


def record_from_plain(plain: Mapping[str, Any]) -> RoundRecord:
    """The record that `record_to_plain` described."""
    values = dict(plain)
    values["cohort"] = tuple(values["cohort"])
    values["contributors"] = tuple(values["contributors"])
    values["withheld"] = tuple(values.get("withheld", ()))
    values["excused"] = tuple(values.get("excused", ()))
    for name in ("training", "evaluation", "before", "central"):
        values[name] = _sums(values.get(name, {}))
    values["client_metrics"] = {client: _sums(sums) for client, sums in values["client_metrics"].items()}
    return RoundRecord(**values)


def _client(plain: Mapping[str, Any]) -> ClientRecord:
    pairs = {name: tuple(pair) for name in ("counted", "given") if (pair := plain.get(name))}
    pairs["course"] = tuple(map(tuple, plain.get("course", ())))
    choice = plain.get("choice")
    return ClientRecord(**{**plain, **pairs, "choice": EncodingChoice.from_plain(choice) if choice else None})


def _assignment(plain: Mapping[str, Any]) -> Assignment:
    return Assignment(**{**plain, "line": InLine(**plain.get("line", {}))})


def _attempt(plain: Mapping[str, Any]) -> Attempt:
    values = dict(plain)
    values["lines"] = {name: InLine(**line) for name, line in values.get("lines", {}).items()}
    values["cohort"] = tuple(values["cohort"])
    values["group"] = {name: _assignment(given) for name, given in values.get("group", {}).items()}
    values["updates"] = _updates(values["updates"])
    values["lost"] = _updates(values.get("lost", {}))
    values["failures"] = {name: SiteFailure(**failure) for name, failure in values["failures"].items()}
    values["evaluations"] = {name: _sums(sums) for name, sums in values["evaluations"].items()}
    values["measured"] = {name: tuple(both) for name, both in values.get("measured", {}).items()}
    if values["aggregated"]:
        aggregated = dict(values["aggregated"])
        aggregated["step"] = Step(**aggregated["step"])
        for name in ("training", "before", "central"):
            aggregated[name] = _sums(aggregated.get(name, {}))
        values["aggregated"] = Aggregated(**aggregated)
    if values["record"]:
        values["record"] = record_from_plain(values["record"])
    return Attempt(**values)


def _updates(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, Update]:
    return {name: _update(values) for name, values in plain.items()}


def _update(plain: Mapping[str, Any]) -> Update:
    vector = plain["vector"]
    reference = RowReference(**vector) if "row" in vector else BlobReference(**vector)
    values = {**plain, "vector": reference, "metrics": _sums(plain["metrics"])}
    if values.get("asked"):
        values["asked"] = tuple(values["asked"])
    if values.get("transfer"):
        values["transfer"] = TransferFigures.from_plain(values["transfer"])
    return Update(**values)


def _sums(plain: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    return {name: (float(value[0]), int(value[1])) for name, value in plain.items()}
