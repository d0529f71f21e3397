"""Rows as frozen values, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from roundtable.core.observability.link_estimate import UNKNOWN_LINK, LinkEstimate
from roundtable.engine.best_model import Best
from roundtable.engine.clients import declared_examples

_READ = 1 << 14
"""Texts whose reading is remembered."""


@dataclass(frozen=True)
class JobRow:
    """A job as it is stored. `snapshot` is the round engine's; `best_model` is "" where none is kept.

    Of a job that is repeated `run` counts from 1, and `repeats` is 1 while another run is to follow this one.
    """

    id: str
    name: str
    request_id: str
    submitter: str
    config: str
    initial_model: str
    model: str
    optimizer: str
    status: str
    reason: str
    rounds: int
    rounds_done: int
    snapshot: Mapping[str, Any]
    version: int
    writer: str
    submitted: float
    updated: float
    submitter_role: str = ""
    best_model: str = ""
    best_round: int = 0
    best_value: float = 0.0
    run: int = 0
    repeats: int = 0

    def is_of(self, role: str, name: str) -> bool:
        """Whether this party submitted the job; jobs of before roles were noted go by the name alone."""
        return self.submitter == name and self.submitter_role in (role, "")

    def after(self, records: Iterable[Mapping[str, Any]], best: Best | None) -> JobRow:
        """The row once these rounds are committed, the next ones; `best` is the job's best model then."""
        models, row = {self.rounds_done: self.model}, self
        for record in records:
            done, model = record["round"], record["model"]
            row, models[done] = (
                replace(row, model=model, optimizer=record["optimizer"], rounds_done=done),
                model,
            )
        if best is not None and best.round in models:
            row = replace(row, best_model=models[best.round], best_round=best.round, best_value=best.value)
        return row

    @classmethod
    def of(cls, row: Row[Any]) -> JobRow:
        values = dict(row._mapping)
        return cls(**{**values, "snapshot": json.loads(values["snapshot"])})


@dataclass(frozen=True)
class EventRow:
    """One entry of a job's history; `sequence` counts from 1 without gaps."""

    sequence: int
    time: float
    kind: str
    message: str
    round: int = 0
    attempt: int = 0
    client: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Capacity:
    """What an agent says that it has for jobs: how many at a time, GPUs, bytes of memory and free disk."""

    jobs: int
    gpus: int
    memory: int
    disk: int


@dataclass(frozen=True)
class AgentRow:
    """An agent as it introduced itself last, and what became of its work over all jobs.

    `drained` and `disabled` say why its silo and operators want it to be asked for nothing new; "" where not.
    `capacity` is not stored: an agent says it whenever it connects. `link` is what was measured of its line.
    """

    name: str
    version: str
    tasks: tuple[str, ...]
    metadata: Mapping[str, str]
    devices: tuple[str, ...]
    first_seen: float
    last_seen: float
    selected: int = 0
    completed: int = 0
    examples: int | None = None
    drained: str = ""
    disabled: str = ""
    capacity: Capacity | None = None
    link: LinkEstimate = UNKNOWN_LINK

    @classmethod
    def of(cls, row: Row[Any]) -> AgentRow:
        values = dict(row._mapping)
        values["tasks"] = _words_in(values["tasks"])
        values["devices"] = _words_in(values["devices"])
        values["metadata"] = _values_in(values["metadata"])
        values["link"] = _link_in(values["link"]) if values["link"] else UNKNOWN_LINK
        return cls(**values)

    def with_record(self, stored: AgentRow | None) -> AgentRow:
        """With what is stored of its work over all jobs; as it is where it has never come."""
        if stored is None:
            return self
        return replace(self, selected=stored.selected, completed=stored.completed, examples=stored.examples)

    @property
    def size(self) -> int | None:
        """Examples of its newest update, else what it declares as metadata `examples`; None for neither."""
        return declared_examples(self.metadata) if self.examples is None else self.examples

    def offers(self, task: str) -> bool:
        """Whether the agent has a task, by its whole name or by its file's stem (`digits.py:Digits`)."""
        return task in self.tasks or Path(task.partition(":")[0]).stem in self.tasks


# Lists of thousands of silos are read all the time, and hardly any of it changes between.
@lru_cache(maxsize=_READ)
def _words_in(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


@lru_cache(maxsize=_READ)
def _values_in(text: str) -> Mapping[str, str]:
    return dict(json.loads(text))


@lru_cache(maxsize=_READ)
def _link_in(text: str) -> LinkEstimate:
    return LinkEstimate.from_plain(json.loads(text))


@dataclass(frozen=True)
class Learnt:
    """What an update has told of its silo for all jobs; None for what its job does not let be told."""

    examples: int | None
    link: LinkEstimate | None

    @property
    def values(self) -> dict[str, Any]:
        """Columns of the silo's row, and what they hold from now on."""
        found = {} if self.examples is None else {"examples": self.examples}
        return found if self.link is None else {**found, "link": to_json(self.link.plain())}


@dataclass(frozen=True)
class UpdateRow:
    """An update that was received whole. `receipt` is "accepted", or "rejected" with a reason.

    `statement` is the silo's signed statement of it as JSON; empty from a silo without an identity.
    """

    round: int
    attempt: int
    client: str
    digest: str
    size: int
    examples: int
    loss: float | None
    metrics: Mapping[str, tuple[float, int]]
    receipt: str
    reason: str
    received: float
    statement: str = ""

    @classmethod
    def of(cls, row: Row[Any]) -> UpdateRow:
        values = dict(row._mapping)
        del values["job"]
        return cls(**{**values, "metrics": json.loads(values["metrics"])})


@dataclass(frozen=True)
class RelayedSumRow:
    """A relay's sum that counts; `statement` is what the relay has signed about it, as JSON. `member` is the
    first of its silos by name."""

    round: int
    attempt: int
    member: str
    relay: str
    digest: str
    received: float
    statement: str


@dataclass(frozen=True)
class ArtifactRow:
    """A blob on disk that something in the database mentions."""

    digest: str
    size: int
    kind: str
    created: float


@dataclass(frozen=True)
class LedgerRow:
    """A charge against somebody's privacy; `charge` is JSON as `roundtable.privacy.Charge` writes it."""

    population: str
    silo: str
    job: str
    round: int
    attempt: int
    charge: str
    released: bool
    time: float
    digest: str = ""


_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def to_json(value: Any) -> str:
    """Compact JSON; NaN and infinity are refused, because nobody else could read them."""
    return _COMPACT.encode(value)
