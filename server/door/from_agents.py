"""Decodes what agents say into checked, bounded, immutable values.

Whatever else of the coordinator sees a name, a number or a text of a silo sees it after it was checked here:
words of steps can be names of files, sums of numbers cannot overflow, and texts can be logged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from roundtable.core import bounds
from roundtable.core.errors import FAILURE_KINDS, ProtocolError
from roundtable.core.foreign_text import printable
from roundtable.core.identity.signing import MOST_RELAYS, PATH_MARK
from roundtable.core.observability.log_levels import LEVELS
from roundtable.core.observability.logs import LineKind
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.observability.transfer_figures import EncodingTrial, ModelArrival, Writing
from roundtable.engine import messages as m
from roundtable.proto import MAX_MESSAGE_BYTES, agent_pb2, common_pb2
from roundtable.proto.receipts import update_values
from roundtable.server.door.agent_messages import (
    AgentMessage,
    Beat,
    Begun,
    Evaluation,
    Farewell,
    GivenUp,
    InstallationProof,
    Introduction,
    JobStep,
    KeyRequests,
    LinesShared,
    MaintenanceNews,
    Passage,
    ProgressReport,
    ProtocolReply,
    RefusedMessage,
    RenewalRequest,
    ReportSaid,
    SelfHelp,
    SiloLine,
    StepProgress,
    UploadOffer,
)
from roundtable.server.store import Capacity

MAX_METRICS = 600
MAX_SUM = 1e100
"""Of a metric. Such sums times 2^53, added up over any number of silos, are far from overflow."""
_MAX_TEXT = 2000
_MAX_NAME = 100
_MAX_CHAIN = 200
_MAX_DEVICES = 100
MAX_SEEN = 1000
MAX_REASON = 200
_REQUEST_BYTES = 8192
MOST_LINES = 500
"""Lines that a silo shares in one message."""
_LINE = 1100
_REPORT_BYTES = 256 << 10
_MOST_SECONDS = 10 * 366 * 86400.0
_MOST_ERROR = 1e9
_MOST_TRIALS = 16
_LEAST_SIZE = 1e-9
_MOST_WAYS, _MOST_RANKS, _MAX_PLAN = 20, 1_000_000, 500
_REPORT_STATES = ("shown", "denied", "sent")
_KINDS = get_args(LineKind)


def message_of(message: agent_pb2.FromAgent) -> AgentMessage:
    """Decodes one message of the control stream; what does not pass is a `RefusedMessage`, never an error."""
    kind = message.WhichOneof("message") or ""
    try:
        if kind not in _DECODERS:
            raise ProtocolError("it is of a kind that this coordinator does not know")
        return _DECODERS[kind](message)
    except ProtocolError as error:
        return RefusedMessage(kind, str(error), _at_or_none(message, kind))


def step_of(message: common_pb2.Step) -> JobStep:
    """Decodes a step's key; ProtocolError for words that are no identifiers, and numbers beyond bounds."""
    job, phase = bounds.word(message.job, "a step's job"), bounds.word(message.phase, "a step's phase")
    round = bounds.within(message.round, 0, bounds.MOST_ROUNDS, "a step's round")
    return JobStep(
        job, m.Step(round, bounds.within(message.attempt, 0, bounds.MOST_ROUNDS, "its attempt"), phase)
    )


def offer_of(header: agent_pb2.UploadHeader) -> UploadOffer:
    """Decodes what goes before an update's bytes.

    ProtocolError for a step or an offset that cannot be; the rest that cannot be is the offer's `flaw`, which
    the silo's round is told of.
    """
    at, content, flaw = step_of(header.step), header.content, ""
    metrics: Mapping[str, tuple[float, int]] = {}
    if not bounds.is_digest(content.digest):
        flaw = "the update's digest is no BLAKE3 digest of 64 hexadecimal digits"
    try:
        metrics = metrics_of(header.metrics)
    except ProtocolError as error:
        flaw = flaw or f"the update's metrics are refused: {error}"
    if header.examples > bounds.MOST_COUNT:
        flaw = flaw or f"the update claims {header.examples} examples; at most 2^53 can be"
    for text in (content.digest, header.layout, header.model):
        bounds.text(text, _MAX_NAME, "a name in an upload's header")
    bounds.text(header.encoding, _MAX_CHAIN, "the encoding in an upload's header")
    return UploadOffer(
        at=at,
        digest=printable(content.digest),
        size=min(content.size, bounds.MOST_BYTES),
        layout=printable(header.layout),
        encoding=printable(header.encoding, _MAX_CHAIN),
        examples=min(header.examples, bounds.MOST_COUNT),
        metrics=metrics,
        offset=bounds.within(header.offset, 0, bounds.MOST_BYTES, "an upload's offset"),
        announcement=bounds.bounded(header.announcement, MAX_MESSAGE_BYTES, "an upload's announcement"),
        model=printable(header.model),
        time=bounds.within(header.time, 0.0, bounds.LATEST, "an upload's time"),
        signature=bounds.bounded(header.signature, bounds.SIGNATURE_BYTES, "an upload's signature"),
        statement={name: value for name, value in update_values("", header).items() if name != "client"},
        flaw=flaw,
        writing=_writing(header.writing) if header.HasField("writing") else None,
        arrival=ModelArrival(
            min(header.arrival.size, bounds.MOST_BYTES),
            bounds.within(header.arrival.seconds, 0.0, _MOST_SECONDS, "the seconds of a model's arrival"),
        ),
    )


