"""Whether agents remember more than the database does: then it was restored from an old backup."""

from __future__ import annotations

from roundtable.server.door.agent_messages import Introduction
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.store import FINAL, Database
from roundtable.server.store.jobs import JobPosition, positions_of


async def forgotten(jobs: JobRegistry, database: Database, hello: Introduction) -> str:
    """Names what the agent has seen and the database does not know, with the remedy; empty if nothing."""
    if hello.coordinator != database.identity:
        return ""
    wanted = {job for job, *_ in hello.seen}
    stored = await database.read(lambda connection: positions_of(connection, wanted)) if wanted else {}
    for job, round, attempt in hello.seen:
        position = _position(jobs, job, stored.get(job))
        if position is None or (round, attempt) > position:
            at = f"round {position[0]}, attempt {position[1]}" if position else "nothing"
            return (
                f"the coordinator's database is older than what this silo has seen: of job {job} "
                f"the silo knows round {round}, attempt {attempt}, the database {at}. It was "
                "restored from an old backup; restore a newer one, or accept the loss with "
                "`roundtable restore --new-identity`"
            )
    return ""


def _position(jobs: JobRegistry, job: str, stored: JobPosition | None) -> tuple[int, float] | None:
    """(round, attempt) that the job has come to; every attempt at the last round of one that is over.

    A job is over before its driver is gone, for as long as its end waits for the database.
    """
    runner = jobs.runner(job)
    if runner is not None and (view := runner.view().value).status not in FINAL:
        return view.round, view.attempt
    if stored is None:
        return None
    return (stored.done + 1 if stored.status in FINAL else stored.rounds, float("inf"))
