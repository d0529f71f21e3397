"""How often the 95 % intervals of noisy surveys hold, how far answers are off, what noise is there.

    python benchmarks/survey_privacy.py [--repetitions 500] [--json FILE] [--figure FILE]

Each repetition draws new rows and new noise (AES-256-CTR). `naive` are the intervals that take noisy sums for
exact ones. Audited is the epsilon that a release bears out from below, with 95 % confidence: a row's presence
is guessed from the score that tells best, and the noise is measured over many releases of the same rows.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.analyses.noisy.noisy_question import Q95
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Table
from roundtable.privacy import SecureNoise, add_gaussian, compose, solve_noise, sums_charge
from roundtable.privacy.audit.gaussian_bounds import least_mu

DELTA = 1e-6
COLUMNS = {
    "age": ColumnTable(least=0, most=100),
    "rate": ColumnTable(least=40, most=200),
    "sex": ColumnTable(kind="category", values=("f", "m")),
    "ill": ColumnTable(kind="category", values=("no", "yes")),
    "visits": ColumnTable(least=0, most=12),
}


class _Asked(Table):
    questions: list[AnyQuestion]


def asked(questions: Sequence[dict[str, Any]], noise: float) -> Survey:
    """The survey of these questions with so much noise at each silo."""
    tables = validate(_Asked, TomlDocument({"questions": list(questions)}, "benchmark", "")).questions
    return Survey.of(COLUMNS, tables, 1, noise)


def rows_of(generator: np.random.Generator, rows: int) -> DataTable:
    """People of a population whose figures are known: see TRUE."""
    sex = (generator.random(rows) < 0.4).astype(np.float64)
    age = np.clip(generator.normal(55.0, 12.0, rows), 0, 100)
    rate = 180.0 - 0.8 * age + 5.0 * sex + generator.uniform(-20, 20, rows)
    ill = (generator.random(rows) < 0.2 + 0.2 * sex).astype(np.float64)
    # From draws of their own, so that the other columns are what they were.
    own = np.random.default_rng(int(age[0] * 1e9))
    visits = own.poisson(np.exp(0.3 + 0.01 * (age - 55.0) + 0.4 * sex)) * 1.0
    return DataTable({"age": age, "rate": rate, "sex": sex, "ill": ill, "visits": visits}, COLUMNS)


def released(survey: Survey, tables: Sequence[DataTable], noise: float, source: SecureNoise) -> list[Any]:
    """The answers over these silos, each of which adds its noise."""
    public = survey.public_places.unpack(torch.zeros(survey.public_places.size))
    for _ in range(survey.rounds):
        sums: dict[str, Doubles] = {}
        for table in tables:
            for name, exact in survey.sums(table, public).items():
                noisy = add_gaussian(torch.from_numpy(np.asarray(exact)), noise, source).vector.numpy()
                sums[name] = sums.get(name, 0.0) + noisy
        public = survey.step({**public, "silos": np.array([float(len(tables))])}, sums)
    return survey.answers(public)


@dataclass(frozen=True)
class Setting:
    """So many rows over so many silos at an epsilon, and how the questions share it."""

    rows: int
    silos: int
    epsilon: float


def _holds(interval: Sequence[float] | None, true: float) -> bool | None:
    return None if interval is None else bool(interval[0] - 1e-9 <= true <= interval[1] + 1e-9)


SD = 12.0


def _mean(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    found = values["age"]["all"]
    naive = None
    if found["mean"] is not None:
        reach = Q95 * (found["sd"] or 0.0) / math.sqrt(max(found["count"], 1.0))
        naive = [found["mean"] - reach, found["mean"] + reach]
    exact = sum(map(len, tables))
    return {
        "mean": _holds(found["mean_interval"], 55.0),
        "mean, naive": _holds(naive, 55.0),
        "count": _holds(found["count_interval"], exact),
        "sd": _holds(found["sd_interval"], SD),
    }


def _difference(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    return {"difference of means": _holds(values.get("interval"), -5.0)}


def _slopes(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    spans = values.get("intervals") or [None] * 3
    return {
        "slope of a number": _holds(spans[1], -0.8),
        "slope of a category": _holds(spans[2], 5.0),
    }


def _correlated(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    spread = math.sqrt((0.8 * SD) ** 2 + 25 * 0.24 + 400 / 3)
    spans = values.get("intervals")
    return {"correlation": _holds(spans[0][1] if spans else None, -0.8 * SD / spread)}


def _median(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    found = values.get("quantiles") or [{"interval": None}] * 2
    upper = 55.0 + SD * float(stats.norm.ppf(0.75))
    return {
        "median": _holds(found[0]["interval"], 55.0),
        "upper quartile": _holds(found[1]["interval"], upper),
    }


def _cells(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    both = sum(int((each.columns["sex"] * each.columns["ill"]).sum()) for each in tables)
    return {"cell of a table": _holds(values["intervals"][1][1], both)}


def _odds(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    spans = values.get("intervals") or [None] * 3
    true = math.log(0.4 / 0.6) - math.log(0.2 / 0.8)
    return {
        "log odds of a number": _holds(spans[1], 0.0),
        "log odds of a category": _holds(spans[2], true),
    }


def _visits(values: dict[str, Any], tables: Sequence[DataTable]) -> dict[str, bool | None]:
    spans = values.get("intervals") or [None] * 3
    return {
        "log rate of a number": _holds(spans[1], 0.01),
        "log rate of a category": _holds(spans[2], 0.4),
    }


CASES: list[tuple[dict[str, Any], Callable[..., dict[str, bool | None]]]] = [
    ({"ask": "describe", "columns": ["age"]}, _mean),
    ({"ask": "t_test", "column": "rate", "by": "sex"}, _difference),
    ({"ask": "linear", "outcome": "rate", "on": ["age", "sex"]}, _slopes),
    ({"ask": "correlation", "columns": ["age", "rate"]}, _correlated),
    ({"ask": "quantiles", "column": "age", "at": [0.5, 0.75]}, _median),
    ({"ask": "table", "rows": "sex", "columns": "ill"}, _cells),
]
FITS: list[tuple[dict[str, Any], Callable[..., dict[str, bool | None]]]] = [
    ({"ask": "logistic", "outcome": "ill", "on": ["age", "sex"]}, _odds),
    ({"ask": "poisson", "outcome": "visits", "on": ["age", "sex"]}, _visits),
]
SETTINGS = [Setting(200, 1, 0.4), Setting(1000, 1, 0.4), Setting(2000, 4, 1.0), Setting(20000, 4, 1.0)]


def coverage(setting: Setting, repetitions: int) -> dict[str, dict[str, float]]:
    """Of each figure: the share of intervals that hold, and of surveys without one; each question alone."""
    noise = solve_noise(sums_charge(1.0), setting.epsilon, DELTA).noise_multiplier
    source, generator = SecureNoise(), np.random.default_rng(7)
    held: dict[str, list[bool | None]] = {}
    surveys = [(asked([question], noise), look) for question, look in [*CASES, *FITS]]
    for _ in range(repetitions):
        each = setting.rows // setting.silos
        tables = [rows_of(generator, each) for _ in range(setting.silos)]
        for survey, look in surveys:
            [answer] = released(survey, tables, noise, source)
            if answer.ask == "table" or not answer.why:
                found = look(answer.values, tables)
            else:
                found = dict.fromkeys(look({}, tables))
            for name, value in found.items():
                held.setdefault(name, []).append(value)
    told = {}
    for name, values in held.items():
        there = [value for value in values if value is not None]
        told[name] = {
            "holds": sum(there) / len(there) if there else math.nan,
            "none": 1 - len(there) / len(values),
        }
    return told


def audited(epsilon: float, releases: int = 2000) -> tuple[float, float]:
    """(claimed, audited) epsilon of a survey's release: the row that changes it most, over measured noise."""
    noise = solve_noise(sums_charge(1.0), epsilon, DELTA).noise_multiplier
    survey = asked([question for question, _ in CASES], noise)
    public = survey.public_places.unpack(torch.zeros(survey.public_places.size))
    generator, source = np.random.default_rng(3), SecureNoise()
    rows = rows_of(generator, 50)
    corners = [
        DataTable({"age": a, "rate": r, "sex": s, "ill": i}, COLUMNS)
        for a, r, s, i in (
            (np.array([a]), np.array([r]), np.array([s]), np.array([i]))
            for a in (0.0, 50.0, 100.0)
            for r in (40.0, 120.0, 200.0)
            for s in (0.0, 1.0)
            for i in (0.0, 1.0)
        )
    ]

    def flat(table: DataTable) -> Doubles:
        return np.concatenate([each.ravel() for each in survey.sums(table, public).values()])

    without = flat(rows)
    changes = [
        flat(DataTable({k: np.append(v, one.columns[k]) for k, v in rows.columns.items()}, COLUMNS)) - without
        for one in corners
    ]
    change = max(changes, key=lambda each: float(np.linalg.norm(each)))
    direction = change / np.linalg.norm(change)
    exact = torch.from_numpy(without)
    scores = np.array(
        [direction @ (add_gaussian(exact, noise, source).vector.numpy() - without) for _ in range(releases)]
    )
    mu = least_mu(scores[None, :], np.array([float(np.linalg.norm(change))]), 0.95)
    return compose([sums_charge(noise)], DELTA), compose([sums_charge(1 / mu)], DELTA)


