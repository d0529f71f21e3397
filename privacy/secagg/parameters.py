"""The numbers that a secure aggregation runs with, chosen from what is assumed and checked by every silo.

Small cohorts use the full graph of Bonawitz et al. 2017 (every silo holds a share of every silo's
secrets, t of n), large ones the k-regular graph of Bell et al. 2020 (t of the k neighbours), with k
and t from the paper's hypergeometric conditions. Nothing here is taken on trust from the
coordinator: a silo recomputes the failure probability of what it is offered.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from roundtable.core.errors import PrivacyError, ProtocolError
from roundtable.privacy.secagg import tails
from roundtable.privacy.secagg.masks import RING_BITS
from roundtable.privacy.secagg.shamir import POINTS

FULL_GRAPH_UP_TO = 50
"""Cohorts up to this size use the full graph: it is the stronger one, and cheap enough."""
MINIMUM_COHORT = 3
_ENCODING = struct.Struct("<6HB?I3d")


@dataclass(frozen=True)
class SecAggParameters:
    """What one attempt runs with.

    `n` silos; `k` neighbours of each (`n − 1` on the full graph); `t` shares reconstruct a secret;
    `consents` signatures over one survivor set are demanded before a silo reveals a share;
    `minimum_survivors` is the smallest survivor set that a silo accepts. `corruption` and `dropout`
    are the shares of the cohort that were assumed. The ring has 2^`ring_bits` elements; an update has
    at most the L2 norm `clip_norm` and an integer weight from 1 to `weight_bound`; `capacity` is the
    cohort size that the ring was filled for, and no smaller than `n`.
    """

    n: int
    k: int
    t: int
    consents: int
    minimum_survivors: int
    capacity: int
    ring_bits: int
    malicious: bool
    weight_bound: int
    clip_norm: float
    corruption: float
    dropout: float

    @property
    def full_graph(self) -> bool:
        return self.k == self.n - 1

    @property
    def corrupt(self) -> int:
        return tails.counted(self.corruption, self.n)

    @property
    def dropped(self) -> int:
        return tails.counted(self.dropout, self.n)

    def privacy_failure(self, corruption: float | None = None) -> float:
        """log2 of the chance that more than the sum over all honest survivors can be learnt.

        `corruption` is the share of corrupt silos to assume (the stated one by default). On the full
        graph this is certain or impossible; on the sparse one it is over the order of the silos.
        """
        corrupt = self.corrupt if corruption is None else tails.counted(corruption, self.n)
        if corrupt > self.n - 2:
            return 0.0
        if self.malicious and 2 * self.consents <= self.n + corrupt:
            return 0.0
        if self.full_graph:
            safe = 2 * self.t > self.n + corrupt if self.malicious else self.t > corrupt
            return -math.inf if safe else 0.0
        leak = tails.shares_leak(self.n, self.k, self.t, corrupt, self.malicious)
        if not self.malicious:
            return _log2_sum(leak, tails.disconnects(self.n, self.k, corrupt, self.dropped))
        lost = self.n - self.minimum_survivors
        cut = min(
            tails.falls_apart(self.n, self.k, corrupt, lost),
            tails.falls_apart_unmasked(self.n, self.k, self.t, corrupt),
        )
        return _log2_sum(leak, cut)

    def correctness_failure(self) -> float:
        """log2 of the chance that the stated dropout, at random, leaves a secret without t holders."""
        if self.full_graph:
            return -math.inf if self.n - self.dropped >= self.t else 0.0
        return tails.too_few_survive(self.n, self.k, self.t, self.dropped)

    def with_cohort(self, n: int) -> SecAggParameters:
        """The parameters for the `n <= capacity` silos that came; the ring stays as it is."""
        if n > self.capacity:
            raise PrivacyError(f"{n} silos came where the ring has room for {self.capacity}; invite fewer")
        chosen = choose_parameters(n, self.dropout, self.corruption, self.malicious)
        return replace(
            chosen,
            capacity=self.capacity,
            ring_bits=self.ring_bits,
            clip_norm=self.clip_norm,
            weight_bound=self.weight_bound,
        )

    def check_against(self, plan: SecAggParameters) -> None:
        """Refuse parameters offered by a coordinator that are weaker than this silo's own `plan`."""
        agreed = ("capacity", "ring_bits", "clip_norm", "weight_bound", "malicious")
        for name in agreed:
            if getattr(self, name) != getattr(plan, name):
                raise ProtocolError(
                    f"the coordinator offers {name} = {getattr(self, name)}, "
                    f"the job says {getattr(plan, name)}"
                )
        if not (MINIMUM_COHORT <= self.n <= self.capacity and 2 <= self.k < self.n and 0 < self.t <= self.n):
            raise ProtocolError(f"n = {self.n}, k = {self.k}, t = {self.t} are not the numbers of a graph")
        if not self.full_graph and (self.k % 2 or self.t > self.k):
            raise ProtocolError(f"a graph of degree {self.k} with threshold {self.t} cannot be built")
        failure = self.privacy_failure(plan.corruption)
        if failure > -tails.SECURITY_BITS + 0.01:
            raise ProtocolError(
                f"k = {self.k}, t = {self.t} among {self.n} silos protect against "
                f"{plan.corrupt} corrupt ones except with probability 2^{failure:.1f}; "
                f"2^-{tails.SECURITY_BITS} is demanded"
            )

    def summary(self) -> str:
        """One line for people: the graph, its threshold and both failure probabilities."""
        graph = "full graph" if self.full_graph else f"graph of degree {self.k}"
        kind = "malicious" if self.malicious else "semi-honest"
        return (
            f"{self.n} silos, {graph}, threshold {self.t}; against a {kind} coordinator with "
            f"{self.corrupt} corrupt silos privacy fails with probability {_power(self.privacy_failure())}; "
            f"with {self.dropped} dropouts the sum is lost with probability "
            f"{_power(self.correctness_failure())}"
        )

    def to_bytes(self) -> bytes:
        """A fixed-size encoding; it is part of what every key and signature is bound to."""
        return _ENCODING.pack(
            self.n,
            self.k,
            self.t,
            self.consents,
            self.minimum_survivors,
            self.capacity,
            self.ring_bits,
            self.malicious,
            self.weight_bound,
            self.clip_norm,
            self.corruption,
            self.dropout,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> SecAggParameters:
        """Read what `to_bytes` wrote; ProtocolError for anything that is not that."""
        if len(data) != _ENCODING.size:
            raise ProtocolError(f"parameters of {len(data)} bytes where {_ENCODING.size} were expected")
        parameters = cls(*_ENCODING.unpack(data))
        if parameters.to_bytes() != data:
            raise ProtocolError("parameters are not in their canonical encoding")
        try:
            _check_ranges(parameters)
        except PrivacyError as error:
            raise ProtocolError(f"the coordinator offers parameters that cannot be used: {error}") from error
        return parameters


PARAMETERS_BYTES = _ENCODING.size


def choose_parameters(
    cohort_size: int,
    dropout: float,
    corruption: float,
    malicious: bool = True,
    *,
    ring_bits: int = 32,
    clip_norm: float = 1.0,
    weight_bound: int = 1,
) -> SecAggParameters:
    """The graph, threshold and ring for a cohort.

    `dropout` and `corruption` are the shares of the cohort that may vanish and that may collude with
    the coordinator, who is `malicious` (lies at will) or merely curious. `summary()` of the answer
    states the failure probabilities. PrivacyError where fewer than 3 silos take part or no threshold
    can serve both assumptions.
    """
    n = cohort_size
    if n < MINIMUM_COHORT:
        raise PrivacyError(
            f"secure aggregation of {n} silos hides nothing; it needs at least {MINIMUM_COHORT}"
        )
    if n > POINTS:
        raise PrivacyError(f"a cohort of {n} silos is beyond the {POINTS} that can hold shares")
    if not (0 <= dropout < 1 and 0 <= corruption < 1):
        raise PrivacyError(f"dropout {dropout} and corruption {corruption} must be at least 0 and below 1")
    corrupt, dropped = tails.counted(corruption, n), tails.counted(dropout, n)
    majority = (n + corrupt) // 2 + 1
    degree = None
    if n > FULL_GRAPH_UP_TO:
        degree = tails.choose_degree(n, corrupt, dropped, malicious)
    if degree is None:
        k, t = n - 1, _full_threshold(n, corrupt, dropped, malicious)
        consents = survivors = max(t, majority if malicious else 0)
    else:
        k, t = degree
        consents = min(majority, n - dropped)
        unmaskable = tails.falls_apart_unmasked(n, k, t, corrupt) <= -(tails.SECURITY_BITS + 1)
        survivors = consents if unmaskable else n - dropped
        if malicious and consents < majority:
            raise _infeasible(n, corrupt, dropped, majority)
    parameters = SecAggParameters(
        n=n,
        k=k,
        t=t,
        consents=consents,
        minimum_survivors=survivors,
        capacity=n,
        ring_bits=ring_bits,
        malicious=malicious,
        weight_bound=weight_bound,
        clip_norm=clip_norm,
        corruption=corruption,
        dropout=dropout,
    )
    _check_ranges(parameters)
    return parameters


def _full_threshold(n: int, corrupt: int, dropped: int, malicious: bool) -> int:
    """⌊2n/3⌋ + 1 where both assumptions allow it, else the nearest threshold that they do."""
    lowest = (n + corrupt) // 2 + 1 if malicious else max(corrupt + 1, n // 2 + 1)
    if n - dropped < lowest:
        raise _infeasible(n, corrupt, dropped, lowest)
    return min(max(2 * n // 3 + 1, lowest), n - dropped)


def _infeasible(n: int, corrupt: int, dropped: int, needed: int) -> PrivacyError:
    return PrivacyError(
        f"no threshold serves {n} silos of which {corrupt} are corrupt and {dropped} drop out: {needed} "
        f"must answer and {n - dropped} will; assume less corruption or dropout"
    )


def _check_ranges(parameters: SecAggParameters) -> None:
    if parameters.ring_bits not in RING_BITS:
        raise PrivacyError(f"a ring of {parameters.ring_bits} bits is not supported; use one of {RING_BITS}")
    if not (math.isfinite(parameters.clip_norm) and parameters.clip_norm > 0):
        raise PrivacyError(f"a clip norm of {parameters.clip_norm} is not a positive number")
    if not 1 <= parameters.weight_bound < 1 << 32:
        raise PrivacyError(f"a weight bound of {parameters.weight_bound} is not a whole number from 1 up")
    for name in ("corruption", "dropout"):
        if not 0 <= getattr(parameters, name) < 1:
            raise PrivacyError(f"{name} {getattr(parameters, name)} must be at least 0 and below 1")


def _log2_sum(a: float, b: float) -> float:
    top = max(a, b)
    return top if top == -math.inf else top + math.log2(2 ** (a - top) + 2 ** (b - top))


def _power(log2: float) -> str:
    if log2 == -math.inf:
        return "0"
    return "1" if log2 >= 0 else f"2^{log2:.1f}"
