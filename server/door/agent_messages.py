"""What agents can say, as checked values; `from_agents.py` makes them of the wire's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roundtable.core.errors import SiteFailure
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.observability.transfer_figures import NOTHING_CAME, ModelArrival, Writing
from roundtable.engine import messages as m
from roundtable.server.store import AgentRow, Capacity


@dataclass(frozen=True)
class JobStep:
    """A step of a job, as a silo names it: words that can be names of files, and numbers within bounds."""

    job: str
    step: m.Step


@dataclass(frozen=True)
class Passage:
    """A silo's word that relays may speak for it: their names, from its own to the coordinator's, and its
    signature."""

    path: tuple[str, ...]
    signature: bytes


@dataclass(frozen=True)
class Introduction:
    """An agent's hello; `seen` is (job, round, attempt), `clock` Unix time at the agent."""

    version: str
    protocol: int
    tasks: tuple[str, ...]
    metadata: Mapping[str, str]
    devices: tuple[str, ...]
    clock: float
    identity: bytes
    coordinator: str
    seen: tuple[tuple[str, int, int], ...]
    installation: bytes
    drained: str
    capacity: Capacity | None
    passage: Passage | None = None

    def row(self, name: str, now: float, relay: str = "") -> AgentRow:
        """The agent as it is stored; the relay that it comes by is among what is told of it."""
        metadata = {**self.metadata, "relay": relay} if relay else self.metadata
        row = AgentRow(name, self.version, self.tasks, metadata, self.devices, now, now)
        return replace(row, drained=self.drained, capacity=self.capacity)


@dataclass(frozen=True)
class Beat:
    """A heartbeat; `state` is what the agent does, in a word."""

    state: str


@dataclass(frozen=True)
class Begun:
    """The instruction was understood and work has begun; `queued`: it stands in line behind other steps.

    `setup` is what it is trained on, where the silo says so. `prepared`: it is done, and its update is kept.
    """

    at: JobStep
    queued: bool = False
    setup: TrainingSetup | None = None
    prepared: bool = False

    def event(self, site: str) -> m.WorkStarted | m.UpdateReady:
        """As the engine hears of it from this silo."""
        step = self.at.step
        if self.prepared:
            return m.UpdateReady(site, step)
        return m.WorkStarted(
            site,
            step,
            "queued" if self.queued else "training" if step.phase in (m.TRAIN, m.PREPARE) else "evaluating",
        )


@dataclass(frozen=True)
class StepProgress:
    """How far an agent says it is with its step; `figures`, by name, are of its newest training step."""

    done: int
    total: int
    loss: float
    figures: Mapping[str, float] | None = None


@dataclass(frozen=True)
class ProgressReport:
    """How far the silo is with a step."""

    at: JobStep
    progress: StepProgress


@dataclass(frozen=True)
class GivenUp:
    """The step failed at the silo; `kind` is one of FAILURE_KINDS."""

    at: JobStep
    kind: str
    detail: str

    def failure(self, site: str) -> SiteFailure:
        """As the failure of this silo."""
        step = self.at.step
        return SiteFailure(site, step.round, step.attempt, step.phase, self.kind, self.detail)


@dataclass(frozen=True)
class SelfHelp:
    """An incident that the silo deals with itself, by `action`."""

    what: GivenUp
    action: str

    @property
    def at(self) -> JobStep:
        """The step that it happened at."""
        return self.what.at

    def event(self, site: str) -> m.Troubled:
        """As the engine hears of it from this silo."""
        return m.Troubled(self.at.step, self.what.failure(site), self.action)


@dataclass(frozen=True)
class Evaluation:
    """Sums and counts of a silo's test metrics, by name."""

    at: JobStep
    metrics: Mapping[str, tuple[float, int]]

    def event(self, site: str) -> m.Evaluated:
        """As the engine hears of it from this silo."""
        return m.Evaluated(site, self.at.step, self.metrics)


@dataclass(frozen=True)
class ProtocolReply:
    """A message of secure aggregation."""

    at: JobStep
    payload: bytes


@dataclass(frozen=True)
class Farewell:
    """The agent leaves on purpose."""

    reason: str


@dataclass(frozen=True)
class MaintenanceNews:
    """Why the silo takes no new rounds from now on; "" where it takes them again."""

    drained: str


@dataclass(frozen=True)
class SiloLine:
    """A line of a silo's log about a job, at Unix time `time` by its clock; `number` orders its lines."""

    number: int
    time: float
    job: str
    round: int
    attempt: int
    phase: str
    level: str
    kind: str
    text: str


@dataclass(frozen=True)
class LinesShared:
    """Lines that a silo's policy shares, in their order."""

    lines: tuple[SiloLine, ...]


@dataclass(frozen=True)
class ReportSaid:
    """What a silo's people say to a request for a report; `report` is JSON, unread."""

    request: str
    status: str
    reason: str
    report: str


@dataclass(frozen=True)
class InstallationProof:
    """An installation's signature over a challenge."""

    signature: bytes


@dataclass(frozen=True)
class RefusedMessage:
    """A message that is refused as a whole. `at` is the step that it was to answer, where that passes."""

    kind: str
    reason: str
    at: JobStep | None = None


AgentMessage = (
    Introduction
    | Beat
    | Begun
    | ProgressReport
    | GivenUp
    | SelfHelp
    | Evaluation
    | ProtocolReply
    | Farewell
    | MaintenanceNews
    | LinesShared
    | ReportSaid
    | InstallationProof
    | RefusedMessage
)


@dataclass(frozen=True)
class UploadOffer:
    """An update that is offered: BLAKE3 digest and bytes, and what it is said to be.

    `flaw` says why nothing of the kind can be taken, in words; empty if nothing is wrong. `model` is the one
    that it was trained from; `statement` is what the silo has signed at `time`, but for its own name.
    `writing` and `arrival` are what the silo says of its work, and nothing rests on them.
    """

    at: JobStep
    digest: str
    size: int
    layout: str
    encoding: str
    examples: int
    metrics: Mapping[str, tuple[float, int]]
    offset: int
    announcement: bytes
    model: str
    time: float
    signature: bytes
    statement: Mapping[str, str | int | float]
    flaw: str = ""
    writing: Writing | None = None
    arrival: ModelArrival = NOTHING_CAME


@dataclass(frozen=True)
class KeyRequests:
    """Signing requests (PEM) for the connection's key and for the one to sign with."""

    node: bytes
    identity: bytes


@dataclass(frozen=True)
class RenewalRequest:
    """A silo's wish for new certificates of the same keys, signed with the identity that it has.

    `node` is its present node certificate, PEM, where the connection does not show it: behind a relay.
    """

    requests: KeyRequests
    identity: bytes
    time: float
    signature: bytes
    node: bytes = b""