def errors(rows: int, epsilons: Sequence[float], repetitions: int) -> dict[str, list[float]]:
    """Root mean squared errors of answers against the population, by epsilon."""
    generator, source = np.random.default_rng(11), SecureNoise()
    found: dict[str, list[float]] = {"mean of age": [], "slope of age": [], "median of age": []}
    for epsilon in epsilons:
        noise = solve_noise(sums_charge(1.0), epsilon, DELTA).noise_multiplier
        off: dict[str, list[float]] = {name: [] for name in found}
        surveys = [asked([CASES[place][0]], noise) for place in (0, 2, 4)]
        for _ in range(repetitions):
            table = rows_of(generator, rows)
            mean, slope, median = (released(each, [table], noise, source)[0] for each in surveys)
            values = mean.values["age"]["all"]["mean"]
            off["mean of age"].append(math.nan if values is None else values - 55.0)
            off["slope of age"].append(math.nan if slope.why else slope.values["coefficients"][1] + 0.8)
            off["median of age"].append(
                math.nan if median.why else median.values["quantiles"][0]["value"] - 55.0
            )
        for name, each in off.items():
            kept = np.array(each)
            good = kept[~np.isnan(kept)]
            enough = len(good) >= 0.9 * len(kept)
            found[name].append(float(np.sqrt((good**2).mean())) if enough else math.nan)
    return found