def _writing(message: agent_pb2.Writing) -> Writing:
    seconds = bounds.within(message.seconds, 0.0, _MOST_SECONDS, "the seconds of an update's encoding")
    if len(message.trials) > _MOST_TRIALS:
        raise ProtocolError(f"{len(message.trials)} trials of encodings; at most {_MOST_TRIALS} can be")
    trials = tuple(map(_trial, message.trials))
    if math.isnan(message.error):
        return Writing(seconds, trials=trials)
    error = bounds.within(message.error, 0.0, _MOST_ERROR, "the error of an update's encoding")
    return Writing(seconds, error, trials)


def _trial(message: agent_pb2.Trial) -> EncodingTrial:
    return EncodingTrial(
        bounds.text(message.encoding, _MAX_CHAIN, "the encoding of a trial"),
        bounds.within(message.size, _LEAST_SIZE, 1e3, "the bytes of a trial"),
        bounds.within(message.seconds, 0.0, 1e3, "the seconds of a trial"),
        bounds.within(message.error, 0.0, _MOST_ERROR, "the error of a trial"),
    )


def metrics_of(messages: Iterable[common_pb2.Metric]) -> dict[str, tuple[float, int]]:
    """Decodes named sums. A sum that is NaN is left out: the silo has none, as of a loss without a batch.

    Raises ProtocolError, naming metric and value, for a sum beyond ±MAX_SUM, a count beyond 2^53, an
    empty, overlong or unprintable name, a name given twice, and more than MAX_METRICS of them.
    """
    metrics: dict[str, tuple[float, int]] = {}
    names: set[str] = set()
    for metric in messages:
        name, shown = metric.name, printable(metric.name, _MAX_NAME)
        if not 0 < len(name) <= _MAX_NAME or shown != name or name in names:
            raise ProtocolError(
                f"a metric is called '{shown}': empty, overlong, not printable or given twice"
            )
        if abs(metric.sum) > MAX_SUM:
            raise ProtocolError(
                f"the metric {name!r} has the sum {metric.sum:g}; between {-MAX_SUM:g} and {MAX_SUM:g} can be"
            )
        if metric.count > bounds.MOST_COUNT:
            raise ProtocolError(f"the metric {name!r} counts {metric.count} examples; at most 2^53 can be")
        if len(names) == MAX_METRICS:
            raise ProtocolError(f"more than {MAX_METRICS} metrics")
        names.add(name)
        if not math.isnan(metric.sum):
            metrics[name] = (metric.sum, metric.count)
    return metrics


def requests_of(message: common_pb2.CertificateRequests) -> KeyRequests:
    """Decodes signing requests, of a few hundred bytes each."""
    return KeyRequests(
        bounds.bounded(message.node, _REQUEST_BYTES, "a certificate request"),
        bounds.bounded(message.identity, _REQUEST_BYTES, "a certificate request"),
    )


def renewal_of(message: agent_pb2.RenewRequest) -> RenewalRequest:
    """Decodes a request for new certificates."""
    return RenewalRequest(
        requests_of(message.requests),
        bounds.bounded(message.identity, bounds.CERTIFICATE_BYTES, "the silo's certificate"),
        bounds.within(message.time, 0.0, bounds.LATEST, "the time of a renewal"),
        bounds.bounded(message.signature, bounds.SIGNATURE_BYTES, "a renewal's signature"),
        bounds.bounded(message.node, bounds.CERTIFICATE_BYTES, "the silo's certificate"),
    )


