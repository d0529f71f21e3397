"""What is left of the budgets of epsilon that the silo has set itself, for its own page and its doctor.

Nobody else is told: what is left tells of jobs of other coordinators, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.known_jobs import KnownJobs
from roundtable.client.policy.privacy_rules import stated_epsilon
from roundtable.client.training.silo_account import kept_accounts
from roundtable.core.config import job_from_json
from roundtable.privacy import Budget

UNITS = ("example", "client")
STATED = "stated"
_LITTLE = 0.1


@dataclass(frozen=True)
class OwnBudget:
    """One budget: of an `account` of the silo's own, by its unit, or of what jobs state. Infinite where the
    policy sets none (`key` is what would)."""

    account: str
    key: str
    epsilon: float
    spent: float

    @property
    def left(self) -> float:
        return max(0.0, self.epsilon - self.spent) if math.isfinite(self.epsilon) else math.inf

    @property
    def is_nearly_spent(self) -> bool:
        return self.left < _LITTLE * self.epsilon


class OwnBudgets:
    """Adds up again only what has changed since: composition takes its time."""

    def __init__(self, config: AgentConfig) -> None:
        self._policy = config.policy
        self._accounts = config.state / "privacy"
        self._jobs = KnownJobs(config.state)
        self._known = config.state / "jobs" / "known"
        self._made: dict[str, tuple[object, float]] = {}

    def now(self) -> list[OwnBudget]:
        """All budgets. Blocks; PrivacyError or ResourceError where the silo's own files cannot be read."""
        own = [self._budget(unit, "epsilon", self._policy.epsilon) for unit in UNITS]
        return [*own, self._budget(STATED, "stated_epsilon", self._policy.stated_epsilon)]

    def _budget(self, account: str, key: str, most: float | None) -> OwnBudget:
        if most is None:
            return OwnBudget(account, key, math.inf, 0.0)
        if account == STATED:
            return OwnBudget(account, key, most, self._once(account, self._jobs_stamp(), self._promised))
        stamp = _stamp([self._accounts / f"{account}.json"])
        return OwnBudget(account, key, most, self._once(account, stamp, self._spent))

    def _once(self, name: str, stamp: object, count: Callable[[str], float]) -> float:
        if name not in self._made or self._made[name][0] != stamp:
            self._made[name] = stamp, count(name)
        return self._made[name][1]

    def _jobs_stamp(self) -> object:
        return _stamp(sorted(self._known.glob("*.json")) if self._known.is_dir() else [])

    def _spent(self, unit: str) -> float:
        account, policy = kept_accounts(self._accounts).get(unit), self._policy
        if account is None or policy.epsilon is None:
            return 0.0
        kept = account.budget
        budget = Budget(kept.population, policy.epsilon, policy.delta or kept.delta, kept.accountant)
        return replace(account, budget=budget).spent().epsilon

    def _promised(self, _: str) -> float:
        return math.fsum(stated_epsilon(job_from_json(job.config)) for job in self._jobs.taken_part())


def _stamp(files: Iterable[Path]) -> object:
    """Changes with the files."""
    found = []
    for file in files:
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        found.append((file.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)
