"""From what an operator submits to the rows of a job, checked as far as it can be before a round."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, EncodingError, LayoutError
from roundtable.core.observability.tracking import check_inside, check_trackers
from roundtable.core.privacy_table import NoPrivacy
from roundtable.engine import CentralNoise, RoundEngine
from roundtable.engine.selection import undeclared
from roundtable.engine.validation.feasibility import check_device, check_rule
from roundtable.engine.validation.standardise_composition import check_filled
from roundtable.privacy import Budget
from roundtable.server.jobs.admission.series import in_series
from roundtable.server.jobs.job_driver import Submission, check_approved, layout_of, plan_of
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.privacy_budget import budgets_of, check_all
from roundtable.server.operations.populations import check_counted
from roundtable.server.store import ArtifactRow, JobRow
from roundtable.server.store.agent_rows import all_clients
from roundtable.server.store.artifacts import is_readable
from roundtable.server.store.ledger import Total, budget_of, totals


async def rows_of(
    submission: Submission, job: JobConfig, after: Sequence[str], run: int, services: JobServices
) -> tuple[JobRow, ArtifactRow]:
    """The rows of a job that nobody has begun, as run `run` if it is repeated.

    `after`: the identifiers of the jobs that it comes after. Raises ConfigError or PrivacyError for a job
    that cannot work.
    """
    database, whose = services.database, services.populations.of(job)
    services.retention.keep.check_wanted(job)
    limit = await database.read(lambda connection: budget_of(connection, whose))
    check_counted(job, limit)
    if not await database.read(lambda connection: is_readable(connection, submission.model)):
        # A job would hand somebody's update to all silos.
        digest = submission.model[:12]
        raise ConfigError(f"the initial model {digest} is not stored here: upload it before the job")
    agents = await database.read(all_clients)
    if run == 1:
        # Later a series goes on, though a silo has left or the rules are others.
        services.queue.check(job.queue, submission.submitter, submission.submitter_role)
        make_algorithm(job.algorithm).check_clients([agent.name for agent in agents])
    offering = [agent for agent in agents if agent.offers(job.task.name)]
    if run == 1 and offering and (why := undeclared(job.cohort, [each.metadata for each in offering])):
        raise ConfigError(why, key=("cohort", "label"))
    population = max(1, len(offering))
    spent: Sequence[Total] = ()
    budgets = budgets_of(job.privacy, whose)
    if not isinstance(job.privacy, NoPrivacy):
        spent = await database.read(lambda connection: totals(connection, whose))
        budgets += [limit] if limit else []
    # Nobody who is known yet may come once the job is there.
    known = len(offering) if run == 1 else 0
    row, artifact = await asyncio.to_thread(
        _made, submission, job, population, known, spent, budgets, after, services
    )
    return in_series(row, job, run, services.clock()), artifact


def _made(
    submission: Submission,
    job: JobConfig,
    population: int,
    known: int,
    spent: Sequence[Total],
    budgets: Sequence[Budget],
    after: Sequence[str],
    services: JobServices,
) -> tuple[JobRow, ArtifactRow]:
    """Blocks: reads its model. `population`: how many silos there are for it; `known`: its rule is to go
    with so many, 0 where it may be any; `spent`: what they bear.

    BudgetExceeded where one of the budgets does not hold a round, or all of a survey, beside that.
    """
    path = services.artifacts.path(submission.model)
    try:
        layout = layout_of(submission.model, services)
    except (EncodingError, LayoutError) as error:
        reason = str(error).replace(str(path), f"artifact {submission.model[:12]}")
        raise ConfigError(f"the initial model cannot be used: {reason}") from error
    check_approved(job, services)
    check_filled(job)
    if job.stop.central:
        raise ConfigError(
            f"stop.metric = {job.stop.metric!r} is measured on test data of the server, which a simulation "
            "alone has; name a metric of the silos"
        )
    check_inside(job.tracking)
    check_trackers(job.tracking)
    plan = plan_of(job, layout, population, spent)
    if (charge := plan.least_charge) is not None:
        check_all(budgets, spent, charge)
    check_device(plan)
    if known:
        check_rule(
            job, plan, max(known, job.cohort.size or 0, job.round.buffer or 0, job.cohort.minimum or 0)
        )
    if plan.aggregation.takes("root_update") and not services.trusted.offers(job.task):
        raise ConfigError(
            f"aggregation.rule = {job.aggregation.rule!r} measures updates by training on trusted data, "
            f"and this coordinator has none for the task {job.task.name!r} with the parameters that the "
            "job sets: give its coordinator.toml a table [root_data.NAME] with task, data and parameters"
        )
    engine = RoundEngine.begin(
        job,
        submission.model,
        secrets.randbits(63),
        separation=plan.separation,
        strategy=plan.strategy,
        regional=job.regions.rounds > 1,
        unchecked=any(spec.digest for spec in layout.tensors),
    )
    noise = dict(plan.noise.settled) if isinstance(plan.noise, CentralNoise) else {}
    now = services.clock()
    row = JobRow(
        id=submission.job,
        name=job.title[:100],
        request_id=submission.request_id,
        submitter=submission.submitter,
        submitter_role=submission.submitter_role,
        config=job.to_json(),
        initial_model=submission.model,
        model=submission.model,
        optimizer="",
        status=engine.state.status,
        reason=engine.state.reason,
        rounds=job.rounds,
        rounds_done=0,
        snapshot={
            "engine": engine.snapshot(),
            "population": population,
            "noise": noise,
            "signature": submission.signature.hex(),
            "certificate": submission.certificate.decode(),
            "after": list(after),
            "signed": {"time": submission.time, "coordinator": submission.coordinator},
        },
        version=1,
        writer=services.writer,
        submitted=now,
        updated=now,
    )
    return row, ArtifactRow(submission.model, path.stat().st_size, "model", now)
