"""Encodes what agents are told: the messages of the control stream, and the answers to uploads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from roundtable.core.model_delta import Hop
from roundtable.engine import messages as m
from roundtable.proto import agent_pb2, common_pb2
from roundtable.server.store.report_rows import ReportRow

SECURE = "secure"
ToAgent = agent_pb2.ToAgent
"""A message of the control stream, made here and handed on unread."""
RESULTS: dict[agent_pb2.UploadReceipt.Status.ValueType, str] = {
    agent_pb2.UploadReceipt.ACCEPTED: "accepted",
    agent_pb2.UploadReceipt.REJECTED: "rejected",
    agent_pb2.UploadReceipt.STALE: "stale",
    agent_pb2.UploadReceipt.DUPLICATE: "duplicate",
}
"""What became of an upload, in a word."""


@dataclass(frozen=True)
class SignedSubmission:
    """Who asked for a job, and the proof of it, as silos get it."""

    submitter: str
    request_id: str
    signature: bytes
    certificate: bytes
    initial_model: str
    time: float = 0.0
    coordinator: str = ""


@dataclass(frozen=True)
class CloneSighting:
    """When somebody else came with a silo's certificate and was refused, and from where."""

    time: float
    address: str


@dataclass(frozen=True)
class SizedHop:
    """A hop from model to model, and the bytes of its artifact."""

    hop: Hop
    size: int


def instruction(
    job: str,
    config: str,
    layout: str,
    action: m.Instruct,
    size: int,
    now: float,
    identities: Sequence[bytes] = (),
    submission: SignedSubmission | None = None,
    hops: Sequence[SizedHop] = (),
) -> ToAgent:
    """The message for an `Instruct`; `size` is the model's, `identities` are for secure aggregation, `hops`
    lead from older models to newer ones."""
    model = common_pb2.Artifact(digest=action.model, size=size)
    message = agent_pb2.Instruction(
        step=_step(job, action.step),
        deadline_seconds=max(0.0, action.deadline - now),
        job_config=config,
        submission=common_pb2.Submission(**asdict(submission)) if submission else None,
    )
    for each in hops:
        delta = common_pb2.Artifact(digest=each.hop.delta, size=each.size)
        message.hops.append(agent_pb2.Hop(base=each.hop.base, model=each.hop.model, delta=delta))
    if action.counted is not None:
        message.counted.CopyFrom(_step(job, m.Step(*action.counted, m.TRAIN)))
    if action.step.phase in (m.CHECK, m.EVALUATE):
        message.evaluate.CopyFrom(agent_pb2.Evaluate(model=model, layout=layout))
    else:
        message.train.CopyFrom(
            agent_pb2.Train(
                model=model,
                layout=layout,
                identities=identities,
                steps=action.steps or 0,
                encoding=action.encoding,
                prepared=_step(job, m.Step(*action.prepared, m.PREPARE)) if action.prepared else None,
            )
        )
    return ToAgent(instruction=message)


def exchange(job: str, round: int, attempt: int, payload: bytes) -> ToAgent:
    """The message that carries a message of secure aggregation."""
    step = common_pb2.Step(job=job, round=round, attempt=attempt, phase=SECURE)
    work = agent_pb2.Exchange(payload=payload)
    return ToAgent(instruction=agent_pb2.Instruction(step=step, exchange=work))


def withdrawal(job: str, action: m.Withdraw) -> ToAgent:
    """The message for a `Withdraw`."""
    return ToAgent(withdraw=agent_pb2.Withdraw(step=_step(job, action.step), reason=action.reason))


def job_over(job: str, reason: str, ended: float) -> ToAgent:
    """A withdrawal of round 0: nothing of the job matters any more."""
    return ToAgent(withdraw=agent_pb2.Withdraw(step=common_pb2.Step(job=job), reason=reason, ended=ended))


def refused(reason: str) -> ToAgent:
    """The connection is not wanted."""
    return ToAgent(refused=agent_pb2.Refused(reason=reason))


def heartbeat() -> ToAgent:
    """The answer to a heartbeat."""
    return ToAgent(heartbeat=agent_pb2.Heartbeat())


def clone_seen(sighting: CloneSighting | None) -> agent_pb2.CloneSeen | None:
    """Who was refused last for coming with the agent's certificate; None for nobody."""
    return agent_pb2.CloneSeen(time=sighting.time, address=sighting.address) if sighting else None


def clone(sighting: CloneSighting) -> ToAgent:
    """News of somebody who came with the agent's certificate."""
    return ToAgent(clone=clone_seen(sighting))


def revocations(newest: bytes) -> ToAgent:
    """The root's newest list."""
    return ToAgent(revocations=newest)


def standing(reason: str) -> ToAgent:
    """That operators have disabled the silo, and why; with "", that they have enabled it again."""
    return ToAgent(standing=agent_pb2.Standing(disabled=bool(reason), reason=reason))


def lines_taken(number: int) -> ToAgent:
    """The shared lines that came together and ended with this number are not wanted again."""
    return ToAgent(lines_taken=number)


def report_wish(row: ReportRow) -> ToAgent:
    """That operators ask for a report of the silo."""
    return ToAgent(
        report_wish=agent_pb2.ReportWish(
            request=row.request,
            author=row.author,
            reason=row.reason,
            created=row.created,
            expires=row.expires,
        )
    )


def report_taken(request: str) -> ToAgent:
    """The answer to this request is not wanted again."""
    return ToAgent(report_taken=request)


def challenge(nonce: bytes) -> ToAgent:
    """A number that the installation is to sign."""
    return ToAgent(challenge=nonce)


def certificates(name: str, node: bytes, identity: bytes) -> common_pb2.Certificates:
    """New certificates (PEM) of a silo."""
    return common_pb2.Certificates(name=name, node=node, identity=identity)


def _step(job: str, step: m.Step) -> common_pb2.Step:
    return common_pb2.Step(job=job, round=step.round, attempt=step.attempt, phase=step.phase)
