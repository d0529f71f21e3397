"""What operators are shown of the ledger: each account with its ε, its limit, and the guarantee in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.engine import Connection

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy, Private
from roundtable.engine import Plan
from roundtable.privacy import Charge, account_statement, check_delta, compose, statement
from roundtable.privacy.protection import hidden, people, protection
from roundtable.server.door.to_operators import JobPromise, PopulationAccount
from roundtable.server.jobs.privacy_budget import accounts, silo_statement, spent_of, worst, worst_charges
from roundtable.server.store import FINAL, JobRow
from roundtable.server.store.ledger import Limit, Total, jobs_of, limits, populations, private_jobs, totals

DEFAULT_DELTA = 1e-6


@dataclass(frozen=True)
class Books:
    """What the database says of one population; `jobs` gives each job's level."""

    population: str
    known: Sequence[Total]
    jobs: Mapping[str, Private]
    limit: Limit | None

    def delta(self, wanted: float) -> float:
        """Where ε is taken: as asked, at the limit's δ, or at the least that a job promised."""
        if wanted:
            return wanted
        if self.limit is not None:
            return self.limit.budget.delta
        return min((privacy.delta for privacy in self.jobs.values()), default=DEFAULT_DELTA)

    def accounts(self, wanted: float) -> list[PopulationAccount]:
        """The shared account, and that of each silo which bears more."""
        delta = self.delta(wanted)
        accountant = self.limit.budget.accountant if self.limit is not None else "pld"
        paid = [total for total in self.known if total.released]
        reserved = accounts(self.known)
        told = []
        for silo, charges in accounts(paid).items():
            spent = spent_of(paid, silo, self.population, delta, accountant, tuple(self.jobs))
            levels = [privacy.level for privacy in self.jobs.values()]
            told.append(
                PopulationAccount(
                    population=self.population,
                    silo=silo,
                    epsilon=spent.epsilon,
                    delta=delta,
                    accountant=accountant,
                    relation=spent.relation,
                    releases=spent.releases,
                    reserved_epsilon=compose(reserved[silo], delta, accountant),
                    jobs=spent.jobs,
                    statement=account_statement(spent, levels, charges, silo),
                )
            )
        return told


def books(connection: Connection, population: str) -> tuple[list[Books], list[str]]:
    """Of one population, or of all; and the jobs whose accounts no one but the silos keeps.

    Raises PrivacyError for a population that nobody has charged or limited.
    """
    names = populations(connection)
    if population and population not in names:
        known = ", ".join(names) or "none yet"
        raise PrivacyError(f"the ledger knows no population {population!r}; known are {known}")
    jobs, limit = private_jobs(connection), limits(connection)
    chosen = [
        Books(
            name,
            totals(connection, name),
            {job: jobs[job] for job in jobs_of(connection, name)},
            limit.get(name),
        )
        for name in names
        if population in ("", name)
    ]
    charged = {job for name in names for job in jobs_of(connection, name)}
    return chosen, [
        job for job, privacy in jobs.items() if isinstance(privacy, ExampleLevel) and job not in charged
    ]


def accounts_at(kept: Sequence[Books], delta: float) -> list[PopulationAccount]:
    """Every account of these books; belongs in a thread. PrivacyError for a δ outside (0, 1)."""
    if delta:
        check_delta(delta, None)
    return [account for each in kept for account in each.accounts(delta)]


def job_privacy(
    row: JobRow,
    job: JobConfig,
    dimension: int,
    plan: Plan,
    population: str,
    known: Sequence[Total],
    limit: Limit | None,
) -> JobPromise:
    """What a job promises against whom, and spends: by the charges that its ledger takes, to its last round.

    `job` has its noise settled, as the plan has it. Belongs in a thread.
    """
    privacy = plan.privacy
    told = JobPromise(
        job=row.id,
        level=privacy.level,
        hides=hidden(job),
        people=people(privacy),
        settled_job=job.to_json(),
        dimension=dimension,
        protections=protection(privacy),
        population=population,
        silos=int(row.snapshot["population"]),
        rounds_done=row.rounds_done,
        rounds=row.rounds,
        population_budget=None if limit is None else limit.budget.epsilon,
    )
    if isinstance(privacy, NoPrivacy):
        return told
    told = replace(told, delta=privacy.delta, budget=privacy.epsilon)
    if isinstance(privacy, ExampleLevel) and not plan.silos_pay:
        return replace(told, statement=silo_statement(privacy))
    measure = (privacy.delta, privacy.accountant)
    all_of_it = [
        charge for each in range(1, row.rounds + 1) if (charge := _charge_of(plan, each)) is not None
    ]
    left = [] if row.status in FINAL else all_of_it[row.rounds_done :]
    paid = [total for total in known if total.released]
    now = worst_charges(privacy, paid)
    return replace(
        told,
        epsilon=compose(now, *measure),
        forecast=compose([*now, *left], *measure),
        own_forecast=compose(all_of_it, *measure),
        statement=statement(privacy, worst(paid, population, *measure, (row.id,)), plan.sampling),
    )


def _charge_of(plan: Plan, round: int) -> Charge | None:
    return plan.charge_of(round) or plan.silo_charge(round)
