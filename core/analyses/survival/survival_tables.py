"""The tables of questions about times to an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from roundtable.core.analyses.question import Question
from roundtable.core.analyses.survival.concordance import Concordance
from roundtable.core.analyses.survival.cox_regression import Cox
from roundtable.core.analyses.survival.survival_curves import KaplanMeier
from roundtable.core.tables.table_description import ColumnName, ColumnTable
from roundtable.core.toml_tables import Finite, Table, as_tuple

Described = Mapping[str, ColumnTable]
Covariates = Annotated[tuple[ColumnName, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=200)]


class _TimesTable(Table):
    name: str | None = Field(None, min_length=1, max_length=100, description="title of the answer")
    time: ColumnName = Field(description="numbers from 0 on: time to the event, or to the last look")
    event: ColumnName = Field(description="a category of two values: censored, then the event")
    every: Finite = Field(gt=0, description="width of the grid of times; a time counts as its interval's end")


class SurvivalTable(_TimesTable):
    """Kaplan-Meier curves, and the log-rank test between groups."""

    ask: Literal["survival"] = Field(description="this kind of question")
    by: ColumnName | None = Field(None, description="a category: one curve for each of its values")
    until: Finite | None = Field(None, gt=0, description="also the mean time without the event up to here")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return KaplanMeier(columns, least, title, self.time, self.event, self.every, self.by, self.until)


class CoxTable(_TimesTable):
    """Cox's proportional hazards."""

    ask: Literal["cox"] = Field(description="this kind of question")
    on: Covariates = Field(description="what explains the hazard: numbers, and categories as in regressions")
    ties: Literal["efron", "breslow"] = Field("efron", description="how events in one interval count")
    strata: ColumnName | None = Field(None, description="a category: a baseline for each of its values")
    by_silo: bool = Field(False, description="a baseline for each silo; nothing leaves by time then")
    robust: bool = Field(False, description="errors by the infinitesimal jackknife")
    proportional: bool = Field(False, description="test proportional hazards by Schoenfeld's residuals")

    @model_validator(mode="after")
    def _once(self) -> CoxTable:
        named = [self.time, self.event, *self.on, *([] if self.strata is None else [self.strata])]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise ValueError(f"time, event, on and strata name {', '.join(map(repr, twice))} twice")
        if self.proportional and self.by_silo:
            raise ValueError("proportional is tested on risk sets over all silos: leave out by_silo")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Cox(
            columns,
            least,
            title,
            self.time,
            self.event,
            self.every,
            self.on,
            self.ties,
            self.strata,
            self.by_silo,
            self.robust,
            self.proportional,
        )


class ConcordanceTable(_TimesTable):
    """Harrell's C-index of a score."""

    ask: Literal["concordance"] = Field(description="this kind of question")
    score: ColumnName = Field(description="numbers, of which a higher one means an earlier event")
    score_every: Finite = Field(gt=0, description="width of the grid of scores; exact where all lie on it")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Concordance(
            columns, least, title, self.time, self.event, self.every, self.score, self.score_every
        )
