"""The events that the round engine takes and the actions that it returns: plain values, JSON-able."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from roundtable.core.errors import SiteFailure
from roundtable.core.model_delta import Hop
from roundtable.core.observability.transfer_figures import TransferFigures
from roundtable.engine.clients import ClientHeld as ClientHeld
from roundtable.engine.clients import ClientInfo as ClientInfo
from roundtable.engine.clients import ClientJoined as ClientJoined
from roundtable.engine.clients import ClientLeft as ClientLeft
from roundtable.engine.clients import ClientState as ClientState
from roundtable.engine.clients import Held as Held
from roundtable.engine.clients import Step as Step
from roundtable.engine.clients import UpdateReady as UpdateReady
from roundtable.engine.clients import WorkStarted as WorkStarted
from roundtable.engine.steering import Cancel as Cancel
from roundtable.engine.steering import MovedInQueue as MovedInQueue
from roundtable.engine.steering import Pause as Pause
from roundtable.engine.steering import Resume as Resume
from roundtable.engine.steering import Yield as Yield

TRAIN = "train"
PREPARE = "prepare"
CHECK = "check"
AGGREGATE = "aggregate"
EVALUATE = "evaluate"
COMMIT = "commit"
SELECT = "select"
AUTHORIZE = "authorize"

JobStatus = Literal["waiting", "running", "paused", "finished", "cancelled", "failed"]
FINAL: tuple[JobStatus, ...] = ("finished", "cancelled", "failed")


@dataclass(frozen=True)
class BlobReference:
    """A vector stored as an artifact, by its BLAKE3 digest."""

    digest: str


@dataclass(frozen=True)
class RowReference:
    """A vector in the memory of the process that drives the engine: a row of its matrix."""

    row: int


VectorReference = BlobReference | RowReference


@dataclass(frozen=True)
class Update:
    """One client's accepted update; its vector lies where `vector` says, and the engine never looks at it.

    `loss` is the mean over the `examples`; `metrics` are named (sum, count). `asked`: (round, attempt) of its
    model, where not that which it is combined in. `steps`: given by speed. `transfer`: what its way took.
    `relay`: in whose sum it lies; the vector is then that of the sum.
    """

    client: str
    vector: VectorReference
    examples: int
    loss: float | None = None
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    asked: tuple[int, int] | None = None
    steps: int | None = None
    transfer: TransferFigures | None = None
    relay: str = ""

    @property
    def digest(self) -> str:
        """The artifact that holds the vector; a mistake to ask for where it is a row in memory."""
        assert isinstance(self.vector, BlobReference)
        return self.vector.digest

    @property
    def row(self) -> int:
        """The row of the driver's matrix that holds the vector; a mistake to ask for where it is stored."""
        assert isinstance(self.vector, RowReference)
        return self.vector.row

    def staleness(self, round: int) -> int:
        """Models made since the one that it was trained from, if it is combined in `round`."""
        return round - self.asked[0] if self.asked else 0


@dataclass(frozen=True)
class Start:
    """Starts the job; sent once, after `ClientJoined` for the population that is known so far."""


@dataclass(frozen=True)
class UpdateArrived:
    """A client's update has arrived: complete, well-formed and durable."""

    step: Step
    update: Update


Within: TypeAlias = Mapping[str, Sequence[Sequence[Any]]]
"""Of relays the rounds within their regions before a sum: (round, silos, examples, model) of each."""


@dataclass(frozen=True)
class SumArrived:
    """A relay's sum of these updates has arrived: all of them count, or none."""

    step: Step
    updates: tuple[Update, ...]
    within: Within = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """A client has measured the model of `step` on its test data."""

    client: str
    step: Step
    metrics: Mapping[str, tuple[float, int]]


@dataclass(frozen=True)
class ClientFailed:
    """A client will not answer this step, for the reason in `failure`."""

    step: Step
    failure: SiteFailure


@dataclass(frozen=True)
class Troubled:
    """Something failed at a client that will still answer; `action` says what is done about it."""

    step: Step
    failure: SiteFailure
    action: str


@dataclass(frozen=True)
class DeadlinePassed:
    """A timer that `SetTimer` asked for has run out."""

    timer: str


@dataclass(frozen=True)
class Unmasking:
    """The driver is ready to ask clients for what unmasks the sum of these updates, and waits for `Unmask`.

    `charge` is what the round then costs in privacy, whatever comes of it.
    """

    step: Step
    charge: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Aggregated:
    """The driver has combined the updates and stored the new model.

    `optimizer` names the artifact with the server optimizer's state ("" for none); `excluded` maps a client
    to the reason why its update was left out; `charge` is what the round costs in privacy. `training` are
    the round's training metrics where no single update tells any, `before` those that came with them of the
    model that the round began with, `central` what the server measured of the new one, on test data of its
    own. `delta` names the artifact with the encoded change from the old model
    to the new one ("" for none). `directions` are sketches of the updates, where the job chooses by them.
    """

    step: Step
    model: str
    optimizer: str = ""
    excluded: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    charge: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    before: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    delta: str = ""
    central: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    directions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AggregationFailed:
    """The updates cannot be combined; the attempt has failed for this reason.

    Unless updates that had been accepted are `damaged` where they are kept (client → what is wrong):
    then their clients are asked to send them again.
    """

    step: Step
    reason: str
    damaged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """The record of `Commit` is durable."""

    round: int


