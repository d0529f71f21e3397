"""Checks that a round of a job can succeed: its rule with so many clients, its budget with its noise."""

from __future__ import annotations

from dataclasses import replace

import torch

from roundtable.aggregation import ClientRow, TensorMatrix, aggregate
from roundtable.aggregation.registry import RULES
from roundtable.aggregation.rows.device_rows import gpu
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy, masking_of
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import compose

_COLUMNS = 4
_MOST = 256
"""Rows up to which a rule is tried: one that compares pairs would take too long over more."""


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
    if config.rule not in RULES or more or masking_of(job.privacy) is not None:
        return
    if job.cohort.strategy == "poisson" or count > _MOST:
        return
    rows = [ClientRow(f"{number:03}", loss=1.0) for number in range(count)]
    weights = {row.name: 1.0 for row in rows} if config.weighting == "custom" else {}
    try:
        aggregate(TensorMatrix(torch.zeros(count, _COLUMNS)), rows, replace(config, weights=weights))
    except AggregationError as error:
        raise ConfigError(f"[aggregation], in a round of {count}: {error}") from error


def check_device(plan: Plan) -> None:
    """Raises ConfigError for a job whose updates are to be combined on a GPU where torch sees none."""
    if plan.aggregation.device == "cuda":
        try:
            gpu()
        except AggregationError as error:
            raise ConfigError(str(error), key=("aggregation", "device")) from error


def check_budget(plan: Plan) -> None:
    """Raises ConfigError where the first round alone would spend more than the job's budget.

    Left to the ledgers are records, whose account each silo keeps, and what earlier jobs have spent.
    """
    privacy, charge = plan.privacy, plan.least_charge
    if isinstance(privacy, NoPrivacy | ExampleLevel) or charge is None:
        return
    noise = privacy.noise_multiplier
    if noise is None or privacy.epsilon is None:
        return
    first = compose([charge], privacy.delta, privacy.accountant)
    if first > privacy.epsilon:
        raise ConfigError(
            f"the first round would spend epsilon = {first:.3g} of privacy.epsilon = {privacy.epsilon:g}, so "
            f"there would be none: raise privacy.noise_multiplier ({noise:g}), or leave it out, and the "
            "least noise that keeps the budget over all rounds is taken"
        )
