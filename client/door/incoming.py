"""Decodes what the coordinator says into checked, bounded, immutable values.

Only this module and `outgoing.py` know the wire's messages. Whatever else of the agent sees a name, a size,
an interval or a text of the coordinator sees it after it was checked here: identifiers can be names of files,
numbers are finite and within bounds, and texts can be logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roundtable.client.door.model_names import (
    ArtifactName,
    ModelHop,
    RegionOrigin,
    artifact_of,
    hops_of,
    region_of,
)
from roundtable.client.door.submissions import SubmissionProof, submission_of
from roundtable.client.step_key import StepKey
from roundtable.core import bounds
from roundtable.core.errors import ProtocolError
from roundtable.core.foreign_text import printable
from roundtable.proto import MAX_MESSAGE_BYTES, agent_pb2, common_pb2

_MOST_SECONDS = 10 * 366 * 86400.0
_BEAT_SECONDS = (0.05, 3600.0)
_CHAIN_CHARACTERS = 200
_CONFIG_CHARACTERS = 1 << 20
_NONCE_BYTES = 64
_REASON = 200
_REQUEST_CHARACTERS = 32
_ADDRESS_CHARACTERS = 100
_MOST_IDENTITIES = 100_000
_MOST_STEPS = (1 << 32) - 1
_SHOWN_STEP = 128

Status = Literal["unspecified", "accepted", "duplicate", "stale", "rejected", "held"]
STATUSES: dict[agent_pb2.UploadReceipt.Status.ValueType, Status] = {
    agent_pb2.UploadReceipt.STATUS_UNSPECIFIED: "unspecified",
    agent_pb2.UploadReceipt.ACCEPTED: "accepted",
    agent_pb2.UploadReceipt.DUPLICATE: "duplicate",
    agent_pb2.UploadReceipt.STALE: "stale",
    agent_pb2.UploadReceipt.REJECTED: "rejected",
    agent_pb2.UploadReceipt.HELD: "held",
}


@dataclass(frozen=True)
class CloneNews:
    """Somebody else came with this silo's certificate and was refused: when, and from where, as the
    coordinator saw it."""

    time: float
    address: str


@dataclass(frozen=True)
class Welcome:
    """The coordinator's introduction; `heartbeat` in seconds, `clock` in Unix time, `relay` the identity
    certificate (PEM) of the relay that handed it on, if one did."""

    coordinator: str
    heartbeat: float
    clock: float
    identity: bytes
    revocations: bytes
    clone: CloneNews | None = None
    relay: bytes = b""


@dataclass(frozen=True)
class Challenge:
    """What the installation is to sign before it is welcomed."""

    nonce: bytes


@dataclass(frozen=True)
class ModelWork:
    """Training from a model, or evaluating it; `identities` certify the peers in secure aggregation, `steps`
    are those to take, where the job leaves them to the coordinator, as it may the update's `encoding`.
    `prepared`: nothing is trained, the update that this step has left is masked."""

    kind: Literal["train", "evaluate"]
    model: ArtifactName
    layout: str
    identities: tuple[bytes, ...] = ()
    steps: int | None = None
    encoding: str = ""
    prepared: StepKey | None = None


@dataclass(frozen=True)
class ExchangeWork:
    """A message of secure aggregation."""

    payload: bytes
    kind: Literal["exchange"] = "exchange"


@dataclass(frozen=True)
class StepInstruction:
    """One thing to do within `seconds` of its arrival; `config` is the whole job as JSON, unparsed.

    `counted`: the newest of the silo's training steps of the job whose update is in the model, or in one
    before it. `hops` lead from older models of the job to newer ones. `region`: whose a region's model is.
    """

    step: StepKey
    seconds: float
    config: str
    work: ModelWork | ExchangeWork
    submission: SubmissionProof
    counted: StepKey | None = None
    hops: tuple[ModelHop, ...] = ()
    region: RegionOrigin | None = None


@dataclass(frozen=True)
class Withdrawal:
    """A step that no longer matters; without one the job is over, since `ended` (its clock)."""

    job: str
    step: StepKey | None
    reason: str
    ended: float = math.inf


@dataclass(frozen=True)
class Dismissal:
    """The connection is not wanted."""

    reason: str


@dataclass(frozen=True)
class RevocationNews:
    """The root's newest revocation list (PEM)."""

    revocations: bytes


@dataclass(frozen=True)
class StandingNews:
    """Why operators have disabled the silo; "" where they have not."""

    disabled: str


@dataclass(frozen=True)
class LinesTaken:
    """The coordinator has the shared lines that came together and ended with this number."""

    number: int


