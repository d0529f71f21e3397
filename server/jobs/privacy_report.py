"""What operators are shown of the ledger: each account with its ε, its limit, and the guarantee in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.engine import Connection

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy, Private
from roundtable.engine import Plan
from roundtable.privacy import Charge, account_statement, check_delta, compose, statement
from roundtable.privacy.protection import hidden, protection
from roundtable.proto import operator_pb2
from roundtable.server.jobs.privacy_budget import accounts, silo_statement, spent_of, worst, worst_charges
from roundtable.server.store import FINAL, JobRow, LedgerRow
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

    def messages(self, wanted: float) -> list[operator_pb2.PrivacyAccount]:
        """The shared account, and that of each silo which bears more."""
        delta = self.delta(wanted)
        accountant = self.limit.budget.accountant if self.limit is not None else "pld"
        paid = [total for total in self.known if total.released]
        reserved = accounts(self.known)
        messages = []
        for silo, charges in accounts(paid).items():
            spent = spent_of(paid, silo, self.population, delta, accountant, tuple(self.jobs))
            levels = [privacy.level for privacy in self.jobs.values()]
            messages.append(
                operator_pb2.PrivacyAccount(
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
        return messages


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
    return chosen, [job for job, privacy in jobs.items() if isinstance(privacy, ExampleLevel)]


def reply(kept: Sequence[Books], delta: float, kept_by_silos: Sequence[str]) -> operator_pb2.PrivacyReply:
    """All of it as one message; belongs in a thread. PrivacyError for a δ outside (0, 1)."""
    if delta:
        check_delta(delta, None)
    return operator_pb2.PrivacyReply(
        accounts=[message for each in kept for message in each.messages(delta)],
        budgets=[limit_to(each.limit) for each in kept if each.limit is not None],
        kept_by_silos=kept_by_silos,
    )


def job_privacy(
    row: JobRow, plan: Plan, population: str, known: Sequence[Total], limit: Limit | None
) -> operator_pb2.JobPrivacy:
    """What a job promises against whom, and spends: by the charges that its ledger takes, to its last round.

    Belongs in a thread.
    """
    privacy = plan.privacy
    told = operator_pb2.JobPrivacy(
        job=row.id,
        level=privacy.level,
        hides=hidden(privacy),
        protections=[
            operator_pb2.Protection(party=each.party, holds=each.holds, assumption=each.assumption)
            for each in protection(privacy)
        ],
        population=population,
        silos=int(row.snapshot["population"]),
        rounds_done=row.rounds_done,
        rounds=row.rounds,
    )
    if limit is not None:
        told.population_budget = limit.budget.epsilon
    if isinstance(privacy, NoPrivacy):
        return told
    told.delta = privacy.delta
    if privacy.epsilon is not None:
        told.budget = privacy.epsilon
    if isinstance(privacy, ExampleLevel):
        told.statement = silo_statement(privacy)
        return told
    measure = (privacy.delta, privacy.accountant)
    all_of_it = [
        charge for each in range(1, row.rounds + 1) if (charge := _charge_of(plan, each)) is not None
    ]
    left = [] if row.status in FINAL else all_of_it[row.rounds_done :]
    paid = [total for total in known if total.released]
    now = worst_charges(privacy, paid)
    told.epsilon = compose(now, *measure)
    told.forecast = compose([*now, *left], *measure)
    told.own_forecast = compose(all_of_it, *measure)
    told.statement = statement(privacy, worst(paid, population, *measure, (row.id,)), plan.sampling)
    return told


def _charge_of(plan: Plan, round: int) -> Charge | None:
    return plan.charge_of(round) or plan.silo_charge


def limit_to(limit: Limit) -> operator_pb2.PrivacyBudget:
    """A limit as a message."""
    budget = limit.budget
    return operator_pb2.PrivacyBudget(
        population=budget.population,
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.accountant,
        author=limit.author,
        time=limit.time,
    )


def charge_to(row: LedgerRow) -> operator_pb2.PrivacyCharge:
    """A row of the ledger as a message."""
    # Written again, so that every charge has the same fields, whichever version wrote it.
    text = json.dumps(json.loads(row.charge), sort_keys=True)
    return operator_pb2.PrivacyCharge(
        population=row.population,
        silo=row.silo,
        job=row.job,
        round=row.round,
        attempt=row.attempt,
        charge=text,
        released=row.released,
        time=row.time,
    )
