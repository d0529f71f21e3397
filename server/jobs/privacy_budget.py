"""The privacy ledger: what a job may spend is reserved before any silo is asked for anything.

An account belongs to a population: the silos' data under one name, over all jobs that use it. What every
silo bears alike is charged once; where silos add their own noise, each silo that answered is charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy, Private
from roundtable.engine import Plan
from roundtable.engine import messages as m
from roundtable.privacy import (
    Budget,
    Charge,
    Spent,
    compose,
    hold,
    merged,
    relation_of,
    statement,
)
from roundtable.privacy.statement import DRAWN_SILOS
from roundtable.server.store import Database, LedgerRow
from roundtable.server.store.ledger import (
    EVERY_SILO,
    Total,
    add,
    budget_of,
    is_released,
    jobs_of,
    release,
    reserve,
    totals,
)


@dataclass(frozen=True)
class Guarantee:
    """What a published model promises, in words and in figures; no figures where silos keep the accounts."""

    statement: str
    figures: Mapping[str, float]


class Account:
    """What one job charges to its population: nothing where silos keep the only accounts.

    `turn` is held while anything is reserved, by all jobs: two of one population cannot both take what
    is left of its budget.
    """

    def __init__(
        self,
        job: str,
        config: JobConfig,
        plan: Plan,
        population: str,
        database: Database,
        clock: Callable[[], float],
        turn: asyncio.Lock,
    ) -> None:
        if isinstance(config.privacy, NoPrivacy):
            raise PrivacyError("a job without privacy charges no account")
        self._job = job
        self._plan = plan
        self._privacy = config.privacy
        self._database = database
        self._clock = clock
        self._turn = turn
        self.population = population

    async def reserve(self, step: m.Step) -> None:
        """Writes the reservation of an attempt; BudgetExceeded where a budget does not hold it."""
        charge = self._plan.charge_of(step.round) or self._plan.silo_charge(step.round)
        if charge is None:
            return
        async with self._turn:
            # What this job has reserved for an earlier attempt and not released is replaced.
            known = await self._database.read(lambda c: totals(c, self.population, instead_of=self._job))
            limit = await self._database.read(lambda c: budget_of(c, self.population))
            budgets = [*budgets_of(self._privacy, self.population), *([limit] if limit else [])]
            await asyncio.to_thread(check_all, budgets, known, charge)
            row = self._row(EVERY_SILO if self._plan.silos_pay else "", step, charge, released=False)
            await self._database.write(lambda connection: reserve(connection, row))

    async def release(self, step: m.Step) -> None:
        """Charges an attempt for good, before anything of it is seen; what is seen later is paid for.

        PrivacyError where its reservation was given back meanwhile: then nothing of it may be seen.
        """
        if self._plan.charge_of(step.round) is None:
            return
        at = (self._job, step.round, step.attempt)
        if not await self._database.write(lambda connection: release(connection, *at)):
            raise PrivacyError(
                f"nothing is reserved in the privacy ledger for round {step.round}, attempt {step.attempt}: "
                "the job has ended, or a newer attempt has begun"
            )

    async def receive(self, client: str, step: m.Step, digest: str) -> None:
        """Charges a silo whose own noise is all that hides its update, before a byte of that is here.

        Once for each digest: trained again, an update has other noise.
        """
        charge = self._plan.silo_charge(step.round)
        if charge is not None:
            row = replace(self._row(client, step, charge, released=True), digest=digest)
            await self._database.write(lambda connection: add(connection, row))

    async def guarantee(self, step: m.Step) -> Guarantee:
        """The guarantee of the model that this step publishes; its own charge is counted."""
        if isinstance(self._privacy, ExampleLevel) and not self._plan.silos_pay:
            return Guarantee(silo_statement(self._privacy), {})
        known = await self._database.read(lambda connection: totals(connection, self.population))
        jobs = await self._database.read(lambda connection: jobs_of(connection, self.population))
        paid = [total for total in known if total.released]
        charge = self._plan.charge_of(step.round)
        at = (self._job, step.round, step.attempt)
        if charge is not None and not await self._database.read(lambda c: is_released(c, *at)):
            paid.append(Total("", charge.to_json(), True, 1))
        return await asyncio.to_thread(self._guarantee, paid, tuple(sorted({*jobs, self._job})))

    def _guarantee(self, paid: Sequence[Total], jobs: tuple[str, ...]) -> Guarantee:
        spent = worst(paid, self.population, self._privacy.delta, self._privacy.accountant, jobs)
        words = statement(self._privacy, spent, self._plan.sampling)
        return Guarantee(words, {"epsilon": spent.epsilon, "delta": spent.delta})

    def _row(self, silo: str, step: m.Step, charge: Charge, released: bool) -> LedgerRow:
        at = (self._job, step.round, step.attempt)
        return LedgerRow(self.population, silo, *at, charge.to_json(), released, self._clock())


def budgets_of(privacy: NoPrivacy | Private, population: str) -> list[Budget]:
    """The budget that a job brings for its population's account: none or one.

    At level example it is of each silo's own account, or, where sums are released, of the job alone.
    """
    if isinstance(privacy, NoPrivacy | ExampleLevel) or privacy.epsilon is None:
        return []
    return [Budget(population, privacy.epsilon, privacy.delta, privacy.accountant, privacy.population)]


def accounts(known: Iterable[Total]) -> Mapping[str, tuple[Charge, ...]]:
    """What each silo bears, shared charges and its own; under "" what is shared, which every silo bears."""
    own: dict[str, list[Charge]] = {"": []}
    for total in known:
        silo = "" if total.silo == EVERY_SILO else total.silo
        own.setdefault(silo, []).append(_charge(total.charge).repeated_by(total.count))
    shared = own.pop("")
    charged = {"": merged(shared)}
    return charged | {silo: merged([*shared, *charges]) for silo, charges in sorted(own.items())}


def check_all(budgets: Iterable[Budget], known: Iterable[Total], charge: Charge) -> None:
    """BudgetExceeded where one of the budgets does not hold one more charge to every silo."""
    # Silos that have spent alike are one question.
    distinct = {charges: silo for silo, charges in accounts(known).items()}
    for budget in budgets:
        for charges, silo in distinct.items():
            hold(budget, charges, charge, silo or None)


def worst_charges(privacy: NoPrivacy | Private, known: Iterable[Total]) -> tuple[Charge, ...]:
    """What the silo bears that has spent most by the job's own measure."""
    if isinstance(privacy, NoPrivacy):
        return ()
    measure = (privacy.delta, privacy.accountant)
    return max(accounts(known).values(), key=lambda charges: compose(charges, *measure))