@dataclass(frozen=True)
class ReportWish:
    """Operators ask for a report of this silo: who and why, fit to be shown; Unix times there."""

    request: str
    author: str
    reason: str
    created: float
    expires: float


@dataclass(frozen=True)
class ReportTaken:
    """The coordinator has the answer to this request."""

    request: str


@dataclass(frozen=True)
class Alive:
    """The answer to a heartbeat."""


@dataclass(frozen=True)
class BadMessage:
    """A message that is refused as a whole. `step` is what it named, unchecked, to be refused."""

    reason: str
    step: StepKey | None = None


Message = (
    Welcome
    | Challenge
    | StepInstruction
    | Withdrawal
    | Dismissal
    | RevocationNews
    | StandingNews
    | CloneNews
    | LinesTaken
    | ReportWish
    | ReportTaken
    | Alive
    | BadMessage
)


@dataclass(frozen=True)
class Receipt:
    """What became of an upload, as the coordinator signed it."""

    status: Status
    reason: str
    time: float
    signature: bytes
    sealed: int
    sealed_hash: str


@dataclass(frozen=True)
class UploadState:
    """Bytes that have arrived; a receipt instead if the rest is not wanted."""

    offset: int
    receipt: Receipt | None


def message_of(message: object) -> Message:
    """Decodes one message of the control stream; what does not pass is a `BadMessage`, never an error."""
    assert isinstance(message, agent_pb2.ToAgent)
    kind = message.WhichOneof("message")
    decode = _DECODERS.get(kind or "")
    try:
        if decode is None:
            raise ProtocolError("a message of a kind that this agent does not know")
        return decode(message)
    except ProtocolError as error:
        step = _as_named(message.instruction.step) if kind == "instruction" else None
        return BadMessage(f"the coordinator's word is refused: {error}", step)


def receipt_of(message: agent_pb2.UploadReceipt) -> Receipt:
    """Decodes a receipt; ProtocolError for one that does not pass."""
    status = STATUSES.get(message.status)
    if status is None:
        raise ProtocolError(f"the coordinator's receipt has the unknown status {message.status}")
    sealed_hash = message.sealed_hash and bounds.digest(message.sealed_hash, "a receipt's audit entry")
    return Receipt(
        status,
        printable(message.reason),
        bounds.within(message.time, 0.0, bounds.LATEST, "a receipt's time"),
        bounds.bounded(message.signature, bounds.SIGNATURE_BYTES, "a receipt's signature"),
        message.sealed,
        sealed_hash,
    )


def upload_state_of(message: agent_pb2.UploadState, size: int) -> UploadState:
    """Decodes how much of an upload of `size` bytes has arrived; ProtocolError for more than that."""
    if not message.wanted:
        return UploadState(0, receipt_of(message.receipt))
    return UploadState(bounds.within(message.offset, 0, size, "the offset of an upload"), None)


def step_of(step: common_pb2.Step) -> StepKey:
    """Decodes a step's key; ProtocolError for words that are no identifiers and rounds below 1."""
    job, phase = bounds.word(step.job, "a job"), bounds.word(step.phase, "a phase")
    round = bounds.within(step.round, 1, bounds.MOST_ROUNDS, "a round")
    return StepKey(job, round, bounds.within(step.attempt, 1, bounds.MOST_ROUNDS, "an attempt"), phase)


def _welcome(message: agent_pb2.ToAgent) -> Welcome:
    welcome = message.welcome
    return Welcome(
        bounds.word(welcome.coordinator, "the coordinator's database"),
        bounds.within(welcome.heartbeat_seconds, *_BEAT_SECONDS, "the seconds between heartbeats"),
        bounds.within(welcome.clock, 0.0, bounds.LATEST, "the coordinator's clock"),
        bounds.bounded(welcome.identity, bounds.CERTIFICATE_BYTES, "the coordinator's certificate"),
        bounds.bounded(welcome.revocations, MAX_MESSAGE_BYTES, "the revocation list"),
        _clone(welcome.clone) if welcome.HasField("clone") else None,
        bounds.bounded(welcome.relay, bounds.CERTIFICATE_BYTES, "the relay's certificate"),
    )


def _clone(message: agent_pb2.CloneSeen) -> CloneNews:
    time = bounds.within(message.time, 0.0, bounds.LATEST, "the time of a clone")
    return CloneNews(time, printable(message.address, _ADDRESS_CHARACTERS))


