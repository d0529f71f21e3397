"""Who shares masks and secrets with whom, and the public randomness that orders them.

The sparse graph is Harary's on a random circle (Bell et al. 2020, section 3): nobody chooses it, for
the order comes from a beacon that all silos of the cohort make together. Each commits to a nonce in
its signed advertisement, the cohort is fixed, and only then are the nonces opened, every one of them
or the attempt ends. One honest silo is enough to make the beacon unpredictable before the cohort and
all keys are fixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

NONCE_BYTES = 32


def commit(nonce: bytes, owner: str) -> bytes:
    """The commitment to a 32-byte nonce; the owner's name keeps others from repeating it as theirs."""
    return hashlib.sha256(b"roundtable secagg nonce\0" + nonce + owner.encode()).digest()


def combine_beacon(nonces: Sequence[bytes]) -> bytes:
    """The beacon made of all opened nonces, in the order of the cohort."""
    return hashlib.sha256(b"roundtable secagg beacon\0" + b"".join(nonces)).digest()


def order(beacon: bytes, count: int) -> list[int]:
    """The permutation of 0 .. count − 1 that a beacon stands for."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(b"roundtable secagg order\0" + beacon + index.to_bytes(4, "little")).digest()

    return sorted(range(count), key=rank)


class Graph:
    """The graph of a cohort: every silo's neighbours, and the holders of its shares, by index."""

    def __init__(self, n: int, k: int, beacon: bytes = b"") -> None:
        self.n = n
        self.k = k
        self._order = list(range(n)) if k == n - 1 else order(beacon, n)
        self._place = {index: place for place, index in enumerate(self._order)}
        self._neighbours: dict[int, tuple[int, ...]] = {}

    def neighbours(self, index: int) -> tuple[int, ...]:
        """The silos with which `index` shares a mask, ascending."""
        if index not in self._neighbours:
            place, half = self._place[index], self.k // 2
            steps = (*range(-half, 0), *range(1, half + 1))
            found = sorted(self._order[(place + step) % self.n] for step in steps)
            everybody = (other for other in range(self.n) if other != index)
            self._neighbours[index] = tuple(everybody if self.k == self.n - 1 else found)
        return self._neighbours[index]

    def holders(self, index: int) -> tuple[int, ...]:
        """The silos that hold a share of the secrets of `index`, ascending.

        The full graph is Bonawitz et al.'s t of n, in which a silo keeps a share of its own.
        """
        return tuple(range(self.n)) if self.k == self.n - 1 else self.neighbours(index)
