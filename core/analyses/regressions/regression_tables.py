"""The tables of questions that fit regressions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roundtable.core.analyses.ask_table import AskTable, Described, Names, different
from roundtable.core.analyses.noisy.noisy_newton import NoisyLogistic, NoisyPoisson
from roundtable.core.analyses.noisy.noisy_products import NoisyLinear
from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.analyses.question import Question
from roundtable.core.analyses.regression import Linear
from roundtable.core.analyses.regressions.count_regression import NegativeBinomial, Poisson
from roundtable.core.analyses.regressions.logistic_regression import Logistic
from roundtable.core.analyses.regressions.meta_analysis import MetaAnalysis
from roundtable.core.analyses.regressions.mixed_intercept import MixedIntercept
from roundtable.core.analyses.regressions.penalised_regression import PenalisedLinear, PenalisedLogistic
from roundtable.core.analyses.regressions.weighted_linear import WeightedLinear
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnName
from roundtable.core.toml_tables import Finite


class _RegressionTable(AskTable):
    why_exact: ClassVar[str] = "each step of its fit asks the rows again, and no bounded steps are made yet"
    outcome: ColumnName = Field(description="what is explained")
    on: Names = Field(description="what explains it: numbers, and categories as one column for each value")

    @model_validator(mode="after")
    def _once(self) -> _RegressionTable:
        different((self.outcome, *self.on), "outcome and on")
        return self


class LinearTable(_RegressionTable):
    """Linear regression of a number."""

    ask: Literal["linear"] = Field(description="this kind of question")
    weights: ColumnName | None = Field(
        None, description="a column of numbers from 0 on: precisions of rows (weighted least squares)"
    )

    @model_validator(mode="after")
    def _weighted(self) -> LinearTable:
        different((self.outcome, *self.on, *filter(None, [self.weights])), "outcome, on and weights")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        if self.weights is not None:
            return WeightedLinear(columns, least, title, self.outcome, self.on, self.weights)
        return Linear(columns, least, title, self.outcome, self.on)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        if self.weights is not None:
            raise ConfigError(f"{title}: no noise is made for weighted sums: leave weights or [privacy] out")
        return NoisyLinear(columns, title, self.outcome, self.on)


class LogisticTable(_RegressionTable):
    """Logistic regression of a category of two values."""

    ask: Literal["logistic"] = Field(description="this kind of question")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Logistic(columns, least, title, self.outcome, self.on)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyLogistic(columns, title, self.outcome, self.on)


class PoissonTable(_RegressionTable):
    """Poisson regression of a count."""

    ask: Literal["poisson"] = Field(description="this kind of question")
    exposure: ColumnName | None = Field(
        None, description="a column that each row's count is for: time, area, people"
    )

    @model_validator(mode="after")
    def _exposed(self) -> PoissonTable:
        different((self.outcome, *self.on, *filter(None, [self.exposure])), "outcome, on and exposure")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Poisson(columns, least, title, self.outcome, self.on, self.exposure)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyPoisson(columns, title, self.outcome, self.on, self.exposure)


class NegativeBinomialTable(_RegressionTable):
    """Negative binomial regression of a count: variance mean + alpha · mean²."""

    ask: Literal["negative_binomial"] = Field(description="this kind of question")
    exposure: ColumnName | None = Field(
        None, description="a column that each row's count is for: time, area, people"
    )
    alpha: Finite | None = Field(
        None, ge=1e-5, le=1e5, description="given; default: estimated with the coefficients"
    )

    @model_validator(mode="after")
    def _exposed(self) -> NegativeBinomialTable:
        different((self.outcome, *self.on, *filter(None, [self.exposure])), "outcome, on and exposure")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return NegativeBinomial(columns, least, title, self.outcome, self.on, self.exposure, self.alpha)


class MetaAnalysisTable(_RegressionTable):
    """Random-effects meta-analysis of the silos' own linear or logistic regressions."""

    ask: Literal["meta_analysis"] = Field(description="this kind of question")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return MetaAnalysis(columns, least, title, self.outcome, self.on)


class MixedInterceptTable(_RegressionTable):
    """Linear regression with a random intercept for each silo."""

    ask: Literal["mixed_intercept"] = Field(description="this kind of question")
    restricted: bool = Field(True, description="restricted maximum likelihood; false: maximum likelihood")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return MixedIntercept(columns, least, title, self.outcome, self.on, self.restricted)


class ElasticNetTable(_RegressionTable):
    """Linear or logistic regression with a penalty: ridge, lasso, and what lies between."""

    ask: Literal["elastic_net"] = Field(description="this kind of question")
    penalty: Finite = Field(
        gt=0, description="beside the mean loss, of standardised slopes: scikit-learn's alpha, or 1 / (n C)"
    )
    l1_ratio: Finite = Field(0.5, ge=0, le=1, description="1 is the lasso, 0 is ridge")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question: logistic where the outcome is a category."""
        found = columns.get(self.outcome)
        kind = PenalisedLogistic if found is not None and found.kind == "category" else PenalisedLinear
        return kind(columns, least, title, self.outcome, self.on, self.penalty, self.l1_ratio)
