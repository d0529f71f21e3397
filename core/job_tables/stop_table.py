"""`[stop]`: reasons to end before the last round."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from roundtable.core.measures.columns import CENTRAL
from roundtable.core.toml_tables import Finite, Seconds, Table

_SMALLER = frozenset(("mae", "mape", "mse", "ece", "nll", "ppl", "brier", "crps", "wer", "cer"))
"""Words in the names of metrics of which the smaller value is the better one."""


class StopTable(Table):
    """`[stop]`: reasons to end before the last round."""

    metric: str | None = Field(
        None,
        description="metric to watch: one of the task's, or loss; central_NAME is what a simulation's server "
        "measures on test data of its own",
    )
    target: Finite | None = Field(None, description="stop once the metric has reached this")
    patience: int | None = Field(None, ge=1, description="stop after so many evaluations without improvement")
    minimum_improvement: Finite = Field(0.0, ge=0, description="what counts as an improvement")
    larger_is_better: bool | None = Field(
        None, description="default: false for loss, error, perplexity, mse, mae and the like, else true"
    )
    time: Seconds | None = Field(None, gt=0, description="stop after so much time")

    @property
    def early(self) -> bool:
        """Whether the metric may end the job."""
        return self.patience is not None or self.target is not None

    @property
    def central(self) -> bool:
        """Whether the metric is one that a simulation's server measures on test data of its own."""
        return self.metric is not None and self.metric.startswith(CENTRAL)

    @model_validator(mode="after")
    def _consistent(self) -> StopTable:
        if self.metric is None and (self.target is not None or self.patience is not None):
            raise ValueError("target and patience need a metric")
        return self


def larger_is_better(metric: str, stop: StopTable) -> bool:
    """A metric's direction: as `[stop]` states it of its own metric; else what the metric's name says."""
    if metric == stop.metric and stop.larger_is_better is not None:
        return stop.larger_is_better
    name = metric.lower()
    if any(part in name for part in ("loss", "error", "perplexity", "rmse")):
        return False
    return _SMALLER.isdisjoint(re.split(r"[^a-z0-9]+", name))
