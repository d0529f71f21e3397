"""What the tables of all questions share: a title, names of columns, descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnName, ColumnTable
from roundtable.core.toml_tables import Finite, Table, as_tuple

Described = Mapping[str, ColumnTable]
Names = Annotated[tuple[ColumnName, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=200)]


def different(names: tuple[str, ...], key: str) -> None:
    """ValueError where a name occurs twice."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{key} names {', '.join(map(repr, twice))} twice")


class AskTable(Table):
    """One question; its kind is `ask`."""

    why_exact: ClassVar[str] = "no sums of bounded sensitivity are made for it yet"
    """Why it has no answer under differential privacy."""

    name: str | None = Field(None, min_length=1, max_length=100, description="title of the answer")
    weight: Finite = Field(
        1.0,
        ge=0.001,
        le=1000,
        description="under [privacy]: how much of the budget it gets, beside the others' weights",
    )

    @property
    def goes_by_silos(self) -> bool:
        """Whether silos' sums have places of their own, so that it has to be known which silos take part."""
        return False

    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        """The question under differential privacy. ConfigError for one that has none."""
        kind = getattr(self, "ask", "")
        raise ConfigError(
            f"{title}: ask = {kind!r} is not answered under [privacy]: {self.why_exact}. What is: describe, "
            "t_test, correlation, linear, logistic, poisson, histogram, quantiles, table, top_values, "
            "survival and boosted_trees"
        )
