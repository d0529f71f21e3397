"""A job's rounds as a browser draws them: thinned out to what a screen can show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_ROUNDS = 2000
_PLAIN = ("round", "attempt", "started", "ended", "closed", "failures", "excluded", "weights", "withheld")
_KINDS = ("training", "evaluation", "before")


def rounds_of(records: Iterable[str], most: int = MOST_ROUNDS) -> list[dict[str, Any]]:
    """Records of committed rounds as the page needs them: means in the place of sums, no vectors.

    More than `most` are thinned out evenly; the first and the last stay.
    """
    return [_round(json.loads(record)) for record in thinned(list(records), most)]


def thinned(values: Sequence[str], most: int) -> list[str]:
    """At most `most` of the values, evenly over them, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(index * step)] for index in range(most)]


def _round(record: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: record[name] for name in _PLAIN if name in record}
    for kind in _KINDS:
        shown[kind] = means(record.get(kind) or {})
    shown["cohort"] = len(record.get("cohort") or ())
    shown["contributors"] = list(record.get("contributors") or ())
    shown["clients"] = {name: means(values) for name, values in (record.get("client_metrics") or {}).items()}
    charge = record.get("charge") or {}
    shown["epsilon"] = charge.get("epsilon")
    return shown


def means(sums: Mapping[str, Any]) -> dict[str, float]:
    """Sum by count of each metric; those without examples, or that are not finite, are left out."""
    found = {}
    for name, pair in sums.items():
        total, count = pair
        if count and math.isfinite(total / count):
            found[name] = total / count
    return found
