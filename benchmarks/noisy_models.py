"""How well trees and logistic regression under noise predict, by ε, beside exact answers and pooled rows.

    python benchmarks/noisy_models.py [--rows 20000] [--draws 3] [--json FILE] [--figure FILE]

Rows lie in four silos; ten features of which five tell something, two of them by their product, which a
logistic regression of single columns does not see. AUROC is on 20,000 new rows. Exact answers come from the
masked survey over the same files, pooled ones from xgboost and from Newton's method on all rows in one place.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import xgboost
from scipy import stats

from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Table
from roundtable.privacy import SecureNoise, add_gaussian, solve_noise, sums_charge
from roundtable.surveys import analyse

DELTA, SILOS, LIMIT = 1e-6, 4, 5.0
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
NAMES = [f"x{place}" for place in range(10)]
COLUMNS = {name: ColumnTable(least=-LIMIT, most=LIMIT) for name in NAMES}
COLUMNS |= {"ill": ColumnTable(kind="category", values=("no", "yes"))}
_ON = {"outcome": "ill", "on": NAMES}
QUESTIONS: dict[str, dict[str, Any]] = {
    "50 trees of random splits": {"ask": "boosted_trees", **_ON, "rounds": 50},
    "10 trees of best splits": {
        "ask": "boosted_trees",
        **_ON,
        "splits": "best",
        "rounds": 10,
        "max_depth": 2,
        "bins": 8,
    },
    "logistic regression": {"ask": "logistic", **_ON},
}
COLOURS = ("tab:green", "tab:olive", "tab:blue")


class _Asked(Table):
    questions: list[AnyQuestion]


def people(rows: int, seed: int) -> tuple[Doubles, Doubles, Doubles]:
    """(features [rows, 10], who is ill, the true risk)."""
    draw = np.random.default_rng(seed)
    x = np.clip(draw.normal(0, 1, (rows, 10)), -LIMIT, LIMIT)
    risk = 1.0 * x[:, 0] - 0.8 * x[:, 1] + 0.6 * x[:, 2] + 0.8 * x[:, 3] * x[:, 4]
    return x, (draw.random(rows) < 1 / (1 + np.exp(-risk))) * 1.0, risk


def auroc(told: Doubles, outcome: Doubles) -> float:
    """Of scores, ties counted half."""
    ranks, many = stats.rankdata(told), int(outcome.sum())
    above = ranks[outcome == 1].sum() - many * (many + 1) / 2
    return float(above / (many * (len(outcome) - many)))


def predicted(answer: Any, x: Doubles) -> Doubles | None:
    """Scores of rows by a survey's answer; None where it has none."""
    if answer.why:
        return None
    if answer.model is None:
        found: Doubles = x @ np.array(answer.values["coefficients"][1:])
        return found
    loaded = xgboost.Booster(model_file=bytearray(json.dumps(answer.model).encode()))
    return np.asarray(loaded.predict(xgboost.DMatrix(x.astype(np.float32), feature_names=NAMES)), np.float64)


def noisy(question: dict[str, Any], tables: Sequence[DataTable], epsilon: float) -> Any:
    """The answer over these silos, each of which adds its noise."""
    noise = solve_noise(sums_charge(1.0), epsilon, DELTA).noise_multiplier
    asked = validate(_Asked, TomlDocument({"questions": [question]}, "benchmark", "")).questions
    survey, source = Survey.of(COLUMNS, asked, 1, noise), SecureNoise()
    public = survey.public_places.unpack(torch.zeros(survey.public_places.size))
    for _ in range(survey.rounds):
        sums: dict[str, Doubles] = {}
        for table in tables:
            for name, exact in survey.sums(table, public).items():
                released = add_gaussian(torch.from_numpy(np.asarray(exact)), noise, source).vector.numpy()
                sums[name] = sums.get(name, 0.0) + released
        public = survey.step({**public, "silos": np.array([float(len(tables))])}, sums)
    return survey.answers(public)[0]


def exact(parts: Sequence[tuple[Doubles, Doubles]]) -> dict[str, Any]:
    """The answers of a masked survey without noise."""
    lines = ['table = "people"']
    for name in NAMES:
        lines += [f"[columns.{name}]", f"least = {-LIMIT}", f"most = {LIMIT}"]
    lines += ["[columns.ill]", 'kind = "category"', 'values = ["no", "yes"]']
    for name, question in QUESTIONS.items():
        kept = {"name": name, **{key: value for key, value in question.items() if key != "splits"}}
        lines += ["[[questions]]", *(f"{key} = {json.dumps(value)}" for key, value in kept.items())]
    lines.append("[silos]")
    with TemporaryDirectory() as folder:
        for number, (x, ill) in enumerate(parts):
            rows = [
                ",".join([*map(repr, each.tolist()), "yes" if one else "no"])
                for each, one in zip(x, ill, strict=True)
            ]
            (Path(folder) / f"{number}.csv").write_text("\n".join([",".join([*NAMES, "ill"]), *rows]) + "\n")
            lines.append(f'silo{number} = "{number}.csv"')
        (Path(folder) / "survey.toml").write_text("\n".join(lines))
        return {answer.title: answer for answer in analyse(Path(folder) / "survey.toml").answers}


