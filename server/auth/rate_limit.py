"""Who asks too often: a bucket of calls for each caller, and a lockout after wrong secrets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from roundtable.core.errors import IdentityError

_REMEMBERED = 10_000


class WrongSecret(IdentityError):
    """A token or an invitation that does not hold; too many of them lock an address out."""


@dataclass
class _Bucket:
    level: float
    seen: float


class RateLimit:
    """`burst` calls at once and `rate` a second after that, for each key. The oldest keys are forgotten."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def allows(self, key: str) -> bool:
        """Whether one more call fits; if so, it is counted."""
        now = self._clock()
        bucket = self._buckets.pop(key, None) or _Bucket(self._burst, now)
        bucket.level = min(self._burst, bucket.level + (now - bucket.seen) * self._rate)
        bucket.seen = now
        self._buckets[key] = bucket
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        if bucket.level < 1:
            return False
        bucket.level -= 1
        return True


@dataclass
class _WrongTries:
    failures: int = 0
    until: float = 0.0
    last: float = 0.0


class Lockout:
    """After `allowed` wrong secrets from one address it waits, twice as long after each further one.

    The address is locked out, not the name: otherwise anybody could lock out anybody.
    """

    def __init__(
        self, clock: Callable[[], float], allowed: int = 5, first: float = 30.0, longest: float = 3600.0
    ) -> None:
        self._clock, self._allowed, self._first, self._longest = clock, allowed, first, longest
        self._records: OrderedDict[str, _WrongTries] = OrderedDict()

    def seconds(self, address: str) -> float:
        """How long this address still has to wait; 0 if it may try."""
        record = self._records.get(address)
        return max(0.0, record.until - self._clock()) if record else 0.0

    def wrong(self, address: str) -> None:
        """A wrong secret came from there."""
        now = self._clock()
        record = self._records.pop(address, None) or _WrongTries()
        if now - record.last > self._longest:
            record = _WrongTries()
        record.failures, record.last = record.failures + 1, now
        if record.failures >= self._allowed:
            doublings = min(record.failures - self._allowed, 20)
            record.until = now + min(self._longest, self._first * 2**doublings)
        self._records[address] = record
        if len(self._records) > _REMEMBERED:
            self._records.popitem(last=False)

    def right(self, address: str) -> None:
        """A right one came: the count begins anew."""
        self._records.pop(address, None)