def draw(path: Path, rows: int, epsilons: Sequence[float], found: dict[str, list[float]]) -> None:
    """Error against epsilon."""
    from matplotlib.figure import Figure

    units = {"mean of age": 12.0, "slope of age": 0.8, "median of age": 12.0}
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for name, values in found.items():
        axes.loglog(epsilons, np.array(values) / units[name], marker="o", label=name)
    axes.set_xlabel(f"epsilon of the question at delta = {DELTA:g}")
    axes.set_ylabel("error: of means over the sd, of the slope over itself")
    axes.set_title(f"{rows:,} rows of one silo, one question a survey")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    told: dict[str, Any] = {"repetitions": options.repetitions, "delta": DELTA, "coverage": []}
    for setting in SETTINGS:
        found = coverage(setting, options.repetitions)
        told["coverage"].append({**setting.__dict__, "figures": found})
        print(f"{setting.rows} rows, {setting.silos} silos, epsilon {setting.epsilon:g}")
        for name, each in found.items():
            print(f"  {name:<22} holds {each['holds']:7.1%}   no answer {each['none']:6.1%}")
    for epsilon in (0.4, 1.0, 3.0):
        claimed, bound = audited(epsilon)
        told.setdefault("audit", []).append({"claimed": claimed, "audited": bound})
        print(f"claimed epsilon {claimed:.4g}, audited {bound:.4g}")
    epsilons = [0.1, 0.2, 0.4, 1.0, 2.0, 4.0, 8.0]
    found = errors(5000, epsilons, max(20, options.repetitions // 5))
    told["errors"] = {"rows": 5000, "epsilons": epsilons, **found}
    for name, values in found.items():
        print(f"{name:<16}", "  ".join(f"{value:.3g}" for value in values))
    if options.figure is not None:
        draw(options.figure, 5000, epsilons, found)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
