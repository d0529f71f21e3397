"""A job as the queue sees it: what its engine, its row and its file say of its turn."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.job_tables.queue_table import covers
from roundtable.engine import RoundEngine
from roundtable.engine import messages as m
from roundtable.engine.view import shortage
from roundtable.server.queue.standing import Contender
from roundtable.server.queue.timeline import ONE_JOB, Amounts
from roundtable.server.store import AgentRow, JobRow


def contender_of(
    row: JobRow,
    job: JobConfig,
    engine: RoundEngine,
    blocked: str,
    freed: float,
    pace: float | None,
    elapsed: float,
) -> Contender | None:
    """The job as `schedule` takes it; None where it is paused or over.

    `freed`: when the last of those that it comes after has ended; it waits since then. `pace`: seconds that
    its rounds took, None before the first; `elapsed`: those of the one that runs so far.
    """
    state, population = engine.state, engine.population
    if state.status not in ("waiting", "running"):
        return None
    held, there = population.held(), population.free()
    rest, ends = _durations(job, engine, pace, elapsed)
    return Contender(
        job=row.id,
        name=row.name,
        project=job.queue.project or row.submitter,
        priority=job.queue.priority if state.priority is None else state.priority,
        since=max(state.queued or row.submitted, freed),
        turn=not engine.queued,
        silos=frozenset(name for name in population.known() if name not in held),
        there=len(there),
        least=engine.least,
        demand=job.resources.demand,
        starved=engine.starved,
        yielding=bool(state.yielding),
        shortage=_shortage(job, engine),
        blocked=state.hold or blocked,
        rest=rest,
        ends=ends,
        earliest=max(job.queue.earliest, float(row.snapshot.get("begins", 0.0))),
    )


def _durations(
    job: JobConfig, engine: RoundEngine, pace: float | None, elapsed: float
) -> tuple[float | None, float | None]:
    """Seconds until the last round ends, and until the one that runs does: measured, else as the job says."""
    within = job.regions.rounds  # The rounds that one here stands for.
    stated = None if job.resources.expected is None else job.resources.expected / job.rounds * within
    each, left = stated if pace is None else pace, -(-(job.rounds - engine.state.summary.done) // within)
    if each is None:
        return None, None
    if engine.queued:
        return each * left, None
    ends = max(0.0, each - elapsed)
    return ends + each * max(0, left - 1), ends


def _shortage(job: JobConfig, engine: RoundEngine) -> str:
    """Which silos the job still waits for before it can begin; "" where it can."""
    population = engine.population
    there = population.free()
    if len(there) < engine.least:
        return shortage(job, engine.least, population)
    for group in job.resources.at_least:
        count = sum(covers(group.labels, population.info(name).metadata) for name in there)
        if count < group.silos:
            wanted = ", ".join(f"{label} = {value}" for label, value in group.labels.items())
            return f"{count} of {group.silos} silos with {wanted} are available; waiting for more to connect"
    return ""


def amounts_of(silo: AgentRow) -> Amounts:
    """What a silo has for jobs, as it says; room for one job where it says nothing."""
    if silo.capacity is None:
        return ONE_JOB
    amounts: dict[str, float] = {"jobs": silo.capacity.jobs, "gpus": silo.capacity.gpus}
    told = {"memory": silo.capacity.memory, "disk": silo.capacity.disk}
    return amounts | {resource: amount for resource, amount in told.items() if amount}


def held_of(silo: AgentRow) -> m.Held | None:
    """Why no job asks this silo for anything new; None where jobs may."""
    if silo.disabled:
        return "disabled"
    return "drained" if silo.drained else None


def held_for(job: JobConfig, silo: AgentRow) -> m.Held | None:
    """Why this job asks the silo for nothing new; None where it may."""
    has = None if silo.capacity is None else amounts_of(silo)
    return held_of(silo) or (None if job.resources.suits(silo.metadata, has) else "unsuited")
