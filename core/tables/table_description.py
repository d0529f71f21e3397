"""What a table's columns are: kinds, units, ranges, values and missing codes; where a silo's table is.

A study says it once of the columns that it needs, a silo of the table that it has ([data.NAME] in
agent.toml): two parties that mean the same column then mean the same by it, or are told in what they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from roundtable.core.toml_tables import Finite, Table, as_tuple

Code = str | int | Finite
Codes = Annotated[tuple[Code, ...], BeforeValidator(as_tuple)]
Header = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
ColumnName = Annotated[str, Field(min_length=1, max_length=100)]
MOST_VALUES = 64
FIRST_ROUNDED = 2.0**53
"""From here on neighbouring whole numbers are the same double."""


class ColumnTable(Table):
    """One column. A number lies between `least` and `most`; a category takes one of the `values`."""

    kind: Literal["number", "category"] = Field("number", description="number, or category")
    unit: str | None = Field(None, max_length=40, description='of a number, such as "mg/dl"')
    least: Finite | None = Field(None, description="a number below is a mistake in the data")
    most: Finite | None = Field(None, description="a number above is a mistake in the data")
    values: Codes = Field((), max_length=MOST_VALUES, description="of a category: all that there can be")
    missing: Codes = Field((), max_length=MOST_VALUES, description="what stands for a missing value")
    recode: dict[str, Code] = Field(
        default_factory=dict,
        max_length=MOST_VALUES,
        description='what stands in the table, and what is meant by it: { M = "male", F = "female" }',
    )

    @model_validator(mode="after")
    def _consistent(self) -> ColumnTable:
        numbers = (self.unit, self.least, self.most)
        if self.kind == "category":
            if any(value is not None for value in numbers):
                raise ValueError("unit, least and most are of numbers; a category has values")
            keys = [code_key(value) for value in self.values]
            if len(set(keys)) != len(keys):
                raise ValueError(f"values = {list(self.values)} repeats one of them")
            if len(keys) == 1:
                raise ValueError(f"values = {list(self.values)}: a category has at least two")
        elif self.values:
            raise ValueError('values are of a category: set kind = "category", or leave them out')
        if self.least is not None and self.most is not None and not self.least < self.most:
            raise ValueError(f"least = {self.least:g} is not below most = {self.most:g}")
        return self

    @property
    def middle(self) -> float:
        """Of the range."""
        assert self.least is not None
        assert self.most is not None
        return self.least + (self.most - self.least) / 2

    @property
    def half(self) -> float:
        """Half of the range's width."""
        assert self.least is not None
        assert self.most is not None
        return (self.most - self.least) / 2

    @property
    def labels(self) -> list[str]:
        """The values of a category as they are printed."""
        return [str(value) for value in self.values]


Columns = Annotated[dict[ColumnName, ColumnTable], Field(max_length=1000)]


class DataTableTable(Table):
    """`[data.NAME]` of a silo: where a table is, and what its columns are.

    A CSV or Parquet file, or a query to a database that SQLAlchemy reaches. `columns` may leave columns out:
    of those a study's own description is believed.
    """

    file: str | None = Field(None, min_length=1, description="a .csv, .tsv or .parquet file")
    header: Header = Field((), description="names of the columns of a CSV file that has no line of them")
    separator: Annotated[str, Field(min_length=1, max_length=1)] = Field(
        ",", description="between the values of a CSV file"
    )
    url: str | None = Field(
        None, min_length=1, description='of a database, as SQLAlchemy writes it: "postgresql+psycopg://…"'
    )
    query: str | None = Field(None, min_length=1, description="the SELECT whose rows are the table")
    columns: Columns = Field(default_factory=dict, description="by name, as [data.NAME.columns.age]")

    @model_validator(mode="after")
    def _one_place(self) -> DataTableTable:
        if (self.file is None) == (self.url is None):
            raise ValueError("a table is in a file or behind a url: give one of the two")
        if (self.url is None) != (self.query is None):
            raise ValueError(
                "url and query belong together: the database, and the SELECT that gives the table"
            )
        if len(set(self.header)) != len(self.header):
            raise ValueError(f"header = {list(self.header)} repeats a name")
        return self


def code_key(value: Any) -> float | str:
    """A value as it is compared: 1, 1.0 and "1" are the same; a whole number that is no double stays text,
    so that it is not the same as its neighbours, and so does what has underscores ("1_5")."""
    text = str(value).strip()
    try:
        number = float(text)
    except ValueError:
        return text
    if "_" in text or not math.isfinite(number):
        return text
    return _as_written(text, number) if abs(number) >= FIRST_ROUNDED else number


def number_of(key: float | str) -> float | None:
    """The double next to what is compared; None for a text that is no finite number."""
    if isinstance(key, float):
        return key
    found = float(key) if key.removeprefix("-").isdecimal() else math.inf
    return found if math.isfinite(found) else None


def _as_written(text: str, number: float) -> float | str:
    try:
        whole = int(text)
    except ValueError:
        return number
    return number if whole == number else str(whole)


def differences(
    study: Mapping[str, ColumnTable], silo: Mapping[str, ColumnTable], names: frozenset[str] | set[str]
) -> list[str]:
    """In what a silo's table, which has columns of these `names`, is not as the study describes it.

    Each difference is one sentence; columns that the study does not need are left alone. What only one side
    states (a unit, a range, the values) is no difference.
    """
    found = []
    for name, wanted in study.items():
        if name not in names:
            found.append(f"column {name!r} is missing")
            continue
        here = silo.get(name)
        if here is None:
            continue
        if here.kind != wanted.kind:
            found.append(f"column {name!r} is a {here.kind} here and a {wanted.kind} in the study")
            continue
        if None not in (here.unit, wanted.unit) and here.unit != wanted.unit:
            found.append(f"column {name!r} is in {here.unit!r} here and in {wanted.unit!r} in the study")
        mine, theirs = ({code_key(v): v for v in table.values} for table in (here, wanted))
        if mine and theirs and (strange := [value for key, value in mine.items() if key not in theirs]):
            found.append(
                f"column {name!r} has the values {', '.join(map(repr, strange))} here, which the study does "
                f"not know: it has {', '.join(map(repr, wanted.values))}"
            )
    return found
