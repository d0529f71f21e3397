"""Where the values of a step lie while it runs, and one block of memory for those that the kernels make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roundtable.simulation.backends.vectorised.recording import Call, Recording, Ref, ValueLayout

_ALIGNMENT = 16


class Aliased(Exception):
    """Two values share memory in a way that their operation does not tell."""


def roots(recording: Recording) -> dict[Ref, Ref]:
    """For each value the one whose memory it is a window on: itself, unless a view made it."""
    roots_of = {ref: ref for ref in [*recording.inputs, *recording.constants]}
    for call in recording.calls:
        owners = {recording.kinds[ref].storage: roots_of[ref] for ref in call.reads}
        for ref in call.outputs:
            if ref is None or ref in roots_of:
                continue
            owner = owners.get(recording.kinds[ref].storage)
            roots_of[ref] = ref if owner is None else owner
    return roots_of


def is_window(call: Call, root: Mapping[Ref, Ref]) -> bool:
    """Whether all that a call does is to look at a value in another way.

    Raises Aliased for an operation that does more and gives a window on its argument all the same.
    """
    made = [ref for ref in call.outputs if ref is not None]
    windows = [root[ref] != ref and ref not in call.reads for ref in made]
    if not any(windows):
        return False
    if call.writes or not all(windows):
        raise Aliased(str(call.operator))
    return True


def lifetimes(
    calls: Sequence[Call], ends: Sequence[Ref], root: Mapping[Ref, Ref]
) -> dict[Ref, tuple[int, int]]:
    """For each root the first and the last call that has to do with it; `ends` are needed after the last."""
    spans: dict[Ref, tuple[int, int]] = {}
    for number, call in enumerate(calls):
        for ref in [*call.reads, *(out for out in call.outputs if out is not None)]:
            first, _ = spans.get(root[ref], (number, number))
            spans[root[ref]] = (first, number)
    for ref in ends:
        spans[root[ref]] = (spans.get(root[ref], (len(calls), 0))[0], len(calls))
    return spans


def packed(
    owners: Sequence[Ref], spans: Mapping[Ref, tuple[int, int]], kinds: Mapping[Ref, ValueLayout]
) -> tuple[dict[Ref, int], int]:
    """Places in one block, and its length, in values; who lives at other times may share."""
    places: dict[Ref, int] = {}
    taken: list[tuple[int, int, int]] = []
    length = 0
    for ref in sorted(owners, key=lambda ref: spans[ref][0]):
        kind, (first, last) = kinds[ref], spans[ref]
        extent = kind.offset + 1 + sum((n - 1) * s for n, s in zip(kind.shape, kind.stride, strict=True))
        extent = -(-extent // _ALIGNMENT) * _ALIGNMENT
        taken = [block for block in taken if block[2] >= first]
        place = 0
        for start, end, _ in sorted(taken):
            if place + extent <= start:
                break
            place = max(place, end)
        taken.append((place, place + extent, last))
        places[ref] = place
        length = max(length, place + extent)
    return places, length
