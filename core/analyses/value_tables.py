"""The tables of questions that rank values, and of those about a model's scores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roundtable.core.analyses.apart.silo_evaluation import SiloEvaluation
from roundtable.core.analyses.ask_table import AskTable, Described, Names, different
from roundtable.core.analyses.noisy.noisy_cells import NoisyTopValues
from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.analyses.principal_components import Components
from roundtable.core.analyses.question import Question
from roundtable.core.analyses.ranked_values import MannWhitney, TopValues
from roundtable.core.analyses.score_evaluation import ScoreEvaluation
from roundtable.core.tables.table_description import ColumnName
from roundtable.core.toml_tables import Finite

_EVERY = "of a number: width of the grid of its values, from least on; 1 for whole numbers"


class MannWhitneyTable(AskTable):
    """The Mann-Whitney and the Kruskal-Wallis test between two groups."""

    ask: Literal["mann_whitney"] = Field(description="this kind of question")
    column: ColumnName = Field(description="a column of numbers, or a category whose values are in order")
    by: ColumnName = Field(description="a category of two values")
    every: Finite | None = Field(None, gt=0, description=_EVERY)
    continuity: bool = Field(True, description="correct the normal approximation by half a rank")

    @model_validator(mode="after")
    def _apart(self) -> MannWhitneyTable:
        different((self.column, self.by), "column and by")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return MannWhitney(columns, least, title, self.column, self.by, self.every, self.continuity)


class TopValuesTable(AskTable):
    """The most frequent values of a stated domain."""

    ask: Literal["top_values"] = Field(description="this kind of question")
    column: ColumnName = Field(description="a category, or a column of numbers")
    most: int = Field(10, ge=1, le=1000, description="how many values")
    every: Finite | None = Field(None, gt=0, description=_EVERY)

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return TopValues(columns, least, title, self.column, self.most, self.every)

    @override
    def make_noisy(self, columns: Described, title: str) -> NoisyQuestion:
        return NoisyTopValues(columns, title, self.column, self.most, self.every)


class ComponentsTable(AskTable):
    """Principal components."""

    ask: Literal["components"] = Field(description="this kind of question")
    columns: Names = Field(min_length=2, description="columns of numbers")
    components: int = Field(2, ge=1, le=200, description="how many, those with the largest variances")
    standardise: bool = Field(True, description="divide columns by their standard deviations")

    @model_validator(mode="after")
    def _once(self) -> ComponentsTable:
        different(self.columns, "columns")
        return self

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        return Components(columns, least, title, self.columns, self.components, self.standardise)


class EvaluateTable(AskTable):
    """How well a model's scores tell an outcome."""

    ask: Literal["evaluate"] = Field(description="this kind of question")
    score: ColumnName = Field(description="a column with the model's scores; probabilities lie from 0 to 1")
    outcome: ColumnName = Field(description="a category of two values; high scores tell the second")
    threshold: Finite = Field(0.5, description="a score from here on tells the second value")
    bins: int = Field(10, ge=2, le=100, description="of the calibration curve, from 0 to 1")
    by: ColumnName | None = Field(None, description="a category: the same for each of its values")
    by_silo: bool = Field(
        False, description="the same for each silo's own rows, which its policy has to allow (own_figures)"
    )
    every: Finite | None = Field(
        None, gt=0, description="width of the grid of scores; default: a thousandth of the range"
    )

    @model_validator(mode="after")
    def _apart(self) -> EvaluateTable:
        different((self.score, self.outcome, *filter(None, [self.by])), "score, outcome and by")
        if self.by_silo and self.by is not None:
            raise ValueError(
                f"by = {self.by!r} and by_silo: what one of them hides may follow from the other; ask for one"
            )
        return self

    @property
    @override
    def goes_by_silos(self) -> bool:
        return self.by_silo

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        if self.by_silo:
            return SiloEvaluation(
                columns, least, title, self.score, self.outcome, self.threshold, self.bins, self.every
            )
        return ScoreEvaluation(
            columns,
            least,
            title,
            self.score,
            self.outcome,
            self.threshold,
            self.bins,
            self.by,
            self.every,
        )
