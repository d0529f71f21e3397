"""A silo's own account of what its data has spent, kept as JSON at the silo.

It outlives rounds, jobs and restarts: a fresh accountant for every round would forget what was spent.
Write the JSON durably before the round's update leaves the silo.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.accounting.ledger import Budget, Entry, Spent, check, spent


@dataclass(frozen=True)
class SiloAccount:
    """The budget of one silo's data set and every charge made to it."""

    budget: Budget
    entries: tuple[Entry, ...] = ()

    def check(self, charge: Charge) -> float:
        """The ε after one more `charge`. Raises `BudgetExceeded` where the budget does not hold it."""
        return check(self.budget, self.entries, charge)

    def charged(self, job: str, round: int, attempt: int, charge: Charge) -> SiloAccount:
        """The account with a round in it. An attempt that is already there is not charged again.

        Raises `BudgetExceeded` as `check` does, `PrivacyError` for an attempt that has another charge.
        """
        entry = Entry(self.budget.population, "", job, round, attempt, charge, released=True)
        for known in self.entries:
            if (known.job, known.round, known.attempt) == (job, round, attempt):
                if known != entry:
                    raise PrivacyError(
                        f"job {job!r}, round {round}, attempt {attempt} is already in this silo's account "
                        "with "
                        "another charge; a retry with other settings is a new attempt"
                    )
                return self
        self.check(charge)
        return replace(self, entries=(*self.entries, entry))

    def spent(self) -> Spent:
        """What the silo's data has spent so far."""
        return spent(self.entries, self.budget.population, self.budget.delta, self.budget.accountant)

    def to_json(self) -> str:
        """The account as text."""
        entries = [
            {"job": e.job, "round": e.round, "attempt": e.attempt, "charge": json.loads(e.charge.to_json())}
            for e in self.entries
        ]
        return json.dumps({"version": 1, "budget": asdict(self.budget), "entries": entries}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> SiloAccount:
        """The inverse of `to_json`. Raises `PrivacyError` for all else: it never starts afresh on its own."""
        try:
            data = json.loads(text)
            if data["version"] != 1:
                raise PrivacyError(f"this silo's privacy account has version {data['version']}, not 1")
            budget = Budget(**data["budget"])
            return cls(budget, tuple(_entry(budget.population, each) for each in data["entries"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PrivacyError(
                f"this silo's privacy account cannot be read ({error}); restore it from a backup: without "
                "it what "
                "was spent is unknown, and no round may start"
            ) from error


def _entry(population: str, data: Mapping[str, Any]) -> Entry:
    charge = Charge.from_json(json.dumps(data["charge"]))
    return Entry(
        population, "", str(data["job"]), int(data["round"]), int(data["attempt"]), charge, released=True
    )
