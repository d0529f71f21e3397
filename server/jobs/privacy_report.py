"""What operators are shown of the ledger: each account with its ε, its limit, and the guarantee in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.engine import Connection

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel, Private
from roundtable.privacy import account_statement, check_delta, compose
from roundtable.proto import operator_pb2
from roundtable.server.jobs.privacy_budget import accounts, spent_of
from roundtable.server.store import LedgerRow
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
        found = []
        for silo, charges in accounts(paid).items():
            spent = spent_of(paid, silo, self.population, delta, accountant, tuple(self.jobs))
            levels = [privacy.level for privacy in self.jobs.values()]
            found.append(
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
        return found


def books(connection: Connection, population: str) -> tuple[list[Books], list[str]]:
    """Of one population, or of all; and the jobs whose accounts no one but the silos keeps.

    Raises PrivacyError for a population that nobody has charged or limited.
    """
    names = populations(connection)
    if population and population not in names:
        known = ", ".join(names) or "none yet"
        raise PrivacyError(f"the ledger knows no population {population!r}; known are {known}")
    jobs, limit = private_jobs(connection), limits(connection)
    found = [
        Books(
            name,
            totals(connection, name),
            {job: jobs[job] for job in jobs_of(connection, name)},
            limit.get(name),
        )
        for name in names
        if population in ("", name)
    ]
    return found, [job for job, privacy in jobs.items() if isinstance(privacy, ExampleLevel)]


def reply(found: Sequence[Books], delta: float, kept_by_silos: Sequence[str]) -> operator_pb2.PrivacyReply:
    """All of it as one message; belongs in a thread. PrivacyError for a δ outside (0, 1)."""
    if delta:
        check_delta(delta, None)
    return operator_pb2.PrivacyReply(
        accounts=[message for each in found for message in each.messages(delta)],
        budgets=[limit_to(each.limit) for each in found if each.limit is not None],
        kept_by_silos=kept_by_silos,
    )


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
