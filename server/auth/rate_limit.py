"""Who asks too often: a bucket of calls for each caller, and lockouts after wrong secrets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from roundtable.core.errors import IdentityError

_REMEMBERED = 10_000


class WrongSecret(IdentityError):
    """A token or an invitation that does not hold; too many of them lock it out for a while."""


@dataclass
class _Bucket:
    level: float
    seen: float


class RateLimit:
    """`burst` at once and `rate` a second after that, for each key. The oldest keys are forgotten."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def allows(self, key: Hashable) -> bool:
        """Counts one more call if the limit allows it; returns whether it does."""
        return not self.take(key)

    def take(self, key: Hashable, amount: float = 1.0) -> float:
        """Takes so much out of the bucket, if it is there; otherwise the seconds until it will be.

        What is more than a bucket holds is let through once the bucket is full, and empties it.
        """
        bucket, wanted = self._filled(key), min(amount, self._burst)
        if bucket.level < wanted:
            return (wanted - bucket.level) / self._rate
        bucket.level -= wanted
        return 0.0

    def give_back(self, key: Hashable, amount: float) -> None:
        """Puts so much back into the bucket, or what it still holds."""
        bucket = self._filled(key)
        bucket.level = min(self._burst, bucket.level + amount)

    def _filled(self, key: Hashable) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.pop(key, None) or _Bucket(self._burst, now)
        bucket.level = min(self._burst, bucket.level + (now - bucket.seen) * self._rate)
        bucket.seen = now
        self._buckets[key] = bucket
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        return bucket


@dataclass
class _WrongTries:
    failures: int = 0
    until: float = 0.0
    last: float = 0.0


class Lockout:
    """After `allowed` wrong secrets for one key it waits, twice as long after each further one."""

    def __init__(self, clock: Callable[[], float], allowed: int, first: float, longest: float) -> None:
        self._clock = clock
        self._allowed = allowed
        self._first = first
        self._longest = longest
        self._records: OrderedDict[Hashable, _WrongTries] = OrderedDict()

    def seconds(self, key: Hashable) -> float:
        """How long this key still has to wait; 0 if it may try."""
        record = self._records.get(key)
        return max(0.0, record.until - self._clock()) if record else 0.0

    def wrong(self, key: Hashable) -> None:
        """Counts a wrong secret against this key."""
        now = self._clock()
        record = self._records.pop(key, None) or _WrongTries()
        if now - record.last > self._longest:
            record = _WrongTries()
        record.failures, record.last = record.failures + 1, now
        if record.failures >= self._allowed:
            doublings = min(record.failures - self._allowed, 20)
            record.until = now + min(self._longest, self._first * 2**doublings)
        self._records[key] = record
        if len(self._records) > _REMEMBERED:
            self._records.popitem(last=False)

    def right(self, key: Hashable) -> None:
        """Resets the count of an address that has shown a right secret."""
        self._records.pop(key, None)


class Lockouts:
    """One for a credential at an address, after five wrong secrets; a short one for an address, after 100.

    The address is part of the first key, otherwise anybody could lock out anybody; and the second is gentle
    because a whole organisation may stand behind one address.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._credentials = Lockout(clock, allowed=5, first=30.0, longest=3600.0)
        self._addresses = Lockout(clock, allowed=100, first=1.0, longest=60.0)

    def seconds(self, address: str, credential: str) -> float:
        """How long this credential has to wait at this address; 0 if it may be tried."""
        return max(self._credentials.seconds((address, credential)), self._addresses.seconds(address))

    def wrong(self, address: str, credential: str) -> None:
        """A wrong secret came from there for this credential."""
        self._credentials.wrong((address, credential))
        self._addresses.wrong(address)

    def right(self, address: str, credential: str) -> None:
        """A right one came: the credential's count begins anew, the address's goes on."""
        self._credentials.right((address, credential))
