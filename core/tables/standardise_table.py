"""`[standardise]` of a job: columns of a table that every silo centres and scales alike before training.

The job holds the numbers themselves, so that whatever keeps a job (a database, a run's folder, a signature, a
silo's approval) keeps them, and a silo that resumes or joins late works with the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import BeforeValidator, Field, model_validator

from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnName, ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.toml_tables import Finite, Name, Table

KEY = "standardise"
ALL = "all"
"""What the answer to `describe` calls the one group of rows that nothing divides."""
Figures = Mapping[str, tuple[float, float]]
"""By column: (mean, standard deviation with n − 1)."""
_LARGEST_FILE = 1 << 26


def _by_name(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if twice := sorted({name for name in value if value.count(name) > 1}, key=str):
            raise ValueError(f"columns names {', '.join(map(repr, twice))} twice")
        return {name: {} for name in value}
    return value


class StandardisedColumn(ColumnTable):
    """A column of numbers as the study means it, with its mean and standard deviation over all silos."""

    mean: Finite | None = Field(None, description="over all silos; found before round 1 where it is left out")
    sd: Annotated[Finite, Field(gt=0)] | None = Field(None, description="standard deviation, with n - 1")

    @model_validator(mode="after")
    def _known_together(self) -> StandardisedColumn:
        if self.kind != "number":
            raise ValueError("a category has no mean: standardise columns of numbers")
        if (self.mean is None) != (self.sd is None):
            raise ValueError("mean and sd belong together: give both, or neither")
        return self

    @property
    def described(self) -> ColumnTable:
        """The column without its figures."""
        return ColumnTable.model_validate(self.model_dump(exclude={"mean", "sd"}))


class StandardiseTable(Table):
    """`[standardise]`: a silo's table, and its columns that a task gets as (x - mean) / sd.

    Where a column has no mean yet, it is found before round 1: in the `answers` of an earlier analysis, or by
    an analysis of the job's silos, for which the study states each column's least and most.
    """

    table: Name = Field(description="the silo's table, [data.NAME] in its agent.toml")
    columns: Annotated[
        dict[ColumnName, StandardisedColumn], BeforeValidator(_by_name), Field(min_length=1, max_length=200)
    ] = Field(description="names in a list, or what the study says of each, as [standardise.columns.age]")
    answers: str | None = Field(
        None, min_length=1, description="a file beside the job: what `roundtable analyse --json` answered"
    )
    least_count: int = Field(5, ge=1, le=10**6, description="fewest rows of which a mean is told")
    found: Literal["given", "exact", "noised"] = Field(
        "given",
        description="written by who fills in: given by the job, exact figures of silos' rows, or figures "
        "with noise under differential privacy",
    )
    source: str = Field("", max_length=200, description="written by who fills in: where the figures are from")

    @property
    def complete(self) -> bool:
        """Whether every column has its figures."""
        return all(column.mean is not None for column in self.columns.values())

    @property
    def described(self) -> dict[str, ColumnTable]:
        """The columns as the study means them."""
        return {name: column.described for name, column in self.columns.items()}

    def filled(
        self, figures: Figures, source: str, found: Literal["exact", "noised"] = "exact"
    ) -> StandardiseTable:
        """The same with figures of silos' rows where there are none yet, and without a file to look into."""
        columns = {
            name: column
            if column.mean is not None
            else column.model_copy(update=dict(zip(("mean", "sd"), figures[name], strict=True)))
            for name, column in self.columns.items()
        }
        changed = {"columns": columns, "answers": None, "found": found, "source": source}
        return self.model_copy(update=changed)

    def answered(self, folder: Path) -> StandardiseTable:
        """The same with the figures in the file `answers`. ConfigError where it has none for a column."""
        assert self.answers is not None
        path = folder / self.answers
        key = (KEY, "answers")
        try:
            if path.stat().st_size > _LARGEST_FILE:
                raise ConfigError(f"{path} is too large to be the answers of an analysis", key=key)
            raw = path.read_bytes()
            document = json.loads(raw)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", key=key) from error
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or not isinstance(document.get("answers"), list):
            raise ConfigError(
                f"{path} holds no answers: write them by `roundtable analyse SURVEY --json > {self.answers}`",
                key=key,
            )
        figures = self._figures(_described_in(document["answers"]), str(path))
        privacy = document.get("privacy")
        private = isinstance(privacy, Mapping) and privacy.get("guarantee") is True
        return self.filled(figures, _said(path, raw), "noised" if private else "exact")

    def figures(self, values: Mapping[str, Any], where: str) -> Figures:
        """The figures that an answer to `describe` has of each column. ConfigError where it has none."""
        return self._figures([values], where)

    def _figures(self, answers: list[Mapping[str, Any]], where: str) -> Figures:
        found: dict[str, tuple[float, float]] = {}
        for name, column in self.columns.items():
            if column.mean is not None:
                continue
            groups = next((each[name] for each in answers if name in each), None)
            own = groups.get(ALL) if isinstance(groups, Mapping) and set(groups) == {ALL} else None
            if own is None:
                raise ConfigError(
                    f"{where} does not describe column {name!r} over all rows: ask describe of it, without "
                    "by",
                    key=(KEY, "columns"),
                )
            found[name] = self._pair(name, own, where)
        return found

    def _pair(self, name: str, own: Any, where: str) -> tuple[float, float]:
        count, mean, sd = (_number(own, key) for key in ("count", "mean", "sd"))
        if count is None or count < self.least_count or mean is None:
            few = f"fewer than {self.least_count} rows"
            raise ConfigError(f"{where}: column {name!r} has {few}: no mean is told", key=(KEY, "columns"))
        if sd is None or sd <= 0:
            raise ConfigError(
                f"{where}: column {name!r} is constant over all silos, and cannot be divided by its standard "
                "deviation: leave it out",
                key=(KEY, "columns"),
            )
        return mean, sd

    def applied(self, table: DataTable) -> DataTable:
        """The table with (x - mean) / sd in each of the columns; missing values stay missing."""
        columns = dict(table.columns)
        for name, column in self.columns.items():
            assert column.mean is not None
            assert column.sd is not None
            columns[name] = (table.column(name) - column.mean) / column.sd
        return DataTable(columns, table.descriptions)


def _described_in(answers: list[Any]) -> list[Mapping[str, Any]]:
    return [
        each["values"]
        for each in answers
        if isinstance(each, Mapping)
        and each.get("ask") == "describe"
        and each.get("answered") is True
        and isinstance(each.get("values"), Mapping)
    ]


def _number(values: Any, key: str) -> float | None:
    value = values.get(key) if isinstance(values, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _said(path: Path, raw: bytes) -> str:
    return f"{path.name[:100]}, BLAKE3 {blake3(raw).hexdigest()}"
