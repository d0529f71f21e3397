"""Groups of clients that are alike: `diversity` takes from each as equal a number as it can."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roundtable.engine.clients import ClientInfo

_MOST_LABELS = 1000


def by_value(infos: Sequence[ClientInfo], label: str) -> list[list[int]]:
    """The numbers of those that declare the same under `label`; in the order of what they declare."""
    groups: dict[str, list[int]] = {}
    for index, info in enumerate(infos):
        groups.setdefault(info.metadata.get(label, ""), []).append(index)
    return [groups[value] for value in sorted(groups)]


def by_histogram(
    infos: Sequence[ClientInfo], label: str, most: int, chance: np.random.Generator
) -> list[list[int]]:
    """At most `most` groups of clients that declare, under `label`, mixtures of labels that are close.

    Close is a small total variation distance. Those that declare none that can be read
    are a group of their own beside the others.
    """
    told = {i: counts for i, info in enumerate(infos) if (counts := histogram(info.metadata.get(label, "")))}
    kinds = {kind: place for place, kind in enumerate(sorted({k for each in told.values() for k in each}))}
    mixtures = np.zeros((len(told), len(kinds)))
    for row, counts in zip(mixtures, told.values(), strict=True):
        for kind, count in counts.items():
            row[kinds[kind]] = count
        row /= row.sum()
    silent = [index for index in range(len(infos)) if index not in told]
    numbers = list(told)
    groups = _spread(mixtures, most - bool(silent), chance, _total_variation) if numbers else []
    return [[numbers[i] for i in group] for group in groups] + ([silent] if silent else [])


def by_direction(directions: Sequence[str], most: int, chance: np.random.Generator) -> list[list[int]]:
    """At most `most` groups of clients whose last updates, in sketches, pointed the same way.

    Close is a small 1 − cosine. Those of whom no update is known ("") are a group of their own.
    """
    told = [index for index, text in enumerate(directions) if text]
    silent = [index for index, text in enumerate(directions) if not text]
    if not told:
        return [silent]
    points = np.array([_sketch(directions[index]) for index in told], dtype=np.float64)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    groups = _spread(points, most - bool(silent), chance, _one_less_cosine)
    return [[told[i] for i in group] for group in groups] + ([silent] if silent else [])


def direction_text(sketch: np.ndarray) -> str:
    """A sketch [width] as it is kept, without its length: a byte for each place. "" for one that is zero or
    not finite: it points nowhere."""
    largest = float(np.abs(sketch).max(initial=0.0))
    if not 0 < largest < np.inf:
        return ""
    return base64.b64encode(np.rint(sketch * (127 / largest)).astype(np.int8).tobytes()).decode()


def _sketch(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=np.int8)


def histogram(text: str) -> Mapping[str, int]:
    """The counts in what a client declares: "0:120 1:34"; empty for what is no histogram."""
    counts: dict[str, int] = {}
    for pair in text.split():
        kind, _, count = pair.rpartition(":")
        if not kind or not (count.isascii() and count.isdigit() and len(count) < 16) or kind in counts:
            return {}
        counts[kind] = int(count)
    return counts if sum(counts.values()) and len(counts) <= _MOST_LABELS else {}


Distances = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The distances [n] of points [n, d] from one point [d]."""


def _total_variation(points: np.ndarray, point: np.ndarray) -> np.ndarray:
    distances: np.ndarray = 0.5 * np.abs(points - point).sum(axis=1)
    return distances


def _one_less_cosine(points: np.ndarray, point: np.ndarray) -> np.ndarray:
    distances: np.ndarray = 1.0 - points @ point
    return distances


def _spread(
    points: np.ndarray, most: int, chance: np.random.Generator, distances: Distances
) -> list[list[int]]:
    """Groups around at most `most` points that are far from each other: the first at random, then the one
    furthest from all before (Gonzalez 1985), until all lie on one of them."""
    nearest = np.full(len(points), np.inf)
    owner = np.zeros(len(points), dtype=np.int64)
    centre, number = int(chance.integers(len(points))), 0
    while number < max(1, most):
        away = distances(points, points[centre])
        closer = away < nearest
        owner[closer], nearest[closer] = number, away[closer]
        centre, number = int(np.argmax(nearest)), number + 1
        if nearest[centre] <= 1e-12:
            break
    return [np.flatnonzero(owner == group).tolist() for group in range(number)]
