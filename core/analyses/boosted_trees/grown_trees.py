"""The answer of boosted trees: the model, its losses, and what features are worth in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundtable.core.analyses.boosted_trees.boosting_objectives import Boosting
from roundtable.core.analyses.boosted_trees.feature_bins import BoostingPlan
from roundtable.core.analyses.boosted_trees.xgboost_model import (
    IMPORTANCE_HEADER,
    importance_of,
    importance_rows,
    xgboost_model,
)
from roundtable.core.analyses.exact_sums import Arrays
from roundtable.core.analyses.question import Answer


def grown_trees(
    title: str,
    ask: str,
    on: Sequence[str],
    plan: BoostingPlan,
    objective: Boosting,
    metric: str,
    public: Arrays,
) -> Answer:
    """Of the public numbers of a question whose trees are grown; `metric` is the name of its losses."""
    times = int(public["best"][0])
    model = xgboost_model(on, objective, plan.growth.learning_rate, public, times)
    importance = importance_of(on, public, times * objective.outputs)
    losses, told = public["losses"], int(public["done"][0]) + 1
    counted = int(public["rows"].sum())
    values: dict[str, Any] = {
        "n": counted,
        "rounds": times,
        "objective": objective.name,
        "metric": metric,
        "base_score": float(public["base"][0]),
        "training_loss": losses[:told, 0].tolist(),
        "importance": importance,
        "features": list(on),
    }
    last = losses[times]
    notes = [
        f"{counted} rows; {times * objective.outputs} trees of {objective.name}; "
        f"{metric} {losses[0, 0]:.6g} before them, {last[0]:.6g} with them"
    ]
    if plan.held_out:
        held = int(public["held"][0])
        values["n_held_out"] = held
        values["held_out_loss"] = losses[:told, 1].tolist()
        notes.append(f"{metric} {last[1]:.6g} on {held} rows that were held out")
    rows = importance_rows(importance)
    return Answer(title, ask, IMPORTANCE_HEADER, rows, values, notes=notes, model=model)
