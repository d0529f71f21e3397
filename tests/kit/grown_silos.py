"""Boosted trees over silos in memory, and what is compared with those of xgboost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

Frame = dict[str, np.ndarray]


def described(
    frame: Mapping[str, Any], question: Mapping[str, Any], kinds: int = 0
) -> dict[str, ColumnTable]:
    """The columns that a question uses; the outcome is a category of so many values, where there are any."""
    found = {}
    for name in (*question["on"], question["outcome"]):
        least, most = float(np.nanmin(frame[name])), float(np.nanmax(frame[name]))
        found[name] = ColumnTable(least=least, most=most)
    if kinds:
        found[question["outcome"]] = ColumnTable(kind="category", values=tuple(range(kinds)))
    return found


def grow(
    silos: list[Frame],
    question: Mapping[str, Any],
    columns: dict[str, ColumnTable],
    least: int = 1,
    *,
    forgetful: bool = False,
) -> Answer:
    """The answer, with every vector on its way as a float32 update's mean; `forgetful` silos start anew in
    every round."""
    asked = TypeAdapter(AnyQuestion).validate_python({"ask": "boosted_trees", **question})
    survey = Survey.of(columns, [asked], least)
    parts = [DataTable({name: silo[name] for name in columns}, columns) for silo in silos]
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    kept = {name: np.zeros(shape) for name, shape in survey.kept_places.shapes.items()}
    for _ in range(survey.rounds):
        down = survey.public_places.unpack(survey.public_places.pack(public))
        if forgetful:
            parts = [DataTable(part.columns, columns) for part in parts]
        rows = [survey.sum_places.encode(survey.sums(part, down)) for part in parts]
        mean = torch.stack(rows).double().mean(dim=0).float()
        held = survey.kept_places.unpack(survey.kept_places.pack(kept))
        after = survey.step({**down, **held}, survey.sum_places.decode(mean, len(parts)))
        public, kept = ({name: after[name] for name in old} for old in (public, kept))
        if not survey.open(public):
            break
    assert not survey.open(public)
    return survey.answers(public)[0]


def trees_of(model: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = model["learner"]["gradient_booster"]["model"]["trees"]
    return found


def same_trees(mine: Any, theirs: Any) -> None:
    """Structure, thresholds and directions alike; gains and sums up to xgboost's float32."""
    assert len(trees_of(mine)) == len(trees_of(theirs))
    for one, two in zip(trees_of(mine), trees_of(theirs), strict=True):
        for key in ("left_children", "right_children", "parents", "split_indices", "default_left"):
            assert one[key] == two[key]
        for key in ("split_conditions", "base_weights", "sum_hessian", "loss_changes"):
            wanted = np.array(two[key])
            assert np.allclose(one[key], wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max()), key


def edges_of(matrix: Any) -> dict[str, list[float]]:
    """The cuts that xgboost has made; what comes first of each feature is a guard below all values."""
    offsets, values = matrix.get_quantile_cut()
    return {
        name: values[offsets[place] + 1 : offsets[place + 1]].tolist()
        for place, name in enumerate(matrix.feature_names)
    }
