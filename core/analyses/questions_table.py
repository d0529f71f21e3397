"""What a survey may ask: the tables of its questions, and the questions that they make."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from roundtable.core.analyses.apart.median_of_means import RobustDescribe
from roundtable.core.analyses.ask_table import AskTable, Described, Names, different
from roundtable.core.analyses.bisected_quantiles import BisectedQuantiles
from roundtable.core.analyses.boosted_trees.trees_table import BoostedTreesTable
from roundtable.core.analyses.correlations import Correlation
from roundtable.core.analyses.counted_cells import ColumnHistogram, Contingency
from roundtable.core.analyses.exact_sums import MOST_SILOS
from roundtable.core.analyses.moments import Anova, Describe, TTest
from roundtable.core.analyses.noisy.noisy_cells import NoisyContingency, NoisyHistogram
from roundtable.core.analyses.noisy.noisy_moments import NoisyDescribe, NoisyTTest
from roundtable.core.analyses.noisy.noisy_products import NoisyCorrelation
from roundtable.core.analyses.noisy.noisy_quantiles import NoisyQuantiles
from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.analyses.order_statistics import Quantiles
from roundtable.core.analyses.own_question import OwnTable
from roundtable.core.analyses.question import Question
from roundtable.core.analyses.regressions.regression_tables import (
    ElasticNetTable,
    LinearTable,
    LogisticTable,
    MetaAnalysisTable,
    MixedInterceptTable,
    NegativeBinomialTable,
    PoissonTable,
)
from roundtable.core.analyses.survival.survival_tables import (
    ConcordanceTable,
    CoxTable,
    SurvivalTable,
    WeightedCoxTable,
)
from roundtable.core.analyses.value_tables import (
    ComponentsTable,
    EvaluateTable,
    MannWhitneyTable,
    TopValuesTable,
)
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnName
from roundtable.core.toml_tables import Finite, as_tuple

Shares = Annotated[
    tuple[Annotated[Finite, Field(ge=0, le=1)], ...],
    BeforeValidator(as_tuple),
    Field(min_length=1, max_length=50),
]


class DescribeTable(AskTable):
    """Rows, missing values, means and standard deviations."""

    ask: Literal["describe"] = Field(description="this kind of question")
    columns: Names = Field(description="columns of numbers")
    by: ColumnName | None = Field(None, description="a category: one answer for each of its values")
    pooling: Literal["sum", "median_of_means"] = Field(
        "sum",
        description="sum: exact, of all rows; median_of_means: silos that lie move it little; without masks",
    )
    liars: int = Field(
        1,
        ge=1,
        le=511,
        description="of median_of_means: most silos whose sums may not be those of their rows",
    )
    groups: int | None = Field(
        None,
        ge=3,
        le=MOST_SILOS,
        description="of median_of_means: groups of silos, 2 · liars + 1 at least, the default",
    )
    seed: int = Field(0, ge=0, le=2**53, description="of median_of_means: draws who is in which group")

    @model_validator(mode="after")
    def _once(self) -> DescribeTable:
        different(self.columns, "columns")
        return self

    @model_validator(mode="after")
    def _outvoted(self) -> DescribeTable:
        if self.pooling == "sum":
            for key in ("liars", "groups", "seed"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f'{key} is of pooling = "median_of_means", and would be ignored')
        elif self.groups is not None and self.groups < 2 * self.liars + 1:
            raise ValueError(
                f"groups = {self.groups} and liars = {self.liars}: it takes {2 * self.liars + 1} groups at "
                "least to outvote them"
            )
        return self

    @property
    @override
    def goes_by_silos(self) -> bool:
        return self.pooling == "median_of_means"

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        if self.pooling == "median_of_means":
            return RobustDescribe(
                columns, least, title, self.columns, self.by, self.liars, self.groups, self.seed
            )
        return Describe(columns, least, title, self.columns, self.by)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        if self.pooling == "median_of_means":
            raise ConfigError(
                f'{title}: pooling = "median_of_means" and [privacy]: a group\'s mean has the noise of '
                "its silos, which a sum over all averages out; leave one of them out"
            )
        return NoisyDescribe(columns, title, self.columns, self.by)


class CorrelationTable(AskTable):
    """Covariances and correlations."""

    ask: Literal["correlation"] = Field(description="this kind of question")
    columns: Names = Field(min_length=2, description="columns of numbers")

    @model_validator(mode="after")
    def _once(self) -> CorrelationTable:
        different(self.columns, "columns")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Correlation(columns, least, title, self.columns)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyCorrelation(columns, title, self.columns)


class HistogramTable(AskTable):
    """A histogram over the column's range."""

    ask: Literal["histogram"] = Field(description="this kind of question")
    column: ColumnName = Field(description="a column of numbers")
    bins: int = Field(10, ge=1, le=4096, description="of equal width from least to most")
    by: ColumnName | None = Field(None, description="a category: one histogram for each of its values")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return ColumnHistogram(columns, least, title, self.column, self.bins, self.by)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyHistogram(columns, title, self.column, self.bins, self.by)


