"""A job as people see it: where it stands, what each client does, what the round waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundtable.core.config import JobConfig
from roundtable.engine import messages as m
from roundtable.engine.population import Population
from roundtable.engine.selection import least_for_selection, rested
from roundtable.engine.state import Attempt, EngineState
from roundtable.engine.validation.secure_feasibility import fewest

_AT_WORK = {"queued", "training", "ready", "evaluating", "uploading"}
_SHOWN = 5
WHO_HELD: Mapping[m.Held, str] = {
    "drained": "drained by its silo",
    "disabled": "disabled by operators",
    "unsuited": "without what [resources] of the job asks for",
}


@dataclass(frozen=True)
class ClientView:
    """What one client does, since when (in the time that `handle` was given)."""

    state: m.ClientState
    since: float
    note: str


@dataclass(frozen=True)
class EngineView:
    """Where the job stands; `waiting_for` is one sentence, empty when it waits for nobody."""

    round: int
    attempt: int
    phase: str
    status: m.JobStatus
    reason: str
    deadline: float | None
    waiting_for: str
    model: str
    clients: Mapping[str, ClientView]


def view(
    job: JobConfig, state: EngineState, population: Population, *, with_clients: bool = True
) -> EngineView:
    """The view of a state; without its clients, of which there may be thousands, if they are not wanted."""
    attempt = state.attempt
    clients = {
        name: ClientView(_state_of(name, state, population), record.since, record.note)
        for name, record in (sorted(state.clients.items()) if with_clients else ())
    }
    return EngineView(
        round=attempt.round if attempt else state.summary.done,
        attempt=attempt.number if attempt else 0,
        phase=attempt.phase if attempt else "",
        status=state.status,
        reason=state.reason,
        deadline=attempt.deadline if attempt else None,
        waiting_for=_waiting_for(job, state, population) if attempt and state.status != "paused" else "",
        model=state.model,
        clients=clients,
    )


def _waiting_for(job: JobConfig, state: EngineState, population: Population) -> str:
    attempt = state.attempt
    assert attempt is not None
    if attempt.phase == m.SELECT:
        free = population.free()
        there = len(rested(free, state))
        least = max(least_for_selection(job.cohort, attempt.settled, population), fewest(job))
        if there == len(free):
            return shortage(job, least, population)
        said = (
            f"{there} of {least} clients may take part; {len(free) - there} others did within the last "
            f"{state.separation - 1} rounds. Waiting for more to connect"
        )
        return "; ".join([said, *held_in_words(population)])
    if attempt.phase == m.TRAIN and job.round.mode == "buffered" and not attempt.group:
        busy = [n for n, given in state.at_work.items() if not given.away]
        shown = ", ".join(busy[:_SHOWN]) + (f" and {len(busy) - _SHOWN} more" if len(busy) > _SHOWN else "")
        here, are = len(state.ready) or len(attempt.updates), " ready" if state.ready else ""
        said = f"{here} of {attempt.target} updates{are}; at work: {shown or 'nobody'}"
        return "; ".join([said, *(() if busy else held_in_words(population))])
    if attempt.phase in (m.CHECK, m.TRAIN, m.EVALUATE):
        return _waiting_for_answers(attempt, state, population)
    return {m.AGGREGATE: "combining the updates", m.COMMIT: "storing the round"}.get(attempt.phase, "")


def shortage(job: JobConfig, least: int, population: Population) -> str:
    """What a round waits for that needs `least` clients: how many are there, which are held, and, where it
    cannot be these, by which name silos must have the job's task."""
    said = [f"{len(population.free())} of {least} clients are available; waiting for more to connect"]
    if (known := len(population.known())) < least:
        come = "silo that has come so far has" if known < 2 else "silos that have come so far have"
        said.append(f"{known or 'no'} {come} the task {job.task.name!r} in [tasks] of agent.toml")
    return "; ".join([*said, *held_in_words(population)])


def held_in_words(population: Population) -> list[str]:
    """For each reason how many of the known clients are held, and which: "2 of 5 are drained by …"."""
    held, known = population.held(), len(population.known())
    said = []
    for reason, who in WHO_HELD.items():
        names = [name for name, why in held.items() if why == reason]
        if names:
            are = who.replace("its silo", "their silos") if len(names) > 1 else who
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            verb = "are" if len(names) > 1 else "is"
            said.append(f"{len(names)} of {known} {verb} {are}: {', '.join(names[:_SHOWN])}{more}")
    return said


def _waiting_for_answers(attempt: Attempt, state: EngineState, population: Population) -> str:
    told: dict[str, tuple[str, Mapping[str, Any]]] = {
        m.CHECK: ("models compared with the job's", {**attempt.evaluations, **attempt.failures}),
        m.TRAIN: ("updates", attempt.updates),
        m.EVALUATE: ("evaluations", attempt.evaluations),
    }
    word, have = told[attempt.phase]
    awaited = list(attempt.awaited)
    shown = ", ".join(f"{n} ({_state_of(n, state, population)})" for n in awaited[:_SHOWN])
    more = f" and {len(awaited) - _SHOWN} more" if len(awaited) > _SHOWN else ""
    return f"{len(have)} of {len(have) + len(awaited)} {word}; waiting for {shown or 'nobody'}{more}"


def _state_of(name: str, state: EngineState, population: Population) -> m.ClientState:
    """Nobody works for a job that does not run: what it asked for last is withdrawn."""
    now = state.clients[name].state
    if not population.is_online(name):
        return "offline"
    return "available" if now in _AT_WORK and state.status != "running" else now