@dataclass(frozen=True)
class Authorized:
    """The privacy budget holds what this attempt can cost."""

    step: Step


@dataclass(frozen=True)
class Denied:
    """The privacy budget does not hold another round: the job ends with the model that it has."""

    step: Step
    reason: str


Event = (
    Start
    | ClientJoined
    | ClientLeft
    | ClientHeld
    | WorkStarted
    | UpdateReady
    | UpdateArrived
    | SumArrived
    | Evaluated
    | ClientFailed
    | Troubled
    | DeadlinePassed
    | Unmasking
    | Aggregated
    | AggregationFailed
    | Committed
    | Authorized
    | Denied
    | Cancel
    | Pause
    | Resume
    | Yield
    | MovedInQueue
)


@dataclass(frozen=True)
class Authorize:
    """Check the ledger before anything is asked of anyone; answer with `Authorized` or `Denied`."""

    step: Step


@dataclass(frozen=True)
class Instruct:
    """Tell the client to train (phase `train`) or to evaluate (phase `evaluate`) `model`; idempotent.

    In phase `check` it makes its own model, and says whether that is the job's. In phase `prepare` it trains
    and keeps its update; in phase `train` with `prepared`, the (round, attempt) of that, it does not train
    but masks that update among `cohort`.

    `cohort` is who was selected and has not failed. `counted`: (round, attempt) of the client's newest update
    that is in `model` or in one before it: the client goes on from what that training left with it. `hops`
    lead from older models to newer ones. `steps`, `encoding`: where they are the client's own.
    """

    client: str
    step: Step
    model: str
    deadline: float
    cohort: tuple[str, ...] = field(default=(), compare=False, repr=False)
    counted: tuple[int, int] | None = None
    hops: tuple[Hop, ...] = field(default=(), compare=False, repr=False)
    steps: int | None = None
    encoding: str = ""
    prepared: tuple[int, int] | None = None


@dataclass(frozen=True)
class Withdraw:
    """Tell the client that the step no longer matters."""

    client: str
    step: Step
    reason: str


@dataclass(frozen=True)
class SetTimer:
    """Send `DeadlinePassed(timer)` at time `at`. A timer of the same name replaces the older one."""

    timer: str
    at: float


@dataclass(frozen=True)
class Aggregate:
    """Combine these updates, sorted by client; answer with `Aggregated` or `AggregationFailed`.

    `cohort` names everybody who was asked in this attempt: secure aggregation waits for their masks.
    `population` is how many clients there are.
    """

    step: Step
    model: str
    optimizer: str
    updates: tuple[Update, ...]
    cohort: tuple[str, ...]
    population: int = 1


@dataclass(frozen=True)
class Unmask:
    """Allow the driver to ask clients to unmask the sum: no other sum of this round will ever be made."""

    step: Step


@dataclass(frozen=True)
class RoundRecord:
    """All that is kept of a committed round. Metrics are named (sum, count) over the silos.

    `evaluation` is of the model that the round has made, `before` of the one that it began with, `central` of
    the new one on the server's own test data, in a simulation. `staleness`: how many models old each update's
    own was, if buffered. `closed`: why no model was made; `model` is the one before. `withheld` names fields
    that may not be told. `population`: how many clients there were; `excused` had no turn at their silo.
    `transfers`: of each update what its way took (`TransferFigures.known`). `within`: of relays the
    rounds within their regions."""

    round: int
    attempt: int
    model: str
    optimizer: str
    cohort: tuple[str, ...]
    contributors: tuple[str, ...]
    failures: Mapping[str, str]
    excluded: Mapping[str, str]
    weights: Mapping[str, float]
    training: Mapping[str, tuple[float, int]]
    evaluation: Mapping[str, tuple[float, int]]
    client_metrics: Mapping[str, Mapping[str, tuple[float, int]]]
    diagnosis: Mapping[str, Any]
    charge: Mapping[str, Any]
    started: float
    ended: float
    before: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    staleness: Mapping[str, int] = field(default_factory=dict)
    closed: str = ""
    withheld: tuple[str, ...] = ()
    population: int = 1
    central: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    transfers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    excused: tuple[str, ...] = ()
    within: Within = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """Make the record durable in one transaction with the engine's snapshot; answer with `Committed`.

    No update of round `settled`, or one before it, will be wanted any more.
    """

    record: RoundRecord
    settled: int


@dataclass(frozen=True)
class Note:
    """Add an event to the job's history: a stable kind, a sentence for people, and values."""

    kind: str
    message: str
    round: int = 0
    attempt: int = 0
    client: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StatusChanged:
    """The job is now in this state; finished, cancelled and failed are final."""

    status: JobStatus
    reason: str


Action = Authorize | Instruct | Withdraw | SetTimer | Aggregate | Unmask | Commit | Note | StatusChanged
