"""A job as the queue sees it: what its engine, its row and its file say of its turn."""

from __future__ import annotations

import math

from roundtable.core.config import JobConfig
from roundtable.core.job_tables.queue_table import ResourcesTable
from roundtable.engine import RoundEngine
from roundtable.engine import messages as m
from roundtable.engine.view import shortage
from roundtable.server.queue.decision import ONE_JOB, Amounts, Contender
from roundtable.server.store import AgentRow, JobRow


def contender_of(
    row: JobRow, job: JobConfig, engine: RoundEngine, pace: float | None, blocked: str
) -> Contender | None:
    """The job as `schedule` takes it; None where it is paused or over. `pace`: seconds that a round takes."""
    state, population = engine.state, engine.population
    if state.status not in ("waiting", "running"):
        return None
    held = population.held()
    return Contender(
        job=row.id,
        name=row.name,
        project=job.queue.project or row.submitter,
        priority=job.queue.priority if state.priority is None else state.priority,
        since=state.queued or row.submitted,
        turn=not engine.queued,
        silos=frozenset(name for name in population.known() if name not in held),
        there=len(population.free()),
        least=engine.least,
        demand=demand_of(job.resources),
        starved=engine.starved,
        yielding=bool(state.yielding),
        shortage=shortage(engine.least, population),
        blocked=state.hold or blocked,
        rest=None if pace is None else pace * (job.rounds - state.summary.done),
    )


def demand_of(wish: ResourcesTable) -> Amounts:
    """What the job takes of each silo while it has its turn."""
    amounts = {"jobs": 1.0, "gpus": float(wish.gpus), "memory": float(wish.memory_bytes)}
    return {resource: amount for resource, amount in amounts.items() if amount}


def amounts_of(silo: AgentRow) -> Amounts:
    """What a silo has for jobs, as it says; room for one job where it says nothing."""
    if silo.capacity is None:
        return ONE_JOB
    amounts: dict[str, float] = {"jobs": silo.capacity.jobs, "gpus": silo.capacity.gpus}
    return amounts | ({"memory": silo.capacity.memory} if silo.capacity.memory else {})


def held_of(silo: AgentRow) -> m.Held | None:
    """Why no job asks this silo for anything new; None where jobs may."""
    if silo.disabled:
        return "disabled"
    return "drained" if silo.drained else None


def held_for(job: JobConfig, silo: AgentRow) -> m.Held | None:
    """Why this job asks the silo for nothing new; None where it may."""
    return held_of(silo) or (None if suits(job.resources, silo) else "unsuited")


def suits(wish: ResourcesTable, silo: AgentRow) -> bool:
    """Whether the silo has what the job asks for; one that was never heard of what it has may have it."""
    if any(silo.metadata.get(label) != value for label, value in wish.labels.items()):
        return False
    has = amounts_of(silo)
    return silo.capacity is None or all(
        has.get(name, math.inf) >= least for name, least in demand_of(wish).items()
    )