def _introduction(message: agent_pb2.FromAgent) -> Introduction:
    """Names, texts and lists are cut to their bounds: an agent of another version is told so."""
    hello = message.hello
    if len(hello.seen) > MAX_SEEN:
        raise ProtocolError(
            f"the agent names {len(hello.seen)} jobs that it remembers; at most {MAX_SEEN} can be"
        )
    return Introduction(
        bounds.one_line(hello.version, 50),
        hello.protocol,
        tuple(printable(task, 200) for task in hello.tasks[: bounds.MOST_TASKS]),
        {
            printable(key, _MAX_NAME): printable(value, 500)
            for key, value in list(hello.metadata.items())[: bounds.MOST_LABELS]
        },
        tuple(printable(device, 200) for device in hello.devices[:_MAX_DEVICES]),
        hello.clock if abs(hello.clock) <= bounds.LATEST else 0.0,
        bounds.bounded(hello.identity, bounds.CERTIFICATE_BYTES, "the identity certificate"),
        printable(hello.coordinator, 200),
        tuple(
            (bounds.word(step.job, "a job that was seen"), step.round, step.attempt) for step in hello.seen
        ),
        bounds.bounded(hello.installation, bounds.SIGNATURE_BYTES, "the installation's key"),
        _drained(hello.maintenance),
        _capacity(hello.capacity) if hello.HasField("capacity") else None,
        passage_of(hello.passage) if hello.HasField("passage") else None,
    )


def passage_of(message: agent_pb2.Passage) -> Passage:
    """Decodes a silo's word for the relays on its way to the coordinator."""
    path = tuple(message.relay.split(PATH_MARK, MOST_RELAYS))
    if len(path) > MOST_RELAYS or len(set(path)) < len(path):
        raise ProtocolError(f"a passage names {MOST_RELAYS} relays at most, each once")
    return Passage(
        tuple(bounds.word(relay, "a relay's name") for relay in path),
        bounds.bounded(message.signature, bounds.SIGNATURE_BYTES, "a passage's signature"),
    )


def _capacity(said: agent_pb2.Capacity) -> Capacity:
    return Capacity(
        bounds.within(said.jobs, 1, 1000, "the jobs at a time"),
        bounds.within(said.gpus, 0, 10_000, "the number of GPUs"),
        bounds.within(said.memory, 0, bounds.MOST_COUNT, "the bytes of memory"),
        bounds.within(said.disk, 0, bounds.MOST_COUNT, "the free bytes of disk"),
    )


def _drained(message: agent_pb2.Maintenance) -> str:
    return (bounds.one_line(message.reason, MAX_REASON) or "no reason given") if message.drained else ""


def _begun(message: agent_pb2.Accepted) -> Begun:
    setup = _setup(message.setup) if message.HasField("setup") else None
    return Begun(step_of(message.step), message.queued, setup, message.prepared)


def _setup(message: agent_pb2.Setup) -> TrainingSetup:
    if len(message.degrees) > _MOST_WAYS:
        raise ProtocolError(f"{len(message.degrees)} ways of parallelism; at most {_MOST_WAYS} can be")
    degrees = {
        bounds.word(name, "a way of parallelism"): bounds.within(degree, 1, _MOST_RANKS, "its degree")
        for name, degree in message.degrees.items()
    }
    return TrainingSetup(
        bounds.within(message.machines, 1, _MOST_RANKS, "the number of machines"),
        bounds.within(message.ranks, 1, _MOST_RANKS, "the number of ranks"),
        bounds.one_line(message.device, _MAX_NAME),
        bounds.within(message.memory, 0, bounds.MOST_COUNT, "the bytes of a device"),
        bounds.one_line(message.plan, _MAX_PLAN),
        dict(sorted(degrees.items())),
        bounds.within(message.factor_rank, 0, _MOST_RANKS, "the rank of factors"),
    )


