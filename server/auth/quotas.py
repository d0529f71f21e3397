"""What one caller may hold and use up, for every call in one place.

A caller is a role and a name; a stranger is the address that the call comes from. What is counted is work:
calls, calls that stand open, entries of the audit log, bytes, certificates. Whoever has used up a quota is
refused with what, how many and when again; nobody else is. Certificates are counted in the database, all
else in this process: a restart forgives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from pydantic import Field

from roundtable.core.errors import ResourceError
from roundtable.core.toml_tables import Seconds, Table
from roundtable.server.auth.rate_limit import RateLimit

Quota = Literal["rate", "calls", "changes", "certificates", "jobs", "stored", "unfinished"]
QUOTAS: tuple[Quota, ...] = get_args(Quota)

CALLS_A_SECOND, CALLS_AT_ONCE = 100.0, 1000.0
STRANGERS_A_SECOND, STRANGERS_AT_ONCE = 2.0, 20.0
FAILED_CHANGE = 3.0
"""What a change that failed costs besides: its entry in the audit log stays for ever, and told of nothing."""
DAY = 86400.0
_HOUR = 3600.0
_TOLD_A_SECOND = 1 / _HOUR


class QuotaTable(Table):
    """`[quotas]` of coordinator.toml: of each caller, known by role and name."""

    calls: int = Field(64, ge=4, description="calls and streams that one caller has open at once")
    changes: int = Field(
        200, ge=10, description="calls an hour that change something, each an entry of the audit log"
    )
    certificates: int = Field(10, ge=2, description="pairs a day that are issued for the same keys of a silo")
    jobs: int = Field(50, ge=1, description="of one submitter that are not over")
    stored: int = Field(1 << 40, ge=1, description="bytes a day of artifacts that one operator stores")
    unfinished: int = Field(4, ge=1, description="half stored artifacts that are kept of one operator")
    idle: Seconds = Field(
        120.0,
        ge=1,
        le=3600,
        description="for which a call may wait for its caller's next message, or to be read",
    )
    connections: int = Field(4096, ge=8, description="open at once at each address, of all callers together")


class QuotaExceeded(ResourceError):
    """A caller has used up one of its quotas; the message says which, and when there is more."""


class Quotas:
    """Counts what callers hold and use. `told` hears of each caller's first refusal of a kind in an hour."""

    def __init__(
        self, table: QuotaTable, clock: Callable[[], float], told: Callable[[str, Quota, str], None]
    ) -> None:
        self.table = table
        self.rate = RateLimit(CALLS_A_SECOND, CALLS_AT_ONCE, clock)
        self._strangers = RateLimit(STRANGERS_A_SECOND, STRANGERS_AT_ONCE, clock)
        self._changes = RateLimit(table.changes / _HOUR, table.changes + FAILED_CHANGE, clock)
        self._stored = RateLimit(table.stored / DAY, table.stored, clock)
        self._open: Counter[str] = Counter()
        self._told = told
        self._alerts = RateLimit(_TOLD_A_SECOND, 1.0, clock)
        self.refusals: Counter[Quota] = Counter()

    def arrive(self, who: str, cost: float, *, known: bool) -> None:
        """Counts a call of this cost. QuotaExceeded if the caller makes too many."""
        bucket = self.rate if known else self._strangers
        if wait := bucket.take(who, cost):
            raise self.exceeded(
                who, "rate", f"too many calls in a short time; wait {_shown(wait)}, then go on"
            )

    @contextmanager
    def open_call(self, who: str) -> Iterator[None]:
        """Counts a call while it lasts. QuotaExceeded if the caller has too many open."""
        if self._open[who] >= self.table.calls:
            raise self.exceeded(
                who,
                "calls",
                f"{who} has {self.table.calls} calls open, the most that one caller may have: end one",
            )
        self._open[who] += 1
        try:
            yield
        finally:
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]

    @contextmanager
    def change(self, who: str) -> Iterator[None]:
        """Counts a call that is noted in the audit log. QuotaExceeded if the caller makes too many.

        What a failure costs is taken beforehand: many at once fail no more often than one after the other.
        """
        if wait := self._changes.take(who, 1 + FAILED_CHANGE):
            raise self.exceeded(
                who,
                "changes",
                f"{who} has made as many changes as one caller may in an hour, {self.table.changes}, those "
                f"that failed counted {1 + FAILED_CHANGE:.0f} times; the next one may come in {_shown(wait)}",
            )

        yield
        self._changes.give_back(who, FAILED_CHANGE)

    def submit(self, who: str, living: int) -> None:
        """QuotaExceeded if a caller has so many jobs that are not over that it may have no more."""
        if living >= self.table.jobs:
            raise self.exceeded(
                who,
                "jobs",
                f"{who} has {living} jobs that are not over, the most of one submitter: end one first",
            )

    def store(self, who: str, count: int) -> None:
        """Counts bytes of an artifact as they come in. QuotaExceeded if the caller stores too many."""
        if wait := self._stored.take(who, count):
            raise self.exceeded(
                who,
                "stored",
                f"{who} has stored as many bytes as one operator may within a day, {self.table.stored}; what "
                f"has arrived is kept, go on in {_shown(wait)}",
            )

    def exceeded(self, who: str, quota: Quota, problem: str) -> QuotaExceeded:
        """The refusal, counted; to be raised. Names the setting where there is one."""
        self.refusals[quota] += 1
        if self._alerts.allows((who, quota)):
            self._told(who, quota, problem)
        return QuotaExceeded(
            problem if quota == "rate" else f"{problem} (the coordinator's [quotas] {quota})"
        )


def _shown(seconds: float) -> str:
    """A wait in words, never too short."""
    whole = int(seconds) + 1
    return f"{whole} s" if whole < 120 else f"{whole // 60 + 1} min"