def worst(
    known: Sequence[Total], population: str, delta: float, accountant: str, jobs: tuple[str, ...]
) -> Spent:
    """The account of the silo that has spent most."""
    charged = accounts(known)
    silo = max(charged, key=lambda silo: (compose(charged[silo], delta, accountant), silo))
    return spent_of(known, silo, population, delta, accountant, jobs)


def spent_of(
    known: Sequence[Total], silo: str, population: str, delta: float, accountant: str, jobs: tuple[str, ...]
) -> Spent:
    """The account of one silo, or under "" of what all silos share."""
    charges = accounts(known)[silo]
    releases = sum(total.count for total in known if total.silo in ("", EVERY_SILO, silo))
    return Spent(population, compose(charges, delta, accountant), delta, relation_of(charges), releases, jobs)


@lru_cache(maxsize=4096)
def _charge(text: str) -> Charge:
    """Rounds of one job cost the same: their text is read once."""
    return Charge.from_json(text)


def silo_statement(privacy: ExampleLevel) -> str:
    """What is known of a guarantee whose account each silo keeps for itself."""
    limit = (
        f"at most epsilon = {privacy.epsilon:g} at delta = {privacy.delta:g} for this job"
        if privacy.epsilon is not None
        else f"what a noise multiplier of {privacy.noise_multiplier:g} costs its number of records"
    )
    return (
        "Differential privacy for any one record of a participating organisation (silo). Each silo adds the "
        f"noise to its own training before anything leaves it, and spends {limit}; its own account, over all "
        "jobs, is kept at the silo, which refuses a round that would pass its budget. "
        f"{DRAWN_SILOS} No other party is trusted. What it does not cover: that a silo took part, how many "
        "records it has (its sampling rate, steps and noise follow from that), facts about the whole "
        "population that the model is meant to learn, and other uses of the same records."
    )