def pooled(question: dict[str, Any], x: Doubles, ill: Doubles, new: Doubles) -> Doubles:
    """Scores of new rows by a model of all rows in one place."""
    if question["ask"] == "logistic":
        t, slopes = np.column_stack([np.ones(len(x)), x]), np.zeros(x.shape[1] + 1)
        for _ in range(20):
            chance = 1 / (1 + np.exp(-t @ slopes))
            hessian = t.T @ (t * (chance * (1 - chance))[:, None])
            slopes += np.linalg.solve(hessian, t.T @ (ill - chance))
        found: Doubles = new @ slopes[1:]
        return found
    keys = {"objective": "binary:logistic", "tree_method": "hist", "max_depth": question.get("max_depth", 4)}
    keys |= {"max_bin": question.get("bins", 64), "nthread": 1}
    model = xgboost.train(keys, xgboost.DMatrix(x, ill), question["rounds"])
    return np.asarray(model.predict(xgboost.DMatrix(new)), np.float64)


def measured(rows: int, draws: int) -> dict[str, Any]:
    """AUROC of each model: by ε of each draw of noise (None for no answer), exact and pooled."""
    x, ill, _ = people(rows, 1)
    new, outcome, risk = people(20_000, 2)
    places = np.array_split(np.arange(rows), SILOS)
    tables = [
        DataTable({**dict(zip(NAMES, x[own].T, strict=True)), "ill": ill[own]}, COLUMNS) for own in places
    ]
    told: dict[str, Any] = {"rows": rows, "delta": DELTA, "epsilons": EPSILONS, "risk": auroc(risk, outcome)}
    known = exact([(x[own], ill[own]) for own in places])
    for name, question in QUESTIONS.items():
        by_epsilon = []
        for epsilon in EPSILONS:
            scores = [predicted(noisy(question, tables, epsilon), new) for _ in range(draws)]
            by_epsilon.append([None if each is None else auroc(each, outcome) for each in scores])
        own = predicted(known[name], new)
        told[name] = {
            "noisy": by_epsilon,
            "exact": None if own is None else auroc(own, outcome),
            "pooled": auroc(pooled(question, x, ill, new), outcome),
        }
        shown = "  ".join(f"{_mean(each):.3f}" for each in by_epsilon)
        print(f"{name:<28} {shown}   exact {told[name]['exact']:.3f}  pooled {told[name]['pooled']:.3f}")
    return told


def _mean(found: Sequence[float | None]) -> float:
    """NaN where not every draw has an answer."""
    return math.nan if None in found else float(np.mean([each for each in found if each is not None]))


def draw(path: Path, told: dict[str, Any]) -> None:
    """AUROC against epsilon."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for (name, colour), style in zip(zip(QUESTIONS, COLOURS, strict=True), ("o", "s", "^"), strict=True):
        own = told[name]
        means = [_mean(each) for each in own["noisy"]]
        axes.semilogx(told["epsilons"], means, marker=style, color=colour, label=name)
        for epsilon, each in zip(told["epsilons"], own["noisy"], strict=True):
            seen = [value for value in each if value is not None]
            axes.plot([epsilon] * len(seen), seen, "_", color=colour)
        axes.axhline(own["exact"], color=colour, linestyle="--", linewidth=1)
        axes.plot([told["epsilons"][-1] * 1.25], [own["pooled"]], marker="*", color=colour, markersize=9)
    axes.axhline(told["risk"], color="grey", linestyle=":", linewidth=1)
    axes.plot([], [], "--", color="black", linewidth=1, label="exact, masked")
    axes.plot([], [], "*", color="black", label="rows in one place")
    axes.plot([], [], ":", color="grey", label="the true risk")
    axes.set_xticks(told["epsilons"], [f"{each:g}" for each in told["epsilons"]])
    axes.minorticks_off()
    axes.set_xlabel(f"epsilon of the survey at delta = {told['delta']:g}")
    axes.set_ylabel("AUROC on 20,000 new rows")
    axes.set_title(f"{told['rows']:,} rows in four silos, each of which adds its noise")
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    began = time.process_time()
    told = measured(options.rows, options.draws)
    print(f"true risk {told['risk']:.3f}; {time.process_time() - began:.0f} s of processor time")
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    if options.figure is not None:
        draw(options.figure, told)


if __name__ == "__main__":
    main()