def _progress(message: agent_pb2.FromAgent) -> ProgressReport:
    said = message.progress
    for name, value in (("done", said.done), ("total", said.total)):
        if value > bounds.MOST_COUNT:
            raise ProtocolError(f"the progress has {name} = {value}; at most 2^53 can be")
    named = {field.name: value for field, value in said.figures.ListFields()}
    for name, value in named.items():
        if isinstance(value, int) and value > bounds.MOST_COUNT:
            # A float holds it as another one, which the message that tells operators of it may not hold.
            raise ProtocolError(f"the progress has {name} = {value}; at most 2^53 can be")
    figures = {name: float(value) for name, value in named.items() if not math.isnan(value)}
    for name, figure in {**figures, "loss": said.loss}.items():
        if abs(figure) > MAX_SUM:
            raise ProtocolError(f"the progress has {name} = {figure:g}; at most {MAX_SUM:g} can be")
    has = said.HasField("figures")
    progress = StepProgress(said.done, max(said.total, said.done), said.loss, figures if has else None)
    return ProgressReport(step_of(said.step), progress)


def _given_up(message: agent_pb2.Failure | agent_pb2.Trouble) -> GivenUp:
    """Unknown kinds become `task_error`, long texts are cut. No silo excuses itself as busy."""
    kind = message.kind if message.kind in FAILURE_KINDS and message.kind != "busy" else "task_error"
    detail = bounds.one_line(message.detail, _MAX_TEXT) or "no reason given"
    return GivenUp(step_of(message.step), kind, detail)


def _shared(message: agent_pb2.FromAgent) -> LinesShared:
    lines = message.lines.lines
    bounds.within(len(lines), 1, MOST_LINES, "the number of lines that are shared at once")
    return LinesShared(tuple(map(_line, lines)))


def _line(said: agent_pb2.SharedLine) -> SiloLine:
    at = said.step
    if said.level not in LEVELS or said.kind not in _KINDS:
        what = printable(f"{said.level} {said.kind}", 80)
        raise ProtocolError(f"a line of its log is {what!r}: of no level or kind that there is")
    return SiloLine(
        bounds.within(said.number, 1, bounds.MOST_COUNT, "the number of a line"),
        bounds.within(said.time, 0.0, bounds.LATEST, "the time of a line"),
        bounds.word(at.job, "a line's job"),
        bounds.within(at.round, 0, bounds.MOST_ROUNDS - 1, "a line's round"),
        bounds.within(at.attempt, 0, bounds.MOST_ROUNDS - 1, "a line's attempt"),
        bounds.word(at.phase, "a line's phase") if at.phase else "",
        said.level,
        said.kind,
        bounds.one_line(said.text, _LINE),
    )


def _report(message: agent_pb2.FromAgent) -> ReportSaid:
    said = message.report
    if said.status not in _REPORT_STATES:
        raise ProtocolError(f"a report is {printable(said.status, 40)!r}: of no state that there is")
    data = bounds.bounded(said.report, _REPORT_BYTES, "a report")
    try:
        text = data.decode()
        if said.status == "sent" and not isinstance(json.loads(text), dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a report is no JSON: {printable(error, 200)}") from error
    return ReportSaid(
        bounds.word(said.request, "a request"),
        said.status,
        bounds.one_line(said.reason, MAX_REASON),
        text if said.status == "sent" else "",
    )


def _reply(message: agent_pb2.FromAgent) -> ProtocolReply:
    payload = bounds.bounded(message.reply.payload, MAX_MESSAGE_BYTES, "a message of secure aggregation")
    return ProtocolReply(step_of(message.reply.step), payload)


_DECODERS: dict[str, Callable[[agent_pb2.FromAgent], AgentMessage]] = {
    "hello": _introduction,
    "heartbeat": lambda message: Beat(bounds.one_line(message.heartbeat.state, 50)),
    "accepted": lambda message: _begun(message.accepted),
    "progress": _progress,
    "failure": lambda message: _given_up(message.failure),
    "trouble": lambda message: SelfHelp(
        _given_up(message.trouble), bounds.one_line(message.trouble.action, _MAX_TEXT)
    ),
    "lines": _shared,
    "report": _report,
    "evaluated": lambda message: Evaluation(
        step_of(message.evaluated.step), metrics_of(message.evaluated.metrics)
    ),
    "reply": _reply,
    "goodbye": lambda message: Farewell(bounds.one_line(message.goodbye.reason, 500)),
    "maintenance": lambda message: MaintenanceNews(_drained(message.maintenance)),
    "proof": lambda message: InstallationProof(
        bounds.bounded(message.proof, bounds.SIGNATURE_BYTES, "an installation's signature")
    ),
}


def _at_or_none(message: agent_pb2.FromAgent, kind: str) -> JobStep | None:
    step = getattr(getattr(message, kind, None), "step", None)
    try:
        return step_of(step) if isinstance(step, common_pb2.Step) else None
    except ProtocolError:
        return None
