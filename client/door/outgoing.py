"""Encodes what the agent says: the only place that makes the wire's messages (`incoming.py` reads them)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roundtable.client.door.incoming import STATUSES, Receipt
from roundtable.client.door.model_names import ArtifactName
from roundtable.client.policy.capacity import SiloCapacity
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import Figures
from roundtable.client.training.metrics import Metrics
from roundtable.core.errors import ProtocolError
from roundtable.core.evidence.release import release
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import sign
from roundtable.core.observability.logs import LineKind
from roundtable.core.observability.released import Told
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.observability.transfer_figures import NOTHING_CAME, ModelArrival, Writing
from roundtable.proto import PROTOCOL_VERSION, agent_pb2, common_pb2
from roundtable.proto.receipts import receipt_values, update_values


@dataclass(frozen=True)
class ProgressFigures:
    """How far local work is: `done` of `total`, in examples or bytes; its newest loss and step."""

    done: int = 0
    total: int = 0
    loss: float = math.nan
    figures: Figures | None = None


@dataclass(frozen=True)
class UpdateFigures:
    """What goes with an update in the clear: its example count and training metrics, and how it was
    written."""

    examples: int = 0
    metrics: Metrics = field(default_factory=dict)
    writing: Writing | None = None


@dataclass(frozen=True)
class LogLine:
    """A line of the agent's log, logged at a Unix time about a step (round 0: the job); fit to be shown."""

    number: int
    time: float
    step: StepKey
    level: str
    kind: LineKind
    text: str

    def numbered(self, number: int) -> LogLine:
        """The line with its place among all of this silo."""
        return replace(self, number=number)

    def instead(self, text: str) -> LogLine:
        """A warning of the agent's in the place of this line."""
        return replace(self, level="warning", kind="agent", text=text)


FromAgent = agent_pb2.FromAgent
"""A message of the control stream, made here and handed on unread."""
_EXACT = ("step", "steps", "memory_bytes")


def hello(
    tasks: Iterable[str],
    metadata: Mapping[str, str],
    devices: Iterable[str],
    spooled: Iterable[StepKey] = (),
    identity: bytes = b"",
    coordinator: str = "",
    seen: Mapping[str, tuple[int, int]] | None = None,
    installation: bytes = b"",
    drained: str | None = None,
    capacity: SiloCapacity | None = None,
    passage: tuple[str, bytes] | None = None,
) -> FromAgent:
    """What the agent says of itself; `seen` is (round, attempt) by job, at the `coordinator` of before.

    `installation` is the public key of this installation of the agent, `drained` why the silo takes no new
    rounds; None where it does. `passage` names the relay that may speak for the silo, with its signature.
    """
    return FromAgent(
        hello=agent_pb2.Hello(
            version=release().version,
            protocol=PROTOCOL_VERSION,
            tasks=sorted(tasks),
            metadata=metadata,
            devices=devices,
            clock=time.time(),
            spooled=[_step(step) for step in spooled],
            identity=identity,
            coordinator=coordinator,
            installation=installation,
            maintenance=_maintenance(drained),
            capacity=agent_pb2.Capacity(**capacity._asdict()) if capacity else None,
            passage=agent_pb2.Passage(relay=passage[0], signature=passage[1]) if passage else None,
            seen=[
                common_pb2.Step(job=job, round=round, attempt=attempt)
                for job, (round, attempt) in (seen or {}).items()
            ],
        )
    )


def proof(signature: bytes) -> FromAgent:
    """The installation's answer to a challenge."""
    return FromAgent(proof=signature)


def heartbeat(state: str) -> FromAgent:
    """ "I am alive"; `state` is what the agent does, in a word."""
    return FromAgent(heartbeat=agent_pb2.Heartbeat(state=state))


def maintenance(drained: str | None) -> FromAgent:
    """The silo takes no new rounds from now on, or takes them again."""
    return FromAgent(maintenance=_maintenance(drained))


def shared_lines(told: Told[Sequence[LogLine]]) -> FromAgent:
    """Lines of the agent's log that the silo's policy shares."""
    return FromAgent(lines=agent_pb2.SharedLines(lines=map(_line, told.value)))


def report(request: str, status: str, reason: str = "", content: bytes = b"") -> FromAgent:
    """What the silo's people say to a request for a report: shown to them, denied, or sent."""
    return FromAgent(
        report=agent_pb2.SiloReport(request=request, status=status, reason=reason, report=content)
    )


def goodbye(reason: str) -> FromAgent:
    """The agent leaves on purpose."""
    return FromAgent(goodbye=agent_pb2.Goodbye(reason=reason))


def accepted(step: StepKey, queued: bool = False, setup: TrainingSetup | None = None) -> FromAgent:
    """The instruction was understood and work has begun, on `setup`, or stands in line behind other steps."""
    told = None if setup is None else agent_pb2.Setup(**setup.plain())
    return FromAgent(accepted=agent_pb2.Accepted(step=_step(step), queued=queued, setup=told))


