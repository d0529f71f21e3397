"""Decodes what operators, and silos that were invited, ask for: checked, bounded, immutable values.

ProtocolError for what does not pass; what a value then means is for those to judge who are asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundtable.core import bounds
from roundtable.core.errors import ProtocolError
from roundtable.core.foreign_text import printable
from roundtable.core.identity.credentials import check_name
from roundtable.core.identity.invitation import Secret
from roundtable.core.observability.log_levels import LEVELS
from roundtable.privacy import Budget
from roundtable.proto import administration_pb2 as pb
from roundtable.proto import common_pb2, operator_pb2
from roundtable.server.door.agent_messages import KeyRequests
from roundtable.server.door.from_agents import MAX_REASON, requests_of

CONFIG_CHARACTERS = 1 << 20
_NAME = 200
_REASON = 500
_MOST_SECONDS = 10 * 366 * 86400.0
_LAST = (1 << 63) - 1
_SILO = 64


@dataclass(frozen=True)
class StoredBlob:
    """An artifact by BLAKE3 digest and size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class DownloadWish:
    """An artifact, by what may be its digest, and the first byte of it that is wanted."""

    digest: str
    offset: int


@dataclass(frozen=True)
class JobWish:
    """A job as it is submitted: JSON, unparsed, and the proof of who asks."""

    request_id: str
    config: str
    model: str
    signature: bytes
    certificate: bytes
    time: float
    coordinator: str


@dataclass(frozen=True)
class LogWish:
    """Lines of a job's log from a place on; `silo`, `level` and `round` narrow them, "" and 0 do not."""

    job: str
    first: int
    follow: bool
    silo: str
    level: str
    round: int


@dataclass(frozen=True)
class HistoryWish:
    """A job, and how many of its rounds between these two, 0 for no bound; none: the newest."""

    job: str
    rounds: int
    between: tuple[int, int]


@dataclass(frozen=True)
class InvitationWish:
    """A silo that is to be invited, for so long and so many uses."""

    silo: str
    seconds: float
    uses: int


@dataclass(frozen=True)
class RevocationWish:
    """A party that is to be voided."""

    name: str
    role: str
    reason: str


@dataclass(frozen=True)
class TokenWish:
    """A token that is to be made."""

    name: str
    role: str
    seconds: float


@dataclass(frozen=True)
class EnrolmentWish:
    """An invitation's secret, and the keys to certify."""

    secret: Secret
    requests: KeyRequests


def job_of(
    request: operator_pb2.JobRequest
    | operator_pb2.GetJobRequest
    | operator_pb2.WatchJobRequest
    | operator_pb2.JobLogRequest
    | pb.ProvenanceRequest,
) -> str:
    """The identifier, its beginning, or the name by which a job is asked for."""
    return bounds.text(request.job, _NAME, "a job's name")


def history_of(request: operator_pb2.GetJobRequest) -> HistoryWish:
    """Of which job what is wanted to know, and how much of its history."""
    first = bounds.within(request.first, 0, bounds.MOST_ROUNDS, "the first round")
    last = bounds.within(request.last, 0, bounds.MOST_ROUNDS, "the last round")
    rounds = bounds.within(request.rounds, 0, bounds.MOST_ROUNDS, "how many rounds")
    return HistoryWish(job_of(request), rounds, (first, last))


def move_of(request: operator_pb2.MoveJobRequest) -> tuple[str, int | None, str | None]:
    """The job that is to be moved, its new priority, and why it is held; None for what stays as it is."""
    priority = hold = None
    if request.HasField("priority"):
        priority = bounds.within(request.priority, -100, 100, "a priority")
    if request.HasField("hold"):
        hold = bounds.one_line(request.hold, MAX_REASON)
    return bounds.text(request.job, _NAME, "a job's name"), priority, hold


def place_of(number: int) -> int:
    """A place in a history, from 1; 0 is the first, too."""
    return bounds.within(max(1, number), 1, _LAST, "the place to begin at")


def log_of(request: operator_pb2.JobLogRequest) -> LogWish:
    """The lines of a job's log that are asked for."""
    if request.level and request.level not in LEVELS:
        shown = printable(request.level, 40)
        raise ProtocolError(f"{shown!r} is not a level of the log: there are {', '.join(LEVELS)}")
    return LogWish(
        job_of(request),
        place_of(request.from_sequence),
        request.follow,
        bounds.text(request.silo, _NAME, "a silo's name"),
        request.level,
        bounds.within(request.round, 0, bounds.MOST_ROUNDS - 1, "a round"),
    )


