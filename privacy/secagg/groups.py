"""A cohort split into groups, one secure sum each, for robust rules that must see more rows than one.

The groups follow from the beacon (`graph.py`): every silo of the cohort has committed to a nonce before
the cohort was fixed and opened it afterwards, so nobody could know or choose who would be in a group,
and every silo recomputes it. What follows is bound to the group: to the whole signed roster, the beacon
and the places of its members in the roster.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import replace

from roundtable.core.errors import PrivacyError
from roundtable.privacy.secagg import tails
from roundtable.privacy.secagg.custody import Cohort
from roundtable.privacy.secagg.graph import order
from roundtable.privacy.secagg.parameters import MINIMUM_COHORT


def make_groups(names: Sequence[str], size: int, beacon: bytes) -> list[tuple[str, ...]]:
    """Split a cohort into groups of at least `size` silos for one secure sum each.

    The split is a function of the sorted names and a `beacon` that no single party chose, so that every
    silo can recompute it; groups differ by at most one in length. PrivacyError for groups below 3 or a
    cohort that fills none.
    """
    if size < MINIMUM_COHORT:
        raise PrivacyError(f"groups of {size} silos hide nothing; use at least {MINIMUM_COHORT}")
    cohort = sorted(set(names))
    if len(cohort) != len(names):
        raise PrivacyError("a silo is named twice in the cohort")
    count = len(cohort) // size
    if count == 0:
        raise PrivacyError(f"{len(cohort)} silos do not fill one group of {size}")
    shuffled = [cohort[index] for index in order(beacon, len(cohort))]
    return [tuple(sorted(shuffled[start::count])) for start in range(count)]


def largest_group(size: int, silos: int) -> int:
    """The most silos that a group can hold where up to `silos` come: fewer than two groups' worth."""
    return max(size, min(silos, 2 * size - 1))


def split(whole: Cohort) -> list[tuple[Cohort, tuple[int, ...]]]:
    """The groups of a cohort whose beacon is known: each a cohort of its own, and its silos' places."""
    groups = []
    for names in make_groups(whole.names, whole.parameters.group_size, whole.beacon):
        places = tuple(whole.places[name] for name in names)
        digest = hashlib.sha256(b"roundtable secagg group\0" + whole.sid + whole.beacon)
        digest.update(struct.pack(f"<{len(places)}H", *places))
        group = replace(
            whole,
            parameters=whole.parameters.of_group(len(names)),
            names=names,
            identities=tuple(whole.identities[place] for place in places),
            beacon=digest.digest(),
        )
        groups.append((group, places))
    return groups


def overrun(silos: int, corrupt: int, size: int, tolerated: int) -> float:
    """log2 of the chance that some group holds more than `tolerated` of the `corrupt` among `silos`.

    For groups drawn at random; minus infinity where there are no more than that.
    """
    count = silos // size
    worst = max(tails.exceeds(silos, corrupt, drawn, tolerated + 1) for drawn in {size, -(-silos // count)})
    return min(0.0, math.log2(count) + worst)