def prepared(step: StepKey) -> FromAgent:
    """The step's update is finished, and is kept here until a group is asked to mask it."""
    return FromAgent(accepted=agent_pb2.Accepted(step=_step(step), prepared=True))


def progress(step: StepKey, activity: str, told: Told[ProgressFigures]) -> FromAgent:
    """How far local work is."""
    seen = told.value
    message = agent_pb2.Progress(
        step=_step(step),
        activity=activity,
        done=seen.done,
        total=seen.total,
        loss=seen.loss,
        figures=None if seen.figures is None else figures_message(seen.figures),
    )
    return FromAgent(progress=message)


def trouble(step: StepKey, kind: str, detail: str, action: str) -> FromAgent:
    """An incident that the silo deals with itself."""
    return FromAgent(trouble=agent_pb2.Trouble(step=_step(step), kind=kind, detail=detail, action=action))


def failure(step: StepKey, kind: str, detail: str) -> FromAgent:
    """The step failed at this silo."""
    return FromAgent(failure=agent_pb2.Failure(step=_step(step), kind=kind, detail=detail))


def evaluated(step: StepKey, told: Told[Metrics]) -> FromAgent:
    """The answer to an evaluation."""
    return FromAgent(evaluated=agent_pb2.Evaluated(step=_step(step), metrics=_metrics(told.value)))


def reply(step: StepKey, payload: bytes) -> FromAgent:
    """The answer to a message of secure aggregation."""
    return FromAgent(reply=agent_pb2.Reply(step=_step(step), payload=payload))


def upload_header(
    step: StepKey,
    content: ArtifactName,
    layout: str,
    encoding: str,
    told: Told[UpdateFigures],
    announcement: bytes = b"",
    offset: int = 0,
    model: str = "",
    arrival: ModelArrival = NOTHING_CAME,
) -> agent_pb2.UploadHeader:
    """What goes before an update's bytes; `model` is the digest of the model that it was trained from."""
    return agent_pb2.UploadHeader(
        step=_step(step),
        content=common_pb2.Artifact(digest=content.digest, size=content.size),
        layout=layout,
        encoding=encoding,
        examples=told.value.examples,
        metrics=_metrics(told.value.metrics),
        offset=offset,
        announcement=announcement,
        model=model,
        writing=_writing(told),
        arrival=agent_pb2.Arrival(**arrival._asdict()) if arrival.size else None,
    )


def sign_update(
    header: agent_pb2.UploadHeader, client: str, identity: SiloIdentity, time: float
) -> agent_pb2.UploadHeader:
    """The header with the silo's signature under it, made at this Unix time.

    ProtocolError for metrics that are not finite: no signature covers those.
    """
    header.time = time
    try:
        header.signature = sign(identity, "update", update_values(client, header))
    except ValueError as error:
        raise ProtocolError("a training metric of the update is not finite: it cannot be signed") from error
    return header


def receipt_statement(
    client: str, step: StepKey, content: ArtifactName, receipt: Receipt
) -> dict[str, str | int | float]:
    """What the coordinator signed with a receipt."""
    header = agent_pb2.UploadHeader(
        step=_step(step), content=common_pb2.Artifact(digest=content.digest, size=content.size)
    )
    signed = agent_pb2.UploadReceipt(
        status=next(code for code, status in STATUSES.items() if status == receipt.status),
        time=receipt.time,
        sealed=receipt.sealed,
        sealed_hash=receipt.sealed_hash,
    )
    return receipt_values(client, header, signed)


def download(digest: str, offset: int) -> common_pb2.DownloadRequest:
    """Asks for an artifact's bytes from an offset onwards."""
    return common_pb2.DownloadRequest(digest=digest, offset=offset)


def figures_message(figures: Figures) -> common_pb2.StepFigures:
    """Figures by name as they travel."""
    values = {name: int(value) if name in _EXACT else value for name, value in figures.items()}
    return common_pb2.StepFigures(**values)  # type: ignore[arg-type]


def _writing(told: Told[UpdateFigures]) -> agent_pb2.Writing | None:
    figures = told.value
    if figures.writing is None:
        return None
    return agent_pb2.Writing(
        seconds=figures.writing.seconds,
        error=math.nan if figures.writing.error is None else figures.writing.error,
        trials=[agent_pb2.Trial(**vars(trial)) for trial in figures.writing.trials],
    )


def _maintenance(drained: str | None) -> agent_pb2.Maintenance:
    return agent_pb2.Maintenance(drained=drained is not None, reason=drained or "")


def _step(step: StepKey) -> common_pb2.Step:
    return common_pb2.Step(job=step.job, round=step.round, attempt=step.attempt, phase=step.phase)


def _line(line: LogLine) -> agent_pb2.SharedLine:
    return agent_pb2.SharedLine(
        number=line.number,
        time=line.time,
        step=_step(line.step),
        level=line.level,
        kind=line.kind,
        text=line.text,
    )


def _metrics(metrics: Metrics) -> list[common_pb2.Metric]:
    return [common_pb2.Metric(name=name, sum=value, count=count) for name, (value, count) in metrics.items()]
