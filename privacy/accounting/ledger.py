"""The arithmetic of the ledger: what a population has spent, over every job, and what comes next.

Pure functions over entries. The coordinator (and each silo, for its own records) stores the entries;
it writes one in the transaction that publishes a model, so that nothing is visible unpaid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roundtable.core.errors import BudgetExceeded, PrivacyError
from roundtable.core.privacy_table import ACCOUNTANTS
from roundtable.privacy.accounting.accountants import compose, relation_of
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.accounting.delta import check_delta


@dataclass(frozen=True)
class Entry:
    """One attempt of one round. `silo` is empty where the whole population shares the charge.

    `released` is False while a round is in flight: the entry then only reserves. When an attempt
    fails, its entry is deleted if nothing left the coordinator's hands, and set to released if
    anything did.
    """

    population: str
    silo: str
    job: str
    round: int
    attempt: int
    charge: Charge
    released: bool


@dataclass(frozen=True)
class Budget:
    """The most that may ever be spent on one population."""

    population: str
    epsilon: float
    delta: float
    accountant: str = "pld"
    size: int | None = None

    def __post_init__(self) -> None:
        if not self.epsilon > 0.0:
            raise PrivacyError(
                f"the budget of {self.population!r} is epsilon = {self.epsilon}: it must be above 0"
            )
        if self.accountant not in ACCOUNTANTS:
            raise PrivacyError(
                f"the budget of {self.population!r} names the unknown accountant {self.accountant!r}"
            )
        check_delta(self.delta, self.size)


@dataclass(frozen=True)
class Spent:
    """What a population has spent: ε at δ under `relation`, over so many releases of these jobs."""

    population: str
    epsilon: float
    delta: float
    relation: str
    releases: int
    jobs: tuple[str, ...]


def spent(
    entries: Iterable[Entry], population: str, delta: float, accountant: str = "pld", silo: str | None = None
) -> Spent:
    """What was released about `population`, composed over all its jobs, rounds and attempts.

    With `silo`, only what concerns that silo: its own entries and the shared ones.
    Raises `PrivacyError` for two different entries of the same attempt.
    """
    return _sum([e for e in _of(entries, population, silo) if e.released], population, delta, accountant)


def reserved(entries: Iterable[Entry], budget: Budget, silo: str | None = None) -> Spent:
    """What was released together with what rounds in flight may still release."""
    return _sum(_of(entries, budget.population, silo), budget.population, budget.delta, budget.accountant)


def check(budget: Budget, entries: Iterable[Entry], next_charge: Charge, silo: str | None = None) -> float:
    """The ε after one more `next_charge`, entries in flight counted as spent. Call it before a round starts.

    Raises `BudgetExceeded` where that would pass the budget.
    """
    return hold(budget, [e.charge for e in _of(entries, budget.population, silo)], next_charge, silo)


def hold(budget: Budget, before: Sequence[Charge], next_charge: Charge, silo: str | None = None) -> float:
    """`check` over charges that are all the budget's: what is spent, or may still be, `before` the next."""
    after = compose([*before, next_charge], budget.delta, budget.accountant)
    if after > budget.epsilon:
        now = compose(before, budget.delta, budget.accountant)
        whose = f"{budget.population!r}" + (f", silo {silo!r}" if silo else "")
        raise BudgetExceeded(
            f"the next round would bring the privacy spent on {whose} from epsilon = {now:.4g} to "
            f"{after:.4g} at "
            f"delta = {budget.delta:g}, above its budget of {budget.epsilon:g}; the job stops here. Raise "
            "the budget "
            "if its owner agrees, or start the job with more noise"
        )
    return after


def _of(entries: Iterable[Entry], population: str, silo: str | None) -> list[Entry]:
    chosen: dict[tuple[str, str, int, int], Entry] = {}
    for entry in entries:
        if entry.population != population or (silo is not None and entry.silo not in ("", silo)):
            continue
        key = (entry.silo, entry.job, entry.round, entry.attempt)
        if chosen.setdefault(key, entry) != entry:
            raise PrivacyError(
                f"the ledger of {population!r} holds two different entries for job {entry.job!r}, round "
                f"{entry.round}, attempt {entry.attempt}: an entry is written once and never changed"
            )
    return list(chosen.values())


def _sum(entries: Sequence[Entry], population: str, delta: float, accountant: str) -> Spent:
    charges = [entry.charge for entry in entries]
    epsilon = compose(charges, delta, accountant)
    jobs = tuple(sorted({entry.job for entry in entries}))
    return Spent(population, epsilon, delta, relation_of(charges), len(entries), jobs)
