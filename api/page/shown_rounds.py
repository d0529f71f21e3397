"""A job's rounds as a browser draws them: sums as means, silos as counts, the newest silo by silo."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from roundtable.core.config import job_from_json
from roundtable.core.measures.families import is_cell
from roundtable.core.observability.fairness import fairness_of
from roundtable.core.observability.metric_sums import means, worked_out
from roundtable.core.observability.throughput import Throughput
from roundtable.core.observability.transfer_figures import TransferSums

MOST_ROUNDS = 2000
"""That a curve is drawn of: more are thinned out, where they are kept."""
NEWEST, MOST_SILOS = 40, 60
"""Rounds and silos of the tables of who contributed and what each measured."""
MOST_WORKED_OUT = 2000
"""Silos' sums of which one answer works out figures that are not means."""
_PLAIN = ("round", "attempt", "started", "ended", "closed", "withheld")
_KINDS = ("training", "evaluation", "before", "central")


def rounds_of(records: Iterable[str], config: str) -> list[dict[str, Any]]:
    """Records of committed rounds as curves need them: means in the place of sums, no vectors, no names.

    `spread`: the lowest and the highest figure of a silo, by metric; of figures that are not means in the
    newest rounds alone, where many silos tell them.
    """
    metrics, left, shown = _metrics(config), MOST_WORKED_OUT, list[dict[str, Any]]()
    for record in reversed([json.loads(record) for record in records]):
        told = [_of_silo(sums, metrics if left > 0 else None) for sums in _told(record).values()]
        if metrics or any(map(is_cell, record.get("evaluation") or ())):
            left -= len(told)
        shown.append(_round(record, told))
    return shown[::-1]


def measured_of(records: Iterable[str], config: str, most: int = MOST_SILOS) -> dict[str, Any] | None:
    """What each silo measured of the newest model of which silos told figures, and how evenly it serves them;
    None where none did, or where that is not told. Figures of at most so many silos; `fairness` is of all."""
    told = next((each for each in map(json.loads, reversed(list(records))) if _told(each)), None)
    if told is None:
        return None
    rows = {name: _of_silo(sums, _metrics(config)) for name, sums in sorted(_told(told).items())}
    fairness = fairness_of(rows, job_from_json(config).stop) if config else {}
    return {
        "round": told["round"],
        "columns": list(dict.fromkeys(name for row in rows.values() for name in row)),
        "silos": dict(list(rows.items())[:most]),
        "more": max(0, len(rows) - most),
        "fairness": {metric: asdict(found) for metric, found in fairness.items()},
    }


def silos_of(records: Iterable[str], most: int = MOST_SILOS) -> dict[str, Any]:
    """Who contributed to these rounds: by round, for each silo what became of it, why, and its weight.

    `rules`: of each round how many updates were left out for which reason, by the name that the rule gives.
    At most so many silos, those that were left out or failed most often before others; `more` are not told.
    """
    rounds = [json.loads(record) for record in records]
    trouble: Counter[str] = Counter()
    for record in rounds:
        names = (*(record.get("contributors") or ()), *_left_out(record))
        trouble.update(dict.fromkeys(names, 0))
        trouble.update(_left_out(record))
    told = sorted(sorted(trouble, key=lambda name: (-trouble[name], name))[:most])
    return {
        "silos": told,
        "more": len(trouble) - len(told),
        "rounds": [_outcomes(record, set(told)) for record in rounds],
    }


def _left_out(record: Mapping[str, Any]) -> list[str]:
    return [*(record.get("failures") or ()), *(record.get("excluded") or ())]


def _outcomes(record: Mapping[str, Any], told: set[str]) -> dict[str, Any]:
    weights = record.get("weights") or {}
    silos = {name: ["counted", "", weights.get(name)] for name in record.get("contributors") or ()}
    silos |= {name: ["failed", why, None] for name, why in (record.get("failures") or {}).items()}
    silos |= {name: ["excluded", why, None] for name, why in (record.get("excluded") or {}).items()}
    by_rule = {
        fault["client"]: fault["reason"] for fault in (record.get("diagnosis") or {}).get("excluded", ())
    }
    rules = Counter(by_rule.get(name, "other") for name in record.get("excluded") or ())
    return {
        "round": record["round"],
        "silos": {name: each for name, each in silos.items() if name in told},
        "rules": dict(rules),
    }


def _metrics(config: str) -> Mapping[str, str]:
    """The figures that a job works out by itself; of one that may not be seen, none."""
    return job_from_json(config).metrics if config else {}


def _told(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return record.get("client_metrics") or {}


def _of_silo(sums: Mapping[str, Any], metrics: Mapping[str, str] | None) -> dict[str, float]:
    """A silo's means and, unless `metrics` is None, what else follows from its sums; all finite."""
    pairs = {name: (total, count) for name, (total, count) in sums.items()}
    return _means(pairs if metrics is None else worked_out(pairs, metrics)[0])


def _means(sums: Mapping[str, Any]) -> dict[str, float]:
    found = means({name: (total, count) for name, (total, count) in sums.items()})
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _round(record: Mapping[str, Any], told: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    shown = {name: record[name] for name in _PLAIN if name in record}
    for kind in _KINDS:
        shown[kind] = _means(record.get(kind) or {})
    for kind in ("cohort", "contributors", "failures", "excluded"):
        shown[kind] = len(record.get(kind) or ())
    values: dict[str, list[float]] = {}
    for each in told:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    shown["spread"] = {name: [min(each), max(each)] for name, each in values.items() if len(each) > 1}
    shown["epsilon"] = (record.get("charge") or {}).get("epsilon")
    shown["transfers"] = _transfers(record.get("transfers") or {})
    shown["throughput"] = _throughput(record)
    return shown


def _throughput(record: Mapping[str, Any]) -> dict[str, int | float]:
    """What is known of the round's tokens and of the share of its time in communication."""
    seconds, told = record.get("ended", 0.0) - record.get("started", 0.0), record.get("transfers") or {}
    names = record.get("contributors") or ()
    return Throughput.of(record.get("training") or {}, told, names, seconds).figures()


def _transfers(transfers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Bytes and losses of a round's updates together, and how many silos used which encoding."""
    if not transfers:
        return None
    sums = TransferSums.of(transfers.values())
    encodings = Counter(each["encoding"] for each in transfers.values() if each.get("encoding"))
    wanted = ("up", "up_plain", "down", "down_plain", "error")
    return {**{name: getattr(sums, name) for name in wanted}, "encodings": dict(encodings)}