def _instruction(message: agent_pb2.ToAgent) -> StepInstruction:
    asked = message.instruction
    step = step_of(asked.step)
    work: ModelWork | ExchangeWork
    match asked.WhichOneof("work"):
        case "train":
            identities = tuple(asked.train.identities)
            bounds.within(len(identities), 0, _MOST_IDENTITIES, "the number of peers")
            for each in identities:
                bounds.bounded(each, bounds.CERTIFICATE_BYTES, "a peer's certificate")
            work = ModelWork(
                "train",
                artifact_of(asked.train.model),
                _layout(asked.train.layout),
                identities,
                bounds.within(asked.train.steps, 0, _MOST_STEPS, "the steps to take") or None,
                bounds.text(asked.train.encoding, _CHAIN_CHARACTERS, "the encoding of an update"),
                _prepared(asked.train.prepared, step) if asked.train.HasField("prepared") else None,
            )
        case "evaluate":
            work = ModelWork("evaluate", artifact_of(asked.evaluate.model), _layout(asked.evaluate.layout))
        case "exchange":
            work = ExchangeWork(bounds.bounded(asked.exchange.payload, MAX_MESSAGE_BYTES, "an exchange"))
        case _:
            raise ProtocolError("an instruction asks for no work that this agent knows")
    return StepInstruction(
        step,
        bounds.within(asked.deadline_seconds, 0.0, _MOST_SECONDS, "the seconds until a deadline"),
        bounds.text(asked.job_config, _CONFIG_CHARACTERS, "a job's configuration"),
        work,
        submission_of(asked.submission),
        _counted(asked.counted, step) if asked.HasField("counted") else None,
        hops_of(asked.hops),
        region_of(asked),
    )


def _counted(message: common_pb2.Step, step: StepKey) -> StepKey:
    counted = step_of(message)
    latest = step.round if step.phase == "evaluate" else step.round - 1
    if (counted.job, counted.phase) != (step.job, "train") or counted.round > latest:
        raise ProtocolError(f"an instruction for {step} says that {counted} is in its model")
    return counted


def _prepared(message: common_pb2.Step, step: StepKey) -> StepKey:
    prepared = step_of(message)
    if (prepared.job, prepared.phase) != (step.job, "prepare") or prepared[:3] > step[:3]:
        raise ProtocolError(f"an instruction for {step} asks for the update of {prepared} to be masked")
    return prepared


def _withdrawal(message: agent_pb2.ToAgent) -> Withdrawal:
    step, reason = message.withdraw.step, printable(message.withdraw.reason)
    if step.round == 0:
        ended = bounds.within(message.withdraw.ended, 0.0, bounds.LATEST, "the time of a job's end")
        return Withdrawal(bounds.word(step.job, "a job"), None, reason, ended or math.inf)
    return Withdrawal(step.job, step_of(step), reason)


_DECODERS: dict[str, Callable[[agent_pb2.ToAgent], Message]] = {
    "welcome": _welcome,
    "challenge": lambda message: Challenge(bounds.bounded(message.challenge, _NONCE_BYTES, "a challenge")),
    "instruction": _instruction,
    "withdraw": _withdrawal,
    "refused": lambda message: Dismissal(printable(message.refused.reason)),
    "standing": lambda message: StandingNews(_disabled(message.standing)),
    "heartbeat": lambda message: Alive(),
    "revocations": lambda message: RevocationNews(
        bounds.bounded(message.revocations, MAX_MESSAGE_BYTES, "the revocation list")
    ),
    "clone": lambda message: _clone(message.clone),
    "report_wish": lambda message: _wish(message.report_wish),
    "report_taken": lambda message: ReportTaken(bounds.word(message.report_taken, "a request")),
    "lines_taken": lambda message: LinesTaken(message.lines_taken),
}


def _wish(message: agent_pb2.ReportWish) -> ReportWish:
    return ReportWish(
        bounds.word(bounds.text(message.request, _REQUEST_CHARACTERS, "a request"), "a request"),
        bounds.one_line(message.author, _REASON),
        bounds.one_line(message.reason, _REASON),
        bounds.within(message.created, 0.0, bounds.LATEST, "the time of a request"),
        bounds.within(message.expires, 0.0, bounds.LATEST, "the end of a request"),
    )


def _disabled(standing: agent_pb2.Standing) -> str:
    return (bounds.one_line(standing.reason, _REASON) or "no reason given") if standing.disabled else ""


def _as_named(step: common_pb2.Step) -> StepKey:
    """The key as the coordinator wrote it, for the refusal that answers it."""
    return StepKey(step.job[:_SHOWN_STEP], step.round, step.attempt, step.phase[:_SHOWN_STEP])


def _layout(digest: str) -> str:
    return bounds.digest(digest, "a layout")