def round_of(request: pb.ProvenanceRequest) -> int:
    """A round's number; 0 is the newest."""
    return bounds.within(request.round, 0, bounds.MOST_ROUNDS, "a round")


def header_of(part: operator_pb2.PutPart) -> StoredBlob:
    """The artifact that is to be stored."""
    content = part.header.content
    digest = bounds.digest(content.digest, "a transfer begins with a header, and the artifact")
    return StoredBlob(digest, content.size)


def download_of(request: common_pb2.DownloadRequest) -> DownloadWish:
    """What is to be sent; agents ask in the same way."""
    offset = bounds.within(request.offset, 0, _LAST, "the first byte of a download")
    return DownloadWish(printable(request.digest, 64), offset)


def submission_of(request: operator_pb2.SubmitJobRequest) -> JobWish:
    """A job that is to be made."""
    return JobWish(
        bounds.name(request.request_id, _NAME, "request_id:"),
        bounds.text(request.job_config, CONFIG_CHARACTERS, "the job"),
        bounds.digest(request.model.digest, "the initial model"),
        bounds.bounded(request.signature, bounds.SIGNATURE_BYTES, "the job's signature"),
        bounds.bounded(request.certificate, bounds.CERTIFICATE_BYTES, "the submitter's certificate"),
        bounds.within(request.time, 0.0, bounds.LATEST, "the time of the signature"),
        bounds.text(request.coordinator, _NAME, "the coordinator's name"),
    )


def population_of(request: operator_pb2.PrivacyRequest) -> str:
    """A population; empty for all of them."""
    return bounds.name(request.population, _NAME, "the population") if request.population else ""


def delta_of(request: operator_pb2.PrivacyRequest) -> float:
    """δ at which to report; 0 where none is asked for."""
    return bounds.within(request.delta, 0.0, 1.0, "delta")


def budget_of(request: operator_pb2.PrivacyBudget) -> Budget:
    """The most that may be spent on a population; PrivacyError for values that are no budget."""
    population = bounds.name(request.population, _NAME, "a budget needs the name of its population:")
    epsilon = bounds.within(request.epsilon, 0.0, 1e6, "epsilon")
    return Budget(
        population, epsilon, bounds.within(request.delta, 0.0, 1.0, "delta"), request.accountant or "pld"
    )


def invitation_of(request: pb.InviteRequest) -> InvitationWish:
    """A silo to invite; IdentityError for what cannot name one."""
    check_name(request.silo)
    seconds = bounds.within(request.valid_seconds, 0.0, _MOST_SECONDS, "the seconds of an invitation")
    return InvitationWish(request.silo, seconds, request.uses)


def revocation_of(request: pb.RevokeRequest) -> RevocationWish:
    """A party to void; IdentityError for what cannot name one."""
    check_name(request.name)
    reason = bounds.one_line(request.reason, _REASON)
    return RevocationWish(request.name, bounds.text(request.role, _SILO, "a role"), reason)


def asking_of(
    request: operator_pb2.DisableClientRequest | operator_pb2.AskReportRequest,
) -> tuple[str, str]:
    """A client that something is wanted of, and why; IdentityError for what cannot name one."""
    check_name(request.name)
    return request.name, bounds.one_line(request.reason, MAX_REASON) or "no reason given"


def named_of(request: operator_pb2.EnableClientRequest | operator_pb2.ShowReportRequest) -> str:
    """A client; IdentityError for what cannot name one."""
    check_name(request.name)
    return request.name


def confirmation_of(request: pb.ConfirmRequest) -> str:
    """The request that somebody confirms."""
    return bounds.text(request.request_id, _SILO, "a request's identifier")


def token_of(request: pb.CreateTokenRequest) -> TokenWish:
    """A token to make; IdentityError for what cannot name one."""
    check_name(request.name)
    seconds = bounds.within(request.valid_seconds, 0.0, _MOST_SECONDS, "the seconds of a token")
    return TokenWish(request.name, bounds.text(request.role, _SILO, "a role"), seconds)


def token_name_of(request: pb.RevokeTokenRequest) -> str:
    """The token to void."""
    return bounds.text(request.name, _NAME, "a token's name")


def enrolment_of(request: pb.EnrollRequest) -> EnrolmentWish:
    """A silo's answer to its invitation; what is longer than a secret is none."""
    return EnrolmentWish(Secret(request.identifier[:32], request.secret[:64]), requests_of(request.requests))