class QuantilesTable(AskTable):
    """Quantiles; the extremes as the k-th smallest and largest value."""

    ask: Literal["quantiles"] = Field(description="this kind of question")
    column: ColumnName = Field(description="a column of numbers")
    at: Shares = Field((0.25, 0.5, 0.75), description="shares: 0.5 is the median, 0 and 1 the extremes")
    method: Literal["linear", "inverted_cdf"] = Field(
        "linear", description="linear: between two values; inverted_cdf: a value that occurs"
    )
    search: Literal["histogram", "bisection"] = Field(
        "histogram", description="histogram: few rounds of many counts; bisection: more rounds of two each"
    )
    within: Finite | None = Field(
        None, gt=0, description="of bisection: how wide the brackets are that are looked for, as the column"
    )

    @model_validator(mode="after")
    def _wide(self) -> QuantilesTable:
        if self.search == "bisection" and self.within is None:
            raise ValueError('search = "bisection" takes within, the width at which it ends')
        if self.search == "histogram" and self.within is not None:
            raise ValueError('within is of search = "bisection": a histogram is refined as far as doubles go')
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        if self.within is not None:
            return BisectedQuantiles(columns, least, title, self.column, self.at, self.method, self.within)
        return Quantiles(columns, least, title, self.column, self.at, self.method)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        if self.search == "bisection":
            raise ConfigError(
                f'{title}: search = "bisection" and [privacy]: each round would cost as much as the one '
                "histogram that quantiles under noise ask for; leave search and within out"
            )
        return NoisyQuantiles(columns, title, self.column, self.at)


class ContingencyTable(AskTable):
    """Rows in each cell of two categories, with the chi-square test."""

    ask: Literal["table"] = Field(description="this kind of question")
    rows: ColumnName = Field(description="a category")
    columns: ColumnName = Field(description="another category")
    yates: bool = Field(False, description="Yates' correction, of a table of two by two")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Contingency(columns, least, title, self.rows, self.columns, self.yates)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyContingency(columns, title, self.rows, self.columns, self.yates)


class TTestTable(AskTable):
    """Student's and Welch's t-test between two groups."""

    ask: Literal["t_test"] = Field(description="this kind of question")
    column: ColumnName = Field(description="a column of numbers")
    by: ColumnName = Field(description="a category of two values")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return TTest(columns, least, title, (self.column,), self.by)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyTTest(columns, title, (self.column,), self.by)


class AnovaTable(AskTable):
    """One-way analysis of variance."""

    ask: Literal["anova"] = Field(description="this kind of question")
    column: ColumnName = Field(description="a column of numbers")
    by: ColumnName = Field(description="a category")

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Anova(columns, least, title, (self.column,), self.by)


AnyQuestion = Annotated[
    DescribeTable
    | CorrelationTable
    | HistogramTable
    | QuantilesTable
    | ContingencyTable
    | TTestTable
    | AnovaTable
    | LinearTable
    | LogisticTable
    | PoissonTable
    | NegativeBinomialTable
    | ElasticNetTable
    | MetaAnalysisTable
    | MixedInterceptTable
    | MannWhitneyTable
    | TopValuesTable
    | ComponentsTable
    | EvaluateTable
    | SurvivalTable
    | CoxTable
    | WeightedCoxTable
    | ConcordanceTable
    | BoostedTreesTable
    | OwnTable,
    Field(discriminator="ask"),
]
