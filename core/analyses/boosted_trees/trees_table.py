"""The table of the question `boosted_trees`, with xgboost's names for what xgboost has, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from roundtable.core.analyses.ask_table import AskTable
from roundtable.core.analyses.boosted_trees.boosted_cox import BoostedHazards
from roundtable.core.analyses.boosted_trees.boosting import BoostedTrees
from roundtable.core.analyses.boosted_trees.boosting_objectives import POISSON_STEP, Boosting
from roundtable.core.analyses.boosted_trees.feature_bins import BoostingPlan
from roundtable.core.analyses.boosted_trees.noisy_trees import NoisyTrees
from roundtable.core.analyses.boosted_trees.ranked_trees import RankedTrees
from roundtable.core.analyses.boosted_trees.split_choice import Growth
from roundtable.core.analyses.question import Question
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnName, ColumnTable
from roundtable.core.toml_tables import Finite, as_tuple

Features = Annotated[tuple[ColumnName, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=200)]
Edges = Annotated[tuple[Finite, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=1024)]
Group = Annotated[tuple[ColumnName, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=200)]
MOST_NODES = 1 << 17
"""Places of all trees of a question."""


class BoostedTreesTable(AskTable):
    """Gradient-boosted trees, as xgboost grows them on the pooled rows."""

    ask: Literal["boosted_trees"] = Field(description="this kind of question")
    outcome: ColumnName = Field(
        description="a number (squared error), or a category (logistic or multinomial loss)"
    )
    event: ColumnName | None = Field(
        None, description="of a time as outcome: a category of two values, censored, then the event (Cox)"
    )
    every: Finite | None = Field(
        None, gt=0, description="with event: width of the grid of times; a time counts as its interval's end"
    )
    objective: Literal["squared_error", "poisson", "rank_ndcg", "rank_pairwise"] | None = Field(
        None,
        description="of a number: squared_error, the default, or poisson for a count; with query: rank_ndcg "
        "or rank_pairwise",
    )
    query: ColumnName | None = Field(
        None,
        description="to rank: the column of whole numbers whose equal values make a query, within a silo",
    )
    top: int | None = Field(
        None,
        ge=1,
        le=2048,
        description="to rank: a query's first rows that are paired with all its others, and that NDCG is of; "
        "default 32",
    )
    on: Features = Field(description="the features; a category counts as the place of its value")
    rounds: int = Field(50, ge=1, le=2000, description="of boosting")
    learning_rate: Finite = Field(0.3, gt=0, le=1, description="what each tree counts (eta)")
    max_depth: int = Field(4, ge=1, le=10, description="levels of splits of a tree")
    min_child_weight: Finite = Field(1.0, ge=0, description="least sum of Hessians of a side of a split")
    reg_lambda: Finite = Field(1.0, ge=0, description="L2 penalty of leaves (lambda)")
    reg_alpha: Finite = Field(0.0, ge=0, description="L1 penalty of leaves (alpha)")
    gamma: Finite = Field(0.0, ge=0, description="least gain of a split")
    bins: int = Field(64, ge=2, le=1024, description="most bins of a column of numbers")
    splits: Literal["best", "random"] | None = Field(
        None,
        description="under [privacy] alone: random (default), so that only leaves cost, or best",
    )
    cuts: Literal["quantiles", "equal"] = Field(
        "quantiles", description="bins of about equally many rows, or of equal width"
    )
    edges: dict[ColumnName, Edges] = Field(
        default_factory=dict, description="given cuts, in the place of those: { age = [40, 50, 60] }"
    )
    monotone: dict[ColumnName, Literal[-1, 1]] = Field(
        default_factory=dict, description="features with which predictions only rise (1) or fall (−1)"
    )
    interactions: Annotated[tuple[Group, ...], BeforeValidator(as_tuple), Field(max_length=200)] = Field(
        (), description="groups of features; a path of a tree stays within one of them"
    )
    held_out: Finite = Field(
        0.0, ge=0, lt=1, description="share of rows that trees are tested on and not grown on"
    )
    early_stopping: int = Field(
        0, ge=0, le=2000, description="stop after so many rounds without a lower held-out loss; 0: never"
    )
    base_score: Finite | None = Field(
        None, description="prediction before the first tree; default: the outcome's mean"
    )
    weights: ColumnName | None = Field(
        None, description="a column of numbers from 0 on: how much each row counts; default: all alike"
    )
    seed: int = Field(
        0, ge=0, lt=1 << 32, description="draws the rows that are held out, and splits that are random"
    )

    @model_validator(mode="after")
    def _fits(self) -> BoostedTreesTable:
        if (self.event is None) != (self.every is None):
            raise ValueError("event and every go together: whether, and on which grid of times when")
        if self.event is not None and self.objective is not None:
            raise ValueError("objective and event do not go together: a time with its event takes Cox's")
        if self.event is not None and self.weights is not None:
            raise ValueError("weights and event do not go together: hazards take rows as they are")
        ranks = self.objective is not None and self.objective.startswith("rank_")
        if ranks != (self.query is not None):
            raise ValueError(
                "query and objective rank_ndcg or rank_pairwise go together: rows are ranked within a query"
            )
        if self.top is not None and not ranks:
            raise ValueError("top is of rankings: set objective and query, or leave it out")
        if ranks and self.weights is not None:
            raise ValueError(
                "weights and query do not go together: pairs are of a query, and weights of rows"
            )
        if self.weights == self.outcome:
            raise ValueError(f"outcome and weights are both {self.outcome!r}")
        others = [name for name in (self.event, self.query) if name is not None]
        named = (self.outcome, *self.on, *others)
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise ValueError(f"outcome, event, query and on name {', '.join(map(repr, twice))} twice")
        groups = {name for group in self.interactions for name in group}
        for key, names in (
            ("edges", {*self.edges}),
            ("monotone", {*self.monotone}),
            ("interactions", groups),
        ):
            if strange := sorted(names - {*self.on}):
                raise ValueError(f"{key} names {', '.join(map(repr, strange))}, which on does not")
        if self.early_stopping and not self.held_out:
            raise ValueError("early_stopping looks at rows that are held out: set held_out, such as 0.2")
        return self

    @property
    def _boosting(self) -> BoostingPlan:
        signs = tuple(self.monotone.get(name, 0) for name in self.on)
        growth = Growth(
            self.learning_rate,
            self.max_depth,
            self.reg_lambda,
            self.reg_alpha,
            self.gamma,
            self.min_child_weight,
            signs if any(signs) else (),
            tuple(frozenset(map(self.on.index, group)) for group in self.interactions),
            POISSON_STEP if self.objective == "poisson" else 0.0,
        )
        return BoostingPlan(
            self.rounds,
            growth,
            self.bins,
            self.cuts,
            self.edges,
            self.held_out,
            self.early_stopping,
            self.base_score,
            self.seed,
            self.objective == "poisson",
            self.weights,
        )

    def make(self, columns: Mapping[str, ColumnTable], least: int, title: str) -> Question:
        """The question. ConfigError where its trees are too many to publish, or base_score does not fit."""
        if self.splits is not None:
            raise ConfigError(
                f"{title}: splits is of surveys with [privacy], and others take the best: leave it out"
            )
        plan = self._boosting
        asked = (columns, least, title, self.outcome, self.on, plan)
        kind = columns[self.outcome].kind if self.outcome in columns else "number"
        if self.query is not None:
            by_ndcg = self.objective == "rank_ndcg"
            made: BoostedTrees = RankedTrees(*asked, self.query, by_ndcg, self.top or 32)
        elif self.objective is not None and kind != "number":
            raise ConfigError(
                f"{title}: objective is of numbers, and {self.outcome!r} is a category: leave it out"
            )
        elif self.event is not None and self.every is not None:
            made = BoostedHazards(*asked, self.event, self.every)
        else:
            made = BoostedTrees(*asked)
        self._check(title, plan, made.objective, plan.growth.nodes)
        return made

    @override
    def make_noisy(self, columns: Mapping[str, ColumnTable], title: str) -> NoisyTrees:
        """The question under privacy. ConfigError for what has no bound, or would be another release."""
        for unfit, key, why in (
            (self.event is not None, "event", "a row's part in the hazards of others has no bound"),
            (self.objective == "poisson", "objective", "the gradient of a count has no bound"),
            (
                self.query is not None,
                "query",
                "a row is in pairs with others, so it changes the gradients of its whole query, and what is "
                "hidden is one row",
            ),
            (
                self.weights is not None,
                "weights",
                "a row that weighs more would have to be hidden by more noise",
            ),
            (self.held_out > 0, "held_out", "losses are of rows, and each would cost as much as a tree"),
            (bool(self.monotone), "monotone", "the noise of leaves is as likely to fall as to rise"),
        ):
            if unfit:
                raise ConfigError(f"{title}: {key} is not answered under [privacy]: {why}; leave it out")
        plan = self._boosting
        made = NoisyTrees(columns, title, self.outcome, self.on, plan, self.splits != "best")
        self._check(title, plan, made.loss.of, plan.growth.nodes)
        return made

    def _check(self, title: str, plan: BoostingPlan, objective: Boosting, nodes: int) -> None:
        places = plan.rounds * objective.outputs * nodes
        if places > MOST_NODES:
            raise ConfigError(
                f"{title}: {plan.rounds} rounds of {objective.outputs} trees of depth "
                f"{plan.growth.max_depth} have {places:,} places for nodes, and {MOST_NODES:,} are "
                "published at most: set fewer rounds, or a smaller max_depth"
            )
        if self.base_score is not None and not objective.takes(self.base_score):
            raise ConfigError(
                f"{title}: base_score = {self.base_score:g} is none of {objective.name}, which takes "
                f"{objective.bases}"
            )
