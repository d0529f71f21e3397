"""What the tables of all questions share: a title, names of columns, descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from roundtable.core.tables.table_description import ColumnName, ColumnTable
from roundtable.core.toml_tables import Table, as_tuple

Described = Mapping[str, ColumnTable]
Names = Annotated[tuple[ColumnName, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=200)]


def different(names: tuple[str, ...], key: str) -> None:
    """ValueError where a name occurs twice."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{key} names {', '.join(map(repr, twice))} twice")


class AskTable(Table):
    """One question; its kind is `ask`."""

    name: str | None = Field(None, min_length=1, max_length=100, description="title of the answer")
