"""Between the wire's messages and the engine's values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roundtable.core.errors import FAILURE_KINDS, ProtocolError, SiteFailure
from roundtable.core.foreign_text import printable
from roundtable.engine import messages as m
from roundtable.proto import agent_pb2, common_pb2, operator_pb2
from roundtable.server.store import AgentRow, EventRow, JobRow

SECURE = "secure"
MAX_METRICS = 200
MAX_COUNT = 1 << 53
MAX_SUM = 1e100
"""Of a metric. Such sums times `MAX_COUNT`, added up over any number of silos, are far from overflow."""
_MAX_TEXT = 2000
_MAX_NAME = 100
_MAX_NUMBER = 1 << 31
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


@dataclass(frozen=True)
class StepProgress:
    """How far an agent says it is with its step; `figures`, by name, are of its newest training step."""

    done: int
    total: int
    loss: float
    figures: Mapping[str, float] | None = None


def step_of(message: common_pb2.Step) -> m.Step:
    """Decodes a step's key; the job is named beside it. ProtocolError for a phase that is no identifier."""
    if not _WORD.fullmatch(message.phase):
        raise ProtocolError(f"a step's phase {message.phase[:80]!r} is no valid identifier")
    if max(message.round, message.attempt) > _MAX_NUMBER:
        raise ProtocolError(f"round {message.round}, attempt {message.attempt} is beyond {_MAX_NUMBER}")
    return m.Step(message.round, message.attempt, message.phase)


def step_to(job: str, step: m.Step) -> common_pb2.Step:
    """The wire's form of a step."""
    return common_pb2.Step(job=job, round=step.round, attempt=step.attempt, phase=step.phase)


def metrics_of(messages: Iterable[common_pb2.Metric]) -> dict[str, tuple[float, int]]:
    """Decodes named sums. A sum that is NaN is left out: the silo has none, as of a loss without a batch.

    Raises ProtocolError, naming metric and value, for a sum beyond ±MAX_SUM, a count beyond MAX_COUNT, an
    empty, overlong or unprintable name, a name given twice, and more than MAX_METRICS of them.
    """
    metrics: dict[str, tuple[float, int]] = {}
    for metric in messages:
        name, shown = metric.name, printable(metric.name, _MAX_NAME)
        if not 0 < len(name) <= _MAX_NAME or shown != name or name in metrics:
            raise ProtocolError(
                f"a metric is called '{shown}': empty, overlong, not printable or given twice"
            )
        if abs(metric.sum) > MAX_SUM:
            raise ProtocolError(
                f"the metric {name!r} has the sum {metric.sum:g}; between {-MAX_SUM:g} and {MAX_SUM:g} can be"
            )
        if metric.count > MAX_COUNT:
            raise ProtocolError(f"the metric {name!r} counts {metric.count} examples; at most 2^53 can be")
        if len(metrics) == MAX_METRICS:
            raise ProtocolError(f"more than {MAX_METRICS} metrics")
        if not math.isnan(metric.sum):
            metrics[name] = (metric.sum, metric.count)
    return metrics


def progress_of(message: agent_pb2.Progress) -> StepProgress:
    """Decodes how far an agent says it is. ProtocolError, naming the value, for one beyond its bounds."""
    for name, value in (("done", message.done), ("total", message.total)):
        if value > MAX_COUNT:
            raise ProtocolError(f"the progress has {name} = {value}; at most 2^53 can be")
    figures = {field.name: float(value) for field, value in message.figures.ListFields()}
    for name, figure in {**figures, "loss": message.loss}.items():
        if abs(figure) > MAX_SUM:
            raise ProtocolError(f"the progress has {name} = {figure:g}; at most {MAX_SUM:g} can be")
    total = max(message.total, message.done)
    return StepProgress(message.done, total, message.loss, figures if message.HasField("figures") else None)


def failure_of(site: str, message: agent_pb2.Failure) -> SiteFailure:
    """Decodes a silo's failure; unknown kinds become `task_error`, long texts are cut."""
    kind = message.kind if message.kind in FAILURE_KINDS else "task_error"
    detail = " ".join(message.detail.split())[:_MAX_TEXT] or "no reason given"
    step = step_of(message.step)
    return SiteFailure(site, step.round, step.attempt, step.phase, kind, detail)


