"""Whether agents remember more than the database does: then it was restored from an old backup."""

from __future__ import annotations

from roundtable.proto import agent_pb2
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.store import FINAL, Database
from roundtable.server.store.jobs import UnknownJob


async def forgotten(jobs: JobRegistry, database: Database, hello: agent_pb2.Hello) -> str:
    """Names what the agent has seen and the database does not know, with the remedy; empty if nothing."""
    if hello.coordinator != database.identity:
        return ""
    for step in hello.seen:
        position = await _position(jobs, step.job)
        if position is None or (step.round, step.attempt) > position:
            at = f"round {position[0]}, attempt {position[1]}" if position else "nothing"
            return (
                f"the coordinator's database is older than what this silo has seen: of job {step.job} the "
                f"silo knows round {step.round}, attempt {step.attempt}, the database {at}. It was restored "
                "from an old backup; restore a newer one, or accept the loss with "
                "`roundtable restore --new-identity`"
            )
    return ""


async def _position(jobs: JobRegistry, job: str) -> tuple[int, float] | None:
    """(round, attempt) that the job has come to; every attempt at the last round of one that is over."""
    runner = jobs.runner(job)
    if runner is not None:
        view = runner.view()
        return view.round, view.attempt
    try:
        row = await jobs.find(job)
    except UnknownJob:
        return None
    return (row.rounds_done + 1, float("inf")) if row.status in FINAL else (row.rounds, float("inf"))
