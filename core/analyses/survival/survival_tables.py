"""The tables of questions about times to an event."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from roundtable.core.analyses.ask_table import AskTable, Described, Names, different
from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.analyses.question import Question
from roundtable.core.analyses.survival.concordance import Concordance
from roundtable.core.analyses.survival.cox_regression import Cox
from roundtable.core.analyses.survival.noisy_curves import NoisyKaplanMeier
from roundtable.core.analyses.survival.survival_curves import KaplanMeier
from roundtable.core.analyses.survival.weighted_cox import WeightedCox
from roundtable.core.tables.table_description import ColumnName
from roundtable.core.toml_tables import Finite, as_tuple


class _TimesTable(AskTable):
    why_exact: ClassVar[str] = (
        "a person's hazard, which has no bound, is in the sums over the risk sets of all earlier times; ask "
        "survival, whose counts a person is in once"
    )
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

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyKaplanMeier(columns, title, self.time, self.event, self.every, self.by, self.until)


class CoxTable(_TimesTable):
    """Cox's proportional hazards."""

    ask: Literal["cox"] = Field(description="this kind of question")
    on: Names = Field(description="what explains the hazard: numbers, and categories as in regressions")
    ties: Literal["efron", "breslow"] = Field("efron", description="how events in one interval count")
    strata: ColumnName | None = Field(None, description="a category: a baseline for each of its values")
    by_silo: bool = Field(False, description="a baseline for each silo; nothing leaves by time then")
    robust: bool = Field(False, description="errors by the infinitesimal jackknife")
    proportional: bool = Field(False, description="test proportional hazards by Schoenfeld's residuals")

    @model_validator(mode="after")
    def _once(self) -> CoxTable:
        strata = [] if self.strata is None else [self.strata]
        different((self.time, self.event, *self.on, *strata), "time, event, on and strata")
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


class WeightedCoxTable(_TimesTable):
    """Cox regression weighted by the inverse probability of a treatment."""

    ask: Literal["weighted_cox"] = Field(description="this kind of question")
    treatment: ColumnName = Field(description="a category of two values: not treated, then treated")
    propensity: Names = Field(description="what explains who is treated, by logistic regression")
    on: Annotated[tuple[ColumnName, ...], BeforeValidator(as_tuple), Field(max_length=200)] = Field(
        (), description="what explains the hazard beside the treatment"
    )
    ties: Literal["efron", "breslow"] = Field("efron", description="how events in one interval count")
    strata: ColumnName | None = Field(None, description="a category: a baseline for each of its values")
    by_silo: bool = Field(False, description="a baseline for each silo; nothing leaves by time then")

    @model_validator(mode="after")
    def _once(self) -> WeightedCoxTable:
        strata = [] if self.strata is None else [self.strata]
        first = (self.time, self.event, self.treatment)
        different((*first, *self.on, *strata), "time, event, treatment, on and strata")
        different((*first, *self.propensity), "time, event, treatment and propensity")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return WeightedCox(
            columns,
            least,
            title,
            self.time,
            self.event,
            self.every,
            self.treatment,
            self.propensity,
            self.on,
            self.ties,
            self.strata,
            self.by_silo,
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
