"""Whether a job's rule can give an answer at all, with as many clients as a round may have."""

from __future__ import annotations

from dataclasses import replace

import torch

from roundtable.aggregation import ClientRow, TensorMatrix, aggregate
from roundtable.aggregation.registry import RULES
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.engine.plan import Plan

_COLUMNS = 4
_MOST = 256
"""Beyond so many rows a rule that compares pairs takes longer than a user likes to wait for nothing."""


def check_rule(job: JobConfig, plan: Plan, clients: int) -> None:
    """Raises ConfigError, with the paper's condition, for a rule that no round of this job can satisfy.

    `clients` is how many there are. The rule is asked for the aggregate of as many equal updates as a round
    can have, so that nothing depends on their values. Left to the first round are rules of other packages,
    those that look at more than the round's updates, sampled or very large cohorts, and secure groups.
    """
    config = plan.aggregation
    wanted = job.round.buffer if job.round.mode == "buffered" else job.cohort.size
    count = min(wanted or clients, clients)
    more = config.takes("history") or config.takes("root_update") or "pivot" in config.parameters
    if config.rule not in RULES or more or plan.privacy.secure_aggregation:
        return
    if job.cohort.strategy == "poisson" or count > _MOST:
        return
    rows = [ClientRow(f"{number:03}", loss=1.0) for number in range(count)]
    weights = {row.name: 1.0 for row in rows} if config.weighting == "custom" else {}
    try:
        aggregate(TensorMatrix(torch.zeros(count, _COLUMNS)), rows, replace(config, weights=weights))
    except AggregationError as error:
        raise ConfigError(f"[aggregation], in a round of {count}: {error}") from error
