"""The numbers that a secure aggregation runs with, chosen from what is assumed and checked by every silo.

Small cohorts use the full graph of Bonawitz et al. 2017 (every silo holds a share of every silo's
secrets, t of n), large ones the k-regular graph of Bell et al. 2020 (t of the k neighbours), with k
and t from the paper's hypergeometric conditions. Nothing here is taken on trust from the
coordinator: a silo recomputes the failure probability of what it is offered.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields, replace

from roundtable.core.errors import PrivacyError, ProtocolError
from roundtable.privacy.secagg import tails
from roundtable.privacy.secagg.masks import RING_BITS
from roundtable.privacy.secagg.shamir import POINTS

FULL_GRAPH_UP_TO = 50
"""Cohorts up to this size use the full graph: it is the stronger one, and cheap enough."""
MINIMUM_COHORT = 3
_ENCODING = struct.Struct("<8HB?IdH")


@dataclass(frozen=True)
class SecAggParameters:
    """What one attempt runs with.

    `n` silos; `k` neighbours of each (`n − 1` on the full graph); `t` shares reconstruct a secret;
    `consents` signatures over one survivor set are demanded before a silo reveals a share;
    `minimum_survivors` is the smallest survivor set that a silo accepts. `corrupt` and `dropped` silos
    were assumed. The ring has 2^`ring_bits` elements; an update has at most the L2 norm `clip_norm` and
    an integer weight from 1 to `weight_bound`; `capacity` is the number of silos invited, for which the
    ring has room, and no smaller than `n`.

    With a `group_size` the cohort is split into groups of at least so many silos, each of which runs the
    protocol on its own; `n`, `k`, `t` and so on are those of a group of that size, and `with_cohort`
    gives those of a larger one.
    """

    n: int
    k: int
    t: int
    consents: int
    minimum_survivors: int
    capacity: int
    corrupt: int
    dropped: int
    ring_bits: int
    malicious: bool
    weight_bound: int
    clip_norm: float
    group_size: int = 0

    def __post_init__(self) -> None:
        if self.ring_bits not in RING_BITS:
            raise PrivacyError(f"a ring of {self.ring_bits} bits is not supported; use one of {RING_BITS}")
        if not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise PrivacyError(f"a clip norm of {self.clip_norm} is not a positive number")
        if not 1 <= self.weight_bound < 1 << 32:
            raise PrivacyError(f"a weight bound of {self.weight_bound} is not a whole number from 1 up")

    @property
    def full_graph(self) -> bool:
        return self.k == self.n - 1

    @property
    def least(self) -> int:
        """The smallest number of silos with which any phase may end."""
        return max(self.minimum_survivors, self.consents, self.t)

    def privacy_failure(self, corrupt: int | None = None) -> float:
        """log2 of the chance that more than the sum over all honest survivors can be learnt.

        `corrupt` silos are assumed, the stated number by default. On the full graph this is certain or
        impossible; on the sparse one it is over the order of the silos.
        """
        corrupt = self.corrupt if corrupt is None else corrupt
        if corrupt > self.n - 2:
            return 0.0
        if self.malicious and 2 * self.consents <= self.n + corrupt:
            return 0.0
        if self.full_graph:
            safe = 2 * self.t > self.n + corrupt if self.malicious else self.t > corrupt
            return -math.inf if safe else 0.0
        leak = tails.shares_leak(self.n, self.k, self.t, corrupt)
        if not self.malicious:
            return _log2_sum(leak, tails.disconnects(self.n, self.k, corrupt, self.dropped))
        lost = self.n - self.minimum_survivors
        return _log2_sum(leak, tails.falls_apart(self.n, self.k, self.t, corrupt, lost))

    def correctness_failure(self) -> float:
        """log2 of the chance that the stated dropout, at random, leaves a secret without t holders."""
        if self.full_graph:
            return -math.inf if self.n - self.dropped >= self.t else 0.0
        return tails.too_few_survive(self.n, self.k, self.t, self.dropped)

    def with_cohort(self, n: int) -> SecAggParameters:
        """The parameters for the `n <= capacity` silos that came; the ring stays as it is.

        All corrupt silos are taken to be among them, for it is the coordinator that says who came. As
        many dropouts are provided for as their share of those invited, or as many as are possible.
        """
        if n > self.capacity:
            raise PrivacyError(f"{n} silos came where the ring has room for {self.capacity}; invite fewer")
        for dropped in range(tails.counted(self.dropped / self.n, n), 0, -1):
            try:
                graph = _choose_graph(n, self.corrupt, dropped, self.malicious)
            except PrivacyError:
                continue
            return self._with_graph(n, dropped, graph)
        return self._with_graph(n, 0, _choose_graph(n, self.corrupt, 0, self.malicious))

    def of_group(self, n: int) -> SecAggParameters:
        """The parameters of a group of n silos, once the groups are drawn."""
        return replace(self.with_cohort(n), group_size=0)

    def _with_graph(self, n: int, dropped: int, graph: tuple[int, int, int, int]) -> SecAggParameters:
        k, t, consents, survivors = graph
        return replace(self, n=n, k=k, t=t, consents=consents, minimum_survivors=survivors, dropped=dropped)

    def check_against(self, plan: SecAggParameters) -> None:
        """Refuse parameters offered by a coordinator that are weaker than this silo's own `plan`."""
        if plan.group_size or self.group_size:
            if self != plan:
                raise ProtocolError(f"the coordinator offers {self}, and the job says {plan}")
            return
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
        failure = self.privacy_failure(plan.corrupt)
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
        who = f"groups of {self.n} silos" if self.group_size else f"{self.n} silos"
        return (
            f"{who}, {graph}, threshold {self.t}; against a {kind} coordinator with "
            f"{self.corrupt} corrupt silos privacy fails with probability {_power(self.privacy_failure())}; "
            f"with {self.dropped} dropouts the sum is lost with probability "
            f"{_power(self.correctness_failure())}"
        )

    def to_bytes(self) -> bytes:
        """A fixed-size encoding; it is part of what every key and signature is bound to."""
        return _ENCODING.pack(*(getattr(self, field.name) for field in fields(self)))

    @classmethod
    def from_bytes(cls, data: bytes) -> SecAggParameters:
        """Read what `to_bytes` wrote; ProtocolError for anything that is not that."""
        if len(data) != _ENCODING.size:
            raise ProtocolError(f"parameters of {len(data)} bytes where {_ENCODING.size} were expected")
        try:
            parameters = cls(*_ENCODING.unpack(data))
        except PrivacyError as error:
            raise ProtocolError(f"the coordinator offers parameters that cannot be used: {error}") from error
        if parameters.to_bytes() != data:
            raise ProtocolError("parameters are not in their canonical encoding")
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
    for name, share in (("dropout", dropout), ("corruption", corruption)):
        if not 0 <= share < 1:
            raise PrivacyError(f"a {name} of {share} is not a share from 0 to below 1")
    corrupt, dropped = tails.counted(corruption, cohort_size), tails.counted(dropout, cohort_size)
    k, t, consents, survivors = _choose_graph(cohort_size, corrupt, dropped, malicious)
    return SecAggParameters(
        n=cohort_size,
        k=k,
        t=t,
        consents=consents,
        minimum_survivors=survivors,
        capacity=cohort_size,
        corrupt=corrupt,
        dropped=dropped,
        ring_bits=ring_bits,
        malicious=malicious,
        weight_bound=weight_bound,
        clip_norm=clip_norm,
    )


