"""The coordinator's last step: secrets from shares, masks from secrets, and one pass over the sum.

Lagrange coefficients are computed once for each set of responders (on the full graph there is one
set). Every secret can be checked: a mask key against the public key that was advertised, a
self-mask seed against its commitment. So a false share is noticed, other responders are tried, and
the liar is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg import keys, shamir
from roundtable.privacy.secagg.custody import Cohort
from roundtable.privacy.secagg.masks import MaskSum, Ring, piece_length, reduce_ring
from roundtable.privacy.secagg.payloads import Advert

ATTEMPTS_AT_A_SECRET = 5000
"""Enough to find any two liars among 100 responders, in about a second."""


class Reconstruction:
    """Puts secrets together from the responders' shares.

    `shares[responder][owner]` is the share of the owner's secret that the responder revealed.
    """

    def __init__(self, cohort: Cohort, shares: Mapping[int, Mapping[int, bytes]]) -> None:
        self._cohort = cohort
        self._shares = shares
        self._coefficients: dict[tuple[int, ...], shamir.Symbols] = {}
        self.liars: set[int] = set()

    def secret(self, owner: int, is_true: Callable[[bytes], bool]) -> bytes:
        """The owner's secret; ProtocolError where too few shares of it came or they do not fit together."""
        threshold, name = self._cohort.parameters.t, self._cohort.names[owner]
        responders = [
            index for index in self._cohort.graph.holders(owner) if owner in self._shares.get(index, {})
        ]
        honest = [index for index in responders if index not in self.liars]
        if len(honest) < threshold:
            raise ProtocolError(f"{len(honest)} shares of a secret of {name} came, {threshold} are needed")
        for chosen in itertools.islice(_subsets(honest, threshold), ATTEMPTS_AT_A_SECRET):
            secret = self._combine(owner, chosen)
            if is_true(secret):
                if chosen != tuple(honest[:threshold]):
                    self._blame(owner, chosen, honest)
                return secret
        raise ProtocolError(f"the shares of {name} do not fit together: it or its holders sent false ones")

    def _combine(self, owner: int, chosen: tuple[int, ...]) -> bytes:
        if chosen not in self._coefficients:
            self._coefficients[chosen] = shamir.lagrange([index + 1 for index in chosen])
        return shamir.combine(self._coefficients[chosen], [self._shares[index][owner] for index in chosen])

    def _blame(self, owner: int, chosen: tuple[int, ...], others: Iterable[int]) -> None:
        points, pieces = [index + 1 for index in chosen], [self._shares[index][owner] for index in chosen]
        for index in others:
            expected = shamir.combine(shamir.lagrange(points, at=index + 1), pieces)
            if expected != self._shares[index][owner]:
                self.liars.add(index)


def _subsets(responders: list[int], size: int) -> Iterable[tuple[int, ...]]:
    """The first `size` responders, then the first of those left without any one, any two, and so on."""
    for suspects in range(len(responders) - size + 1):
        for left_out in itertools.combinations(responders, suspects):
            yield tuple(index for index in responders if index not in left_out)[:size]


def remaining_masks(
    cohort: Cohort,
    adverts: tuple[Advert, ...],
    commitments: Mapping[int, bytes],
    survivors: frozenset[int],
    members: frozenset[int],
    reconstruction: Reconstruction,
) -> MaskSum:
    """What must be added to the sum of the survivors' vectors to be left with the sum of their inputs.

    For each survivor its self mask is taken away; for each silo that dropped out after sharing, the
    masks that survivors share with it.
    """
    plus: list[bytes] = []
    minus: list[bytes] = []
    for owner in sorted(survivors):
        seed = reconstruction.secret(owner, _opens(commitments[owner], cohort.binding, owner))
        minus.append(keys.self_mask_key(seed, cohort.binding, owner))
    for owner in sorted(members - survivors):
        pair = keys.KeyPair(reconstruction.secret(owner, _belongs_to(adverts[owner].mask_key)))
        for peer in cohort.graph.neighbours(owner):
            if peer in survivors:
                shared = pair.agree(adverts[peer].mask_key, cohort.names[peer])
                key = keys.mask_key(shared, cohort.binding, owner, peer)
                (minus if peer < owner else plus).append(key)
    return MaskSum(cohort.parameters.ring_bits, plus, minus)


def unmask(total: Ring, masks: MaskSum, ring_bits: int) -> None:
    """Remove the remaining masks from the sum in place, in one pass over it."""
    step = piece_length(ring_bits)
    for start in range(0, len(total), step):
        piece = total[start : start + step]
        masks.add_to(piece)
        reduce_ring(piece, ring_bits)


def _opens(commitment: bytes, binding: bytes, owner: int) -> Callable[[bytes], bool]:
    return lambda seed: keys.seed_commitment(seed, binding, owner) == commitment


def _belongs_to(public: bytes) -> Callable[[bytes], bool]:
    return lambda private: keys.KeyPair(private).public == public