def trouble_of(site: str, message: agent_pb2.Trouble) -> m.Troubled:
    """Decodes an incident that the silo deals with itself."""
    step = message.step
    failure = failure_of(site, agent_pb2.Failure(step=step, kind=message.kind, detail=message.detail))
    return m.Troubled(step_of(step), failure, " ".join(message.action.split())[:_MAX_TEXT])


def client_of(name: str, hello: agent_pb2.Hello, now: float) -> AgentRow:
    """Decodes an agent's introduction; names, texts and lists are cut to their bounds."""
    return AgentRow(
        name=name,
        version=hello.version[:50],
        tasks=tuple(task[:200] for task in hello.tasks[:1000]),
        metadata={key[:_MAX_NAME]: value[:500] for key, value in list(hello.metadata.items())[:100]},
        devices=tuple(device[:200] for device in hello.devices[:100]),
        first_seen=now,
        last_seen=now,
    )


def instruction(
    job: str,
    config: str,
    layout: str,
    action: m.Instruct,
    size: int,
    now: float,
    identities: Sequence[bytes] = (),
    submission: common_pb2.Submission | None = None,
) -> agent_pb2.ToAgent:
    """The message for an `Instruct`; `size` is the model's, `identities` are for secure aggregation."""
    model = common_pb2.Artifact(digest=action.model, size=size)
    message = agent_pb2.Instruction(
        step=step_to(job, action.step),
        deadline_seconds=max(0.0, action.deadline - now),
        job_config=config,
        submission=submission,
    )
    if action.step.phase == m.EVALUATE:
        message.evaluate.CopyFrom(agent_pb2.Evaluate(model=model, layout=layout))
    else:
        message.train.CopyFrom(agent_pb2.Train(model=model, layout=layout, identities=identities))
    return agent_pb2.ToAgent(instruction=message)


def exchange(job: str, round: int, attempt: int, payload: bytes) -> agent_pb2.ToAgent:
    """The message that carries a message of secure aggregation."""
    step = common_pb2.Step(job=job, round=round, attempt=attempt, phase=SECURE)
    work = agent_pb2.Exchange(payload=payload)
    return agent_pb2.ToAgent(instruction=agent_pb2.Instruction(step=step, exchange=work))


def withdrawal(job: str, action: m.Withdraw) -> agent_pb2.ToAgent:
    """The message for a `Withdraw`."""
    return agent_pb2.ToAgent(
        withdraw=agent_pb2.Withdraw(step=step_to(job, action.step), reason=action.reason)
    )


def job_over(job: str, reason: str) -> agent_pb2.ToAgent:
    """A withdrawal of round 0: nothing of the job matters any more."""
    return agent_pb2.ToAgent(withdraw=agent_pb2.Withdraw(step=common_pb2.Step(job=job), reason=reason))


def job_to(row: JobRow, size: int) -> operator_pb2.Job:
    """A job as operators see it; `size` is its newest model's."""
    return operator_pb2.Job(
        id=row.id,
        name=row.name,
        status=row.status,
        reason=row.reason,
        rounds_done=row.rounds_done,
        rounds=row.rounds,
        model=common_pb2.Artifact(digest=row.model, size=size),
        submitted=row.submitted,
        updated=row.updated,
        submitter=row.submitter,
    )


def event_to(event: EventRow) -> common_pb2.Event:
    """An event as operators see it."""
    return common_pb2.Event(
        sequence=event.sequence,
        time=event.time,
        kind=event.kind,
        round=event.round,
        attempt=event.attempt,
        client=event.client,
        message=event.message,
        detail=json.dumps(dict(event.detail), separators=(",", ":")) if event.detail else "",
    )


def figures_to(figures: Mapping[str, float]) -> common_pb2.StepFigures:
    """A silo's newest training step as operators see it."""
    exact = {"step", "steps", "memory_bytes"}
    values = {name: int(value) if name in exact else value for name, value in figures.items()}
    return common_pb2.StepFigures(**values)  # type: ignore[arg-type]


def client_to(row: AgentRow, online: bool, state: str) -> operator_pb2.Client:
    """An agent as operators see it."""
    metadata: Mapping[str, str] = row.metadata
    return operator_pb2.Client(
        name=row.name,
        online=online,
        state=state,
        version=row.version,
        tasks=row.tasks,
        metadata=metadata,
        devices=row.devices,
        last_seen=row.last_seen,
        selected=row.selected,
        completed=row.completed,
    )