def _choose_graph(n: int, corrupt: int, dropped: int, malicious: bool) -> tuple[int, int, int, int]:
    """k, t, the consents and the survivors to demand."""
    if not MINIMUM_COHORT <= n <= POINTS:
        raise PrivacyError(
            f"secure aggregation takes at least {MINIMUM_COHORT} silos, or it hides nothing, and at most "
            f"{POINTS}; there are {n}"
        )
    if corrupt > n - 2:
        raise PrivacyError(f"with {corrupt} of {n} silos corrupt the sum hides no honest one; invite more")
    majority = (n + corrupt) // 2 + 1 if malicious else 1
    degree = tails.choose_degree(n, corrupt, dropped, malicious) if n > FULL_GRAPH_UP_TO else None
    if degree is None:
        t = _full_threshold(n, corrupt, dropped, malicious)
        return n - 1, t, max(t, majority), max(t, majority)
    k, t = degree
    if n - dropped < majority:
        raise _infeasible(n, corrupt, dropped, majority)
    if not malicious:
        return k, t, majority, n - dropped
    return k, t, majority, n - tails.most_lost(n, k, t, corrupt, dropped, n - majority)


def _full_threshold(n: int, corrupt: int, dropped: int, malicious: bool) -> int:
    """⌊2n/3⌋ + 1 where both assumptions allow it, else the nearest threshold that they do."""
    lowest = (n + corrupt) // 2 + 1 if malicious else max(corrupt + 1, n // 2 + 1)
    # A sum of two tells each of them the other's vector, so even three silos must all survive.
    lowest = max(lowest, MINIMUM_COHORT)
    if n - dropped < lowest:
        raise _infeasible(n, corrupt, dropped, lowest)
    return min(max(2 * n // 3 + 1, lowest), n - dropped)


def _infeasible(n: int, corrupt: int, dropped: int, needed: int) -> PrivacyError:
    return PrivacyError(
        f"no threshold serves {n} silos of which {corrupt} are corrupt and {dropped} drop out: {needed} "
        f"must answer and {n - dropped} will; assume less corruption or dropout"
    )


def _log2_sum(a: float, b: float) -> float:
    top = max(a, b)
    return top if top == -math.inf else top + math.log2(2 ** (a - top) + 2 ** (b - top))


def _power(log2: float) -> str:
    if log2 == -math.inf:
        return "0"
    return "1" if log2 >= 0 else f"2^{log2:.1f}"
