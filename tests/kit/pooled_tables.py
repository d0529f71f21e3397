"""Analyses as arithmetic: silos' columns in memory, every vector on its way as a float32 update's mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_NAMING = ("on", "time", "event", "strata", "score", "by", "treatment", "propensity", "weights")


def split(frame: Mapping[str, np.ndarray], owner: np.ndarray) -> list[Frame]:
    """The rows of each owner, in their order."""
    return [{key: values[owner == each] for key, values in frame.items()} for each in np.unique(owner)]


def described(silos: Sequence[Frame], names: set[str], categories: Sequence[str]) -> dict[str, ColumnTable]:
    """Columns as they are: categories with all their values, numbers with their range."""
    found = {}
    for name in sorted(names):
        values = np.concatenate([silo[name] for silo in silos])
        values = values[~np.isnan(values)]
        if name in categories:
            kinds = np.unique(values)
            kinds = kinds if len(kinds) > 1 else np.array([0.0, 1.0])
            found[name] = ColumnTable(kind="category", values=tuple(float(kind) for kind in kinds))
        else:
            least = min(0.0, float(values.min()))
            found[name] = ColumnTable(least=least, most=float(max(values.max(), least + 1)))
    return found


def answer_of(
    silos: Sequence[Frame], question: Mapping[str, Any], categories: Sequence[str] = (), least: int = 1
) -> Answer:
    """The answer to one question; a category's values in the frames are the numbers of its description."""
    names: set[str] = set()
    for key in _NAMING:
        value = question.get(key)
        names |= {value} if isinstance(value, str) else set(value or ())
    columns = described(silos, names, categories)
    survey = Survey.of(columns, [TypeAdapter(AnyQuestion).validate_python(question)], least)
    parts = []
    for silo in silos:
        table = {}
        for name in names:
            kinds = np.array(columns[name].values, float)
            own = silo[name]
            place = np.where(np.isnan(own), np.nan, np.searchsorted(kinds, own))
            table[name] = place if len(kinds) else own
        parts.append(DataTable(table, columns))
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    for _ in range(survey.rounds):
        down = survey.public_places.unpack(survey.public_places.pack(public))
        rows = [survey.sum_places.encode(survey.sums(part, down)) for part in parts]
        mean = torch.stack(rows).double().mean(dim=0).float()
        public = survey.step(down, survey.sum_places.decode(mean, len(parts)))
        if not survey.open(public):
            break
    return survey.answers(public)[0]
