"""Surveys under differential privacy over tables in memory, as silos and their coordinator answer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Table
from roundtable.privacy import SeededNoise, add_gaussian

COLUMNS = {
    "age": ColumnTable(least=0, most=100),
    "rate": ColumnTable(least=-40, most=200),
    "sex": ColumnTable(kind="category", values=("f", "m")),
    "kind": ColumnTable(kind="category", values=(1, 2, 3)),
    "open": ColumnTable(least=0),
    "drug": ColumnTable(kind="category", values=("no", "yes")),
}
Look = Callable[[int, dict[str, Doubles]], None]


class _Asked(Table):
    questions: list[AnyQuestion]


def survey(
    questions: Sequence[dict[str, Any]], noise: float | None, columns: dict[str, ColumnTable] = COLUMNS
) -> Survey:
    """The survey of these questions with so much noise at each silo."""
    asked = validate(_Asked, TomlDocument({"questions": list(questions)}, "test", "")).questions
    return Survey.of(columns, asked, 1, noise)


def released(
    asked: Survey, tables: Sequence[DataTable], noise: float, seed: int = 0, look: Look | None = None
) -> list[Any]:
    """The answers over these silos; `look(stage, public)` sees what is public before each stage."""
    public = asked.public_places.unpack(torch.zeros(asked.public_places.size))
    for stage in range(asked.rounds):
        if look is not None:
            look(stage, public)
        sums: dict[str, Doubles] = {}
        for number, table in enumerate(tables):
            for name, exact in asked.sums(table, public).items():
                source = SeededNoise(seed, number, name, stage)
                noisy = add_gaussian(torch.from_numpy(np.ascontiguousarray(exact)), noise, source)
                sums[name] = sums.get(name, 0.0) + noisy.vector.numpy()
        assert list(sums) == asked.released(stage)
        public = asked.step({**public, "silos": np.array([float(len(tables))])}, sums)
    return asked.answers(public)
